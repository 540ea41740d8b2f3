"""Limits on a chat template's output and time for one row.

A template is a program that comes with a model. If it doubles a text in a loop, or counts to a
billion, it fills the memory or never ends. So loops and macros check the time, and operations that
make long texts are measured first.
"""

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

CHARACTERS = 1_000_000
"""Characters that every text may have; the limit of longer texts depends on their row."""
TIMES = 32
"""Limit of longer texts, as a multiple of their row."""
SECONDS = 30.0
"""Time limit for one row."""
BITS = 100_000
"""Limit of an integer."""
WIDE = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})|[{:.]\d{5}|:[^}]*\{")
"""A width in a format string with more than four digits, or from an argument."""
# fmt: off
STRINGS = frozenset((
    "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "pprint",
    "replace", "string", "title", "trim", "upper", "wordwrap",
))
# fmt: on
"""Filters that turn any value into a text."""
PARTS = 64
"""Number of text parts that are joined at a time."""


class _Left(threading.local):
    """Remaining budget of the row that is being rendered."""

    ends = float("inf")
    most = CHARACTERS
    row: Any = None
    began: float | None = None
    printed = 0

    def start(self, row: Any) -> None:
        self.row, self.ends, self.began = row, time.monotonic() + SECONDS, None
        self.printed = 0

    def stop(self) -> None:
        self.row, self.most, self.ends = None, CHARACTERS, float("inf")

    def late(self) -> None:
        # On a busy machine the wall clock runs without us: from now on only the CPU time of this
        # thread counts.
        now = time.thread_time()
        used = 0.0 if self.began is None else now - self.began
        if used > SECONDS:
            raise SecurityError(f"it takes more than {SECONDS:.0f} seconds")
        self.began = now - used
        self.ends = time.monotonic() + SECONDS - used

    def fit(self, size: int) -> None:
        """Raise SecurityError for a text of more characters than the row accounts for."""
        if size > self.most:
            self.most = CHARACTERS + TIMES * _weight(self.row, 1 << 62)
            if size > self.most:
                raise SecurityError(f"it makes a text of more than {self.most:,} characters")

    def measure(self, value: Any) -> None:
        """Raise SecurityError where the text of a value would be too long."""
        if (size := _weight(value, self.most)) > self.most:
            self.fit(size)
            self.fit(_weight(value, self.most))


left = _Left()
"""Remaining budget of this thread's row."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates end in time, and make texts in proportion to their rows."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalize, **options)
        self.globals.pop("lipsum")
        self.bound_filters()
        self.filters |= {"_concat": _concat, "_measured": _measured}

    def bound_filters(self) -> None:
        """Measure what filters make."""
        self.filters = {name: _bounded(name, one) for name, one in self.filters.items()}

    @property
    def tick(self) -> None:
        """Check the time; read at the start of each loop iteration and macro."""
        if time.monotonic() > left.ends:
            left.late()

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the parts of a text."""
        made, size, waiting = list[str](), 0, iter(parts)
        while some := list(islice(waiting, PARTS)):
            made.append("".join(some))
            size += len(made[-1])
            if size > left.most:
                left.fit(size)
        return "".join(made)

    def call_binop(self, context: Context, operator: str, left_one: Any, right: Any) -> Any:
        """Compute an operation with a large result, after a check."""
        if operator == "*":
            _ensure_product(left_one, right)
        elif operator == "**" and isinstance(left_one, int) and isinstance(right, int):
            if left_one.bit_length() * right > BITS:
                raise SecurityError("it computes too large a number")
        elif operator == "%" and isinstance(left_one, str):
            _ensure_format(left_one, right)
        made = self.binop_table[operator](left_one, right)
        if isinstance(made, str | list | tuple):
            left.fit(len(made))
        return made

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes):
            _ensure_method(owner, __obj.__name__, args)
        made = super().call(__context, __obj, *args, **kwargs)
        if isinstance(made, str | bytes | list | tuple):
            left.fit(len(made))
        return made

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Guard the format method of texts."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        owner = value.__self__

        def call(*args: Any, **kwargs: Any) -> str:
            _ensure_format(owner, [args, kwargs])
            return wrapped(*args, **kwargs)

        return call

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Ticking().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]


