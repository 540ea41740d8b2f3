"""Optimizers that cannot train a run as the recipe says: refused, with the cure.

FSDP2 gives an optimizer DTensors, and many operations of torch do not support these. ZeRO-3 joins
the weights of a parameter group to a flat tensor, gives each rank a piece of it, and calls the
optimizer once for each flat tensor. That is the same as without ZeRO-3 only if each number is
updated on its own. We tried to find out by steps with tiny weights; an optimizer that says so is
simpler, and tests/test_sharded_optimizers.py compares torch's.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from torch import Tensor, optim
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
ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
"""Optimizers of torch that update each number on its own."""
PLAIN = int | float | str | Tensor
"""Types of the attributes in which an optimizer may count."""
WEIGHTS = {"FSDP": "the DTensors of FSDP2", "DEEPSPEED": "the empty weights of ZeRO-3"}
"""How an optimizer sees weights under each strategy that shards them."""


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


def ensure_suits_zero3(optimizer: Optimizer) -> None:
    """Refuse an optimizer that may update flat pieces of weights otherwise than whole weights."""
    kind = type(optimizer)
    if kind not in ELEMENTWISE and not getattr(optimizer, "elementwise", False):
        raise PluginError(
            f"ZeRO-3 gives an optimizer flat pieces of many weights, and {kind.__name__} "
            "is not known to update each number on its own. Launch with DDP or FSDP2 "
            "(recipes/accelerate/), or use another optimizer; one that does so, and counts nothing "
            "in its parameter groups, says elementwise = True"
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


def optimizers_in(value: Any) -> Iterator[Optimizer]:
    """Yield an optimizer, and those that it calls."""
    if isinstance(value, Optimizer):
        yield value
        value = vars(value)
    for item in value.values() if isinstance(value, Mapping) else value:
        if isinstance(item, Optimizer | Mapping | list | tuple):
            yield from optimizers_in(item)


def kept_elsewhere(optimizer: Optimizer) -> dict[str, str]:
    """Return as text what an optimizer holds outside of the states of its weights.

    Not its learning rates, which the schedule sets, and no boolean attributes, in which optimizers
    note that the first step is done.
    """
    values: dict[str, Any] = {}
    for name, attribute in vars(optimizer).items():
        if isinstance(attribute, PLAIN) and not isinstance(attribute, bool):
            values[f"self.{name}"] = attribute
    for number, group in enumerate(optimizer.param_groups):
        for setting in group.keys() - {"params", "lr"}:
            values[f"param_groups[{number}]['{setting}']"] = group[setting]
    states: Any = optimizer.state
    for key in states:
        if isinstance(key, str):
            values[f"state['{key}']"] = states[key]
    for inner in optimizers_in(optimizer):
        if inner.state is not states:
            values[f"the state of its {type(inner).__name__}"] = len(inner.state)
    return {name: repr(value) for name, value in values.items()}


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
    """Whether what a parameter group has under a name holds a value."""
    # Adafactor has two values of eps, the first of them None.
    numbers = [*given] if isinstance(given, list | tuple) else [given]
    wanted = numbers if place is None else numbers[place : place + 1]
    return any(n is not None and math.isclose(float(n), value, rel_tol=1e-6) for n in wanted)
