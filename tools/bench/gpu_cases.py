"""The cases of gpu.py: model shapes, contenders, and the FLOP of a token."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from plugsft.base.types import Ints

WARM = 3
"""Steps before the measured steps: memory is allocated, kernels are tuned and compiled."""
RATE = 1e-5
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }} <|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }} <|im_end|>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
OVERHEAD = 6
"""Tokens that the template adds to a chat of two turns."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    family: str
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    def config(self) -> Any:
        """Return the transformers config of this shape."""
        return AutoConfig.for_model(
            self.family,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            tie_word_embeddings=self.tied,
            max_position_embeddings=8192,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )

    @property
    def multiplied(self) -> int:
        """Return how many weights a token is multiplied with, the head included.

        Embeddings are looked up, not multiplied; tied ones count as the head.
        """
        heads = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (heads + 3 * self.mlp) + self.hidden * self.vocab


@dataclass(frozen=True)
class Case:
    """A model shape, the settings of its training, and its contenders, most important first."""

    shape: Shape
    lora: bool
    batch: int
    """Chats per step, in rows of up to SHORT_ROW tokens; twice as many in longer rows."""
    micro: int
    """Chats per padded micro-batch."""
    steps: int
    """Measured steps."""
    contenders: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    median: int = 400
    longest: int = 4096

    def chats(self, rows: int) -> int:
        """Return the chats per step, in rows of this many tokens."""
        return self.batch * (2 if rows > SHORT_ROW else 1)


@dataclass(frozen=True)
class Contender:
    """A trainer with its features, and the tokens of its packed rows (0: padded)."""

    name: str
    trainer: str
    features: tuple[str, ...]
    rows: int

    @classmethod
    def parse(cls, name: str) -> "Contender":
        """Read a name such as plugsft+compile@16k."""
        words, _, rows = name.partition("@")
        trainer, *features = words.split("+")
        if trainer not in TRAINERS or (rows and not rows.rstrip("k").isdigit()):
            raise SystemExit(
                f"no contender is named {name!r}: write plain, plugsft, trl or trl-default, then "
                "+FEATURE..., then @ROW, as in plugsft+compile@16k"
            )
        tokens = int(rows.rstrip("k")) * (1024 if rows.endswith("k") else 1) if rows else 0
        return cls(name, trainer, tuple(features), tokens)

    @property
    def plugins(self) -> list[str]:
        """The plugins of a run of plugsft; `float32` and `dataset` are settings."""
        return [*TRAINERS[self.trainer], *(f for f in self.features if f not in SETTINGS)]


