"""Load a tokenizer with transformers, or train one on the recipe's data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.utils.hub import cached_file

from ..base.console import say
from ..base.errors import RecipeError, explain_load_error, reason_of
from ..base.limits import read_json_object, read_text
from ..base.types import Rendered, Row, Rows
from ..recipe.tables import Model
from ..tokens.ends import ids_in
from ..tokens.tokenizer import Tokenizer, lighten
from .chat import CHATML
from .render import without

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

Render = Callable[[list[Row], int, Tokenizer], Rendered]
"""(rows, number of their source, tokenizer) -> text."""
CLOCK = "strftime_now"
"""What templates with a date call."""
PAD, END = "<|pad|>", "<|im_end|>"
SPECIAL = [PAD, "<|im_start|>", END]


def load_tokenizer(model: Model, folder: Path) -> PreTrainedTokenizerBase:
    """Load a recipe's tokenizer; `folder` holds that of a model from scratch."""
    where = model.tokenizer or model.path or str(folder)
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    if model.revision and not model.tokenizer:
        options["revision"] = model.revision
    try:
        if model.scratch and not model.tokenizer:
            # Our own, of this class: AutoTokenizer would import torch to look for another.
            tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(where)
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
    except Exception as error:  # transformers raises whatever its readers and the hub raise
        raise RecipeError(
            f"model.{'tokenizer' if model.tokenizer else 'path'}: no tokenizer could be loaded "
            f"from '{where}': {explain_load_error(where, error)}"
        ) from error
    if not tokenizer.is_fast:
        raise RecipeError(
            f"model.tokenizer: '{where}' gives a slow tokenizer ({type(tokenizer).__name__}), "
            "which cannot tell where its tokens end; plugsft needs one with a tokenizer.json"
        )
    # Some tokenizer files truncate or pad; transformers undoes this at each call.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    if model.template_file:
        file = Path(model.template_file)
        try:
            tokenizer.chat_template = read_text(file)
            # By it, transformers reads answers back. That of the model's own template would not do.
            file = file.with_suffix(".response.json")
            tokenizer.response_template = read_json_object(file) if file.exists() else None
        except (OSError, ValueError) as error:
            raise RecipeError(
                f"model.chat_template: '{file}' cannot be read ({reason_of(error)})"
            ) from error
    if model.add_tokens:
        add_tokens(tokenizer, model.add_tokens)
    return tokenizer  # type: ignore[no-any-return]


def data_tokenizer(tokenizer: Any, model: Model, day: str) -> Tokenizer:
    """Reduce a tokenizer to what the data path needs; `day` is that of templates with a date.

    It stops where generation_config.json beside it lets a model stop, too.
    """
    light, stops = lighten(tokenizer), list[str]()
    # The ids of model.path's are those of another vocabulary if there is a model.tokenizer.
    where = model.tokenizer or model.path
    file = where and cached_file(
        where,
        "generation_config.json",
        revision=None if model.tokenizer else model.revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    if file:
        try:
            ids = ids_in(read_json_object(Path(file)).get("eos_token_id"))
        except ValueError as error:
            raise RecipeError(f"model: {file}: {reason_of(error)}; correct it") from error
        stops = tokenizer.convert_ids_to_tokens(ids)
    return replace(
        light,
        honours_blocks=model.template_file is not None,
        more_stops=tuple(filter(None, stops)),
        day=day if CLOCK in (light.chat_template or "") else "",
    )


def add_tokens(tokenizer: Any, tokens: list[str]) -> None:
    """Add tokens to a tokenizer; say which ones it has already."""
    if known := sorted({*tokens} & {*tokenizer.get_vocab()}):
        say(f"model.add_tokens: the tokenizer has these already: {', '.join(known)}")
    tokenizer.add_tokens(tokens)
    for token, number in zip(tokens, tokenizer.convert_tokens_to_ids(tokens), strict=True):
        ids = tokenizer.encode(token, add_special_tokens=False)
        if number not in ids or tokenizer.decode([number]).strip() != token.strip():
            raise RecipeError(
                f"model.add_tokens: '{token}' cannot be a token: the tokenizer reads it as "
                f"{tokenizer.convert_ids_to_tokens(ids)}, and writes '{tokenizer.decode(ids)}'; "
                "choose another text"
            )


def train_tokenizer(sources: Sequence[Rows], render: Render, vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with a chat template on the text of the recipe's data."""
    untrained = lighten(_wrap(tokenizers.Tokenizer(models.BPE())))
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(sources, render, untrained), trainer)
    return _wrap(bpe)


def _wrap(tokenizer: tokenizers.Tokenizer) -> PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # untyped upstream
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHATML.read_text(encoding="utf8"),
    )


def _texts(sources: Sequence[Rows], render: Render, tokenizer: Tokenizer) -> Iterator[list[str]]:
    for number, rows in enumerate(sources):
        for start in range(0, len(rows), 1000):
            read = [row for row in rows.read(start, start + 1000) if isinstance(row, dict)]
            # These are variables of the recipe's template, which comes later.
            batch = [without(row, ["chat_template_kwargs"]) for row in read]
            for text in render(batch, number, tokenizer).texts if batch else []:
                for marker in SPECIAL:
                    text = text.replace(marker, "")
                yield [text]
