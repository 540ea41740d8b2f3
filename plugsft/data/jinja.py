"""Write chats with their templates, and find what {% generation %} blocks mark.

The texts are those of transformers, which would import torch: a worker starts faster without it.
"""

import json
import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, missing

from ..base.types import Row
from .formats import Parts

# Marks around generation blocks, random so that no data contains them. `write` removes them.
BEGIN_MARK, END_MARK = (f"\0{secrets.randbits(64)}{side}" for side in "()")
DICT_ATTRIBUTES = frozenset(dir(dict))
SAFE = {(LoopContext, name) for name in ("first", "index", "index0", "last", "length")} | {
    (str, name) for name in ("endswith", "lstrip", "rstrip", "split", "startswith", "strip")
}
"""Attributes that the sandbox need not look at: its look takes longer than the template."""


@dataclass(frozen=True)
class CompiledTemplate:
    """A chat template, ready to render."""

    template: Template
    marked: bool
    """Whether it has generation blocks."""
    variables: frozenset[str]
    """Names of the variables that it reads."""
    searched: frozenset[str]
    """Texts that it may compare with others or look for in them."""

    def write(self, messages: list[Row], variables: dict[str, Any]) -> Parts:
        """Write messages: the text outside of generation blocks and inside, in turn."""
        marked = self.template.render({**variables, "messages": messages})
        first, *blocks = marked.split(BEGIN_MARK)
        parts = [first]
        for block in blocks:
            inside, mark, outside = block.partition(END_MARK)
            if not mark or END_MARK in outside:
                raise TemplateError("its generation blocks are nested")
            parts += (inside, outside)
        return parts


class _Generation(Extension):
    """Writes a mark before and after each generation block."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # upstream, any set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opening, closing = (
            nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN_MARK, END_MARK)
        )
        return [opening, nodes.Scope(body, lineno=line), closing]


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with faster access to attributes and to the keys of messages."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind, attribute) in SAFE or (kind is Namespace and attribute[:1] != "_"):
            value = getattr(obj, attribute, missing)
            if value is not missing:
                return value
        return super().getattr(obj, attribute)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@lru_cache(maxsize=16)
def compile_template(source: str) -> CompiledTemplate:
    """Compile a chat template."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _raise
    template, tree = environment.from_string(source), environment.parse(source)
    # Each rendering copies the globals, and a plain dict is copied faster than Jinja's ChainMap.
    template.globals = dict(template.globals)
    marked = any(node.data == BEGIN_MARK for node in tree.find_all(nodes.TemplateData))
    variables = frozenset(find_undeclared_variables(tree))
    # Not those that it only writes.
    users = (nodes.Assign, nodes.Call, nodes.Compare, nodes.Filter, nodes.Test)
    constants = (value for node in tree.find_all(users) for value in node.find_all(nodes.Const))
    searched = frozenset(one.value for one in constants if isinstance(one.value, str))
    return CompiledTemplate(template, marked, variables, searched - {""})
