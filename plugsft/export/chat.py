"""`plugsft chat`: talk to a trained model."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.utils import logging as transformers_logging

from ..base.console import is_terminal, out, say
from ..base.errors import TRUST, PlugsftError, explain_load_error
from ..model.config import ensure_safetensors
from ..model.generate import Speaker, Turns
from ..model.load import grow_embeddings
from ..model.published import from_files
from ..model.same_base import is_text_only
from ..output.folder import ADAPTER, base_model, warn_of_changes
from ..tokens.ends import pad_id
from .answers import Answers
from .folder import is_reward_model
from .quantized import add_adapters, keep_stored_weights, quantization, rows_with_added_tokens

with suppress(ImportError):  # Windows has none
    import readline  # noqa: F401  # gives input() arrow keys and a history

FREE = 0.25
"""Share of the context that stays free for the answer."""
CURE = "put its text into the question"
EMPTY = "(the model ended its answer before the first word)"


def chat(folder: Path, ask: Sequence[str], options: Answers, trusted: bool = False) -> None:
    """Answer the questions of --ask, or those typed until Ctrl-D."""
    if not all(question.strip() for question in ask):
        raise PlugsftError("--ask: an empty question has no answer")
    speaker = open_speaker(folder, options, trusted)
    for answer in speaker.answer_all(ask):
        say(answer or EMPTY)
    if not ask:
        try:
            converse(speaker)
        except KeyboardInterrupt:
            say("")  # the shell's prompt begins a line of its own


def open_speaker(folder: Path, options: Answers, trusted: bool = False) -> Speaker:
    """Load the model of a folder to answer with these options."""
    ensure_safetensors(str(folder))
    warn_of_changes(folder)
    if is_reward_model(folder):
        raise PlugsftError(
            f"{folder} is a reward model: it scores answers, and cannot generate. Load it with "
            "transformers' AutoModelForSequenceClassification"
        )
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped upstream
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # as above
    return make_speaker(*load(folder, trusted), options)


def make_speaker(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: Answers
) -> Speaker:
    """Let a loaded model answer with these options."""
    speaker = Speaker(
        model,
        tokenizer,
        options.max_tokens,
        options.temperature,
        system=[{"role": "system", "content": options.system}] if options.system else [],
        sampling=options.sampling,
    )
    ensure_system(speaker)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    return speaker


def ensure_system(speaker: Speaker) -> None:
    """Refuse a system message that the chat template refuses or leaves out."""
    if not speaker.system:
        return
    if not speaker.tokenizer.chat_template:
        raise PlugsftError(
            f"a system message needs a chat template, and the model has none; {CURE}"
        )
    try:
        chat = [*speaker.system, *speaker.ask("?")]
        text = str(speaker.tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception as error:  # a template raises whatever it likes
        raise PlugsftError(
            f"the model's chat template refuses a system message: {error}; {CURE}"
        ) from error
    if speaker.system[0]["content"].strip() not in text:
        raise PlugsftError(f"the model's chat template leaves out a system message; {CURE}")


def load(folder: Path, trusted: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, onto a GPU if available, and its tokenizer.

    The model's Python code runs only if the user trusts it.
    """
    options: dict[str, Any] = {"dtype": "auto", TRUST: trusted, "use_safetensors": True}
    place, adapted = str(folder), (folder / ADAPTER).is_file()
    if adapted:
        place, revision = base_model(folder)
        ensure_safetensors(place, revision)
        options |= {"revision": revision or "main"} | quantization(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
        model, _ = from_files(place, is_text_only(folder), **options)
        if adapted:
            grow_embeddings(model, rows_with_added_tokens(folder, trusted))
            model = add_adapters(model, folder).get_base_model()
    except PlugsftError:
        raise
    except Exception as error:  # transformers raises whatever its readers raise
        raise PlugsftError(
            f"{folder}: no model could be loaded: {explain_load_error(place, error)}"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id(tokenizer))
    device = torch.accelerator.current_accelerator(check_available=True)
    return keep_stored_weights(model).to(device or "cpu").eval(), tokenizer


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
        turns = shorten(speaker, turns + speaker.ask(line))
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


def shorten(speaker: Speaker, chat: Turns) -> Turns:
    """Drop the oldest turns of a chat that leaves no room for the answer."""
    limit = (speaker.context or sys.maxsize) * (1 - FREE)
    while len(chat) > 2 and speaker.encode([chat])["input_ids"].shape[1] > limit:
        chat = chat[2:]
    return chat
