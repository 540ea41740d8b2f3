"""Refuses optimizers that cannot update sharded weights, or would learn something else.

FSDP2 gives an optimizer DTensors, and many operations of torch do not support these. ZeRO-3 joins
the weights of a parameter group to a flat tensor, gives each rank a piece of it, and calls the
optimizer once for each flat tensor. That is the same as without ZeRO-3 only if each number is
updated on its own. Two steps with tiny weights tell.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ..base.errors import PluginError, out_of_memory, reason_of
from .agree import is_lost
from .optimizer_parts import optimizers_in
from .optimizer_state import Describer
from .param_groups import describe_values

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
