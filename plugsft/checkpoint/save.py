"""Saving and restoring the checkpoints of a run.

They are written atomically, without pickles, and only for their own recipe.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from ..base.atomic import (
    Stamp,
    begin_folder,
    damage,
    discard,
    finish,
    is_published,
    list_checkpoints,
    parse_step,
    remove,
    step_folder,
    write_json,
    writing,
)
from ..base.console import say
from ..base.errors import CheckpointError, DiskError, RecipeError, choices, reason_of
from ..ranks.agree import agreed, all_done, are_alike, ensure_alike, from_main, gathered
from ..recipe.tables import Recipe
from ..registry.active import Active
from .files import ShardReader, Shards, host_has_room, owned_shards, stage, write_shards
from .same_run import FORMAT, STATE, ensure_same_run, keys_affecting_results, open_lock, read_json
from .state import TrainState
from .tree import copy_state


class Best(NamedTuple):
    """The best evaluation so far."""

    step: int
    value: float


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written.

    First all ranks write their numbers. Then, in a second task, the main process adds state.json
    and gives the folder its name.
    """

    step: int
    folder: Path
    """The unfinished folder, into which all ranks write."""
    facts: Mapping[str, Any]
    """The content of state.json."""
    in_background: bool
    task: Future[Any]
    written_by_all: bool = False


