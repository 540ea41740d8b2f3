"""Turns of chats, rows of each format, and the templates and tokenizers to write them with."""

from functools import cache
from pathlib import Path

import trl
from conftest import TEXT
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from plugsft.data.chat import CHATML

FOLDER = Path(trl.__file__).parent / "chat_templates"
ASK, TELL = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "owls"}
SYSTEM = {"role": "system", "content": "be brief"}
FUNCTION = {"name": "look_up", "arguments": {"word": "owl"}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdef123", "type": "function", "function": FUNCTION}],
}
RESULT = {"role": "tool", "name": "look_up", "tool_call_id": "abcdef123", "content": "a bird"}
POOR = {"role": "assistant", "content": "elks"}
# A row of each format.
ROWS = {
    "messages": {"messages": [ASK, TELL]},
    "conversations": {"conversations": [ASK, TELL]},
    "conversation": {"conversation": [ASK, TELL]},
    "completion": {"prompt": "who? ", "completion": "owls"},
    "chat completion": {"prompt": [ASK], "completion": [TELL]},
    "alpaca": {"instruction": "who?", "output": "owls"},
    "text": {"text": "owls"},
    "preference": {"prompt": [ASK], "chosen": [TELL], "rejected": [POOR]},
}
# What tokenizers of each kind learn from.
END, BEGIN, UNKNOWN = "<|im_end|>", "<|endoftext|>", "<unk>"
SPECIAL = [
    *(BEGIN, "<|im_start|>", END, UNKNOWN),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<end_of_turn>"),
]
CORPUS = [TEXT] * 5 + ["6 x 7 is 42", "6 x 7 is forty", "who? 🦉 owls 🦊", "a\n\nb\n c"] * 20
PLAIN = [text for text in CORPUS if text.isascii()]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(across):
    """A byte-level BPE; its tokens may go across spaces, as those of some newer models do."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not across)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, how)
    return made


def unigram():
    """As SentencePiece makes them for T5 or XGLM."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    how = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token=UNKNOWN, show_progress=False
    )
    made.train_from_iterator(CORPUS, how)
    return made


def byte_fallback():
    """As Llama 2's: no pre-tokenizer, and bytes for unknown characters."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token=UNKNOWN))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    how = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL + BYTES, show_progress=False)
    made.train_from_iterator(PLAIN, how)
    return made


MAKERS = {
    "BPE": lambda: byte_level(across=False),
    "BPE across spaces": lambda: byte_level(across=True),
    "Unigram": unigram,
    "byte fallback": byte_fallback,
}
TEMPLATES = {path.stem: path.read_text("utf8") for path in sorted(FOLDER.glob("*.jinja"))}
TEMPLATES["chatml"] = CHATML.read_text("utf8")
backend_of = cache(lambda kind: MAKERS[kind]())


def tokenizer_of(kind, template=None):
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend_of(kind), eos_token=END, bos_token=BEGIN, pad_token=BEGIN
    )
    made.chat_template = template and TEMPLATES[template]
    return made
