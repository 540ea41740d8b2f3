"""Optimizers that cannot train a run as the recipe says: refused, with the cure.

FSDP2 gives an optimizer DTensors, and many operations of torch do not support these. ZeRO-3 joins
the weights of a parameter group to a flat tensor, gives each rank a piece of it, and calls the
optimizer once for each flat tensor. That is the same as without ZeRO-3 only if each number is
updated on its own. Two steps with tiny weights tell.
"""

import copy
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ..base.errors import PluginError, RecipeError, out_of_memory, reason_of
from ..recipe.tables import Train
from .agree import is_lost

SETTINGS = ("beta1", "beta2", "eps", "weight_decay")
"""Settings of [train] that the core's AdamW uses, and another optimizer may not."""

PLAIN = bool | int | float | str
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
) -> tuple[Tensor, str, str]:
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
    initial = _values_of(twin)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for step in range(2):
            torch.manual_seed(step)
            gradients = torch.sin(numbers * (7 + step)) * scale
            for weight, gradient in zip(weights, _split(gradients, shapes), strict=True):
                weight.grad = gradient.view(weight.shape).to(device)
            twin.step()
    values = torch.cat([weight.detach().flatten().cpu() for weight in weights])
    return values, initial, _values_of(twin)


def _values_of(optimizer: Optimizer) -> str:
    """Return the values of an optimizer and of its groups as text, to compare."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    own = {key: value for key, value in vars(optimizer).items() if isinstance(value, PLAIN)}
    return json.dumps((groups, own), default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else str(type(value))


def _split(numbers: Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
    return torch.split(numbers, [math.prod(shape) for shape in shapes])


def _unsuitable(reason: str) -> PluginError:
    return PluginError(
        f"ZeRO-3 gives an optimizer flat pieces of many weights, and {reason}. It would learn "
        f"something else than under other launchers. {CURE}"
    )


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
    problems = [
        f"remove train.{key} = {value}: the optimizer of {made_by} does not use it (no parameter "
        f"group of {type(optimizer).__name__} has this value as {_name_in_groups(key)})"
        for key in SETTINGS
        if (value := getattr(train, key)) != Train.model_fields[key].default
        and not any(_holds(group, key, value) for group in groups)
    ]
    if problems and plugins:
        raise RecipeError(problems)


def _holds(group: Mapping[str, Any], key: str, value: float) -> bool:
    """Tell whether a parameter group holds a setting, named as in torch."""
    slices = {"beta1": slice(0, 1), "beta2": slice(1, 2)}
    numbers = group.get("betas", ())[slices[key]] if key in slices else group.get(key)
    # Adafactor has two values of eps, the first of them None.
    items = numbers if isinstance(numbers, list | tuple) else [numbers]
    return any(n is not None and math.isclose(float(n), value, rel_tol=1e-6) for n in items)


def _name_in_groups(key: str) -> str:
    return {"beta1": "betas[0]", "beta2": "betas[1]"}.get(key, f"'{key}'")
