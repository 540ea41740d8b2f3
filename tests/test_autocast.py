"""Plugins under autocast are as close to float32 as the core is."""

import numpy as np
import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from conftest import tiny_tables, write_recipe
from transformers import AutoModelForCausalLM, LlamaConfig

from plugsft.base.machine import look
from plugsft.batches.defaults import BatchDefaults
from plugsft.batches.labels import IGNORED
from plugsft.data.defaults import DataDefaults
from plugsft.model.defaults import ModelDefaults
from plugsft.model.load import make_load
from plugsft.plugins.bfd_packing.documents import documents_of
from plugsft.registry.active import check
from plugsft.registry.load import load

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
LENGTHS = np.array([14, 20, 6])
LORA = {"lora": {"r": 4}}
PACKED = {"bfd_packing": {}}
KINDS = [
    {"fused_loss": {}},
    {"flash_attention": {}},
    {"gradient_checkpointing": {}},
    PACKED,
    PACKED | {"fused_loss": {"chunk": 7}},
    PACKED | {"flash_attention": {}, "gradient_checkpointing": {}},
    LORA,
    LORA | PACKED | {"fused_loss": {}},
    {"lora": {"r": 4, "dora": True}},
    {"lora": {"r": 4, "modules_to_save": ["lm_head"]}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("base")
    AutoModelForCausalLM.from_config(CONFIG).to(torch.bfloat16).save_pretrained(made)
    return made


def batch_of(packed):
    """Return three documents, in a row each or in one."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 96, int(LENGTHS.sum())))
    labels = ids.clone()
    labels[::3] = IGNORED
    starts = LENGTHS.cumsum() - LENGTHS
    labels[starts] = IGNORED
    if packed:
        return {"input_ids": ids[None], "labels": labels[None], **documents_of(LENGTHS)}
    shape = (len(LENGTHS), max(LENGTHS))
    rows, marks, mask = torch.zeros(shape).long(), torch.full(shape, IGNORED), torch.zeros(shape)
    for row, (start, length) in enumerate(zip(starts, LENGTHS, strict=True)):
        rows[row, :length] = ids[start : start + length]
        marks[row, :length] = labels[start : start + length]
        mask[row, :length] = 1
    return {"input_ids": rows, "labels": marks, "attention_mask": mask.long()}


def stepped(tmp_path, folder, plugins, dtype):
    """Load a model with plugins as a run does; return a step's loss and gradients, by name."""
    tables = tiny_tables(tmp_path) | {"plugins": plugins}
    tables["model"] = {"path": str(folder), "dtype": dtype, "tokenizer": str(folder)}
    tables["train"]["micro_batch"] = 1
    recipe, active = load(write_recipe(tmp_path / "recipe.toml", tables))
    active.attach(DataDefaults(tmp_path), BatchDefaults(), ModelDefaults())
    check(active, recipe, look())
    torch.manual_seed(1)
    model = active.hooks.optimize_model(load=make_load(recipe.model, tmp_path)).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # adapters that say something
                parameter += (
                    torch.arange(parameter.numel()).view_as(parameter).remainder(7).sub(3) * 1e-2
                )
    types = {bool(parameter.requires_grad): parameter.dtype for parameter in model.parameters()}
    if dtype == "bfloat16":
        cast = torch.autocast("cpu", torch.bfloat16)
        model.forward = convert_outputs_to_fp32(cast(model.forward))
    batch, score = batch_of("bfd_packing" in plugins), active.hooks.token_nll
    loss = active.hooks.step(model=model, batch=batch, denominator=20, token_nll=score)
    loss.backward()
    grads = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return float(loss.detach()), grads, types


def off(grads, exact):
    """Return the distance of gradients, as a share of the exact ones' length."""
    both = [(grads[name].double(), one.double()) for name, one in exact.items()]
    far = sum(float((a - b).square().sum()) for a, b in both)
    return (far / sum(float(b.square().sum()) for _, b in both)) ** 0.5


@pytest.mark.parametrize("plugins", KINDS, ids=lambda one: "+".join(one))
def test_plugins_under_autocast_are_as_near_to_float32_as_the_core(tmp_path, folder, plugins):
    loss, grads, types = stepped(tmp_path, folder, plugins, "bfloat16")
    true_loss, true, _ = stepped(tmp_path, folder, plugins, "float32")
    core = {name: plugin for name, plugin in plugins.items() if name in ("lora", "bfd_packing")}
    _, plain, _ = stepped(tmp_path, folder, core, "bfloat16")
    limit = off(plain, true)
    print(f"{off(grads, true):.1e} off float32, the core {limit:.1e}")
    assert loss == pytest.approx(true_loss, rel=5e-3) and loss != true_loss
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    assert 1e-5 < off(grads, true) < max(1.5 * limit, 1e-3) < 0.05
    assert types[True] == torch.float32, "what is trained"
    assert types.get(False, torch.bfloat16) == torch.bfloat16, "what is frozen"
