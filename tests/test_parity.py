"""Loss and gradients equal a plain computation, and TRL, on the same rows."""

import json
import warnings

import pytest
import torch
from conftest import chats, tiny_tables
from datasets import Dataset
from gradients import assert_equal, gradients
from plugin_packages import TRL
from transformers import AutoModelForCausalLM

from plugsft.batches.defaults import BatchDefaults
from plugsft.batches.plan import Plan
from plugsft.data.defaults import DataDefaults
from plugsft.data.prepare import prepare
from plugsft.model.defaults import ModelDefaults
from plugsft.registry.load import resolve
from plugsft.run import save_scratch_model
from plugsft.tokens.ends import pad_id

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import SFTConfig, SFTTrainer

ROWS = chats(8, seed=3)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Return our loss and gradients on one global batch, with their model and tokenizer."""
    tables = tiny_tables(tmp_path_factory.mktemp("ours"), ROWS)
    tables["train"] |= {"batch_size": 8, "micro_batch": 3}
    recipe, active = resolve(tables)
    hook = active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults()).hooks
    data = prepare(recipe, active)
    tokens = data.tokens
    folder = save_scratch_model(recipe, data)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    step_plan = Plan(tokens, recipe, 1, hook).plan_step(1)
    loss = 0.0
    for examples in step_plan.layout[0]:
        batch = hook.collate(tokens=tokens, examples=examples, pad=pad_id(data.tokenizer))
        part = hook.step(
            model=model, batch=batch, denominator=step_plan.denominator, token_nll=hook.token_nll
        )
        part.backward()
        loss += float(part.detach())
    return loss, gradients(model), folder, data.tokenizer


def test_equal_to_a_plain_computation(ours):
    """Row by row, unpadded, with masks from transformers itself."""
    loss, found, folder, tokenizer = ours
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    rows = [
        tokenizer.apply_chat_template(
            row["messages"],
            return_dict=True,
            return_assistant_tokens_mask=True,
            return_tensors="pt",
        )
        for row in ROWS
    ]
    total = sum(int(row["assistant_masks"][0, 1:].sum()) for row in rows)
    summed = torch.zeros(())
    for row in rows:
        logits = model(input_ids=row["input_ids"]).logits[0, :-1].double()
        picked = row["assistant_masks"][0, 1:].bool()
        chosen = logits.log_softmax(-1).gather(1, row["input_ids"][0, 1:, None])[:, 0]
        summed = summed - chosen[picked].sum()
    (summed / total).backward()
    assert loss == pytest.approx(float(summed.detach()) / total, rel=1e-5)
    assert_equal(found, gradients(model))


@pytest.mark.filterwarnings("ignore")
def test_equal_to_trl(ours, tmp_path):
    loss, found, folder, tokenizer = ours
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = SFTConfig(
        output_dir=str(tmp_path),
        assistant_only_loss=True,
        **TRL,
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(json.loads(json.dumps(ROWS))),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert len(batch["input_ids"]) == 8
    trained = (batch["labels"][:, 1:] != -100).sum()
    theirs = trainer.compute_loss(model.train(), batch, num_items_in_batch=trained)
    theirs.backward()
    assert loss == pytest.approx(float(theirs.detach()), rel=1e-5)
    assert_equal(found, gradients(model))
