"""What training and generating ask of a tokenizer: its padding, the ends of answers, new tokens."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from transformers.utils import GENERATION_CONFIG_NAME

from ..base.types import Row
from ..recipe.tables import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_IDS = 1 << 32
"""The tokenizers library reads an id as 32 bits."""
ASK: Row = {"role": "user", "content": "!ask!"}
ANSWER: Row = {"role": "assistant", "content": "!answer!"}


def ids_in(setting: Any) -> list[int]:
    """Return the token ids of a setting: a list, one, or what is no id at all."""
    ids = setting if isinstance(setting, list) else [setting]
    return [number for number in ids if type(number) is int and 0 <= number < END_OF_IDS]


def new_ids(model: Model, tokenizer: Any) -> list[int]:
    """Return the ids of the tokens that a recipe adds."""
    return [int(number) for number in tokenizer.convert_tokens_to_ids(model.add_tokens)]


def pad_id(tokenizer: PreTrainedTokenizerBase, config: Any = None) -> int:
    """Choose the token that pads rows: some models have no row for that of their tokenizers.

    Any token will do. Masks come from the lengths of examples and not from this token, so that an
    end-of-text token is trained even if it also pads.
    """
    rows = getattr(config and config.get_text_config(), "vocab_size", None) or END_OF_IDS
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(number) for number in ids if number is not None and number < rows)


def stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every token that ends an answer: the model's, the tokenizer's, the template's."""
    configs = (model.generation_config, model.config, tokenizer)
    stops = [stop for config in configs for stop in ids_in(getattr(config, "eos_token_id", None))]
    if tokenizer.chat_template:
        with suppress(Exception):  # a template may refuse this conversation
            text = str(tokenizer.apply_chat_template([ASK, ANSWER], tokenize=False))
            end = text.rpartition(ANSWER["content"])[2]
            ids = tokenizer.encode(end, add_special_tokens=False)
            stops += [token for token in ids if token in tokenizer.added_tokens_decoder][:1]
    return [*dict.fromkeys(stops)]


def end_generation(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let `generate` stop at the template's end-of-turn token too, as `plugsft chat` does.

    A model without a chat template stays as it is. One that does not generate gets the pad token:
    by it, transformers finds the last token of a row.
    """
    config = getattr(model, "generation_config", None)
    if config is None and tokenizer.pad_token_id is not None:
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if config is not None and tokenizer.chat_template:
        stops = stop_ids(model, tokenizer)
        config.eos_token_id = stops if len(stops) != 1 else stops[0]
        # transformers saves odd values (a temperature without sampling) as they were read, and
        # refuses them in a configuration that was changed.
        with TemporaryDirectory() as folder:
            config.to_json_file(Path(folder, GENERATION_CONFIG_NAME), use_diff=True)
            model.generation_config = type(config).from_pretrained(folder)
