"""`plugsft chat`: talk to a trained model."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.utils import logging as transformers_logging

from ...base.console import is_terminal, out, say
from ...base.errors import PlugsftError
from ...base.load_errors import TRUST, trust_hint
from ...data.load_tokenizer import pad_id, stop_ids
from ...model.config import ensure_safetensors, max_context
from ...output.folder import ADAPTER, base_model

with suppress(ImportError):  # Windows has none
    import readline  # noqa: F401  # gives input() arrow keys and a history

BATCH = 32
"""Questions answered in one batch."""
FREE = 0.25
"""Share of the context that stays free for the answer."""

EMPTY = "(the model ended its answer before the first word)"

Turns = list[dict[str, str]]


def chat(
    folder: Path, ask: Sequence[str], max_tokens: int, temperature: float, trusted: bool = False
) -> None:
    """Answer the questions of --ask, or those typed until Ctrl-D."""
    if not all(question.strip() for question in ask):
        raise PlugsftError("--ask: an empty question has no answer")
    ensure_safetensors(str(folder))
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped upstream
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # as above
    speaker = Speaker(*load(folder, trusted), max_tokens, temperature)
    for start in range(0, len(ask), BATCH):
        chats = [speaker.ask(question) for question in ask[start : start + BATCH]]
        for answer in speaker.answer(chats):
            say(answer or EMPTY)
    if not ask:
        try:
            converse(speaker)
        except KeyboardInterrupt:
            say("")  # the shell's prompt begins a line of its own


def load(folder: Path, trusted: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, onto a GPU if available, and its tokenizer.

    The model's Python code runs only if the user trusts it.
    """
    options: dict[str, Any] = {"dtype": "auto", TRUST: trusted}
    if (folder / ADAPTER).is_file():
        # The revision of the adapters' base model, which transformers does not read.
        options["revision"] = base_model(folder)[1] or "main"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as error:  # transformers raises whatever its readers raise
        first = str(error).strip().partition("\n")[0]
        raise PlugsftError(
            f"{folder}: no model could be loaded: {type(error).__name__}: {first}"
            + trust_hint(error)
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id(tokenizer))
    device = torch.accelerator.current_accelerator(check_available=True)
    return model.to(device or "cpu").eval(), tokenizer


@dataclass
class Speaker:
    """A model that answers."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    temperature: float

    def __post_init__(self) -> None:
        self.stops = stop_ids(self.model, self.tokenizer)
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
            for chat in chats
        ]
        return self.tokenizer(
            texts,
            # A template writes the special tokens.
            add_special_tokens=not templated,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )

    def shorten(self, chat: Turns) -> Turns:
        """Drop the oldest turns of a chat that leaves no room for the answer."""
        limit = (self.context or sys.maxsize) * (1 - FREE)
        while len(chat) > 2 and self.encode([chat])["input_ids"].shape[1] > limit:
            chat = chat[2:]
        return chat

    def answer(self, chats: Sequence[Turns], streamer: TextStreamer | None = None) -> list[str]:
        """Answer several chats in one batch."""
        encoded = self.encode(chats)
        ids = encoded["input_ids"]
        room = (self.context or sys.maxsize) - ids.shape[1]
        if room < 1:
            raise PlugsftError(
                f"a question of {ids.shape[1]:,} tokens; the model's context is {self.context:,}"
            )
        sampling: dict[str, Any] = {"do_sample": False}
        if self.temperature:
            sampling = {"do_sample": True, "temperature": self.temperature}
        config = GenerationConfig(  # type: ignore[no-untyped-call]  # untyped upstream
            max_new_tokens=min(self.max_tokens, room),
            eos_token_id=self.stops or None,
            pad_token_id=pad_id(self.tokenizer),
            use_cache=True,
            **sampling,
        )
        generate: Any = self.model.generate
        generated = generate(
            input_ids=ids.to(self.model.device),
            attention_mask=encoded["attention_mask"].to(self.model.device),
            generation_config=config,
            streamer=streamer,
        )
        return [self._text(row[ids.shape[1] :].tolist()) for row in generated]

    def _text(self, ids: list[int]) -> str:
        ends = [index for index, token in enumerate(ids) if token in self.stops]
        text = self.tokenizer.decode(ids[: ends[0]] if ends else ids, skip_special_tokens=True)
        return str(text).strip()


class Streamer(TextStreamer):
    """Prints an answer word by word; says so if it has none."""

    has_text = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the next words."""
        self.has_text |= bool(text.strip())
        if self.has_text:
            super().on_finalized_text(text, stream_end)
        elif stream_end:
            out.print(EMPTY, style="dim")


def converse(speaker: Speaker) -> None:
    """Answer line after line; each answer takes the earlier turns into account."""
    interactive = sys.stdin.isatty() and is_terminal()
    if interactive:
        say("Ctrl-D or 'exit' ends.")
    turns: Turns = []
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            break
        if line in ("exit", "quit"):
            return
        if not line:
            continue
        turns = speaker.shorten(turns + speaker.ask(line))
        streamer = Streamer(speaker.tokenizer, skip_prompt=True, skip_special_tokens=True)
        try:
            [answer] = speaker.answer([turns], streamer if interactive else None)
        except PlugsftError as error:
            say(str(error))
            turns = turns[:-1]
            continue
        if not interactive:
            say(answer or EMPTY)
        turns.append({"role": "assistant", "content": answer})
    if interactive:
        say("")
