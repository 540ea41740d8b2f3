"""What pluggy does not check as it calls plugins: lost results, sources of errors, and metrics."""

import functools
import inspect
from collections.abc import Callable
from numbers import Real
from types import SimpleNamespace
from typing import Any

from ..base.errors import PluginError, PlugsftError
from ..hooks import PASSES, PLUGIN, Contract, Hooks, is_core
from ..recipe.tables import short

SPECS = {name: spec for name, spec in vars(Hooks).items() if hasattr(spec, "plugsft_spec")}

SOURCE = "plugsft_source"
"""Attribute of an error: the registration that it comes from."""

METRICS = {
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "loss_scale",
    "skipped_steps",
    "learning_rate",
    "trained_tokens",
    "tokens",
    "computed_tokens",
    "tokens_per_second",
    "step_seconds",
    "data_wait_seconds",
    "padding",
    "examples_per_micro_batch",
    "imbalance",
    "memory_gib",
    "stop",
}
"""The core's metrics, and the counts that are all-reduced with them."""


def contract_of(plugin: Any) -> Contract:
    """Return the arguments of a plugin's @plugin(...)."""
    return getattr(plugin, PLUGIN)  # type: ignore[no-any-return]


def hook_mark(cls: type[Any], hook: str) -> dict[str, Any] | None:
    """Return the arguments of @hookimpl on a method, which may be inherited."""
    return getattr(inspect.getattr_static(cls, hook, None), "plugsft_impl", None)


def is_stage(hook: str) -> bool:
    """Tell whether a hook is a stage, not a notice."""
    return bool(vars(SPECS[hook])["plugsft_spec"]["firstresult"])


def guarded(owner: Any, name: str) -> SimpleNamespace:
    """The hooks of a plugin or of the core; they refuse to lose a result, and name their errors."""
    hooks = {}
    for hook in SPECS:
        mark = hook_mark(type(owner), hook)
        if mark is not None:
            guard = _guard_wrapper if mark["wrapper"] else _guard_answer
            hooks[hook] = guard(getattr(owner, hook), name, hook)
    return SimpleNamespace(**hooks)


def _guard_answer(answer: Callable[..., Any], name: str, hook: str) -> Callable[..., Any]:
    needs_result = is_stage(hook) and hook not in PASSES and not is_core(name)

    @functools.wraps(answer)
    def checked(*args: Any) -> Any:
        try:
            result = answer(*args)
        except (Exception, SystemExit) as error:
            _name_source(error, name, hook)
            raise
        if result is None and needs_result:
            raise PluginError(f"plugin '{name}': its answer to '{hook}' is None; return the result")
        return result

    return checked


def _guard_wrapper(wrapper: Callable[..., Any], name: str, hook: str) -> Callable[..., Any]:
    """Refuse a missing `return` or a second yield; pluggy would name this function."""
    where = f"plugin '{name}': its wrapper of '{hook}'"

    @functools.wraps(wrapper)
    def checked(*args: Any) -> Any:
        steps, result, begun = wrapper(*args), None, False
        try:
            next(steps)
            begun = True
            try:
                result = yield
            except BaseException as error:
                steps.throw(error)
            else:
                steps.send(result)
        except StopIteration as end:
            if not begun:
                raise PluginError(f"{where} returned before its yield") from None
            # The result itself may be None: no plugin knew the format of these rows.
            if end.value is None and result is not None:
                raise PluginError(
                    f"{where} returned nothing; end it with: return what the yield gave"
                ) from None
            return end.value
        except (Exception, SystemExit) as error:
            _name_source(error, name, hook)
            raise
        raise PluginError(f"{where} yields twice")

    return checked


def _name_source(error: BaseException, name: str, hook: str) -> None:
    """Note where an unexpected error comes from: the first hook that it leaves."""
    is_answer = isinstance(error, PlugsftError) and is_stage(hook)
    if is_answer or hasattr(error, SOURCE):
        return
    setattr(error, SOURCE, name)
    if is_core(name):
        return
    if isinstance(error, SystemExit):
        raise PluginError(
            f"plugin '{name}' ended the program in its hook '{hook}', as sys.exit() does; a plugin "
            "calls run.stop(reason), or raises PluginError"
        ) from error
    if f"plugins.{name}" not in str(error):  # its message says so
        error.add_note(f"raised by plugin '{name}', in its hook '{hook}'")


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
