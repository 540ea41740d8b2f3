"""Shards or copies a model over its ranks, by DDP, FSDP2 or ZeRO-3.

The loop sees a model and an optimizer, whichever of them is used. Optimizers that cannot update
sharded weights, or would learn something else, are refused: FSDP2 gives an optimizer DTensors, and
many operations of torch do not support these. ZeRO-3 joins the weights of a parameter group to a
flat tensor, gives each rank a piece of it, and calls the optimizer once for each flat tensor. That
is the same as without ZeRO-3 only if each number is updated on its own. Two steps with tiny weights
tell.
"""

import copy
import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, fsdp2_prepare_model
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..base.errors import PluginError, out_of_memory, reason_of
from ..model.load import Load
from ..model.tensor_shards import shard_of
from .agree import is_lost
from .param_groups import describe_values, optimizers_in
from .states import Describer
from .train_state import TrainState
from .zero3 import ZeroTrainState

SHAPES = [(4, 6), (5, 1)]
"""Shapes of the tiny weights."""
WEIGHTS = {"FSDP": "the DTensors of FSDP2", "DEEPSPEED": "the empty weights of ZeRO-3"}
"""How an optimizer sees weights under each strategy that shards them."""
CURE = "Launch with DDP or FSDP2 (recipes/accelerate/), or use another optimizer"


@contextmanager
def explain_optimizer(accelerator: Accelerator, name: str) -> Iterator[None]:
    """Name the optimizer and the cure where its code fails on sharded weights."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        kind = accelerator.distributed_type.value
        if kind not in WEIGHTS or out_of_memory(error) or is_lost(error):
            raise
        raise PluginError(
            f"{name} failed on {WEIGHTS[kind]}: {reason_of(error)}. Launch with DDP "
            "(recipes/accelerate/gpu8.yaml), or use another optimizer"
        ) from error


def ensure_suits_zero3(optimizer: Optimizer, model: Module, flat_tensors: int) -> None:
    """Refuse an optimizer that updates flat pieces of weights otherwise than whole weights."""
    name = type(optimizer).__name__
    _, *inner = optimizers_in(optimizer)
    if inner:
        raise _unsuitable(f"{name} passes them to {type(inner[0]).__name__}")
    if callable(getattr(optimizer, "eval", None)):
        raise PluginError(
            f"{name} has an evaluation mode, and between steps ZeRO-3 leaves an optimizer no "
            f"weights, so its eval() would do nothing. {CURE}"
        )
    if hasattr(optimizer, "__del__"):
        return  # The end of a copy would free what the optimizer needs.
    update = partial(_two_steps, optimizer, [*model.parameters()])
    try:
        shaped, initial, values = update(SHAPES)
    except Exception:
        return  # It needs the real weights.
    try:
        flat, _, _ = update([(len(shaped),)])
    except Exception as error:
        raise _unsuitable(f"{name} does not take them: {error}") from error
    if not torch.allclose(shaped, flat, rtol=1e-4, atol=1e-7):
        raise _unsuitable(f"{name} updates weights by their shape")
    if values != update(SHAPES, scale=3.0)[2]:
        raise _unsuitable(f"{name} keeps a value that depends on all gradients in its groups")
    if values != initial and flat_tensors > 1:
        raise PluginError(
            f"{name} counts in its parameter groups, and ZeRO-3 calls it {flat_tensors} times a "
            "step, once for each group. Give it one parameter group, or launch with DDP or FSDP2"
        )


def _two_steps(
    optimizer: Optimizer,
    parameters: list[Tensor],
    shapes: Sequence[tuple[int, ...]],
    scale: float = 1.0,
) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    """Update tiny weights twice; return them, and the optimizer's values before and after."""
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    device = parameters[0].device
    numbers = torch.linspace(-1, 1, sum(math.prod(shape) for shape in shapes))
    weights = [
        torch.nn.Parameter(values.view(shape).to(device))
        for values, shape in zip(_split(numbers, shapes), shapes, strict=True)
    ]
    twin = object.__new__(type(optimizer))
    skipped = ("state", "param_groups", "step")  # a schedule may have wrapped `step`
    attributes = {key: value for key, value in vars(optimizer).items() if key not in skipped}
    vars(twin).update(copy.deepcopy(attributes, {id(tensor): tensor for tensor in parameters}))
    twin.state = defaultdict(dict)
    twin.param_groups = [{**copy.deepcopy(group), "params": weights}]
    describer = Describer(0, device)
    initial = describe_values(describer, twin)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for step in range(2):
            torch.manual_seed(step)
            gradients = torch.sin(numbers * (7 + step)) * scale
            for weight, gradient in zip(weights, _split(gradients, shapes), strict=True):
                weight.grad = gradient.view(weight.shape).to(device)
            twin.step()
    values = torch.cat([weight.detach().flatten().cpu() for weight in weights])
    return values, initial, describe_values(describer, twin)


