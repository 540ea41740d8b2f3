"""Saving and restoring the checkpoints of a run.

They are written atomically, without pickles, and only for their own recipe.
"""

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

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
from .files import (
    ShardReader,
    host_has_room,
    owned_shards,
    stage,
    stamps_of_ranks,
    write_shards,
)
from .same_run import FORMAT, STATE, ensure_same_run, keys_affecting_results, open_lock
from .state import TrainState


class Best(NamedTuple):
    """The best evaluation so far."""

    step: int
    value: float


@dataclass(frozen=True)
class Saving:
    """A checkpoint whose numbers are being written."""

    step: int
    folder: Path
    """The unfinished folder, into which all ranks write."""
    facts: Mapping[str, Any]
    """The content of state.json."""
    task: Future[dict[str, Stamp]]
    """Writes this rank's numbers; gives the stamps of its files."""


class Checkpoints:
    """The checkpoints of one run.

    `begin` copies this rank's state; a thread writes the copies while the training goes on. Once
    all ranks have written, `publish` adds state.json and gives the folder its name. Collectives
    stay on the main thread.
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
        self._state = state
        self._rank, self._ranks = accelerator.process_index, accelerator.num_processes
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
        self._say_once = cache(say)
        self._saving: Saving | None = None

    def due(self, step: int) -> bool:
        """Whether a checkpoint is written after this step."""
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
        with agreed("copying the state of the plugins"):
            states = copy.deepcopy(self._active.state_dicts())
        self._load([step_folder(self.folder, best.step)], goes_on=False)
        yield best.step
        with agreed("restoring the state of the plugins"):
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
        operation, folder = f"saving step {step}", None
        with agreed(operation):
            described, shards = self._state.describe(self._active.state_dicts())
            text = json.dumps(described)
        if not are_alike(text):
            described["refused"] = find_difference(described)
        if refused := described["refused"]:
            self._say_once(f"warning: checkpoints of this run cannot be resumed: {refused}")
        owned = owned_shards(self._rank, shards)
        # All ranks measure before one copies.
        copies = all_done(host_has_room(self._memory, owned))
        target = step_folder(self.folder, step)
        with agreed(operation), writing(target):
            if copies:
                owned = stage(self._memory, owned)
            if self._rank == 0:
                folder = begin_folder(target)
        folder = from_main(folder)
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
        task = self._thread.submit(write_shards, folder, self._rank, owned, not copies)
        if not copies:
            self._say_once(
                "warning: the host has too little free memory for copies of a checkpoint; training "
                "stops while checkpoints are written"
            )
            task.exception()  # waits
        self._saving, self.saved = Saving(step, folder, facts, task), step

    def publish(self, wait: bool = False) -> int | None:
        """Publish the last checkpoint once all ranks have written it; return its step.

        Without `wait`, None says that a rank still writes.
        """
        saving = self._saving
        if saving is None or not (wait or all_done(saving.task.done())):
            return None
        self._saving = None  # also if the next lines fail
        operation, target = f"saving step {saving.step}", step_folder(self.folder, saving.step)
        try:
            with agreed(operation), writing(target):
                saving.task.result()
            with agreed(operation), writing(target):
                self._finish(saving)
        except BaseException:
            if self._rank == 0:
                remove(saving.folder)
            raise
        if self._rank == 0:
            self._thread.submit(self._remove_oldest, saving.step, saving.facts["best"])
        self.published = saving.step
        return saving.step

    def rescue(self) -> None:
        """Publish the last checkpoint, if all ranks have written it; they cannot agree any more."""
        with suppress(Exception):  # the first failure ends the run
            if self._saving:
                self._saving.task.result()
                self._finish(self._saving)

    def _finish(self, saving: Saving) -> None:
        """Add state.json, and give the folder its name."""
        if self._rank == 0:
            stamps = stamps_of_ranks(saving.folder, self._ranks)
            stamps[STATE] = write_json(saving.folder / STATE, saving.facts)
            finish(saving.folder, step_folder(self.folder, saving.step), lambda _: False, stamps)

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
        path = first_undamaged(checkpoints, (self._rank, self._ranks))
        if path is None:
            return {}
        with (
            ShardReader(path, self._rank, self._ranks) as reader,
            agreed(f"reading {path.name}"),
        ):
            saved = ensure_same_run(path, self._recipe, self._active, self._inputs)
            self._active.load_state_dicts(self._state.restore(reader, saved, goes_on))
        return saved

    def _best_of(self, saved: dict[str, Any]) -> Best | None:
        """Forget the best evaluation that a checkpoint knows if its own checkpoint is missing."""
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


def ensure_one_output(recipe: Recipe) -> None:
    """Refuse ranks that see another output folder than the main process, which has locked it."""
    with agreed("opening the output folder"), writing(recipe.folder):
        recipe.folder.mkdir(parents=True, exist_ok=True)
        # Opened for writing, a file comes from the network's server, not from a cache.
        with open_lock(recipe.folder) as file:
            file.seek(0)
            facts = {"the lock of the output folder": file.read() or "none"}
    ensure_alike(facts, "Give an output on a file system that all machines share")


def find_difference(described: Mapping[str, Any]) -> str:
    """Name the first part of the state in which a rank differs from the main process."""
    own = dict(leaves(described))
    main = from_main(own)
    differing = [path for path in {**main, **own} if main.get(path) != own.get(path)]
    first = next(filter(None, gathered(differing[:1])))
    return f"{first[0]} differs between ranks"


def leaves(described: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each value: as text, NaN equals itself."""
    if isinstance(described, list):
        described = dict(enumerate(described))
    if isinstance(described, Mapping) and described:
        for key, value in described.items():
            yield from leaves(value, f"{path}/{key}" if path else str(key))
    else:
        yield path, json.dumps(described)


def first_undamaged(checkpoints: Sequence[Path], share: tuple[int, int]) -> Path | None:
    """Return the first undamaged checkpoint; each rank compares a share of the files."""
    damaged: list[str] = []
    for path in from_main(checkpoints):  # one list: each rank has looked for itself
        errors = [error for error in gathered(damage(path, share=share)) if error]
        if not errors:
            for problem in damaged:
                say(f"warning: {problem}; trying the one before")
            return path
        damaged.append(f"{path}: the checkpoint is damaged: {errors[0]}")
    if damaged:
        raise CheckpointError(
            f"{'; '.join(damaged)}. Put their files back, or start again with --overwrite"
        )
    return None
