"""Whether a checkpoint belongs to a recipe: the keys that affect results, compared. No torch."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ..base.console import say
from ..base.errors import CheckpointError, reason_of
from ..base.limits import read_json_object
from ..recipe.capabilities import Capability
from ..recipe.parse import anchored, defaults_of, flatten
from ..recipe.tables import Recipe
from ..registry.active import Active

FORMAT = 6
"""Version of a checkpoint's files."""
STATE, LOCK = "state.json", ".plugsft.lock"
"""Files of a checkpoint, and of the output folder while a run writes into it."""
WEIGHT_FILES = "the weights in the model's files"
"""The input of a run whose checksum says what its model was loaded from."""
PUBLISHED = "the class of the model"
"""The input of a run whose model sees: the published class."""
RATE, CHANGED_RATE = "train.learning_rate", "train.learning_rate_after"
"""The peak learning rate, and its changes, which a resume may get for the steps that are left."""
# How recipe keys begin that may differ when a run resumes: paths, batch layout and logging. Plugins
# name their options that affect results themselves. Data are compared by the checksum of their
# tokens: files may be moved, but not changed.
MAY_DIFFER = (
    "output",
    "data.source",  # and sources, but for their weights
    "data.split",
    "device",
    "train.micro_batch",
    "train.keep_whole_gradients",
    "train.log_every",
    "checkpoint.every",
    "checkpoint.keep",  # and keep_best
    "eval.",
    "plugins",
)


def open_lock(folder: Path) -> TextIO:
    """Open an output folder's lock for writing; a link in its place is not followed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    return os.fdopen(os.open(folder / LOCK, flags, 0o666), "a+")


def keys_affecting_results(recipe: Recipe, active: Active) -> dict[str, Any]:
    """The keys that affect results, of the recipe and of its plugins."""
    return own_keys(anchored(recipe)) | active.options_affecting_results()


def own_keys(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a recipe that affect results, without those of its plugins."""
    keys = {key: value for key, value in flatten(tables).items() if not key.startswith(MAY_DIFFER)}
    sources = tables["data"].get("sources") or [{}]
    keys["data.sources.weight"] = [source.get("weight", 1) for source in sources]
    return keys


def ensure_same_run(
    path: Path, recipe: Recipe, active: Active, inputs: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Refuse a checkpoint of another version, of another recipe, or of other inputs, if given."""
    state = read_json(path / STATE)
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: was written by another version of plugsft (format {state.get('format')}; "
            f"this one reads {FORMAT}): resume with that version"
        )
    ensure_published_class(path, state, inputs.get(PUBLISHED))
    now = keys_affecting_results(recipe, active)
    # Keys that are newer than the checkpoint had their default values.
    then = defaults_of(now) | state["recipe"]
    differing = [
        f"{key} was {_show(then.get(key))} and is {_show(now.get(key))}"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key) and not _is_later(key, state["step"])
    ]
    differing += [
        f"{name} have changed"
        for name, checksum in inputs.items()
        if state["inputs"].get(name) != checksum
    ]
    if differing:
        cure = "Undo the changes"
        if then.get(RATE) != now.get(RATE):
            cure += f" (the steps that are left take {CHANGED_RATE}.{state['step']}={now[RATE]})"
        raise CheckpointError(
            f"{path} belongs to another recipe: {'; '.join(differing)}. {cure}, or begin a new run "
            f"with its weights, in another output folder: plugsft export {path} --to FOLDER, then "
            "model.path = FOLDER (if it has adapters, "
            f"{Capability.bundled('adapters').table} adapter = FOLDER)"
        )
    if inputs and state["plugins"] != recipe.plugins:
        say("warning: the plugins or their options differ from those of the checkpoint")
    return state


def ensure_published_class(path: Path, state: Mapping[str, Any], published: str | None) -> None:
    """Refuse a checkpoint from before models that see were trained as their published class."""
    if published and PUBLISHED not in state["inputs"]:
        raise CheckpointError(
            f"{path}: was written by plugsft 0.1.0 (commit 1faea179), which did not train "
            f"{published} as it was published: its checkpoints hold other weights, or other names. "
            "Resume or export it with that version, or begin a new run in another output folder"
        )


def _is_later(key: str, step: int) -> bool:
    """Tell whether a key changes the learning rate after a step; an empty table changes nothing."""
    table, _, change = key.rpartition(".")
    return key == CHANGED_RATE or (table == CHANGED_RATE and int(change) >= step)


def _show(value: Any) -> str:
    return "not set" if value is None else repr(value)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint."""
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({reason_of(error)}); name another one"
        ) from error