def _split(numbers: Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
    return torch.split(numbers, [math.prod(shape) for shape in shapes])


def _unsuitable(reason: str) -> PluginError:
    return PluginError(
        f"ZeRO-3 gives an optimizer flat pieces of many weights, and {reason}. It would learn "
        f"something else than under other launchers. {CURE}"
    )


def is_sharded(accelerator: Accelerator) -> bool:
    """Tell whether each rank stores only its shard of the model."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def loads_in_bfloat16(accelerator: Accelerator) -> bool:
    """Tell whether weights are loaded in bfloat16, and DeepSpeed adds a float32 copy."""
    zero3 = accelerator.distributed_type == DistributedType.DEEPSPEED
    return bool(zero3 and accelerator.mixed_precision == "bf16")


def shard_model(
    accelerator: Accelerator, load: Load, model: Module, make: Callable[[Module], Optimizer]
) -> tuple[Module, Optimizer]:
    """Shard or copy a model over the ranks; make the optimizer of this rank's weights."""
    names = load.names_in_files(model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _scatter_weights(model, accelerator, names, load)
        with explain_optimizer(accelerator, "the plugin's optimizer"):
            optimizer = make(model)
        engine, zero = accelerator.prepare(model, _ensure_updates_trained_weights(model, optimizer))
        if loads_in_bfloat16(accelerator):
            _copy_float32_weights(model, names, load)
        flat_tensors = len(zero.optimizer.fp32_partitioned_groups_flat)
        ensure_suits_zero3(zero.optimizer.optimizer, model, flat_tensors)
        return engine, zero
    if accelerator.is_fsdp2:
        _shard_by_rows(model, accelerator, names, load)
        return model, _ensure_updates_trained_weights(model, make(model))
    plain, model = model, accelerator.prepare_model(model)
    if isinstance(model, DistributedDataParallel):
        _choose_buckets(model)
    return model, _ensure_updates_trained_weights(plain, make(plain))


def _choose_buckets(model: DistributedDataParallel) -> None:
    """Let DDP choose its buckets before the first step.

    It does so after one backward pass. Buckets decide the order in which gradients are added, so a
    resumed run must use the same ones from its first step on.
    """
    total: Any = sum(weight.sum() for weight in model.parameters() if weight.requires_grad)
    model.reducer.prepare_for_backward([])  # as its forward would
    (total * 0).backward()
    model.zero_grad()


def train_state_of(accelerator: Accelerator, model: Module, optimizer: Any) -> TrainState:
    """Return this rank's shard of model and optimizer."""
    zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    return (ZeroTrainState if zero else TrainState)(accelerator, model, optimizer)


def _ensure_updates_trained_weights(model: Module, optimizer: Optimizer) -> Optimizer:
    """Refuse an optimizer that does not update exactly the trainable weights."""
    updated = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    trained = {tensor: name for name, tensor in model.named_parameters() if tensor.requires_grad}
    known = {*updated}
    if left := [name for tensor, name in trained.items() if tensor not in known]:
        raise PluginError(
            f"the plugin that makes the optimizer leaves out {len(left)} trainable weights "
            f"({left[0]} first); give them to a parameter group, or freeze them in optimize_model "
            "(requires_grad_(False))"
        )
    if foreign := [tensor for tensor in updated if tensor not in trained]:
        raise PluginError(
            f"the plugin that makes the optimizer gives it {len(foreign)} tensors that are not "
            f"trainable weights of the model (the first of shape {list(foreign[0].shape)}), so "
            "checkpoints would not save them; remove them from its parameter groups"
        )
    return optimizer


def shard_frozen_model(accelerator: Accelerator, load: Load, model: Any) -> Module:
    """Shard a model that is never trained, like the trained one."""
    names = load.names_in_files(model)
    model.requires_grad_(False).eval()
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _scatter_weights(model, accelerator, names, load)
        deepspeed: Any = importlib.import_module("deepspeed")
        config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
        engine: Module = deepspeed.initialize(model=model, config=config)[0]
        return engine
    if accelerator.is_fsdp2:
        _shard_by_rows(model, accelerator, names, load)
        return model  # type: ignore[no-any-return]
    return accelerator.prepare_model(model, evaluation_mode=True)  # type: ignore[no-any-return]


def _shard_by_rows(model: Any, accelerator: Accelerator, names: dict[str, str], load: Load) -> None:
    """Shard a model by FSDP2; read this rank's rows of the weights that are not loaded yet."""
    fsdp2_prepare_model(accelerator, model)
    if hasattr(model, "generate"):  # adapters' goes to the model inside, past the forward's hooks
        register_fsdp_forward_method(model, "generate")
    if not names:
        return
    present = {
        name: tensor.detach() for name, tensor in _tensors(model).items() if not tensor.is_meta
    }
    model.to_empty(device=accelerator.device)
    model.tie_weights()
    tensors = _tensors(model)
    with torch.no_grad(), load.weights() as weights:
        for name, tensor in present.items():
            tensors[name].copy_(tensor)
        for name, stored in names.items():
            shard = shard_of(tensors[name])
            row = tensors[name][:1].numel()
            start, stop = shard.start // row, (shard.start + shard.values.numel()) // row
            shard.values.copy_(weights.rows(stored, start, stop).reshape(-1))


def _scatter_weights(
    model: Module, accelerator: Accelerator, names: dict[str, str], load: Load
) -> None:
    """Read each tensor on one rank, and let DeepSpeed scatter it."""
    if not names:
        return
    deepspeed: Any = importlib.import_module("deepspeed")
    tensors = dict(model.named_parameters())
    with torch.no_grad(), load.weights() as weights:
        for name, stored in names.items():
            parameter: Any = tensors[name]
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if accelerator.is_main_process:
                    parameter.copy_(weights.rows(stored, 0, parameter.ds_shape[0]))


def _copy_float32_weights(model: Module, names: dict[str, str], load: Load) -> None:
    """Copy float32 files into DeepSpeed's float32 weights, made from rounded ones."""
    access: Any = importlib.import_module("deepspeed").utils
    tensors: dict[str, Any] = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name in names and parameter.requires_grad
    }
    if not tensors:
        return
    with torch.no_grad(), load.weights() as weights:
        for name, parameter in tensors.items():
            shard, row = shard_of(parameter), math.prod(parameter.ds_shape[1:])
            if not shard.values.numel():
                continue
            first, stop = shard.start // row, shard.start + shard.values.numel()
            rows = weights.rows(names[name], first, -(-stop // row))
            if rows.dtype == torch.float32:
                values = torch.zeros_like(parameter.ds_tensor, dtype=torch.float32)
                exact = rows.reshape(-1)[shard.start - first * row : stop - first * row]
                values.view(-1)[: len(exact)].copy_(exact)
                access.safe_set_local_fp32_param(parameter, values)


def _tensors(model: Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