class _Ticking(NodeTransformer):
    """Makes loops and macros check the time, and measures results of `+` and `~`."""

    printing = False
    """Whether the current expression is printed, and so measured, anyway."""

    def _tick(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("tick"), lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _tick

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        """Note that what follows is printed."""
        return self._visit(node, True)

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        """Note that the arguments of a call are not printed as they are."""
        return self._visit(node, False)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        """Measure a sum that is not printed at once."""
        measured = not self.printing
        self._visit(node, True)  # its own terms are parts of it
        return _filtered(node, "_measured") if measured else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Join by a filter."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def _visit(self, node: nodes.Node, printing: bool) -> nodes.Node:
        before, self.printing = self.printing, printing
        self.generic_visit(node)
        self.printing = before
        return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _finalize(value: Any) -> Any:
    """Measure printed values, which blocks and macros collect before joining."""
    if isinstance(value, str):
        left.printed += len(value)
        if left.printed > left.most:
            left.fit(left.printed)
    elif isinstance(value, list | tuple | dict):
        measure(value)
    return value


def measure(value: Any) -> None:
    """Raise SecurityError where the text of a value would be too long."""
    if not isinstance(value, int | float | None):
        left.measure(value)


def _measured(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        left.fit(len(value))
    return value


def _concat(parts: list[Any]) -> str:
    if not all(type(part) is str for part in parts):
        measure(parts)
    return BoundedEnvironment.concat(map(str, parts))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, rest = args[skip], [*args[skip + 1 :], *kwargs.values()]
        if name in STRINGS:
            measure([value, *rest])
        for one in rest:
            if isinstance(one, int):
                left.fit(one)
        if rest and isinstance(value, str):
            _ensure_filter(value, name, rest)
        if name == "join" and rest and isinstance(value, list):
            left.fit(len(value) * len(str(rest[0])))
        made = function(*args, **kwargs)
        if isinstance(made, str | list | tuple):
            left.fit(len(made))
        return made

    return call


def _ensure_filter(value: str, name: str, rest: list[Any]) -> None:
    if name == "format":
        _ensure_format(value, rest)
    elif name == "replace":
        _ensure_method(value, name, rest)
    elif name in ("indent", "wordwrap"):
        widest = max(one if isinstance(one, int) else len(str(one)) for one in rest)
        left.fit((value.count("\n") + value.count(" ") + 1) * widest)


def _ensure_method(owner: Any, name: str, args: Any) -> None:
    """Raise SecurityError where a method of a text would make too long a one."""
    for one in args:
        if isinstance(one, int):
            left.fit(one)
    if name == "replace" and len(args) > 1:
        left.fit(len(owner) + owner.count(args[0]) * len(args[1]))
    elif name == "join" and args:
        items = args[0] if isinstance(args[0], list | tuple) else []
        left.measure(items)
        left.fit(len(owner) * len(items))
    elif name == "expandtabs":
        left.fit(len(owner) * (args[0] if args else 8))


def _ensure_product(one: Any, other: Any) -> None:
    if isinstance(one, int) and isinstance(other, int):
        if one.bit_length() + other.bit_length() > BITS:
            raise SecurityError("it computes too large a number")
    elif isinstance(one, int) or isinstance(other, int):
        count, some = (one, other) if isinstance(one, int) else (other, one)
        if hasattr(some, "__len__"):
            left.fit(count * len(some))


def _ensure_format(form: str, values: Any) -> None:
    if WIDE.search(form):
        raise SecurityError("it formats a value with a width of more than four digits")
    measure([form, values])


def _weight(value: Any, most: int) -> int:
    """Estimate the length of a value's text; stop above `most`."""
    weight, waiting = 0, [value]
    while waiting and weight <= most:
        one = waiting.pop()
        if isinstance(one, str | bytes):
            weight += len(one) + 4
        elif isinstance(one, Mapping):
            weight += 4
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            weight += 4
            waiting += one
        else:
            weight += 16
    return weight
