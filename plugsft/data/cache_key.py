"""The key of prepared data: all that it depends on, and what tells one key from another."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..base.checksums import digest
from ..recipe.parse import flatten
from ..registry.active import Active, contract_of, options_of
from ..tokens.shards import FORMAT
from .chat import training_template
from .slices import Work
from .sources import Source

MAKERS = ("render", "encode")
"""The hooks that decide about tokens."""
VERSIONS = {"read": 1, "render": 1, "pairs": 1, "encode": 1, "mask": 1}
"""Stage of preparing -> version of its output.

Raise a stage's version when its output changes, and tokens are prepared again. tests/test_stages.py
fails where an output has changed and its version has not.
"""
WORDS = {
    "format": "another version of the format",
    "data": "other data, or another split of it",
    "tokenizer": "another tokenizer",
    "template": "another chat template, or another variant of it in trl",
}


def makers(active: Active) -> dict[str, dict[str, Any]]:
    """Return the plugins that decide about tokens, with their options."""
    return {
        name: options_of(plugin)
        for name, plugin in active.plugins.items()
        if active.implements(name, MAKERS)
    }


def with_sources(active: Active, hooks: tuple[str, ...]) -> dict[str, Any]:
    """Return the plugins that have some of these hooks: options, and version of the source.

    The versions of bundled plugins are those of the stages.
    """
    return {
        name: {
            "options": _deciding(plugin),
            "source": "" if active.is_bundled(name) else active.source_digest(name),
        }
        for name, plugin in active.plugins.items()
        if active.implements(name, hooks)
    }


def _deciding(plugin: Any) -> dict[str, Any]:
    """Return the options of a plugin that decide about tokens: all, unless it says which."""
    named = contract_of(plugin).tokens
    return {
        name: value for name, value in options_of(plugin).items() if named is None or name in named
    }


def key_of(work: Work, opened: Sequence[Source], active: Active) -> dict[str, Any]:
    """Return everything that the tokens depend on, and nothing else."""
    light = work.tokenizer
    backend, template = light.backend_tokenizer.to_str(), light.chat_template
    return {
        "format": FORMAT,
        "data": [rows.identity for rows in opened],
        "options": work.data.model_dump(exclude={"source", "split", "sources", "tokens"}),
        "tokenizer": digest({"backend": backend, "names": light.special_tokens_map}),
        "template": digest(
            {"template": template, "training": template and training_template(template)}
        ),
        "stages": VERSIONS,
        "plugins": with_sources(active, ("render",)),
        # By the law of `encode` they give the ids of the model's own tokenizer.
        "encoders": with_sources(active, ("encode",)),
    }


def differences(there: dict[str, Any], here: dict[str, Any]) -> Iterator[str]:
    """Say in a line each what differs between a key that was used and one that is asked for."""
    for part, words in WORDS.items():
        if there.get(part) != here.get(part):
            yield words
    for table in ("options", "stages", "plugins", "encoders"):
        old, new = (flatten(key.get(table) or {}) for key in (there, here))
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                yield _difference(table, name, old.get(name), new.get(name))


def _difference(table: str, name: str, old: Any, new: Any) -> str:
    if table == "options":
        return f"data.{name} was {old!r}, and is {new!r} here"
    if table == "stages":
        return f"another version of plugsft's stage '{name}'"
    plugin, _, rest = name.partition(".")
    if old is None or new is None:
        return f"plugins.{plugin} was {'off' if old is None else 'on'}"
    if rest == "source":
        return f"the source of plugin '{plugin}' has changed"
    return f"plugins.{plugin}.{rest.partition('.')[2]} was {old!r}, and is {new!r} here"
