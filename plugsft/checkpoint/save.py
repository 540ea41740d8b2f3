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

from ..base.atomic import (
    begin_folder,
    damage,
    discard,
    finish,
    is_published,
    list_checkpoints,
    remove,
    step_folder,
    writing,
)
from ..base.console import say
from ..base.errors import CheckpointError, DiskError, PluginError, reason_of
from ..hooks import with_plugins
from ..ranks.agree import agreed, all_done, ensure_alike, from_main, gathered
from ..recipe.tables import Recipe
from ..registry.active import Active
from .contents import Contents
from .files import (
    Copies,
    ShardReader,
    Shards,
    copy_to_host,
    host_has_room,
    owned_shards,
    take_stamps,
    write_shards,
)
from .same_run import FORMAT, STATE, ensure_same_run, keys_affecting_results, open_lock
from .state import TrainState
from .tree import where_in

SAME_STATE = (
    "Checkpoints store what is equal on all ranks, or like a weight: a plugin can add up numbers "
    "with run.ranks.reduce, or return a WeightSlice; an optimizer whose state has another shape "
    "than its weight needs DDP (recipes/accelerate/gpu8.yaml)"
)
"""What cures a state that differs between ranks."""


class Best(NamedTuple):
    """The best evaluation so far."""

    step: int
    value: float
    metric: str = ""
    rows: str = ""
    """The checksum of the rows that were evaluated."""
    wanted: str = "lowest"
    """Whether the lowest value is the best, or the highest."""


@dataclass(frozen=True)
class Pending:
    """A checkpoint that is being written."""

    step: int
    best: Best | None
    """The best evaluation up to this step."""
    folder: Path
    """The unfinished folder, into which all ranks write."""
    task: Future[None]
    """Writes this rank's files."""


