"""What pluggy does not check as it calls plugins: lost results, and wrong metrics."""

import functools
import inspect
from collections.abc import Callable
from numbers import Real
from types import SimpleNamespace
from typing import Any, cast

from ..base.errors import PluginError
from ..hooks import PASSES, PLUGIN, Contract, Hooks
from ..recipe.tables import short

SPECS = {name: spec for name, spec in vars(Hooks).items() if hasattr(spec, "plugsft_spec")}

METRICS = frozenset(
    [
        *("step", "epoch", "loss", "grad_norm", "loss_scale", "skipped_steps", "learning_rate"),
        *("trained_tokens", "tokens", "tokens_per_second", "step_seconds", "data_wait_seconds"),
        *("padding", "examples_per_micro_batch", "imbalance", "memory_gib", "stop"),
        "computed_tokens",
    ]
)
"""The core's metrics, and the counts that are all-reduced with them."""


def contract_of(plugin: Any) -> Contract:
    """Return the arguments of a plugin's @plugin(...)."""
    return cast(Contract, getattr(plugin, PLUGIN))


def hook_mark(cls: type[Any], hook: str) -> dict[str, Any] | None:
    """Return the arguments of @hookimpl on a method, which may be inherited."""
    return getattr(inspect.getattr_static(cls, hook, None), "plugsft_impl", None)


def is_stage(hook: str) -> bool:
    """Tell whether a hook is a stage, not a notice."""
    return bool(vars(SPECS[hook])["plugsft_spec"]["firstresult"])


def keeping_results(plugin: Any, name: str) -> SimpleNamespace:
    """Return the hooks of a plugin; those that must give a result refuse to lose it."""
    hooks = {}
    for hook in SPECS:
        mark = hook_mark(type(plugin), hook)
        if mark is None:
            continue
        function = getattr(plugin, hook)
        if mark["wrapper"]:
            function = _refuse_lost_result(function, name, hook)
        elif is_stage(hook) and hook not in PASSES:
            function = _refuse_none(function, name, hook)
        hooks[hook] = function
    return SimpleNamespace(**hooks)


def _refuse_none(answer: Callable[..., Any], name: str, hook: str) -> Callable[..., Any]:
    @functools.wraps(answer)
    def checked(*args: Any) -> Any:
        result = answer(*args)
        if result is None:
            raise PluginError(f"plugin '{name}': its answer to '{hook}' is None; return the result")
        return result

    return checked


def _refuse_lost_result(wrapper: Callable[..., Any], name: str, hook: str) -> Callable[..., Any]:
    """Refuse a missing `return` or a second yield; pluggy would name this function."""
    where = f"plugin '{name}': its wrapper of '{hook}'"

    @functools.wraps(wrapper)
    def checked(*args: Any) -> Any:
        steps = wrapper(*args)
        try:
            next(steps)
        except StopIteration:
            raise PluginError(f"{where} returned before its yield") from None
        result = None
        try:
            try:
                result = yield
            except BaseException as error:
                steps.throw(error)
            else:
                steps.send(result)
        except StopIteration as end:
            # The result itself may be None: no plugin knew the format of these rows.
            if end.value is None and result is not None:
                raise PluginError(
                    f"{where} returned nothing; end it with: return what the yield gave"
                ) from None
            return end.value
        raise PluginError(f"{where} yields twice")

    return checked


def ensure_metric(metric: str, value: Any, plugin: str, owner: str) -> None:
    """Refuse a plugin's metric that is no number, or whose name another one has."""
    # A tensor, without an import of torch.
    numbers = value.numel() if hasattr(value, "numel") else None
    if numbers != 1 and not isinstance(value, Real):
        what = short(value) if numbers is None else f"a tensor of {numbers} numbers"
        problem = f"is {what}; return the sum of this rank, as a number or a tensor of one number"
    elif metric in METRICS:
        problem = "has the name of a metric of plugsft; rename it"
    elif metric.startswith("eval_"):
        problem = "begins with 'eval_', which plugsft adds to metrics of an evaluation; rename it"
    elif owner != plugin:
        problem = (
            f"has the name of a metric of plugin '{owner}'; rename it, or switch one of them off "
            "with --without"
        )
    else:
        return
    raise PluginError(f"plugin '{plugin}': its metric '{metric}' {problem}")
