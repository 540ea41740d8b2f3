"""What a run saves: checkpoints, and the trained model as a Hugging Face folder.

Checkpoints are written atomically, without pickles, and only for their own recipe. The model is
gathered, written, read back and published.
"""

import json
import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from ..base.atomic import (
    Stamp,
    damage,
    discard,
    is_published,
    list_checkpoints,
    parse_step,
    publish,
    step_folder,
    write_json,
    writing,
)
from ..base.console import say
from ..base.errors import CheckpointError, DiskError, RecipeError, choices, reason_of
from ..data.load_tokenizer import end_generation
from ..model.load import persistent_buffers
from ..model.tensor_shards import TensorShard, shard_of
from ..model.weight_files import Weights, converted_shapes, find_weight_files, meta_copy
from ..ranks.agree import agreed, all_done, are_alike, ensure_alike, gathered
from ..ranks.param_groups import first_difference, name_difference
from ..ranks.shard_files import ShardReader, host_has_room, owned_shards, stage, write_shards
from ..ranks.states import RESUME_ALIKE, copy_state
from ..ranks.train_state import TrainState
from ..recipe.capabilities import Capability
from ..recipe.tables import Recipe
from ..registry.active import Active
from .same_run import FORMAT, STATE, ensure_same_run, keys_affecting_results, open_lock, read_json


class Best(NamedTuple):
    """The best evaluation so far."""

    step: int
    value: float


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
        self._warned = False
        self._task: Future[Any] | None = None
        """What it does in the background."""

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
        self._load([step_folder(self.folder, best.step)])
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
        if self.saved != step:
            self._saving: Any = self._save(step)
            self._task, self.saved = next(self._saving), step

    def publish(self, wait: bool = False) -> int | None:
        """Publish the last checkpoint if all ranks have written it; return its step.

        Without `wait`, return None if a rank still writes.
        """
        while (task := self._task) and (wait or all_done(self._accelerator, task.done())):
            self._task = None  # also if the next line fails
            self._task = next(self._saving, None)
            if self._task is None:
                self.published = self.saved
                return self.saved
        return None

    def rescue(self) -> None:
        """Publish the last checkpoint, if possible, as the run fails: ranks cannot agree."""
        with suppress(Exception):  # the first failure ends the run
            while self._task is not None:
                self._task.result()
                self._task = self._saving.send(True) if self._state.rank == 0 else None

    def _save(self, step: int) -> Generator["Future[Any]", bool | None, None]:
        """Yield what runs in the background; true is sent if the ranks cannot agree."""
        accelerator, operation, rank = self._accelerator, f"saving step {step}", self._state.rank
        target, stamps = step_folder(self.folder, step), dict[str, Stamp]()
        with ExitStack() as stack:
            building = None
            with agreed(accelerator, operation):
                if accelerator.is_main_process:
                    building = stack.enter_context(publish(target, True, stamps))
            # All ranks write into the same folder.
            folder = gathered(accelerator, building)[0]
            facts: dict[str, Any] = {
                "format": FORMAT,
                "step": step,
                "best": self.best,
                "evaluated": self.evaluated,
                "recipe": keys_affecting_results(self._recipe, self._active),
                "plugins": self._recipe.plugins,
                "sharding": self._state.sharding(),
                "inputs": self._inputs,
            }
            with agreed(accelerator, operation):
                plugin_states = self._active.state_dicts()
                described, shards = self._state.describe(plugin_states=plugin_states)
            alike = facts["alike"] = are_alike(accelerator, json.dumps(described))
            with agreed(accelerator, operation):
                if not alike:
                    described, shards = self._state.describe(True, plugin_states)
                else:
                    facts |= described
                owned = owned_shards(rank, shards)
                has_room = host_has_room(self._memory, owned)
            if background := all_done(accelerator, has_room):  # ranks measure before one copies
                with agreed(accelerator, operation):
                    owned = stage(self._memory, owned)
            else:
                self._warn_of_full_host()

            def write() -> None:
                with writing(target):
                    written = write_shards(folder, rank, owned, not background)
                    if not alike:
                        written[rank_file(rank)] = write_json(folder / rank_file(rank), described)
                    write_json(folder / f".{rank_file(rank)}.tmp", written)

            def finish() -> None:
                if accelerator.is_main_process:
                    stamps.update(stamps_in(folder, accelerator.num_processes))
                    stamps[STATE] = write_json(folder / STATE, facts)
                    stack.close()
                    self._remove_oldest(step, facts["best"])

            for work in (write, finish):
                task = self._thread.submit(work)
                if not background:
                    task.exception()  # waits
                alone = yield task
                # When a rank ends, the launcher ends the main rank, which may still remove files.
                with nullcontext() if alone else agreed(accelerator, operation):
                    task.result()

    def _warn_of_full_host(self) -> None:
        """Say once that saves are not in the background."""
        if not self._warned:
            say(
                "warning: the host has too little free memory for copies of a checkpoint; "
                "training stops while checkpoints are written"
            )
        self._warned = True

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
            self.evaluated = saved.get("evaluated", self.saved)
            self.best = self._best_of(saved)

    def _load(self, checkpoints: Sequence[Path]) -> dict[str, Any]:
        """Load the first undamaged checkpoint, if any, into model, optimizer and plugins."""
        # Each rank has listed the folder itself.
        names = ", ".join(path.name for path in checkpoints) or "none"
        facts = {"the checkpoints to resume from": names}
        ensure_alike(self._accelerator, facts, "All nodes must see one output folder")
        path = first_undamaged(self._accelerator, checkpoints)
        if path is None:
            return {}
        state = self._state
        with (
            ShardReader(path, state.rank, state.ranks) as reader,
            agreed(self._accelerator, f"reading {path.name}"),
        ):
            saved = ensure_same_run(path, self._recipe, self._active, self._inputs)
            if not 0 < saved["step"] <= self._steps:
                raise CheckpointError(
                    f"{path / STATE}: is of step {saved['step']}, and the run has "
                    f"{self._steps}; resume from another checkpoint (--resume-from)"
                )
            plugin_states = state.restore(reader, *read_description(path, saved, state))
            self._active.load_state_dicts(plugin_states)
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


