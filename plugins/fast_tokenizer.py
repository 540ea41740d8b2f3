"""Encode with an engine many times as fast as the usual one, trusted only by proof."""

import importlib
import importlib.util
import os
import unicodedata
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, pre_tokenizers

from plugsft import Encoded, Ints, PluginError, RecipeError, hookimpl, plugin, state
from plugsft.kit.tokens import Tokenizer, Tokens, encode

Flat = tuple[NDArray[np.int32], Ints]
Engine = Callable[[list[str]], Flat]
OWN = "transformers"
THREADS = "RAYON_NUM_THREADS"
"""What says, in the processes of multiprocess_tokenize too, how many threads an engine takes."""
WHY = "(it changes them, or they hold characters that engines disagree on)"
CURE = 'Set plugins.fast_tokenizer.engine = "transformers"'
SAMPLE = 96
"""On so many texts of the run an engine is proved, and on so many of the tokenizer's own tokens."""
LETTERS = 250_000
"""Of long texts no more than that: the usual tokenizer takes a quarter of a second for it."""
FRAME = "a{0}b {0}{0}1{0}'s  {0}\n{0}."
"""Shows what an engine takes a character, or an added token, for."""
CHARACTERS = [
    one for one in map(chr, range(9, 0x32000, 199)) if unicodedata.category(one) not in ("Cn", "Cs")
]
# Engines differ in the characters that are younger than the library of the model's tokenizer, in
# a letter s that one of them takes for no s, and in a space that is none since Unicode 6.3.
ALIKE = pre_tokenizers.Split(Regex(r"[^\p{Cn}\u017f\u180e]+"), "removed")


@dataclass(frozen=True)
class Choice:
    """The engine that takes a tokenizer's texts; None is the tokenizer itself."""

    tokenizer: Tokenizer
    name: str = OWN
    engine: Engine | None = None


class Unfit(Exception):
    """An engine cannot be used: why, and whether it is for what it made of the run's rows."""

    def __init__(self, reason: str, rows: bool = False) -> None:
        super().__init__(reason)
        self.rows = rows


@plugin()
class FastTokenizer:
    """Encode with an engine many times as fast as the usual one, trusted only by proof.

    Before the work, its ids are compared with those of the model's own tokenizer on a sample of
    the rows; in the work, on one text of each slice, and the tokens of every text must spell it
    byte for byte. What fails goes through the model's own tokenizer.
    """

    engine: Literal["auto", "gigatoken", "fastokens", "transformers"] = "auto"
    """auto takes the first that can be loaded and proved; transformers is the model's own."""

    first: bool = state(False)
    """Whether the run began in this process, and not another may have encoded before it."""
    choices: Any = state({})
    """By the identity of their tokenizers."""
    reasons: dict[str, str] = state({})
    """Engine -> why it was not taken."""
    counts: dict[str, int] = state({})
    """How many texts each engine encoded, in all processes."""

    @hookimpl
    def check(self) -> None:
        """Refuse an engine that is not installed."""
        self.first = True
        absent = {name: missing(name) for name in ENGINES if not importlib.util.find_spec(name)}
        if self.engine in absent:
            raise RecipeError(absent[self.engine])
        self.reasons = absent if self.engine == "auto" else {}

    @hookimpl
    def encode(self, texts: list[str], tokenizer: Tokenizer, special_tokens: bool) -> Encoded:
        """Encode with an engine; the first texts prove it, and one of each later call."""
        known = id(tokenizer) in self.choices
        if texts and not known:
            self.choices[id(tokenizer)] = self.choose(texts, tokenizer)
        choice = self.choices.get(id(tokenizer), Choice(tokenizer))
        if choice.engine is None:
            return encode(texts, tokenizer, special_tokens)
        encoded = encode(texts, tokenizer, special_tokens, choice.engine, choice.name)
        if texts and known:
            number = len(texts) // 2
            text, stop = texts[number], int(encoded.counts[: number + 1].sum())
            own = tokenizer.backend_tokenizer.encode(text, add_special_tokens=special_tokens)
            if encoded.ids[stop - encoded.counts[number] : stop].tolist() != own.ids:
                raise PluginError(f"{differs(choice.name, text)}. {CURE}")
        return encoded

    def choose(self, texts: list[str], tokenizer: Tokenizer) -> Choice:
        """Return the first engine that can be loaded and proved."""
        for name in ENGINES if self.engine == "auto" else {self.engine} - {OWN}:
            try:
                engine = careful(load(name, tokenizer), tokenizer)
                share = prove(name, engine, texts, tokenizer)
                if self.engine == "auto" and share < 0.5:
                    raise Unfit(f"{name} is of use for {share:.0%} of the texts only")
                return Choice(tokenizer, name, engine)
            except Unfit as error:
                # Rows are not the same in every process: another may have trusted this engine.
                if self.engine == name or (error.rows and not self.first):
                    raise PluginError(f"{error}. {CURE}") from error
                self.reasons[name] = str(error)
        return Choice(tokenizer)

    @hookimpl(wrapper=True)
    def annotate(self) -> Generator[None, Tokens, Tokens]:
        """Hear how many texts each engine encoded: most of it was done in other processes."""
        tokens = yield
        self.counts = self.counts or tokens.facts["engines"]  # the first are those trained on
        return tokens

    @hookimpl
    def verdict(self) -> str | None:
        """Say which engine encoded how many texts, and why not another."""
        total, own = sum(self.counts.values()), self.counts.get(OWN, 0)
        fast = [f"{name} encoded {count:,}" for name, count in self.counts.items() if name != OWN]
        said = []
        if fast:
            said = [f"{', '.join(fast)} of {total:,} texts"]
            if own:
                said[0] += f", the model's own tokenizer {own:,} {WHY}"
        elif own:
            said = [f"the model's own tokenizer encoded {own:,} texts"]
        return "; ".join([*said, *self.reasons.values()]) or None


