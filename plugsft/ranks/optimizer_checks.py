"""Optimizers that cannot train a run as the recipe says: refused, with the cure.

FSDP2 gives an optimizer DTensors, and many operations of torch do not support these. ZeRO-3 joins
the weights of a parameter group to a flat tensor, gives each rank a piece of it, and calls the
optimizer once for each flat tensor. That is the same as without ZeRO-3 only if each number is
updated on its own. Two steps with tiny weights tell.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ..base.errors import PluginError, RecipeError, out_of_memory, reason_of
from ..recipe.tables import Train
from .agree import is_lost

SETTINGS = {
    "beta1": ("betas", 0),
    "beta2": ("betas", 1),
    "eps": ("eps", None),
    "weight_decay": ("weight_decay", None),
}
"""Settings of [train] that the core's AdamW uses, and another optimizer may not: setting -> its
name in a parameter group, and its place there."""
SHAPES = [(4, 8), (16, 1)]
"""Shapes of the tiny weights."""
PIECES = [16, 8]
"""Numbers of the flat tensors that each of two ranks has of the tiny weights."""
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
    if callable(getattr(optimizer, "eval", None)):
        raise PluginError(
            f"{name} has an evaluation mode, and between steps ZeRO-3 leaves an optimizer no "
            f"weights, so its eval() would do nothing. {CURE}"
        )
    if hasattr(optimizer, "__del__"):
        return  # The end of a copy would free what the optimizer needs.
    parameters = [*model.parameters()]
    weights = torch.linspace(-1, 1, 2 * sum(PIECES)).to(parameters[0].device)
    pieces = [(size,) for size in PIECES] if flat_tensors > 1 else [(sum(PIECES),)]
    device = weights.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            whole = _two_steps(optimizer, parameters, weights, SHAPES, at_once=True)
        except Exception:
            return  # It needs the real weights.
        try:
            ranks = [
                _two_steps(optimizer, parameters, half, pieces, at_once=False)
                for half in weights.chunk(2)
            ]
        except Exception as error:
            raise _unsuitable(name, flat_tensors) from error
    # It updates nothing if it passes the weights on to other optimizers.
    if torch.equal(whole, weights) or not torch.allclose(
        whole, torch.cat(ranks), rtol=1e-4, atol=1e-7
    ):
        raise _unsuitable(name, flat_tensors)


def _unsuitable(name: str, flat_tensors: int) -> PluginError:
    return PluginError(
        f"{name} would learn something else under ZeRO-3, which gives it flat pieces of many "
        f"weights, and calls it {flat_tensors} times a step, once for each group: it reads shapes, "
        f"adds up over weights, counts its calls, or passes weights on. {CURE}"
    )


def _two_steps(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    numbers: Tensor,
    shapes: Sequence[tuple[int, ...]],
    at_once: bool,
) -> Tensor:
    """Update numbers twice, as weights of these shapes: all at once, or each as its own group."""
    sizes = [math.prod(shape) for shape in shapes]
    weights = [
        torch.nn.Parameter(values.clone().view(shape))
        for values, shape in zip(torch.split(numbers, sizes), shapes, strict=True)
    ]
    groups = [weights] if at_once else [[weight] for weight in weights]
    twin = _copy(optimizer, parameters, groups)
    for step in range(2):
        for group in groups:
            twin.zero_grad()
            for weight in group:
                weight.grad = torch.sin(weight.detach() * (7 + step))
            twin.step()
    return torch.cat([weight.detach().flatten() for weight in weights])


def _copy(optimizer: Optimizer, parameters: Sequence[Tensor], groups: list[Any]) -> Optimizer:
    """Copy an optimizer with its first group's settings, for groups of other weights."""
    twin = object.__new__(type(optimizer))
    skipped = ("state", "param_groups", "step")  # a schedule may have wrapped `step`
    attributes = {key: value for key, value in vars(optimizer).items() if key not in skipped}
    vars(twin).update(copy.deepcopy(attributes, {id(tensor): tensor for tensor in parameters}))
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    twin.state = defaultdict(dict)
    twin.param_groups = [copy.deepcopy(settings) | {"params": weights} for weights in groups]
    return twin


def ensure_updates_trained_weights(model: Module, optimizer: Optimizer) -> Optimizer:
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


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer, and those that it calls and that have states of their own."""
    inner = [
        item
        for attribute in vars(optimizer).values()
        for item in _items(attribute)
        if isinstance(item, Optimizer) and item.state is not optimizer.state
    ]
    return [optimizer, *(found for item in inner for found in optimizers_in(item))]


def _items(attribute: Any) -> list[Any]:
    if isinstance(attribute, Mapping):
        return [*attribute.values()]
    return [*attribute] if isinstance(attribute, list | tuple) else [attribute]


def ensure_uses_settings(optimizer: Optimizer, train: Train, plugins: Sequence[str]) -> None:
    """Refuse settings that no parameter group holds; `plugins` made or changed the optimizer.

    Settings at their defaults are not looked for.
    """
    groups = [group for part in optimizers_in(optimizer) for group in part.param_groups]
    made_by = " and ".join(f"plugin '{name}'" for name in plugins)
    problems = []
    for setting, (name, place) in SETTINGS.items():
        value, default = getattr(train, setting), Train.model_fields[setting].default
        if value == default or any(_holds(group.get(name), place, value) for group in groups):
            continue
        where = f"'{name}'" if place is None else f"{name}[{place}]"
        problems.append(
            f"remove train.{setting} = {value}: the optimizer of {made_by} does not use it (no "
            f"parameter group of {type(optimizer).__name__} has this value as {where})"
        )
    if problems and plugins:
        raise RecipeError(problems)


def _holds(given: Any, place: int | None, value: float) -> bool:
    """Tell whether what a parameter group has under a name holds a value."""
    # Adafactor has two values of eps, the first of them None.
    numbers = [*given] if isinstance(given, list | tuple) else [given]
    wanted = numbers if place is None else numbers[place : place + 1]
    return any(n is not None and math.isclose(float(n), value, rel_tol=1e-6) for n in wanted)
