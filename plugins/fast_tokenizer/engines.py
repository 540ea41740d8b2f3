"""Fast tokenizer engines: other implementations of the same tokenizers."""

import importlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from plugsft import Ints, not_installed
from plugsft.data_kit import Tokenizer

Ids = tuple[NDArray[np.int32], Ints]
"""The ids of all texts, and the number of ids of each."""
Engine = Callable[[list[str]], Ids]


class UnusableEngine(Exception):
    """An engine cannot be used, with the reason."""

    def __init__(self, reason: str, wrong_ids: bool = False) -> None:
        super().__init__(reason)
        self.wrong_ids = wrong_ids
        """Whether it encoded a text of the run wrongly."""


def load_gigatoken(tokenizer: Tokenizer) -> Engine:
    """Load gigatoken."""
    gigatoken = importlib.import_module("gigatoken")
    loaded = gigatoken.Tokenizer.from_json(tokenizer.json)

    def encode(texts: list[str]) -> Ids:
        # In one thread: encoding takes a tenth of the time of rendering.
        ids = [loaded.encode(text) for text in texts]
        counts = np.array([len(text_ids) for text_ids in ids], np.int64)
        return np.concatenate([np.zeros(0, np.uint32), *ids]).view(np.int32), counts

    return encode


def load_fastokens(tokenizer: Tokenizer) -> Engine:
    """Load fastokens."""
    fastokens = importlib.import_module("fastokens")
    loaded = fastokens.Tokenizer.from_json_str(tokenizer.json)

    def encode(texts: list[str]) -> Ids:
        ids, offsets = loaded.encode_batch_flat(texts)
        stops = np.frombuffer(offsets, np.int64)
        return np.frombuffer(ids, np.int32), stops[1:] - stops[:-1]

    return encode


ENGINES = {"gigatoken": load_gigatoken, "fastokens": load_fastokens}
"""Engines in the order in which "auto" tries them."""


def load(name: str, tokenizer: Tokenizer) -> Engine:
    """Load an engine for a tokenizer; raise UnusableEngine if it does not know such tokenizers."""
    if missing := not_installed(name, "fast"):
        raise UnusableEngine(missing)
    try:
        return ENGINES[name](tokenizer)
    except BaseException as error:
        ensure_engine_error(error)
        reason = str(error).partition("\n")[0]
        raise UnusableEngine(f"{name} cannot load the tokenizer: {reason}") from error


def ensure_engine_error(error: BaseException) -> None:
    """Raise errors that are not an engine's, such as ctrl-C; a panic in Rust is an engine's."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
