"""Checks that pluggy lacks: mistakes in a plugin's class, and lost results."""

import functools
import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any, cast

from ..base.errors import PluginError, did_you_mean
from ..hooks import PASSES, PLUGIN, Contract, Hooks
from ..recipe.tables import short

SPECS = {name: spec for name, spec in vars(Hooks).items() if hasattr(spec, "plugsft_spec")}

STATE_HOOKS = ("state_dict", "load_state_dict")
"""Hooks that a plugin has both, or neither."""

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


def inspect_hooks(cls: type[Any], name: str) -> None:
    """Refuse mistakes that pluggy ignores: misspelt hooks, missing marks, wrong names."""
    for attribute, value in inspect.getmembers_static(cls, inspect.isfunction):
        mark = hook_mark(cls, attribute)
        where = f"plugin '{name}': {attribute}()"
        if mark is None:
            if attribute in SPECS:
                raise PluginError(f"{where} is named like a hook; mark it with @hookimpl")
            continue
        if attribute not in SPECS:
            raise PluginError(f"{where} is no hook{did_you_mean(attribute, SPECS)}")
        if mark["tryfirst"] or mark["trylast"] or mark["hookwrapper"]:
            raise PluginError(
                f"{where}: only wrapper=True is understood; order comes from @plugin(after=...)"
            )
        if mark["wrapper"] and not is_stage(attribute):
            raise PluginError(
                f"{where}: '{attribute}' is a notice to every plugin; it cannot be wrapped"
            )
        yields = inspect.isgeneratorfunction(value)
        if yields and not mark["wrapper"]:
            cure = "mark it @hookimpl(wrapper=True)" if is_stage(attribute) else "a notice has none"
            raise PluginError(f"{where} has a yield: {cure}")
        if mark["wrapper"] and not yields:
            raise PluginError(f"{where} has no yield: remove wrapper=True, or yield once")
        if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value):
            raise PluginError(f"{where}: a hook is a plain function; nothing awaits an async one")
        _inspect_arguments(value, attribute, where)

    for one, other in (STATE_HOOKS, STATE_HOOKS[::-1]):
        if hook_mark(cls, one) and not hook_mark(cls, other):
            raise PluginError(
                f"plugin '{name}' has {one}() and no {other}(): a resumed run would start without "
                f"its state; add {other}()"
            )


def _inspect_arguments(function: Callable[..., Any], hook: str, where: str) -> None:
    allowed = list(inspect.signature(SPECS[hook]).parameters)
    for argument, parameter in inspect.signature(function).parameters.items():
        if argument not in allowed:
            raise PluginError(
                f"{where} has no argument '{argument}'{did_you_mean(argument, allowed) or ';'} "
                f"allowed: {', '.join(allowed[1:])}"
            )
        # pluggy would not pass it, and the default would replace the core's value.
        if parameter.default is not parameter.empty or parameter.kind is parameter.KEYWORD_ONLY:
            raise PluginError(f"{where}: write '{argument}' as a plain argument, with no default")


def hook_mark(cls: type[Any], hook: str) -> dict[str, Any] | None:
    """Return the arguments of @hookimpl on a method, which may be inherited."""
    return getattr(inspect.getattr_static(cls, hook, None), "plugsft_impl", None)


def is_stage(hook: str) -> bool:
    """Tell whether a hook is a stage, not a notice."""
    return bool(vars(SPECS[hook])["plugsft_spec"]["firstresult"])


def refuse_none(function: Callable[..., Any], name: str, hook: str) -> Callable[..., Any]:
    """Wrap an answer to refuse None, unless its hook allows it."""
    if hook in PASSES:
        return function

    @functools.wraps(function)
    def checked(*args: Any) -> Any:
        result = function(*args)
        if result is None:
            raise PluginError(f"plugin '{name}': its answer to '{hook}' is None; return the result")
        return result

    return checked


def refuse_lost_result(function: Callable[..., Any], name: str, hook: str) -> Callable[..., Any]:
    """Wrap a wrapper to refuse a missing `return` or a second yield."""
    where = f"plugin '{name}': its wrapper of '{hook}'"

    @functools.wraps(function)
    def checked(*args: Any) -> Any:
        wrapper = function(*args)
        try:
            next(wrapper)
        except StopIteration:
            raise PluginError(f"{where} returned before its yield") from None
        result = None
        try:
            try:
                result = yield
            except BaseException as error:
                wrapper.throw(error)
            else:
                wrapper.send(result)
        except StopIteration as end:
            # The result itself may be None: no plugin knew the format of these rows.
            if end.value is None and result is not None:
                raise PluginError(
                    f"{where} returned nothing; end it with: return what the yield gave"
                ) from None
            return end.value
        raise PluginError(f"{where} yields twice")

    return checked


def refuse_wrong_metrics(
    function: Callable[..., Any], plugin: str, owners: dict[str, str]
) -> Callable[..., Any]:
    """Wrap `add_metrics` to refuse what is no number, and metric names that are taken.

    `owners` maps each known metric to its plugin.
    """

    @functools.wraps(function)
    def checked(*args: Any) -> Any:
        measured = function(*args)
        for metric, value in (measured or {}).items():
            where = f"plugin '{plugin}': its metric '{metric}'"
            # A tensor, without an import of torch.
            numbers = value.numel() if hasattr(value, "numel") else None
            if numbers != 1 and not isinstance(value, Real):
                what = short(value) if numbers is None else f"a tensor of {numbers} numbers"
                raise PluginError(
                    f"{where} is {what}; return the sum of this rank, as a number or a tensor of "
                    "one number"
                )
            if metric in METRICS:
                raise PluginError(f"{where} has the name of a metric of plugsft; rename it")
            if metric.startswith("eval_"):
                raise PluginError(
                    f"{where}: 'eval_' is the prefix of evaluation metrics, which plugsft adds; "
                    "rename it"
                )
            if owners.setdefault(metric, plugin) != plugin:
                raise PluginError(
                    f"{where} has the name of a metric of plugin '{owners[metric]}'; rename it, or "
                    "switch one of them off with --without"
                )
        return measured

    return checked
