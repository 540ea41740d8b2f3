"""Tools for plugins of the data. Imports numpy, Arrow and tokenizers, but not torch."""

from ..data.defaults import opened, tokenizing
from ..data.pairs import render_pairs
from ..data.render import render_rows
from ..tokens.store import Tokens
from ..tokens.tokenizer import Tokenizer, encode

__all__ = ["Tokenizer", "Tokens", "encode", "opened", "render_pairs", "render_rows", "tokenizing"]
