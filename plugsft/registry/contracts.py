"""What pluggy does not check as it calls plugins: wrong results, sources of errors, and metrics."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..base.errors import PluginError, PlugsftError, choices
from ..hooks import PASSES, PLUGIN, Contract, Hooks, is_core
from ..recipe.tables import short

SPECS = {name: spec for name, spec in vars(Hooks).items() if hasattr(spec, "plugsft_spec")}

TYPES: dict[str, Any] = {
    "Batch": dict,
    "Callable": Callable,
    "Layouts": Sequence,
    "LoadedSteps": Iterable,
}
"""Results in the specifications that are no names of classes."""
UNCHECKED = {"Any", "Ints", "None"}
"""Results that whoever calls the hook looks at, and those of notices that return nothing."""
MOST_METRICS = 240
"""Most metrics of all plugins."""
SOURCE = "plugsft_source"
"""Attribute of an error: the registration that it comes from."""


class CountOf(NamedTuple):
    """In sums over ranks: the name of the count that a plugin's metric is divided by."""

    metric: str

    def __str__(self) -> str:
        return f"the count of {self.metric}"


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
    return SimpleNamespace(name=name, **hooks)  # pluggy takes equal ones for the same plugin


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
        if not is_core(name):
            _ensure_type(result, hook, f"plugin '{name}': its answer to '{hook}'")
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
            _ensure_type(end.value, hook, where)
            return end.value
        except (Exception, SystemExit) as error:
            _name_source(error, name, hook)
            raise
        raise PluginError(f"{where} yields twice")

    return checked


def _ensure_type(result: Any, hook: str, where: str) -> None:
    """Refuse a result whose type is not that of the specification.

    Classes are compared by their names, so that none of torch need be imported.
    """
    wanted = str(SPECS[hook].__annotations__["return"])
    if result is None or wanted in UNCHECKED:
        return
    kinds = re.sub(r"\[.*\]", "", wanted).split(" | ")
    names = [base.__name__ for base in type(result).__mro__]
    if not any(isinstance(result, TYPES.get(kind, ())) or kind in names for kind in kinds):
        raise PluginError(f"{where} gave a value of type {names[0]}; it must give {wanted}")


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


def numbers_of(plugin: str, metric: str, value: Any, declared: Sequence[str]) -> tuple[Any, ...]:
    """Return a metric's sum on this rank and, if given, its count; refuse what is neither."""
    where = f"plugin '{plugin}': its metric '{metric}'"
    if metric not in declared:
        hint = choices(metric, declared, "declared are:")
        raise PluginError(f"{where} is not declared: name it in @plugin(metrics=[...]){hint}")
    numbers = value if isinstance(value, tuple) and len(value) == 2 else (value,)
    for number in numbers:
        size = None
        if hasattr(number, "numel") and not number.is_complex():  # a tensor, without torch
            size = number.numel()
        if size != 1 and not isinstance(number, Real):
            what = short(value) if size is None else f"a tensor of {size} numbers"
            raise PluginError(
                f"{where} is {what}; return the sum of this rank, as a number or a tensor of one "
                "number, or a pair of the sum and the count that divides it"
            )
    return numbers
