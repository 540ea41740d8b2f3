"""First steps of DPO, ours and TRL's."""

import logging
import warnings
from types import SimpleNamespace

import pytest
from datasets import Dataset
from first_step import ROWS, FirstStep, like_trl
from gradients import assert_equal, gradients
from plugin_packages import TRL

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import DPOConfig, DPOTrainer

THEIRS = {"length_normalized": "sigmoid_norm"}
MEASURED = {
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "logp_chosen": "logps/chosen",
    "logp_rejected": "logps/rejected",
}


def open_dpo(folder, rows=None, tokenizer=None, plugins=None, **options):
    """Open a run of DPO with these options, and other plugins."""
    model = like_trl(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "tokenizer")
        model = {"tokenizer": str(folder / "tokenizer")}
    plugins = (plugins or {}) | {"dpo": options}
    micro_batch = 1 if "bfd_packing" in plugins else 3
    return FirstStep(folder, rows or ROWS, plugins, model, {"micro_batch": micro_batch})


def of_trl(folder, run, loss, beta, model, reference=None, peft=None):
    """Return TRL's trainer, and the whole global batch as a batch of its own making."""
    config = DPOConfig(
        output_dir=str(folder),
        loss_type=[THEIRS.get(loss, loss)],
        beta=beta,
        **(TRL | {"per_device_train_batch_size": len(run.rows)}),
    )
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=config,
        train_dataset=Dataset.from_list(run.rows),
        processing_class=run.tokenizer,
        peft_config=peft,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert len(batch["input_ids"]) == 2 * len(run.rows)
    return trainer, batch


def assert_trl_s(run, trainer, batch):
    """Compare our loss, its gradients and measures with theirs."""
    trained = [int((one["labels"][:, 1:] != -100).sum()) for one in run.batches]
    assert sum(trained) == int(batch["completion_mask"].sum())
    loss, measured = run.losses()
    theirs = trainer.compute_loss(trainer.model.train(), batch)
    theirs.backward()
    assert loss == pytest.approx(float(theirs.detach()), rel=1e-5)
    assert_equal(gradients(run.model), gradients(trainer.model))
    logged = {name: trainer._metrics["train"][value][-1] for name, value in MEASURED.items()}
    # Margins are small differences of sums of some 60, times beta.
    assert measured == pytest.approx(logged, rel=1e-5, abs=1e-5 * max(1.0, trainer.beta))
    return loss, measured


def prepared_by_trl(tokenizer, rows):
    """Return (ids, where the answer begins) of both answers of rows, as TRL prepares them."""
    logging.getLogger("trl").setLevel(logging.ERROR)
    args = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    prepared = DPOTrainer._prepare_dataset(
        SimpleNamespace(_tokenizer=tokenizer), Dataset.from_list(rows), tokenizer, args, "train"
    )
    sides = ("chosen_ids", "rejected_ids")
    return [
        [(row["prompt_ids"] + row[side], len(row["prompt_ids"])) for side in sides]
        for row in prepared
    ]
