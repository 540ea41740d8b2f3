"""Checkpoints: published whole or not at all, without pickled code, tied to their recipe."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from .agree import ensure_alike
from .console import say
from .errors import CheckpointError
from .parts import Stored, write
from .publish import damage, discard, is_published, publish, sweep
from .reading import anchored, flatten
from .recipe import Recipe
from .registry import Active
from .spread import Held
from .tokens import Tokens

# What may differ between a checkpoint's recipe and the one that goes on from it: where things lie,
# how they are laid out and shown, and plugins, which change nothing or are compared by themselves.
FREE = (
    "output",
    "device",
    "train.micro_batch",
    "train.keep_whole_gradients",
    "train.log_every",
    "checkpoint.",
    "eval.",
    "plugins.",
)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        recipe: Recipe,
        active: Active,
        tokens: Tokens,
        accelerator: Accelerator,
        held: Held,
        steps: int,
    ) -> None:
        self.folder = recipe.folder / "checkpoints"
        self._recipe, self._active, self._data_key = recipe, active, tokens.facts["key"]
        self._accelerator, self._held = accelerator, held
        self.saved = 0
        """The last step that a checkpoint holds."""
        self._every = recipe.checkpoint.interval(steps)
        self.rhythm = recipe.checkpoint.describe(steps)

    def due(self, step: int) -> bool:
        """Tell whether one is written after this step."""
        return self._every > 0 and step % self._every == 0

    def save(self, step: int) -> None:
        """Publish a checkpoint of a finished step, and remove the oldest."""
        if self.saved == step:
            return
        main = self._accelerator.is_main_process
        if main:
            sweep(self.folder)
        target = self.folder / f"step-{step:06d}"
        parts = self._held.parts()
        with publish(target, replace=True) if main else nullcontext() as mine:
            # Every rank writes what it holds, all into the one folder.
            [folder] = broadcast_object_list([mine])
            write(folder, self._held.rank, parts)
            self._accelerator.wait_for_everyone()
            if main:
                facts = {
                    "step": step,
                    "data": self._data_key,
                    "recipe": _identity(self._recipe, self._active),
                    "plugins": self._recipe.plugins,
                }
                (folder / "state.json").write_text(json.dumps(facts, indent=1))
        if main:
            for old in listed(self.folder)[: -self._recipe.checkpoint.keep]:
                discard(old)
        # A rank that went on, and out, alone would have the launcher end the one that writes.
        self._accelerator.wait_for_everyone()
        self.saved = step

    def restore(self, path: Path | None) -> None:
        """Load a checkpoint, if there is one to go on from, into model and optimizer."""
        # Each rank has looked for itself.
        chosen = {"the checkpoint to go on from": path.name if path else "none"}
        ensure_alike(self._accelerator, chosen, "All nodes must see one output folder")
        if path is None:
            return
        facts = compare(path, self._recipe, self._active, self._data_key)
        with Stored(path) as stored:
            self._held.restore(stored)
        self.saved = int(facts["step"])


def find(recipe: Recipe, active: Active, resume: bool, given: Path | None) -> Path | None:
    """Return a checkpoint to go on from, checked against its manifest and the recipe."""
    path = _choose(recipe, resume, given)
    if path is not None:
        compare(path, recipe, active)
    return path


def _choose(recipe: Recipe, resume: bool, given: Path | None) -> Path | None:
    if given is not None:
        if not is_published(given):
            raise CheckpointError(f"--resume-from {given}: this is no checkpoint folder")
        if (wrong := damage(given)) is not None:
            raise CheckpointError(f"--resume-from {given}: the checkpoint is damaged: {wrong}")
        return given
    if not resume:
        return None
    folder = recipe.folder / "checkpoints"
    found = listed(folder)
    if not found:
        raise CheckpointError(
            f"--resume: there is no checkpoint in {folder}; start anew, with --overwrite in place "
            "of --resume (checkpoint.every says how often one is written)"
        )
    # Disks fail: an older whole checkpoint beats a newer damaged one.
    for path in reversed(found):
        if (wrong := damage(path)) is None:
            return path
        say(f"warning: {path} is damaged: {wrong}; trying the one before")
    raise CheckpointError(f"--resume: every checkpoint in {folder} is damaged")


def listed(folder: Path) -> list[Path]:
    """Return the published checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if is_published(path))


def _identity(recipe: Recipe, active: Active) -> dict[str, Any]:
    """Return the keys of a recipe that decide what is learned, those of its plugins among them."""
    flat = flatten(anchored(recipe))
    own = {
        key: value
        for key, value in flat.items()
        # Data counts by its key, which holds for moved files and notices changed ones.
        if key != "plugins" and not key.startswith((*FREE, "data.source", "data.split"))
    }
    return own | active.learned()


def compare(
    path: Path, recipe: Recipe, active: Active, data_key: str | None = None
) -> dict[str, Any]:
    """Refuse a checkpoint of another recipe or, where its key is known, of other data."""
    facts: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf8"))
    then, now = facts["recipe"], _identity(recipe, active)
    differing = [
        f"{key} was {_shown(then.get(key))} and is {_shown(now.get(key))}"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key)
    ]
    if data_key not in (None, facts["data"]):
        differing.append("the data, its options or the tokenizer have changed")
    if differing:
        model = recipe.folder / "model"
        more = ""
        if (model / "config.json").is_file():
            more = f', with model.path = "{model}" to train its model on'
        raise CheckpointError(
            f"{path} belongs to another recipe: {'; '.join(differing)}. "
            f"Undo the changes, or start anew in another output folder (output=...){more}"
        )
    if data_key and facts["plugins"] != recipe.plugins:
        say("warning: the plugins or their options differ from those of the checkpoint")
    return facts


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
