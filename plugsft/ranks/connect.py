"""Starts the process group, checks the launcher's settings, and synchronizes gradients."""

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, set_seed
from accelerate.utils import other as accelerate_other
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging as transformers_logging

from ..base.errors import LaunchError, reason_of
from ..base.machine import Machine, env_number
from ..recipe.parse import flatten
from ..recipe.tables import Recipe
from .agree import host_group
from .failures import watch
from .launcher import ensure_settings, started_too_few
from .precision import half_dtype, mixed_precision, on_cpu, reduce_in_float32

NAMES = {"FSDP": "FSDP2", "DEEPSPEED": "ZeRO-3"}
KINDS = {"fsdp2": "FSDP", "zero3": "DEEPSPEED"}
"""Strategy -> accelerate's name of it."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Each of these sets torch's allocator; the first one works on every GPU."""
CUDNN_ATTENTION = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
CHECK_LAUNCHER = "start it with `plugsft launch`, or check the launcher's file"


def silence_libraries() -> None:
    """Turn off progress bars and messages of libraries."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped upstream
    if not torch.cuda.is_available():
        # Otherwise an installed DeepSpeed prints that it found no GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        # Otherwise the first save imports DeepSpeed to check the model's class.
        accelerate_other.is_deepspeed_available = lambda: False


def prepare_gpu(recipe: Recipe) -> None:
    """Set what torch reads when CUDA starts; settings of the user win."""
    if recipe.device == "cpu" or not torch.cuda.is_available():
        return
    # Lengths of rows vary; segments of fixed size would leave gaps between tensors.
    if not {*ALLOCATOR} & os.environ.keys():
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    # cuDNN makes a plan for each new length, which takes longer than attention itself.
    if CUDNN_ATTENTION not in os.environ:
        torch.backends.cuda.enable_cudnn_sdp(False)


def start_watch(machine: Machine) -> None:
    """Let the ranks watch each other before there is a process group, if they can."""
    if has_launcher_store(machine):
        watch.start()


def has_launcher_store(machine: Machine) -> bool:
    """Whether the launcher has a store, by which ranks can talk before there is a group."""
    return machine.world_size > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(recipe: Recipe, machine: Machine) -> Accelerator:
    """Start the process group; refuse one that differs from the launcher's settings."""
    cpu, sharded = on_cpu(recipe), bool(machine.strategy)
    if has_launcher_store(machine):
        # Machines without a shared file system prepare a copy each, and a process group would time
        # out on the slowest.
        watch.wait_for_ranks(machine.world_size)
    if cpu:
        _prepare_cpu(machine)
    # Each rank reads its own rows; with this setting, only rank 0 would load weights.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    os.environ.setdefault("FSDP_VERSION", "2")
    precision = mixed_precision(recipe.model, machine.strategy == "zero3")
    # Without cpu=True, ranks on a machine without GPU form no process group.
    try:
        accelerator = Accelerator(
            cpu=cpu and not sharded,
            mixed_precision=precision,
            # Otherwise DDP copies each gradient.
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
    except ValueError as error:  # of its variables, ACCELERATE_*
        raise LaunchError(
            f"accelerate cannot use its settings: {reason_of(error)}. {CHECK_LAUNCHER}"
        ) from error
    kind = accelerator.distributed_type.value
    # Without a strategy, any kind that came up is fine: one process, or DDP.
    wanted = KINDS.get(machine.strategy, machine.strategy or kind)
    if (accelerator.num_processes, kind) != (machine.world_size, wanted):
        raise LaunchError(
            f"the launcher asked for {machine.world_size} ranks of {wanted}, and what came up is "
            f"{accelerator.num_processes} of {kind}. {CHECK_LAUNCHER}"
        )
    if machine.world_size > 1:
        host_group()
        with suppress(RuntimeError, KeyError):  # the host may allow fewer sockets than ranks
            watch.start()
    if kind == KINDS["zero3"]:
        _configure_deepspeed(accelerator, recipe)
    reduce_in_float32(accelerator)
    return accelerator


def ensure_possible(recipe: Recipe, machine: Machine) -> None:
    """Refuse a launch that the recipe contradicts, before anything is prepared for it."""
    cpu = on_cpu(recipe)
    # With GPUs, accelerate starts as many as asked, and the address may be left over.
    if started_too_few() and not torch.cuda.is_available():
        raise LaunchError(
            f"accelerate launch was asked for several processes and started one. {CHECK_LAUNCHER}"
        )
    if machine.strategy and "MASTER_ADDR" not in os.environ:
        raise LaunchError(
            "FSDP or DeepSpeed is asked for by the environment, but no launcher started this "
            f"process as a rank; use accelerate launch. {CHECK_LAUNCHER}"
        )
    if machine.strategy and cpu and torch.cuda.is_available():
        raise LaunchError(
            'device = "cpu" on a machine with GPUs is for DDP; hide them: CUDA_VISIBLE_DEVICES=""'
        )


def _configure_deepspeed(accelerator: Accelerator, recipe: Recipe) -> None:
    """Give DeepSpeed the recipe's settings; refuse a file that contradicts them."""
    # It calls deprecated functions of torch at every step.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    state: Any = accelerator.state
    config = state.deepspeed_plugin.deepspeed_config
    # What is "auto" follows from accelerate's settings.
    given = {name: value for name, value in flatten(config).items() if value != "auto"}
    ensure_settings(given, recipe, "the DeepSpeed file")
    config["gradient_clipping"] = recipe.train.max_grad_norm
    config["gradient_accumulation_steps"] = 1
    config["train_micro_batch_size_per_gpu"] = recipe.train.micro_batch
    if half_dtype(accelerator):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"


def user_set_threads() -> bool:
    """Whether OMP_NUM_THREADS is the user's: accelerate's launcher sets it to 1 by itself."""
    defaults = (None, "1") if "ACCELERATE_MIXED_PRECISION" in os.environ else (None,)
    return os.environ.get("OMP_NUM_THREADS") not in defaults


def disconnect(accelerator: Accelerator, model: Module) -> None:
    """End the process group.

    DDP's reducer ends first. As the last owner of a gloo group it would wait for the group's
    thread while it holds Python's lock, and the thread may wait for that lock: neither would end.
    """
    if isinstance(model, DistributedDataParallel):
        del model.logger, model.reducer
    accelerator.end_training()


@contextmanager
def gradient_sync(
    accelerator: Accelerator, model: Module, last: bool, whole: bool
) -> Iterator[None]:
    """Reduce gradients over ranks: under DDP only after a step's last micro-batch.

    FSDP2 reduces and shards gradients after every micro-batch; with `whole`, ranks store whole
    gradients until the last.
    """
    # DeepSpeed steps inside backward, and reads this to know when.
    accelerator.sync_gradients = last
    waits = not last and (whole or not accelerator.is_fsdp2)
    with accelerator.no_sync(model) if waits else nullcontext():
        yield


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed a step's dropout by its number, so that resuming needs no state."""
    words = np.random.SeedSequence([seed, step, rank]).generate_state(1)
    set_seed(int(words[0]))


def strategy_name(accelerator: Accelerator) -> str:
    """Name the strategy: "single process", "DDP", "FSDP2" or "ZeRO-3"."""
    if accelerator.num_processes == 1:
        return "single process"
    return NAMES.get(accelerator.distributed_type.value, "DDP")


def _prepare_cpu(machine: Machine) -> None:
    local = env_number("LOCAL_WORLD_SIZE", 1, 1)
    if local > 1 or not user_set_threads():
        torch.set_num_threads(max(1, machine.cores // local))
        # Otherwise accelerate sets the threads again.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if machine.strategy == "zero3":
        # This operator is compiled at every start, and a stale lock of it hangs for ever.
        ops: Any = importlib.import_module("deepspeed.ops")
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if machine.strategy:
        PartialState(backend="gloo")
    if machine.strategy == "fsdp2":
        # accelerate switches FSDP on for types that are not CPU's; gloo does the rest.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