class Checkpoints:
    """The checkpoints of one run.

    `begin` copies this rank's state; a thread writes the copies while the training goes on. Once
    all ranks have written, `publish` gives the folder its name. Collectives stay on the main
    thread.
    """

    def __init__(
        self,
        recipe: Recipe,
        active: Active,
        accelerator: Accelerator,
        state: TrainState,
        steps: int,
        per_epoch: int,
        contents: Contents,
    ) -> None:
        self.folder = recipe.folder / "checkpoints"
        self._recipe, self._active, self._contents = recipe, active, contents
        self._state = state
        self._rank, self._ranks = accelerator.process_index, accelerator.num_processes
        self.begun = 0
        """The step of the last checkpoint, which may still be in the background."""
        self.published = 0
        """The step of the last checkpoint that is complete and has its name."""
        self.best: Best | None = None
        """The best evaluation, if the recipe keeps it."""
        self.evaluated = -1
        """The step of the last evaluation that came to its end; 0 is that before step 1."""
        self._every, self._steps = recipe.checkpoint.interval(steps, per_epoch), steps
        self._thread, self._copies = ThreadPoolExecutor(1), Copies()
        self._say_once = cache(say)
        self._pending: Pending | None = None

    def due(self, step: int) -> bool:
        """Whether a checkpoint is written after this step."""
        is_best = self.best is not None and self.best.step == step
        regular = self._every > 0 and step % self._every == 0
        return is_best or regular or step == self._steps

    def compare(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note an evaluation; compare it with the best one, if the recipe keeps it."""
        self.evaluated = step
        checkpoint, best = self._recipe.checkpoint, self.best
        metric = checkpoint.keep_best
        if metric is None:
            return
        if metric not in metrics:
            # `ensure_metrics_exist` has found it among the names that plugins declare.
            raise PluginError(
                f"checkpoint.keep_best: this evaluation has no metric '{metric}', though a plugin "
                f"declares it; it has: {', '.join(metrics)}"
            )
        rows = self._contents.evaluation
        new = Best(step, float(metrics[metric]), metric, rows, checkpoint.best)
        if step == 0 or not math.isfinite(new.value):
            return  # the model before step 1 has no checkpoint
        # Of equal values, the first one: so the best checkpoint is written once.
        choose = min if checkpoint.best == "lowest" else max
        self.best = choose(best or new, new, key=lambda one: one.value)

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
        self._load([step_folder(self.folder, best.step)])
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
        if self.begun == step:
            return
        operation, folder = f"saving step {step}", None
        described, shards = self.describe()
        owned = owned_shards(self._rank, shards)
        # All ranks measure before one copies.
        copied = all_done(host_has_room(self._copies, owned))
        target = step_folder(self.folder, step)
        with agreed(operation), writing(target):
            if copied:
                owned = copy_to_host(self._copies, owned)
            if self._rank == 0:
                folder = begin_folder(target)
        folder = from_main(folder)
        state = {
            "format": FORMAT,
            "step": step,
            "best": self.best,
            "evaluated": self.evaluated,
            "recipe": keys_affecting_results(self._recipe, self._active),
            **described,
        }
        task = self._thread.submit(self._write, folder, state, owned, copied)
        if not copied:
            self._say_once(
                "warning: the host has too little free memory for copies of a checkpoint; training "
                "stops while checkpoints are written"
            )
            task.exception()  # waits
        self._pending, self.begun = Pending(step, self.best, folder, task), step

    def describe(self) -> tuple[dict[str, Any], Shards]:
        """Describe the state of the run; refuse one that no checkpoint could hold."""
        with agreed("describing the state of the run"):
            ensure_kept(self._active, self._state)
            described, shards = self._state.describe(self._active.state_dicts())
        ensure_alike(values_by_place(described), SAME_STATE)
        return described, shards

    def _write(self, folder: Path, state: Mapping[str, Any], owned: Shards, copied: bool) -> None:
        """Write this rank's files, in the thread."""
        if self._rank == 0:
            state = {**state, "contents": self._contents.described()}  # waits for checksums
            (folder / STATE).write_text(json.dumps(state, indent=1))
        write_shards(folder, self._rank, owned, copied)

    def publish(self, wait: bool = False) -> int | None:
        """Publish the last checkpoint once all ranks have written it; return its step.

        Without `wait`, None says that a rank still writes.
        """
        pending = self._pending
        if pending is None or not (wait or all_done(pending.task.done())):
            return None
        self._pending = None  # also if the next lines fail
        operation, target = f"saving step {pending.step}", step_folder(self.folder, pending.step)
        try:
            with agreed(operation), writing(target):
                pending.task.result()
            with agreed(operation), writing(target):  # now that all ranks have written
                self._name(pending)
        except BaseException:
            if self._rank == 0:
                remove(pending.folder)
            raise
        if self._rank == 0:
            self._thread.submit(self._remove_oldest, pending.step, pending.best)
        self.published = pending.step
        return pending.step

    def rescue(self) -> None:
        """Publish the last checkpoint, if all ranks have written it; they cannot agree any more."""
        with suppress(Exception):  # the first failure ends the run
            if self._pending:
                self._pending.task.result()
                self._name(self._pending)

    def _name(self, pending: Pending) -> None:
        """Give the folder its name."""
        if self._rank == 0:
            folder, target = pending.folder, step_folder(self.folder, pending.step)
            finish(folder, target, lambda _: False, take_stamps(folder, self._ranks))

    def _remove_oldest(self, step: int, best: Best | None) -> None:
        """Remove all but the newest checkpoints and the best; warn where that fails."""
        found = list_checkpoints(self.folder)
        # Later ones belong to the run that this one resumed from.
        own = found[: found.index(step_folder(self.folder, step)) + 1]
        best_folder = best and step_folder(self.folder, best.step)
        for path in own[: -self._recipe.checkpoint.keep]:
            try:
                if path != best_folder:
                    discard(path)
            except (DiskError, OSError) as error:
                say(
                    f"warning: {path} could not be removed ({reason_of(error)}); it still takes "
                    "disk space"
                )

    def restore(self, checkpoints: Sequence[Path]) -> None:
        """Go on from the first undamaged checkpoint, if any."""
        if state := self._load(checkpoints):
            self.begun = self.published = state["step"]
            self.evaluated = state["evaluated"]
            self.best = self._remaining_best(state["best"])

    def _load(self, checkpoints: Sequence[Path]) -> dict[str, Any]:
        """Load the first undamaged checkpoint, if any, into model, optimizer and plugins."""
        path = first_undamaged(checkpoints, (self._rank, self._ranks))
        if path is None:
            return {}
        contents = from_main(self._contents.described() if self._rank == 0 else None)
        with agreed(f"reading {path.name}"):
            state = ensure_same_run(path, self._recipe, self._active, contents)
            reader = ShardReader(path, self._rank, self._ranks)
            self._active.load_state_dicts(self._state.restore(reader, state))
        return state

    def _remaining_best(self, best: Any) -> Best | None:
        """The best evaluation that a checkpoint knows, if the checkpoint of the best is there."""
        checkpoint = self._recipe.checkpoint
        if checkpoint.keep_best is None or best is None:
            return None
        known = Best(*best)
        folder = step_folder(self.folder, known.step)
        chosen_by = (checkpoint.keep_best, self._contents.evaluation, checkpoint.best)
        if known[2:] == chosen_by and is_published(folder):
            return known
        say(
            f"warning: the best checkpoint so far, {folder}, is missing, or was chosen by another "
            "checkpoint.keep_best or best, or other rows of [eval]; model/ will be the best of the "
            "steps from here"
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


def ensure_kept(active: Active, state: TrainState) -> None:
    """Refuse an optimizer that keeps what no checkpoint has, unless its plugin keeps it."""
    lost = state.changed_elsewhere()
    makers = {*active.answering("optimizer")} & {*active.plugins} or {*active.having("optimizer")}
    if lost and makers.isdisjoint(active.having("state_dict")):
        raise PluginError(
            f"{with_plugins(active.hooks.optimizer)}: {type(state.optimizer).__name__} changes "
            f"{', '.join(lost[:5])}, and checkpoints store only its state of each weight. Return "
            "it from the plugin's state_dict(), and put it back in load_state_dict(); an optimizer "
            "inside another one may share its state: inner.state = self.state"
        )


def values_by_place(described: Mapping[str, Any]) -> dict[str, str]:
    """Give each value of the states as text, in which NaN equals itself."""
    return {
        where_in(f"{kind}/{owner}/{key}"): json.dumps(value)
        for kind in ("plugin_states", "optimizer_states")
        for owner, state in described[kind].items()
        for key, value in state["dict"].items()
    }


def first_undamaged(checkpoints: Sequence[Path], share: tuple[int, int]) -> Path | None:
    """Return the first undamaged checkpoint; each rank compares a share of the files."""
    damaged: list[str] = []
    paths: Sequence[Path] = from_main(checkpoints)  # one list: each rank has looked for itself
    for path in paths:
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
