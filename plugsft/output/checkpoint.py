"""Checkpoints: written atomically, without pickles, and only for their own recipe."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from ..base.atomic import Stamp, damage, discard, is_published, publish, stamp, sweep, sync, writing
from ..base.console import say
from ..base.errors import CheckpointError, RecipeError, did_you_mean, reason_of
from ..base.step_folders import list_checkpoints, parse_step, step_folder
from ..ranks.agree import agreed, are_alike, ensure_alike, gathered
from ..ranks.optimizer_parts import first_difference, name_difference
from ..ranks.optimizer_state import RESUME_ALIKE
from ..ranks.plugin_state import copy_state
from ..ranks.shard_files import ShardReader, write_shards
from ..ranks.train_state import TrainState
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..tokens.store import Tokens
from .same_run import FORMAT, STATE, ensure_same_run, keys_affecting_results, read_json


class Best(NamedTuple):
    """The best evaluation so far."""

    step: int
    value: float


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
        self.best: Best | None = None
        """The best evaluation, if the recipe keeps it."""
        self._every, self._steps = recipe.checkpoint.interval(steps), steps

    def due(self, step: int) -> bool:
        """Tell whether a checkpoint is written after this step."""
        return self._every > 0 and step % self._every == 0

    def compare(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Compare an evaluation with the best one, if the recipe keeps it."""
        checkpoint = self._recipe.checkpoint
        if checkpoint.keep_best is None:
            return
        if checkpoint.keep_best not in metrics:
            raise RecipeError(
                f"checkpoint.keep_best: evaluations have no metric '{checkpoint.keep_best}'"
                f"{did_you_mean(checkpoint.keep_best, metrics) or ';'} they have: "
                f"{', '.join(metrics)}"
            )
        value = float(metrics[checkpoint.keep_best])
        sign = 1 if checkpoint.best == "lowest" else -1
        if math.isfinite(value) and (self.best is None or sign * value < sign * self.best.value):
            self.best = Best(step, value)

    def is_best(self, step: int) -> bool:
        """Tell whether the evaluation of this step is the best so far."""
        return self.best is not None and self.best.step == step

    @contextmanager
    def best_restored(self, step: int) -> Iterator[int]:
        """Load the best checkpoint, if any, and yield its step.

        After the block, the plugins have the state of this step again.
        """
        best = self.best
        if best is None or best.step == step:
            yield step
            return
        devices: dict[Tensor, torch.device] = {}

        def to_host(tensor: Tensor) -> Tensor:
            copy = tensor.detach().to("cpu", copy=True)
            devices[copy] = tensor.device
            return copy

        with agreed(self._accelerator, "copying the state of the plugins"):
            plugin_states = copy_state(self._active.state_dicts(), to_host)
        self.restore([step_folder(self.folder, best.step)])
        self.saved, self.best = step, best
        yield best.step
        with agreed(self._accelerator, "restoring the state of the plugins"):
            states = copy_state(plugin_states, lambda tensor: tensor.to(devices[tensor]))
            self._active.load_state_dicts(states)

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
                "best": self.best,
                "data": self._data,
                "recipe": keys_affecting_results(self._recipe, self._active),
                "plugins": self._recipe.plugins,
                "sharding": self._state.sharding(),
            }
            with agreed(accelerator, operation):
                plugin_states = self._active.state_dicts()
                described, shards = self._state.describe(plugin_states=plugin_states)
            facts["alike"] = are_alike(accelerator, json.dumps(described))
            with agreed(accelerator, operation), writing(target):
                if not facts["alike"]:
                    described, shards = self._state.describe(True, plugin_states)
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
        old_ones = checkpoints[: -self._recipe.checkpoint.keep]
        for old in (path for path in old_ones if not self.is_best(parse_step(path) or 0)):
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
            self._active.load_state_dicts(
                state.restore(reader, *read_description(path, saved, state))
            )
        self.saved, self.best = int(saved["step"]), self._best_of(saved)

    def _best_of(self, saved: dict[str, Any]) -> Best | None:
        """Return the best evaluation that a checkpoint knows, if its checkpoint is there."""
        if self._recipe.checkpoint.keep_best is None or not saved.get("best"):
            return None
        best = Best(*saved["best"])
        if is_published(folder := step_folder(self.folder, best.step)):
            return best
        say(
            f"warning: the best checkpoint so far, {folder}, is missing; model/ will be the best "
            "of the steps from here"
        )
        return None


def rank_file(rank: int) -> str:
    """Return the file name of a rank's own description."""
    return f"rank-{rank:05d}.json"


def read_description(
    path: Path, facts: dict[str, Any], state: TrainState
) -> tuple[dict[str, Any], bool, bool]:
    """Return the arguments of `TrainState.restore` for this rank.

    They are the description, whether the sharding is the same, and whether each rank has its own.
    """
    then, now = facts["sharding"], state.sharding()
    if facts["alike"]:
        same = then == now or then["kind"] == now["kind"] == "whole"
        return facts, same, False
    if then != now:
        first, *others = (read_json(path / rank_file(rank)) for rank in range(then["ranks"]))
        other = next((rank for rank in others if first_difference(first, rank)), first)
        raise CheckpointError(
            f"{path}: {name_difference(first, other)} differed between the {then['ranks']} ranks, "
            f"and cannot be divided among {now['ranks']} exactly: {RESUME_ALIKE}"
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
