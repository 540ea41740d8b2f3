"""Checkpoints: written atomically, without pickles, and only for their own recipe."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..base.atomic import Stamp, damage, discard, publish, stamp, sweep, sync, writing
from ..base.console import say
from ..base.errors import CheckpointError, reason_of
from ..base.step_folders import list_checkpoints, parse_step, step_folder
from ..ranks.agree import agreed, are_alike, ensure_alike, gathered
from ..ranks.optimizer_state import RESUME_ALIKE
from ..ranks.shard_files import ShardReader, write_shards
from ..ranks.train_state import TrainState
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..tokens.store import Tokens
from .same_run import FORMAT, STATE, ensure_same_run, keys_affecting_results, read_json


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        recipe: Recipe,
        active: Active,
        tokens: Tokens,
        accelerator: Accelerator,
        state: TrainState,
        steps: int,
    ) -> None:
        self.folder = recipe.folder / "checkpoints"
        self._recipe, self._active, self._data = recipe, active, tokens.facts["index"]
        self._accelerator, self._state = accelerator, state
        self.saved = 0
        """The step of the last checkpoint."""
        self._every, self._steps = recipe.checkpoint.interval(steps), steps

    def due(self, step: int) -> bool:
        """Tell whether a checkpoint is written after this step."""
        return self._every > 0 and step % self._every == 0

    def save(self, step: int) -> None:
        """Publish a checkpoint of a finished step, and remove the oldest."""
        if self.saved == step:
            return
        accelerator, operation = self._accelerator, f"saving step {step}"
        target, stamps = step_folder(self.folder, step), dict[str, Stamp]()
        with ExitStack() as stack:
            building = None
            with agreed(accelerator, operation):
                if accelerator.is_main_process:
                    sweep(self.folder)
                    building = stack.enter_context(publish(target, True, stamps))
            # All ranks write into the same folder.
            folder = gathered(accelerator, building)[0]
            facts = {
                "format": FORMAT,
                "step": step,
                "data": self._data,
                "recipe": keys_affecting_results(self._recipe, self._active),
                "plugins": self._recipe.plugins,
                "sharding": self._state.sharding(),
            }
            with agreed(accelerator, operation):
                described, shards = self._state.describe()
            facts["alike"] = are_alike(accelerator, json.dumps(described))
            with agreed(accelerator, operation), writing(target):
                if not facts["alike"]:
                    described, shards = self._state.describe(per_rank=True)
                written = write_shards(folder, self._state.rank, shards)
                if not facts["alike"]:
                    name = rank_file(self._state.rank)
                    written[name] = _write_json(folder / name, described)
                elif accelerator.is_main_process:
                    facts |= described
            for rank_stamps in gathered(accelerator, written):
                stamps |= rank_stamps
            with agreed(accelerator, operation):
                if accelerator.is_main_process:
                    stamps[STATE] = _write_json(folder / STATE, facts)
                stack.close()
        # All ranks wait: when one ends, the launcher ends the main rank, which may still remove.
        with agreed(accelerator, operation):
            if accelerator.is_main_process:
                self._remove_oldest(step)
        self.saved = step

    def _remove_oldest(self, step: int) -> None:
        """Remove all but the newest checkpoints; warn where that fails."""
        # Later ones belong to the run that this one resumed from.
        checkpoints = [
            path for path in list_checkpoints(self.folder) if (parse_step(path) or 0) <= step
        ]
        for old in checkpoints[: -self._recipe.checkpoint.keep]:
            try:
                left, reason = discard(old), "its files are in use or not ours"
            except OSError as error:
                left, reason = old, reason_of(error)
            if left:
                say(f"warning: {left} could not be removed ({reason}); it still takes disk space")

    def restore(self, checkpoints: Sequence[Path]) -> None:
        """Load the first undamaged checkpoint, if any, into model and optimizer."""
        # Each rank has listed the folder itself.
        names = ", ".join(path.name for path in checkpoints) or "none"
        facts = {"the checkpoints to resume from": names}
        ensure_alike(self._accelerator, facts, "All nodes must see one output folder")
        path = first_undamaged(self._accelerator, checkpoints)
        if path is None:
            return
        state = self._state
        with (
            ShardReader(path, state.rank, state.ranks) as reader,
            agreed(self._accelerator, f"reading {path.name}"),
        ):
            saved = ensure_same_run(path, self._recipe, self._active, self._data)
            if not 0 < saved["step"] <= self._steps:
                raise CheckpointError(
                    f"{path / STATE}: is of step {saved['step']}, and the run has "
                    f"{self._steps}; resume from another checkpoint (--resume-from)"
                )
            state.restore(reader, *read_description(path, saved, state))
        self.saved = int(saved["step"])


def rank_file(rank: int) -> str:
    """Return the file name of a rank's own description."""
    return f"rank-{rank:05d}.json"


def read_description(
    path: Path, facts: dict[str, Any], state: TrainState
) -> tuple[dict[str, Any] | None, bool, bool]:
    """Return the arguments of `TrainState.restore` for this rank.

    They are the description, whether the sharding is the same, and whether each rank has its own.
    """
    if facts["format"] == 1:
        return None, False, False
    then, now = facts["sharding"], state.sharding()
    if facts["alike"]:
        same = then == now or then["kind"] == now["kind"] == "whole"
        return facts, same, False
    if then != now:
        raise CheckpointError(
            f"{path}: each of {then['ranks']} ranks had an optimizer state of its own, which "
            f"cannot be divided among {now['ranks']} exactly: {RESUME_ALIKE}"
        )
    return read_json(path / rank_file(state.rank)), True, True


def _write_json(path: Path, facts: dict[str, Any]) -> Stamp:
    path.write_text(json.dumps(facts, indent=1), encoding="utf8")
    sync(path)
    return stamp(path)


def first_undamaged(accelerator: Accelerator, checkpoints: Sequence[Path]) -> Path | None:
    """Return the first undamaged checkpoint; each rank compares a share of the files."""
    share = accelerator.process_index, accelerator.num_processes
    for path in checkpoints:
        errors = [error for error in gathered(accelerator, damage(path, share=share)) if error]
        if not errors:
            return path
        if path is not checkpoints[-1]:
            say(f"warning: {path} is damaged: {errors[0]}; trying the one before")
    if checkpoints:
        more = f", as is each of the {len(checkpoints) - 1} newer ones" if checkpoints[1:] else ""
        raise CheckpointError(f"{checkpoints[-1]}: the checkpoint is damaged: {errors[0]}{more}")
    return None