def stamps_in(folder: Path, ranks: int) -> dict[str, Stamp]:
    """Return the stamps that all ranks leave in the folder of a checkpoint."""
    # If this rank failed alone, others may still write.
    stamps, end = {}, time.monotonic() + 30
    for path in (folder / f".{rank_file(rank)}.tmp" for rank in range(ranks)):
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


def ensure_saveable(model: Any) -> None:
    """Refuse a model that transformers could not save and load again.

    Writes nothing: names and shapes go through transformers' renaming in both directions.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model, "hf_quantizer", None) is not None:
        return
    twin = meta_copy(model)
    state = {**dict(twin.named_parameters()), **persistent_buffers(twin)}
    wanted = {name: list(tensor.shape) for name, tensor in tensors_to_save(twin, state).items()}
    try:
        written = revert_weight_conversion(twin, {name: state[name] for name in wanted})
        made = converted_shapes(twin, {name: [*tensor.shape] for name, tensor in written.items()})
    except Exception as error:  # from transformers' conversions
        raise _unsaveable(f"{type(error).__name__}: {error}") from error
    lost = [name for name, shape in wanted.items() if name not in made or made[name][0] != shape]
    if lost:
        raise _unsaveable(f"{lost[0]} and {len(lost) - 1} more tensors would be lost")


def tensors_to_save(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a model that transformers saves."""
    ignored = model._keys_to_ignore_on_save or ()
    return {name: tensor for name, tensor in state.items() if name not in ignored}


def save_model(
    accelerator: Accelerator, state: TrainState, tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> None:
    """Publish the trained model after comparing the files with the weights."""
    plain: Any = state.plain
    # The folder of an adapter holds what was trained; its base stays where it is.
    dtype = getattr(torch, recipe.model.dtype)
    adapter = hasattr(plain, "peft_config")
    weights: dict[str, Tensor] = {}
    shards: dict[str, TensorShard] = {}
    for name, parameter in state.parameters(trained=adapter).items():
        whole = state.whole(parameter)
        if accelerator.is_main_process:
            shards[name] = state.shard(parameter)
            weights[name] = whole.to("cpu", None if adapter else dtype).contiguous()
    with agreed(accelerator, "writing the trained model"):
        if accelerator.is_main_process:
            buffers = {} if adapter else persistent_buffers(plain)
            shards |= {name: shard_of(buffer) for name, buffer in buffers.items()}
            end_generation(plain, tokenizer)
            with publish(recipe.folder / "model", replace=True) as folder:
                plain.save_pretrained(folder, state_dict=weights | buffers)
                if not adapter:
                    # transformers writes the type of the weights in memory.
                    plain.config.dtype = dtype
                    plain.config.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                if adapter:
                    stored = {name_in_file(name): shard for name, shard in shards.items()}
                    ensure_written(folder, read_adapters(folder), stored, None)
                else:
                    files = Weights(meta_copy(plain), find_weight_files(str(folder), None))
                    ensure_written(folder, files, tensors_to_save(plain, shards), dtype)


def ensure_written(
    folder: Path, weights: Weights, shards: dict[str, TensorShard], dtype: torch.dtype | None
) -> None:
    """Compare the tensors of a written folder with the trained weights."""
    with weights:
        if missing := sorted({*shards} - {*weights.shapes}):
            raise _broken(folder, f"{missing[0]} is missing, as are {len(missing) - 1} more")
        if wrong := weights.differing(shards, dtype):
            raise _broken(folder, wrong)


def read_adapters(folder: Path) -> Weights:
    """Return the tensors of a folder of adapters."""
    files: dict[str, str] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            files |= {name: str(path) for name in file.keys()}  # noqa: SIM118  # no dict
    return Weights(None, files)


def name_in_file(name: str) -> str:
    """Return the name in a file: peft leaves its own words out."""
    name = name.replace("modules_to_save.default.", "").removesuffix(".default")
    return name.replace(".default.", ".")


def _broken(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder.parent}: the trained model was not written as it is: {what}. The last checkpoint "
        "holds all that was trained: --resume goes on from it"
    )


def _unsaveable(why: str) -> RecipeError:
    return RecipeError(
        "model.path: transformers "
        f"{transformers.__version__} could not save and load this model: {why}. "
        "Nothing was trained; use another version of transformers, or adapters "
        f"({Capability.bundled('adapters').table})"
    )
