"""Limits on a chat template's output and time for one row.

A template is a program that comes with a model. If it doubles a text in a loop, or counts to a
billion, it fills the memory or never ends. So loops and macros check the time, and operations that
make long texts check their size first.
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

MAX_CHARACTERS = 1_000_000
"""Characters that every text may have; the limit of longer texts depends on their row."""
ROW_FACTOR = 32
"""Limit of longer texts, as a multiple of their row."""
MAX_SECONDS = 30.0
"""Time limit for one row."""
MAX_BITS = 100_000
"""Limit of an integer."""
WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})|[{:.]\d{5}|:[^}]*\{")
"""A width in a format string with more than four digits, or from an argument."""
# fmt: off
TEXT_FILTERS = frozenset((
    "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "pprint",
    "replace", "string", "title", "trim", "upper", "wordwrap",
))
# fmt: on
"""Filters that turn any value into a text."""
JOINED_PARTS = 64
"""Number of text parts that are joined at a time."""


class _Budget(threading.local):
    """Time and size limits of the row that this thread renders."""

    deadline = float("inf")
    max_size = MAX_CHARACTERS
    row: Any = None
    cpu_start: float | None = None
    printed = 0

    def start(self, row: Any) -> None:
        self.row, self.deadline, self.cpu_start = row, time.monotonic() + MAX_SECONDS, None
        self.printed = 0

    def stop(self) -> None:
        self.row, self.max_size, self.deadline = None, MAX_CHARACTERS, float("inf")

    def check_cpu_time(self) -> None:
        """Raise SecurityError after MAX_SECONDS of this thread's CPU time.

        A busy machine may spend the first MAX_SECONDS on other processes, so the CPU time counts
        from the first call.
        """
        now = time.thread_time()
        used = 0.0 if self.cpu_start is None else now - self.cpu_start
        if used > MAX_SECONDS:
            raise SecurityError(f"it takes more than {MAX_SECONDS:.0f} seconds")
        self.cpu_start = now - used
        self.deadline = time.monotonic() + MAX_SECONDS - used

    def ensure_size(self, size: int) -> None:
        """Raise SecurityError for a text that is too long for its row."""
        if size > self.max_size:
            self.max_size = MAX_CHARACTERS + ROW_FACTOR * _text_size(self.row, 1 << 62)
            if size > self.max_size:
                raise SecurityError(f"it makes a text of more than {self.max_size:,} characters")

    def ensure_fits(self, value: Any) -> None:
        """Raise SecurityError for a value whose text would be too long."""
        if (size := _text_size(value, self.max_size)) > self.max_size:
            self.ensure_size(size)
            self.ensure_size(_text_size(value, self.max_size))


budget = _Budget()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates end in time, and make texts in proportion to their rows."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_check_printed, **options)
        self.globals.pop("lipsum")
        self.filters = {name: _bounded(name, function) for name, function in self.filters.items()}
        self.filters |= {"_concat": _concat, "_measured": _measured}

    @property
    def tick(self) -> None:
        """Check the time; templates read it in each iteration of a loop and each macro."""
        if time.monotonic() > budget.deadline:
            budget.check_cpu_time()

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the parts of a text."""
        joined, size, parts = list[str](), 0, iter(parts)
        while batch := list(islice(parts, JOINED_PARTS)):
            joined.append("".join(batch))
            size += len(joined[-1])
            if size > budget.max_size:
                budget.ensure_size(size)
        return "".join(joined)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a product, power or format, after a check of its size."""
        if operator == "*":
            _ensure_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_BITS:
                raise SecurityError("it computes too large a number")
        elif operator == "%" and isinstance(left, str):
            _ensure_format(left, right)
        result = self.binop_table[operator](left, right)
        if isinstance(result, str | list | tuple):
            budget.ensure_size(len(result))
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes):
            _ensure_method(owner, __obj.__name__, args)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str | bytes | list | tuple):
            budget.ensure_size(len(result))
        return result

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
        return _AddChecks().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]


class _AddChecks(NodeTransformer):
    """Makes loops and macros check the time, and `+` and `~` the size of their results."""

    printing = False
    """Whether the current expression is printed, which checks its size."""

    def _tick(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("tick"), lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _tick

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        """Visit expressions that are printed."""
        return self._visit(node, True)

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        """Visit arguments, which are not printed themselves."""
        return self._visit(node, False)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        """Check a sum that is not printed."""
        is_checked = self.printing
        self._visit(node, True)  # the check of a sum covers its terms
        return node if is_checked else _filtered(node, "_measured")

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


def _check_printed(value: Any) -> Any:
    """Check printed values, which blocks and macros collect before joining."""
    if isinstance(value, str):
        budget.printed += len(value)
        if budget.printed > budget.max_size:
            budget.ensure_size(budget.printed)
    elif isinstance(value, list | tuple | dict):
        budget.ensure_fits(value)
    return value


def _measured(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        budget.ensure_size(len(value))
    return value


def _concat(parts: list[Any]) -> str:
    if not all(type(part) is str for part in parts):
        budget.ensure_fits(parts)
    return BoundedEnvironment.concat(map(str, parts))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter to check its arguments and its result."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, options = args[skip], [*args[skip + 1 :], *kwargs.values()]
        if name in TEXT_FILTERS:
            budget.ensure_fits([value, *options])
        _ensure_integers(options)
        if options and isinstance(value, str):
            _ensure_filter(value, name, options)
        if name == "join" and options and isinstance(value, list):
            budget.ensure_size(len(value) * len(str(options[0])))
        result = function(*args, **kwargs)
        if isinstance(result, str | list | tuple):
            budget.ensure_size(len(result))
        return result

    return call


def _ensure_integers(values: Iterable[Any]) -> None:
    """Raise SecurityError for an integer that would be too long as a width or count."""
    for value in values:
        if isinstance(value, int):
            budget.ensure_size(value)


def _ensure_filter(value: str, name: str, options: list[Any]) -> None:
    if name == "format":
        _ensure_format(value, options)
    elif name == "replace":
        _ensure_method(value, name, options)
    elif name in ("indent", "wordwrap"):
        widest = max(width if isinstance(width, int) else len(str(width)) for width in options)
        budget.ensure_size((value.count("\n") + value.count(" ") + 1) * widest)


def _ensure_method(owner: Any, name: str, args: Any) -> None:
    """Raise SecurityError if a text's method would return too long a text."""
    _ensure_integers(args)
    if name == "replace" and len(args) > 1:
        budget.ensure_size(len(owner) + owner.count(args[0]) * len(args[1]))
    elif name == "join" and args:
        items = args[0] if isinstance(args[0], list | tuple) else []
        budget.ensure_fits(items)
        budget.ensure_size(len(owner) * len(items))
    elif name == "expandtabs":
        budget.ensure_size(len(owner) * (args[0] if args else 8))


def _ensure_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            raise SecurityError("it computes too large a number")
    elif isinstance(left, int) or isinstance(right, int):
        count, value = (left, right) if isinstance(left, int) else (right, left)
        if hasattr(value, "__len__"):
            budget.ensure_size(count * len(value))


def _ensure_format(template: str, values: Any) -> None:
    if WIDE_FORMAT.search(template):
        raise SecurityError("it formats a value with a width of more than four digits")
    budget.ensure_fits([template, values])


def _text_size(value: Any, limit: int) -> int:
    """Estimate the length of a value's text; stop above `limit`."""
    size, values = 0, [value]
    while values and size <= limit:
        value = values.pop()
        if isinstance(value, str | bytes):
            size += len(value) + 4
        elif isinstance(value, Mapping):
            size += 4
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            size += 4
            values += value
        else:
            size += 16
    return size
