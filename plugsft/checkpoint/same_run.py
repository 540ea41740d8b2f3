"""Whether a checkpoint belongs to a recipe: the keys that affect results, compared. No torch."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ..base.console import say
from ..base.errors import CheckpointError, reason_of
from ..base.limits import read_json_object
from ..recipe.capabilities import Capability
from ..recipe.parse import anchored, changed, defaults_of, flatten, show
from ..recipe.tables import Recipe
from ..registry.active import Active

FORMAT = 7
"""Version of a checkpoint's files."""
WRITERS: dict[Any, str] = {6: "plugsft 0.1.0 (commit 1faea179) or an earlier 0.2.0.dev0"}
"""Older version of a checkpoint's files -> what wrote it."""
STATE, LOCK = "state.json", ".plugsft.lock"
"""Files of a checkpoint, and of the output folder while a run writes into it."""
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
    "checkpoint.best",
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
    path: Path, recipe: Recipe, active: Active, contents: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Refuse a checkpoint of another version, of another recipe, or of other contents, if given."""
    state = read_state(path)
    now = keys_affecting_results(recipe, active)
    # Keys that are newer than the checkpoint had their default values; an empty table of a key that
    # is gone set nothing.
    then = {key: value for key, value in state["recipe"].items() if key in now or value != {}}
    then = defaults_of(now) | then
    if contents:
        now, then = now | contents["settings"], then | state["contents"]["settings"]
    differing = show(changed(then, now), then, now)
    if contents:
        then_read, now_read = state["contents"]["checksums"], contents["checksums"]
        for name in changed(then_read, now_read):
            if "" not in (then_read.get(name), now_read.get(name)):  # of files that cannot be read
                differing.append(f"{name} changed")
    if differing:
        new_run = "begin a new run in another output folder"
        # Without its base, nothing is exported.
        if "the weights in the model's files changed" not in differing:
            new_run += (
                f", with its weights: plugsft export {path} --to FOLDER, then model.path = FOLDER "
                f"(if it has adapters, {Capability.bundled('adapters').table} adapter = FOLDER)"
            )
        raise CheckpointError(
            f"{path} belongs to another run: {'; '.join(differing)}. Undo the changes (the run's "
            f"own recipe is {recipe.folder / 'recipe.toml'}), or {new_run}"
        )
    if contents and (noted := changed(state["contents"]["noted"], contents["noted"])):
        say(f"warning: changed since {path.name}: {', '.join(noted)}; results may differ")
    return state


def read_state(path: Path) -> dict[str, Any]:
    """Read what a checkpoint says of itself; refuse one of another version."""
    state = read_json(path / STATE)
    found = state.get("format")
    if found != FORMAT:
        writer = WRITERS.get(found, "another version of plugsft")
        raise CheckpointError(
            f"{path}: was written by {writer} (format {found}; this one reads {FORMAT}): resume "
            f"with that version, or export it with that version (plugsft export {path} --to "
            "FOLDER) and begin a new run with model.path = FOLDER, in another output folder"
        )
    return state


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint."""
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({reason_of(error)}); name another one"
        ) from error
