"""dpo: losses without a reference equal TRL's, in every layout; unused options are refused."""

import importlib
import json
import warnings
from typing import get_args

import pytest
import torch
from conftest import only_full, read_metrics, run_plugsft
from datasets import Dataset
from plugin_packages import TRL
from test_dpo import Run, assert_equal, gradients, logps_of, pairs, shaken
from transformers import AutoModelForCausalLM

from plugsft import testing
from plugsft.plugins.dpo.losses import LOSSES, LossName, Options

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    cpo = importlib.import_module("trl.experimental.cpo")
    orpo = importlib.import_module("trl.experimental.orpo")

FREE = [name for name, loss in LOSSES.items() if not loss.reference]
METRICS = {
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
}
# Our options, and those of TRL's CPO trainer.
CPO = [
    ({"loss": "cpo"}, {"loss_type": "sigmoid"}),
    ({"loss": "cpo", "beta": 0.3, "label_smoothing": 0.2, "nll": 0.5}, {"loss_type": "sigmoid"}),
    ({"loss": "cpo_hinge", "beta": 0.05}, {"loss_type": "hinge"}),
    ({"loss": "cpo_ipo", "beta": 0.4}, {"loss_type": "ipo"}),
    ({"loss": "simpo"}, {"loss_type": "simpo"}),
    (
        {"loss": "simpo", "beta": 3.0, "gamma": 0.5, "nll": 0.7, "label_smoothing": 0.1},
        {"loss_type": "simpo"},
    ),
    ({"loss": "simpo", "alpha": 0.25}, {"loss_type": "alphapo"}),
]
# TRL's ORPO also trains the prompt's tokens: of a prompt of one token, it trains none.
ONE_TOKEN = [
    {"prompt": "who"[:1], "chosen": f"{row['chosen'][0]['content']}.", "rejected": "no owls sing"}
    for row in pairs(6, seed=4)
]


def texts(count=6):
    """Make rows of plain texts, which these trainers and plugsft read alike."""
    return [
        {
            "prompt": f"{row['prompt'][-1]['content']}\n",
            "chosen": row["chosen"][0]["content"],
            "rejected": row["rejected"][0]["content"],
        }
        for row in pairs(count, seed=3)
    ]


def trl_step(folder, run, trainer_class, config):
    """Return the loss, gradients and metrics of TRL's trainer over all rows.

    Its nll is a mean over the tokens of a micro-batch, so it depends on the layout, but for
    micro-batches of one pair.
    """
    model = AutoModelForCausalLM.from_pretrained(run.folder, dtype=torch.float32)
    model.load_state_dict(run.model.state_dict())
    trainer = trainer_class(
        model=model,
        args=config(output_dir=str(folder), **(TRL | {"per_device_train_batch_size": 1}), **{}),
        train_dataset=Dataset.from_list(run.rows),
        processing_class=run.tokenizer,
    )
    losses = []
    for batch in trainer.get_train_dataloader():
        loss = trainer.compute_loss(model.train(), batch) / len(run.rows)
        loss.backward()
        losses.append(float(loss.detach()))
    stored = trainer._stored_metrics["train"]
    means = {name: float(torch.tensor(stored[of]).mean()) for name, of in METRICS.items()}
    return sum(losses), gradients(model), means, trainer
