"""The cache key of prepared data: everything that the tokens depend on."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..base.checksums import digest
from ..recipe.parse import flatten
from ..registry.active import Active, options_of
from ..registry.contracts import contract_of
from ..tokens.schema import FORMAT
from ..tokens.tokenizer import Tokenizer
from .slices import ShardWriter
from .sources import OpenSource

TOKEN_HOOKS = ("render", "encode")
"""The hooks that affect tokens."""
VERSIONS = {"read": 2, "render": 4, "pairs": 3, "encode": 1, "mask": 2}
"""Stage of preparing -> version of its output.

Raise a stage's version when its output changes: tokens are then prepared again.
tests/test_preparation_versions.py fails if an output has changed and its version has not.
"""
DIFFERENCES = {
    "format": "another version of the format",
    "data": "other data, or another split of it",
    "tokenizer": "another tokenizer",
    "template": "another chat template, or other stop tokens",
    "day": "a chat template that writes the date, and another day",
}


def token_plugins(active: Active) -> dict[str, dict[str, Any]]:
    """Return the plugins that affect tokens, with their options."""
    return {
        name: options_of(plugin)
        for name, plugin in active.plugins.items()
        if active.implements(name, TOKEN_HOOKS)
    }


def plugin_versions(active: Active, hooks: tuple[str, ...]) -> dict[str, Any]:
    """Return options and source version of the plugins that implement any of some hooks.

    The versions of bundled plugins are those of the stages.
    """
    return {
        name: {
            "options": _token_options(plugin),
            "source": "" if active.is_bundled(name) else active.source_digest(name),
        }
        for name, plugin in active.plugins.items()
        if active.implements(name, hooks)
    }


def _token_options(plugin: Any) -> dict[str, Any]:
    """Return the options of a plugin that affect tokens. Default: all."""
    declared = contract_of(plugin).affects_tokens
    return {
        name: value
        for name, value in options_of(plugin).items()
        if declared is None or name in declared
    }


def key_of(work: ShardWriter, sources: Sequence[OpenSource], active: Active) -> dict[str, Any]:
    """Return everything that the tokens depend on, and nothing else."""
    tokenizer = work.tokenizer
    return {
        "format": FORMAT,
        "data": [source.identity for source in sources],
        "options": work.data.model_dump(exclude={"source", "split", "sources", "tokens"}),
        "tokenizer": digest({"backend": tokenizer.json, "names": tokenizer.special_tokens_map}),
        "template": template_key(tokenizer),
        "day": tokenizer.day,
        "stages": VERSIONS,
        "plugins": plugin_versions(active, ("render",)),
        # By the law of `encode` they give the ids of the model's own tokenizer.
        "encoders": plugin_versions(active, ("encode",)),
    }


def template_key(tokenizer: Tokenizer) -> str:
    """Return the part of the key that names the chat template."""
    parts = {
        "template": tokenizer.chat_template,
        "blocks": tokenizer.honours_blocks,
        "stops": tokenizer.stops,
    }
    return digest(parts)


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Describe each difference between two cache keys in a line."""
    for part, description in DIFFERENCES.items():
        if old.get(part) != new.get(part):
            yield description
    for table in ("options", "stages", "plugins", "encoders"):
        before, after = (flatten(key.get(table) or {}) for key in (old, new))
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                yield _describe_difference(table, name, before.get(name), after.get(name))


def _describe_difference(table: str, name: str, old: Any, new: Any) -> str:
    if table == "options":
        return f"data.{name} was {old!r} and is now {new!r}"
    if table == "stages":
        return f"another version of plugsft's stage '{name}'"
    plugin, _, rest = name.partition(".")
    if old is None or new is None:
        return f"plugins.{plugin} was {'off' if old is None else 'on'}"
    if rest == "source":
        return f"the source of plugin '{plugin}' has changed"
    return f"plugins.{plugin}.{rest.partition('.')[2]} was {old!r} and is now {new!r}"