class Checkpoints:
    """The checkpoints of one run.

    A save copies this rank's state; a thread writes the copies while the training goes on.
    Collectives stay on the main thread: `publish` asks whether all ranks have written.
    """

    def __init__(
        self,
        recipe: Recipe,
        active: Active,
        accelerator: Accelerator,
        state: TrainState,
        steps: int,
        inputs: Mapping[str, str],
    ) -> None:
        self.folder = recipe.folder / "checkpoints"
        self._recipe, self._active, self._inputs = recipe, active, inputs
        self._accelerator, self._state = accelerator, state
        self._rank = accelerator.process_index
        self.saved = 0
        """The step of the last checkpoint, which may still be in the background."""
        self.best: Best | None = None
        """The best evaluation, if the recipe keeps it."""
        self.published = 0
        """The step of the last checkpoint that is complete."""
        self.evaluated = 0
        """The step of the last evaluation that came to its end."""
        self._every, self._steps = recipe.checkpoint.interval(steps), steps
        self._thread, self._memory = ThreadPoolExecutor(1), dict[str, Tensor]()
        self._warned = set[str]()
        self._saving: Saving | None = None

    def due(self, step: int) -> bool:
        """Tell whether a checkpoint is written after this step."""
        best = self.best and self.best.step
        return step in (best, self._steps) or (self._every > 0 and step % self._every == 0)

    def compare(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note an evaluation; compare it with the best one, if the recipe keeps it."""
        self.evaluated = step
        checkpoint = self._recipe.checkpoint
        if checkpoint.keep_best is None:
            return
        if checkpoint.keep_best not in metrics:
            raise RecipeError(
                f"checkpoint.keep_best: evaluations have no metric '{checkpoint.keep_best}'"
                f"{choices(checkpoint.keep_best, metrics, 'they have:')}"
            )
        value = float(metrics[checkpoint.keep_best])
        sign = 1 if checkpoint.best == "lowest" else -1
        if math.isfinite(value) and (self.best is None or sign * value < sign * self.best.value):
            self.best = Best(step, value)

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
        self._load([step_folder(self.folder, best.step)], goes_on=False)
        yield best.step
        with agreed(self._accelerator, "restoring the state of the plugins"):
            states = copy_state(plugin_states, lambda tensor: tensor.to(devices[tensor]))
            self._active.load_state_dicts(states)

    def save(self, step: int) -> None:
        """Publish the last checkpoint and one of a finished step."""
        self.publish(wait=True)
        self.begin(step)
        self.publish(wait=True)

    def begin(self, step: int) -> None:
        """Begin a checkpoint of a finished step; the last one must be published."""
        if self.saved == step:
            return
        accelerator, operation, folder = self._accelerator, f"saving step {step}", None
        target = step_folder(self.folder, step)
        with agreed(accelerator, operation), writing(target):
            if accelerator.is_main_process:
                folder = begin_folder(target)
        folder = gathered(accelerator, folder)[0]
        with self._removing_at_failure(folder):
            with agreed(accelerator, operation):
                described, shards = self._state.describe(self._active.state_dicts())
                text = json.dumps(described)
            if not are_alike(accelerator, text):
                described["refused"] = find_difference(accelerator, described)
            if refused := described["refused"]:
                self._warn(f"checkpoints of this run cannot be resumed: {refused}")
            owned = owned_shards(self._rank, shards)
            # All ranks measure before one copies.
            in_background = all_done(accelerator, host_has_room(self._memory, owned))
            if in_background:
                with agreed(accelerator, operation):
                    owned = stage(self._memory, owned)
            else:
                self._warn(
                    "the host has too little free memory for copies of a checkpoint; training "
                    "stops while checkpoints are written"
                )
        facts: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "best": self.best,
            "evaluated": self.evaluated,
            "recipe": keys_affecting_results(self._recipe, self._active),
            "plugins": self._recipe.plugins,
            "sharding": self._state.weights.sharding(),
            "inputs": self._inputs,
            **described,
        }
        write = partial(self._write, step, folder, owned, in_background)
        task = self._start(write, in_background)
        self._saving, self.saved = Saving(step, folder, facts, in_background, task), step

    def publish(self, wait: bool = False) -> int | None:
        """Publish the last checkpoint if all ranks have written it; return its step.

        Without `wait`, return None if a rank still writes.
        """
        while (saving := self._saving) and (
            wait or all_done(self._accelerator, saving.task.done())
        ):
            self._saving = None  # also if the next lines fail
            with (
                self._removing_at_failure(saving.folder),
                agreed(self._accelerator, f"saving step {saving.step}"),
            ):
                saving.task.result()
            if saving.written_by_all:
                self.published = saving.step
                return saving.step
            task = self._start(partial(self._finish, saving), saving.in_background)
            self._saving = replace(saving, task=task, written_by_all=True)
        return None

    def rescue(self) -> None:
        """Publish the last checkpoint, if possible, as the run fails: ranks cannot agree."""
        with suppress(Exception):  # the first failure ends the run
            if saving := self._saving:
                saving.task.result()
                if not saving.written_by_all:
                    self._finish(saving)

    def _start(self, work: Callable[[], None], in_background: bool) -> "Future[Any]":
        task = self._thread.submit(work)
        if not in_background:
            task.exception()  # waits
        return task

    def _write(self, step: int, folder: Path, owned: Shards, in_background: bool) -> None:
        """Write this rank's numbers, and tell the main process their checksums."""
        with writing(step_folder(self.folder, step)):
            stamps = write_shards(folder, self._rank, owned, not in_background)
            write_json(stamps_file(folder, self._rank), stamps)

    def _finish(self, saving: Saving) -> None:
        """Add state.json, give the folder its name, and remove old checkpoints."""
        if not self._accelerator.is_main_process:
            return
        target = step_folder(self.folder, saving.step)
        with writing(target):
            stamps = stamps_of_ranks(saving.folder, self._accelerator.num_processes)
            stamps[STATE] = write_json(saving.folder / STATE, saving.facts)
            finish(saving.folder, target, lambda _: False, stamps)
        self._remove_oldest(saving.step, saving.facts["best"])

    @contextmanager
    def _removing_at_failure(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._accelerator.is_main_process:
                remove(folder)
            raise

    def _warn(self, what: str) -> None:
        """Warn once of each thing."""
        if what not in self._warned:
            say(f"warning: {what}")
        self._warned.add(what)

    def _remove_oldest(self, step: int, best: Best | None) -> None:
        """Remove all but the newest checkpoints and the best; warn where that fails."""
        # Later ones belong to the run that this one resumed from.
        paths = [it for it in list_checkpoints(self.folder) if (parse_step(it) or 0) <= step]
        keep, kept = self._recipe.checkpoint.keep, best and step_folder(self.folder, best.step)
        for old in (path for path in paths[:-keep] if path != kept):
            try:
                discard(old)
            except (DiskError, OSError) as error:
                reason = reason_of(error)
                say(f"warning: {old} could not be removed ({reason}); it still takes disk space")

    def restore(self, checkpoints: Sequence[Path]) -> None:
        """Go on from the first undamaged checkpoint, if any."""
        if saved := self._load(checkpoints):
            self.saved = self.published = saved["step"]
            self.evaluated = saved["evaluated"]
            self.best = self._best_of(saved)

    def _load(self, checkpoints: Sequence[Path], goes_on: bool = True) -> dict[str, Any]:
        """Load the first undamaged checkpoint, if any, into model, optimizer and plugins."""
        # Each rank has listed the folder itself.
        names = ", ".join(path.name for path in checkpoints) or "none"
        facts = {"the checkpoints to resume from": names}
        ensure_alike(self._accelerator, facts, "All nodes must see one output folder")
        path = first_undamaged(self._accelerator, checkpoints)
        if path is None:
            return {}
        with (
            ShardReader(path, self._rank, self._accelerator.num_processes) as reader,
            agreed(self._accelerator, f"reading {path.name}"),
        ):
            saved = ensure_same_run(path, self._recipe, self._active, self._inputs)
            if not 0 < saved["step"] <= self._steps:
                raise CheckpointError(
                    f"{path / STATE}: is of step {saved['step']}, and the run has "
                    f"{self._steps}; resume from another checkpoint (--resume-from)"
                )
            self._active.load_state_dicts(self._state.restore(reader, saved, goes_on))
        return saved

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


def ensure_one_output(accelerator: Accelerator, recipe: Recipe) -> None:
    """Refuse ranks that see another output folder than the main process, which has locked it."""
    with agreed(accelerator, "opening the output folder"), writing(recipe.folder):
        recipe.folder.mkdir(parents=True, exist_ok=True)
        # Opened for writing, a file comes from the network's server, not from a cache.
        with open_lock(recipe.folder) as file:
            file.seek(0)
            facts = {"the lock of the output folder": file.read() or "none"}
    ensure_alike(accelerator, facts, "Give an output on a file system that all machines share")


def find_difference(accelerator: Accelerator, described: Mapping[str, Any]) -> str:
    """Name the first part of the state in which a rank differs from the main process."""
    paths = gathered(accelerator, first_difference(from_main(described), described))
    return f"{next(filter(None, paths))} differs between ranks"


def first_difference(one: Any, other: Any) -> str:
    """Return the path to the first difference between two descriptions, or ""."""
    if isinstance(one, list) and isinstance(other, list):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            # NaN differs from itself, but not as text.
            if json.dumps(one.get(key)) != json.dumps(other.get(key)):
                return f"{key}/{first_difference(one.get(key), other.get(key))}".rstrip("/")
    return ""


def stamps_file(folder: Path, rank: int) -> Path:
    """Return the file in which a rank leaves the checksums of what it wrote."""
    return folder / f".rank-{rank:05d}.json.tmp"


def stamps_of_ranks(folder: Path, ranks: int) -> dict[str, Stamp]:
    """Return the checksums that all ranks leave in the folder of a checkpoint."""
    # If this rank failed alone, others may still write.
    stamps, end = {}, time.monotonic() + 30
    for path in (stamps_file(folder, rank) for rank in range(ranks)):
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.1)
        stamps.update(read_json(path))
    return stamps


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
