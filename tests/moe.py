"""Tiny models with experts, and recipes that train them."""

import torch
from conftest import chats, run_plugsft, tiny_tables, write_recipe
from families import VOCABULARY, tiny_config
from transformers import AutoModelForCausalLM

TRAIN = {"batch_size": 8, "micro_batch": 2, "steps": 6, "learning_rate": 1e-3}
FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]


def save_model(folder, family, **changes):
    """Save a tiny model of a family, whose routers choose clearly; return its folder."""
    config = tiny_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder):
    """Train a tokenizer on tiny chats; return its folder."""
    tables = tiny_tables(folder / "base", chats(8))
    scratch = {"hidden": 16, "layers": 1, "heads": 2, "vocab": VOCABULARY, "context": 128}
    tables["model"] = {"scratch": scratch}
    tables["data"] |= {"max_length": 128}
    tables["train"] |= {"steps": 1, "learning_rate": 0.0}
    done = run_plugsft(write_recipe(folder / "base.toml", tables))
    assert done.returncode == 0, done.stderr
    return folder / "base/run/model"


def recipe_of(folder, model, tokenizer, rows=None, **tables):
    """Write the recipe of a run that trains such a model."""
    merged = tiny_tables(folder, rows or chats(21)) | {
        "model": {"path": str(model)} | ({"tokenizer": str(tokenizer)} if tokenizer else {})
    }
    merged["data"] |= {"max_length": 128}
    merged["train"] |= TRAIN
    for name, table in tables.items():
        merged[name] = {**merged.get(name, {}), **table}
    return write_recipe(folder / "recipe.toml", merged)
