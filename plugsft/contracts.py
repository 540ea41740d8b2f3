"""What pluggy would pass over: slips in a plugin's class, and results that are lost."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .errors import PluginError, did_you_mean
from .hooks import PASSES, Hooks

SPECS = {name: spec for name, spec in vars(Hooks).items() if hasattr(spec, "plugsft_spec")}

METRICS = frozenset(
    [
        "step",
        "epoch",
        "loss",
        "grad_norm",
        "learning_rate",
        "trained_tokens",
        "tokens",
        "tokens_per_second",
        "step_seconds",
        "wait_seconds",
        "fill",
        "documents",
        "imbalance",
        "memory_gib",
        "asked",
        "slots",
        "waited",
    ]
)
"""Names of the metrics that the core logs, and of the sums that it adds up beside those."""


def inspect_hooks(cls: type[Any], name: str) -> None:
    """Find the slips that pluggy would pass over: misspelt hooks, forgotten marks, wrong names."""
    for attribute, value in inspect.getmembers_static(cls, inspect.isfunction):
        mark = mark_of(cls, attribute)
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
            raise PluginError(f"{where}: every plugin hears '{attribute}'; nobody wraps it")
        if bool(mark["wrapper"]) != inspect.isgeneratorfunction(value):
            raise PluginError(
                f"{where}: a wrapper is marked @hookimpl(wrapper=True) and yields once; "
                "an answer does neither"
            )
        _inspect_arguments(value, attribute, where)


def _inspect_arguments(function: Callable[..., Any], hook: str, where: str) -> None:
    allowed = list(inspect.signature(SPECS[hook]).parameters)
    for argument, parameter in inspect.signature(function).parameters.items():
        if argument not in allowed:
            raise PluginError(
                f"{where} has no argument '{argument}'{did_you_mean(argument, allowed) or ';'} "
                f"allowed: {', '.join(allowed[1:])}"
            )
        # pluggy would leave it out, and the default would stand for what the core gives.
        if parameter.default is not parameter.empty or parameter.kind is parameter.KEYWORD_ONLY:
            raise PluginError(f"{where}: write '{argument}' as a plain argument, with no default")


def mark_of(cls: type[Any], hook: str) -> dict[str, Any] | None:
    """Return what @hookimpl left on a method, the class's own or inherited."""
    return getattr(inspect.getattr_static(cls, hook, None), "plugsft_impl", None)


def is_stage(hook: str) -> bool:
    """Tell whether a hook is a stage; else it is a notice."""
    return bool(vars(SPECS[hook])["plugsft_spec"]["firstresult"])


def must_answer(function: Callable[..., Any], name: str, hook: str) -> Callable[..., Any]:
    """Make an answer that says so when it gives nothing; where None means something, leave it."""
    if hook in PASSES:
        return function

    @functools.wraps(function)
    def checked(*args: Any) -> Any:
        given = function(*args)
        if given is None:
            raise PluginError(f"plugin '{name}': its answer to '{hook}' is None; return the result")
        return given

    return checked


def must_return(function: Callable[..., Any], name: str, hook: str) -> Callable[..., Any]:
    """Make a wrapper that says so when it loses what the hook gave."""
    where = f"plugin '{name}': its wrapper of '{hook}'"

    @functools.wraps(function)
    def checked(*args: Any) -> Any:
        wrapper = function(*args)
        try:
            next(wrapper)
        except StopIteration:
            raise PluginError(f"{where} returned before its yield") from None
        given = None
        try:
            try:
                given = yield
            except BaseException as error:
                wrapper.throw(error)
            else:
                wrapper.send(given)
        except StopIteration as end:
            # None is an answer too: nobody knew the format of these rows.
            if end.value is None and given is not None:
                raise PluginError(
                    f"{where} returned nothing; end it with: return what the yield gave"
                ) from None
            return end.value
        raise PluginError(f"{where} yields twice")

    return checked


def must_be_apart(
    function: Callable[..., Any], plugin: str, owners: dict[str, str]
) -> Callable[..., Any]:
    """Make a `measure` that refuses the name of a metric of the core or of another plugin.

    `owners` has each known metric's plugin; of two with one name, one would hide the other.
    """

    @functools.wraps(function)
    def checked(*args: Any) -> Any:
        measured = function(*args)
        for metric in measured or ():
            where = f"plugin '{plugin}': its metric '{metric}'"
            if metric in METRICS:
                raise PluginError(f"{where} has the name of one of plugsft itself; rename it")
            if metric.startswith("eval_"):
                raise PluginError(
                    f"{where}: names with 'eval_' are those of evaluation, which puts it before "
                    "every metric; rename it"
                )
            if owners.setdefault(metric, plugin) != plugin:
                raise PluginError(
                    f"{where} has the name of one of plugin '{owners[metric]}'; rename it, or "
                    "switch one of them off with --without"
                )
        return measured

    return checked
