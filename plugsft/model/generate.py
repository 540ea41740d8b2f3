"""Generate answers with a model: for `plugsft chat`, and for plugins during a run."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ..base.errors import PlugsftError
from ..tokens.ends import pad_id, stop_ids
from .config import max_context

BATCH = 32
"""Chats answered in one batch."""
COLDEST = 1e-5
"""Lowest temperature: logits divided by it are still finite numbers."""

Turns = list[dict[str, str]]


@contextmanager
def attention_with_cache(model: PreTrainedModel) -> Iterator[None]:
    """Use the attention that transformers chooses, inside the block.

    The attention of packed rows, and some kernels, take neither padding nor a key-value cache.
    """
    configs: list[Any] = [
        module.config for module in model.modules() if isinstance(module, PreTrainedModel)
    ]
    names = [config._attn_implementation for config in configs]
    name = model.get_correct_attn_implementation(None)
    if name != model.config._attn_implementation:
        model.set_attn_implementation(name)
    try:
        yield
    finally:
        for config, name in zip(configs, names, strict=True):
            config._attn_implementation_internal = name


@dataclass
class Speaker:
    """A model that answers."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    temperature: float
    synced: bool = False
    """Whether all ranks must call the forward equally often: their model is sharded."""
    system: Turns = field(default_factory=list)
    """The messages before each chat."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """More options of transformers; the others are those of the model's generation_config."""

    def __post_init__(self) -> None:
        self.stops = stop_ids(self.model, self.tokenizer)
        self.pad = pad_id(self.tokenizer, self.model.config)
        self.context = max_context(self.model.config)

    def ask(self, question: str) -> Turns:
        """Return a chat with one question."""
        return [{"role": "user", "content": question}]

    def encode(self, chats: Sequence[Turns]) -> Any:
        """Encode chats with the chat template; without one, their last turns."""
        templated = bool(self.tokenizer.chat_template)
        texts = [
            self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            if templated
            else chat[-1]["content"]
            for chat in ([*self.system, *turns] for turns in chats)
        ]
        encoded: Any = self.tokenizer(
            texts,
            # A template writes the special tokens.
            add_special_tokens=not templated,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        encoded["input_ids"].masked_fill_(encoded["attention_mask"] == 0, self.pad)
        return encoded

    def answer_all(self, prompts: Sequence[str | Turns]) -> list[str]:
        """Answer any number of questions and chats."""
        chats = [self.ask(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        batches = [chats[start : start + BATCH] for start in range(0, len(chats), BATCH)]
        return [*chain(*map(self.answer, batches))]

    def answer(self, chats: Sequence[Turns], streamer: TextStreamer | None = None) -> list[str]:
        """Answer several chats in one batch."""
        encoded = self.encode(chats)
        ids = encoded["input_ids"]
        room = (self.context or sys.maxsize) - ids.shape[1]
        if room < 1:
            raise PlugsftError(
                f"a question of {ids.shape[1]:,} tokens; the model's context is {self.context:,}"
            )
        config = GenerationConfig(  # type: ignore[no-untyped-call]  # untyped upstream
            max_new_tokens=min(self.max_tokens, room),
            eos_token_id=self.stops or None,
            pad_token_id=self.pad,
            use_cache=True,
            do_sample=self.temperature > 0,
            temperature=max(self.temperature, COLDEST) if self.temperature else None,
            **self.sampling,
        )
        generated = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=encoded["attention_mask"].to(self.model.device),
            generation_config=config,
            streamer=streamer,
            synced_gpus=self.synced,
        )
        return [self._text(row[ids.shape[1] :].tolist()) for row in generated]

    def _text(self, ids: list[int]) -> str:
        answer = [*takewhile(lambda token: token not in self.stops, ids)]
        return str(self.tokenizer.decode(answer, skip_special_tokens=True)).strip()
