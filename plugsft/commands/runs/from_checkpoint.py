"""Make a model from a checkpoint, of a stopped run or of an earlier step."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...base.atomic import publish
from ...base.errors import PlugsftError
from ...base.machine import look
from ...batches.defaults import BatchDefaults
from ...data.defaults import DataDefaults
from ...data.load_tokenizer import end_generation, load_tokenizer, new_ids
from ...model.defaults import ModelDefaults
from ...model.load import make_load
from ...ranks.launch import silence_libraries
from ...ranks.shard_files import ShardReader
from ...ranks.train_state import WEIGHTS, ensure_same_parameters, fill_weights
from ...registry.active import check
from ...registry.load import load
from .card import add_card


def restore(path: Path, target: Path, without: Sequence[str], trusted: bool, name: str) -> None:
    """Write a checkpoint's model as its run would have at the end.

    `trusted` overrides the run's recipe, which may be someone else's. `name` loads the model.
    """
    silence_libraries()
    output = path.parent.parent
    overrides = [
        f"output={json.dumps(str(output))}",
        f"model.trust_remote_code={str(trusted).lower()}",
    ]
    recipe, active = load(output / "recipe.toml", overrides, without)
    hooks = active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults()).hooks
    with active.name_failing_plugin():
        check(active, recipe, look(), ["optimize_model"])  # no other hook is called here
        from_scratch = recipe.model.scratch is not None
        scratch = find_folder(output / "scratch", "model-*") if from_scratch else Path()
        trained_tokenizer = from_scratch and not recipe.model.tokenizer
        folder = find_folder(output / "scratch", "tokenizer-*") if trained_tokenizer else Path()
        tokenizer = load_tokenizer(recipe.model, folder)
        how = make_load(recipe.model, scratch)
        how.new_tokens = new_ids(recipe.model, tokenizer)
        model: Any = hooks.optimize_model(load=how)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    with torch.no_grad(), ShardReader(path) as reader:
        ensure_same_parameters(reader, trained, reader.names_of(WEIGHTS))
        fill_weights(reader, trained, exact=False)
    end_generation(model, tokenizer)
    with publish(target) as building:
        model.save_pretrained(building)
        tokenizer.save_pretrained(building)
        add_card(building, path, name)


def find_folder(folder: Path, pattern: str) -> Path:
    """Return the only folder that matches a pattern."""
    matches = sorted(folder.glob(pattern))
    if len(matches) != 1:
        raise PlugsftError(
            f"{folder}: should hold one {pattern}, and holds {len(matches)}; resume the run "
            "(--resume), which knows its own"
        )
    return matches[0]
