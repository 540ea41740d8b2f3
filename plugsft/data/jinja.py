"""A chat template, compiled, with the spans that its {% generation %} blocks mark.

The same environment as transformers' own, torch left out: a worker starts in a moment, and a
block is found by marks in the output instead of by joining all that stands before it.
"""

import json
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.utils import Namespace

from ..base.types import Row, Span
from .jinja_limits import BoundedEnvironment, left, measure

INDENT = 32
"""Spaces that tojson(indent=...) may ask for."""
# Nothing in anyone's data spells these, and they are taken out again.
BEGINS, ENDS = (f"\0{secrets.randbits(64)}{side}" for side in "()")


@dataclass(frozen=True)
class Compiled:
    """A chat template, ready to render."""

    template: Template
    marked: bool
    """Whether it has generation blocks."""
    variables: frozenset[str]
    """What it reads."""


class _Generation(Extension):
    """Writes a mark before and after each block."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # a set of the class upstream

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opening, closing = (
            nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGINS, ENDS)
        )
        return [opening, nodes.Scope(body, lineno=line), closing]


class _Dict:
    """`dict` for templates, without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` for templates, without a way to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _refuse_private(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _Environment(BoundedEnvironment):
    """The sandbox, which looks into messages first, where that gives the same: it is faster."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot store '{name}' in a namespace")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    if re.search(r"\d{3}", form):
        raise SecurityError("strftime_now: widths of three digits are of no use")
    return datetime.now().strftime(form)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own would escape what HTML minds.
    measure(value)
    if (isinstance(indent, int) and indent > INDENT) or isinstance(indent, str):
        raise SecurityError(f"tojson(indent={indent!r:.20}): at most {INDENT} spaces")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=16)
def compiled(source: str) -> Compiled:
    """Compile a chat template."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    template, tree = environment.from_string(source), environment.parse(source)
    # Jinja keeps them in layers, which are slow to copy, and copies them at each rendering.
    template.globals = dict(template.globals)
    marked = any(node.data == BEGINS for node in tree.find_all(nodes.TemplateData))
    return Compiled(template, marked, frozenset(find_undeclared_variables(tree)))


def render(
    template: Compiled, messages: list[Row], variables: dict[str, Any]
) -> tuple[str, list[Span]]:
    """Return a conversation's text, and the spans that the template marks."""
    given = {**variables, "messages": messages}
    left.start(given)
    try:
        whole = template.template.render(given)
    finally:
        left.stop()
    first, *parts = whole.split(BEGINS)
    text, spans, at = [first], [], len(first)
    for part in parts:
        inside, mark, outside = part.partition(ENDS)
        if not mark or ENDS in outside:
            raise TemplateError("its generation blocks stand inside each other")
        text += (inside, outside)
        spans.append((at, at + len(inside)))
        at += len(inside) + len(outside)
    return "".join(text), spans
