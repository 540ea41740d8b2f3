"""A model from a checkpoint: that of a run that was stopped, or of one of its earlier steps."""

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
from ...data.load_tokenizer import end_generation, load_tokenizer
from ...model.defaults import ModelDefaults
from ...model.load import make_load
from ...ranks.launch import silence_libraries
from ...ranks.shard_files import ShardReader
from ...ranks.train_state import WEIGHTS, ensure_same_parameters, fill_weights
from ...registry.active import check, load


def restore(path: Path, target: Path, without: Sequence[str], trusted: bool) -> None:
    """Write a checkpoint's model as its run would have at the end.

    `trusted` overrides the run's recipe, which may be someone else's.
    """
    silence_libraries()
    output = path.parent.parent
    ours = [f"output={json.dumps(str(output))}", f"model.trust_remote_code={str(trusted).lower()}"]
    recipe, active = load(output / "recipe.toml", ours, without)
    hooks = active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults()).hooks
    with active.name_failing_plugin():
        check(active, recipe, look())
        made = recipe.model.scratch is not None
        scratch = only(output / "scratch", "model-*") if made else Path()
        names_own = made and not recipe.model.tokenizer
        words = only(output / "scratch", "tokenizer-*") if names_own else Path()
        tokenizer = load_tokenizer(recipe.model, words)
        model: Any = hooks.optimize_model(load=make_load(recipe.model, scratch))
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    with torch.no_grad(), ShardReader(path) as reader:
        ensure_same_parameters(reader, trained, reader.names_of(WEIGHTS))
        fill_weights(reader, trained, exact=False)
    end_generation(model, tokenizer)
    with publish(target) as building:
        model.save_pretrained(building)
        tokenizer.save_pretrained(building)


def only(folder: Path, pattern: str) -> Path:
    """Return the one folder of a pattern."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise PlugsftError(
            f"{folder}: should hold one {pattern}, and holds {len(found)}; go on with the run "
            "(--resume), which knows which one is its own"
        )
    return found[0]
