"""Choose a data set's chat template: the model's, or trl's training variant."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from ..base.checksums import cache_folder, digest
from ..base.errors import DataError, RecipeError
from ..base.types import Row
from ..recipe.tables import Data, Recipe
from ..registry.active import Active
from ..tokens.tokenizer import Tokenizer
from .cache_key import plugin_versions, template_key
from .chat import ANSWER, ASK, REWRITES, Chat, training_template
from .messages import BadRow, read_turns
from .readers.ready import is_ready
from .slices import render
from .sources import OpenSource

CHOSEN = (
    "the model's chat template rewrites earlier turns, so trl's training variant of it writes all "
    "rows"
)
ROWS, RANGES = 50, 100
"""Rows of a range, and ranges of a source, on which the model's template is tried."""
SYSTEM = {"role": "system", "content": "!system!"}
THOUGHT = {"role": "assistant", "content": "<think>\n!thought!\n</think>\n\n!answer!"}
FUNCTION = {"name": "look_up", "arguments": {"word": "!call!"}}
CALLS = [{"id": "abcdef123", "type": "function", "function": FUNCTION}]
CALL: Row = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT: Row = {
    "role": "tool",
    "name": "look_up",
    "tool_call_id": "abcdef123",
    "content": "!result!",
}
PROBES: list[list[Row]] = [
    *([ASK, ANSWER], [SYSTEM, ASK, ANSWER], [ASK, ANSWER, ASK, ANSWER]),
    *([ASK, THOUGHT], [ASK, THOUGHT, ASK, ANSWER], [ASK, CALL, RESULT, ANSWER]),
]
"""Chats on which a template and its variant are compared."""
WORD, SPOKEN = re.compile(r"!\w+!"), ("!answer!", "!thought!", "!call!")
"""The words of the probes, and those of the assistant."""


def choose_template(
    tokenizer: Tokenizer, recipe: Recipe, sources: Sequence[OpenSource], active: Active
) -> Tokenizer:
    """Return the tokenizer with the template that writes all chats.

    It depends on template, options and rows alone, so that all ranks and workers agree.
    """
    model, data = recipe.model, recipe.data
    variant = variant_of(tokenizer)
    for key in ("chat_template", "save_template"):
        if variant is None and getattr(model, key) in ("trl", "training"):
            raise RecipeError(
                f"model.{key}: trl has no training variant of the template of "
                f"'{model.tokenizer or model.path}'; set model.chat_template to a file with "
                "{% generation %} blocks"
            )
    if variant is None or model.chat_template not in ("auto", "trl"):
        return tokenizer
    if model.chat_template == "trl":
        return replace(variant, variant_chosen=False)
    try:
        own, other = Chat(tokenizer, data), Chat(variant, data)
        helps = any(_rewrites(own, turns) and not _rewrites(other, turns) for turns in PROBES)
        if helps and rewrites_rows(tokenizer, data, sources, active):
            why = disprove(tokenizer, variant, data)
            return replace(tokenizer, unproved=why) if why else variant
    except (BadRow, DataError):
        pass  # preparing the rows raises it again, and names them
    return tokenizer


def rewrites_rows(
    tokenizer: Tokenizer, data: Data, sources: Sequence[OpenSource], active: Active
) -> bool:
    """Tell whether a template rewrites earlier turns of sampled rows.

    The cache remembers the answer: a start with prepared tokens reads no row.
    """
    key = {
        "data": [source.identity for source in sources],
        "options": data.model_dump(include={"columns", "ignore", "train_on", "template_kwargs"}),
        "template": template_key(tokenizer),
        "plugins": plugin_versions(active, ("render",)),
        "sample": [ROWS, RANGES],
    }
    file = cache_folder() / "templates" / f"{digest(key)}.json"
    with suppress(OSError, ValueError):
        return bool(json.loads(file.read_text()))
    samples = (
        render(active.hooks, data, name.source, [*_sample(source)], tokenizer)
        for source, name in zip(sources, data.all_sources(), strict=False)
        if not is_ready(source, data)
    )
    rewrites = any(REWRITES in why for sample in samples for why in sample.bad.values())
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rewrites))
    return rewrites


def variant_of(tokenizer: Tokenizer) -> Tokenizer | None:
    """Return the tokenizer with trl's training variant of its template, if any."""
    template = tokenizer.chat_template or ""
    variant = training_template(template) or ("endgeneration" in template and template)
    return replace(tokenizer, chat_template=variant, variant_chosen=True) if variant else None


def disprove(tokenizer: Tokenizer, trained: Tokenizer, data: Data) -> str:
    """Say why a training variant must not replace the template; "" if proved."""
    data = data.model_copy(update={"train_on": "assistant"})
    own, variant = Chat(tokenizer, data), Chat(trained, data)
    own.training = None  # its marks are those to be proved
    if own.write_prompt([ASK], own.variables) != variant.write_prompt([ASK], variant.variables):
        return "it asks for an answer in other words"
    for turns in PROBES:
        (text, parts), expected = _try(variant, turns), _try(own, turns)
        if expected[1] and (text, parts) != expected:
            return "it writes or trains other words than the model's template"
        if WORD.findall("".join(parts)) != [w for w in WORD.findall(text) if w in SPOKEN]:
            return "it marks other words than the assistant's"
        ends = [n for n, turn in enumerate(turns, 1) if parts and turn["role"] == "assistant"]
        if not all(text.startswith(_try(variant, turns[:end])[0].rstrip()) for end in ends):
            return "it rewrites earlier turns too"
    return ""


def _try(chat: Chat, turns: list[Row]) -> tuple[str, list[str]]:
    """Return a probe's text and trained parts, or its reason and no part."""
    try:
        text, spans = chat.render(read_turns(turns))
    except BadRow as error:
        return str(error), []
    return text, [text[start:stop].rstrip() for start, stop in spans]


def _rewrites(chat: Chat, turns: list[Row]) -> bool:
    return REWRITES in _try(chat, turns)[0]


def _sample(source: OpenSource) -> Iterator[Row]:
    for start in range(0, len(source), max(ROWS, len(source) // RANGES)):
        yield from (row for row in source.read(start, start + ROWS) if row is not None)