SHORT_ROW = 8192
SETTINGS = ("float32", "dataset")
"""Features that are no plugins: weights in float32; rows that are filled from the whole epoch."""
PACKED = ("bfd_packing", "async_collate", "flash_attention", "fused_loss")
TRAINERS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "plugsft": PACKED,
    "trl": (),
    "trl-default": (),
}
"""Trainer -> its plugins, before the features. trl packs; trl-default pads."""
LADDER = tuple(
    "+".join(("plain", *PACKED[: number + 1])) + "@4k" for number in range(len(PACKED) - 1)
)
SMALL = Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, True)
MIDDLE = Shape("llama", 2048, 8192, 16, 32, 8, 64, 128_256, True)
LARGE = Shape("llama", 4096, 14_336, 32, 32, 8, 128, 128_256, False)
CASES = {
    "0.6b-lora": Case(
        SMALL,
        lora=True,
        batch=64,
        micro=8,
        steps=6,
        contenders=(
            *("trl@4k", "plugsft@4k", "plugsft+compile@4k"),
            *("trl@32k", "plugsft@32k", "plugsft+compile@32k", "trl@16k"),
            *("plugsft+profiler@4k", "trl+checkpointing@32k", "plugsft+compile+dataset@4k"),
            *("trl+liger@4k", "trl+compile@4k", "trl-default", "plain", *LADDER),
        ),
    ),
    "1b-full": Case(
        MIDDLE,
        lora=False,
        batch=64,
        micro=8,
        steps=6,
        contenders=(
            *("trl+liger@4k", "plugsft+compile@4k", "plugsft@4k", "plugsft+liger@4k"),
            *("trl+liger@16k", "plugsft+compile@16k", "plugsft+compile+low_memory_adam@16k"),
            *("trl@4k", "plugsft+liger+compile@4k", "trl+liger+checkpointing@32k"),
            *("plugsft+compile@32k", "trl+liger@32k", "plugsft+compile+float32@16k"),
            *("trl+compile@4k", "trl-default", "plain", *LADDER),
        ),
    ),
    "8b-lora": Case(
        LARGE,
        lora=True,
        batch=32,
        micro=2,
        steps=3,
        contenders=(
            *("trl@4k", "plugsft+compile@4k", "plugsft@4k", "trl@16k", "plugsft+compile@16k"),
            *("trl+checkpointing@32k", "plugsft+compile+gradient_checkpointing@32k"),
            *("trl@32k", "plugsft+compile@32k", "trl-default", "plain"),
        ),
    ),
    "8b-full": Case(
        LARGE,
        lora=False,
        batch=32,
        micro=1,
        steps=3,
        contenders=(
            *("trl+liger@4k", "plugsft+compile@4k", "plugsft+compile+low_memory_adam@4k"),
            *("trl+liger+checkpointing@16k", "trl+liger+checkpointing@4k"),
            "plugsft+compile+low_memory_adam+gradient_checkpointing@16k",
            *("plugsft@4k", "plugsft+liger@4k", "trl@4k", "trl-default", "plain"),
        ),
    ),
}
TINY = {
    True: ("trl@256", "plugsft@256", "plain+profiler", "trl-default"),
    False: (
        *("trl+checkpointing@256", "plugsft+float32@256", "plugsft+low_memory_adam@256"),
        *("trl+liger@256", "plugsft+dataset@256"),
    ),
}
"""Contenders of the dry run, by whether the case is LoRA. On a CPU, low_memory_adam is refused
there, and Liger fails."""


def flops_per_token(shape: Shape, lengths: Ints, lora: bool, head: float = 1.0) -> float:
    """Return the FLOP per token of documents of these lengths, forward and backward.

    A weight takes 2 FLOP forward (multiply and add), 2 for the gradient of its input, and 2 for
    its own gradient: 6, or 4 for frozen weights (LoRA; adapters are not counted). In attention, a
    document of n tokens has n * n / 2 pairs. Each pair takes 2 per number of a head for queries
    and keys, 2 for the values, and twice that backward: 12. Recomputed layers add nothing. `head`
    is the share of tokens that reach the head, which those without a trained target need not.
    """
    pairs = float((lengths.astype(float) ** 2).sum() / 2 / lengths.sum())
    width = shape.layers * shape.heads * shape.head_dim
    skipped = (1 - head) * shape.hidden * shape.vocab
    return (4 if lora else 6) * (shape.multiplied - skipped) + 12 * width * pairs


def shrink(case: Case) -> Case:
    """Return this case with sizes for a CPU."""
    shape = replace(
        case.shape, hidden=64, mlp=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=1000
    )
    tiny: dict[str, Any] = {"batch": 8, "micro": 4, "steps": 1, "median": 40, "longest": 128}
    return replace(case, shape=shape, dtype="float32", contenders=TINY[case.lora], **tiny)


def parse_case(fields: dict[str, Any]) -> Case:
    """Return the case that these JSON fields describe."""
    return Case(**fields | {"shape": Shape(**fields["shape"])})


def count_words(shape: Shape) -> int:
    """Return how many different words the chats use."""
    return min(shape.vocab, 20_000) - 10


def make_model(arguments: dict[str, Any]) -> None:
    """Save a model with random weights, and a tokenizer with one word per token."""
    case, folder = parse_case(arguments["case"]), Path(arguments["folder"], "model")
    words = ["<|pad|>", "<|im_end|>", "<|im_start|>", "<|unk|>", "user", "assistant"]
    words += [f"w{number}" for number in range(count_words(case.shape))]
    backend = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, "<|unk|>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": words[0], "eos_token": words[1], "unk_token": words[3]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)  # type: ignore[no-untyped-call]  # untyped upstream
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(case.shape.config(), dtype=dtype)  # type: ignore[no-untyped-call]  # untyped upstream
    model.save_pretrained(folder)