def load_gigatoken(tokenizer: Tokenizer) -> Engine:
    """Load gigatoken."""
    gigatoken = importlib.import_module("gigatoken")
    loaded = gigatoken.Tokenizer.from_json(tokenizer.backend_tokenizer.to_str())

    def one_by_one(texts: list[str]) -> Flat:
        # As fast as a batch in one thread, but for the third of a second that awkward takes.
        made = [loaded.encode(text) for text in texts]
        counts = np.array([len(ids) for ids in made], np.int64)
        return np.concatenate([np.zeros(0, np.uint32), *made]).view(np.int32), counts

    def side_by_side(texts: list[str]) -> Flat:
        awkward = importlib.import_module("awkward")
        made = loaded.encode_batch(texts)
        ids = np.asarray(awkward.flatten(made)).view(np.int32)
        return ids, np.asarray(awkward.num(made))

    return one_by_one if os.environ.get(THREADS) == "1" else side_by_side


def load_fastokens(tokenizer: Tokenizer) -> Engine:
    """Load fastokens."""
    if THREADS in os.environ:
        # It reads a variable of its own, at its first batch.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", os.environ[THREADS])
    fastokens = importlib.import_module("fastokens")
    loaded = fastokens.Tokenizer.from_json_str(tokenizer.backend_tokenizer.to_str())

    def engine(texts: list[str]) -> Flat:
        ids, offsets = loaded.encode_batch_flat(texts)
        stops = np.frombuffer(offsets, np.int64)
        return np.frombuffer(ids, np.int32), stops[1:] - stops[:-1]

    return engine


ENGINES = {"gigatoken": load_gigatoken, "fastokens": load_fastokens}
"""In the order in which auto tries them."""


def load(name: str, tokenizer: Tokenizer) -> Engine:
    """Load an engine for a tokenizer, or say why it cannot be."""
    try:
        return ENGINES[name](tokenizer)
    except ModuleNotFoundError as error:
        raise Unfit(missing(name)) from error
    except BaseException as error:
        reason = str(foreign(error)).partition("\n")[0]
        raise Unfit(f"{name} cannot load the tokenizer: {reason}") from error


def missing(name: str) -> str:
    """Say how to install an engine."""
    return f"{name} is not installed: pip install {name}"


def foreign(error: BaseException) -> BaseException:
    """Return an engine's error, also where its Rust panicked, and raise what is none of it."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return error
    raise error


def careful(engine: Engine, tokenizer: Tokenizer) -> Engine:
    """Give no tokens for a text that an engine refuses, or may read otherwise than others.

    Such a text is not spelt by its tokens, and so goes through the model's own tokenizer.
    """
    pieces = np.array(tokenizer.token_bytes.to_pylist(), object)
    spelt = [decoded(piece) for piece in pieces]
    odd = unlike("".join(filter(None, spelt)))
    # A character that no token holds whole lies in several that are no text by themselves.
    suspect = np.array([text is None or not odd.isdisjoint(text) for text in spelt])

    def encode_some(texts: list[str]) -> Flat:
        try:
            return engine(texts)
        except BaseException as error:
            foreign(error)
        if len(texts) == 1:
            return np.zeros(0, np.int32), np.zeros(1, np.int64)
        middle = len(texts) // 2
        (ids, counts), (more, theirs) = encode_some(texts[:middle]), encode_some(texts[middle:])
        return np.concatenate([ids, more]), np.concatenate([counts, theirs])

    def encode_all(texts: list[str]) -> Flat:
        ids, counts = encode_some(texts)
        found = pieces.take(ids[suspect.take(ids, mode="clip")], mode="clip")
        if odd := unlike(b"".join(found).decode(errors="ignore")):
            left = np.array([not odd.isdisjoint(text) for text in texts])
            ids, counts = ids[~np.repeat(left, counts)], np.where(left, 0, counts)
        return ids, counts

    return encode_all


def decoded(piece: bytes) -> str | None:
    """Return the text of a token, if it is one."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def unlike(text: str) -> set[str]:
    """Return the characters of a text that engines may know otherwise."""
    return {one for piece, _ in ALIKE.pre_tokenize_str("".join(set(text))) for one in piece}


def prove(name: str, engine: Engine, texts: list[str], tokenizer: Tokenizer) -> float:
    """Compare an engine's ids with the tokenizer's own; return the share of texts it is of use for.

    On a sample of the texts, and on what tokenizers differ in: added tokens, rare characters.
    """
    added = [one.content for one in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()]
    probes, sample = [FRAME.format(one) for one in [*CHARACTERS, *spread(added)]], spread(texts)
    for some in (probes, sample):
        made = encode(some, tokenizer, False, engine, name)
        own = encode(some, tokenizer, False)
        for text, ours, theirs in zip(some, parts(made), parts(own), strict=True):
            if not np.array_equal(ours, theirs):
                raise Unfit(differs(name, text), rows=some is sample)
    return made.engines[name] / len(sample)


def spread(items: list[str]) -> list[str]:
    """Take a sample from all over a list, small enough for a slow tokenizer."""
    return items[:: max((len(items) - 1) // SAMPLE, sum(map(len, items)) // LETTERS) + 1]


def parts(encoded: Encoded) -> list[NDArray[np.int32]]:
    """Return the ids of each text."""
    return np.split(encoded.ids, np.cumsum(encoded.counts)[:-1])


def differs(name: str, text: str) -> str:
    """Say where an engine's ids are not those of the tokenizer."""
    return f"{name} gives other ids than the model's own tokenizer for the text {text[:60]!r}"
