"""Tools for plugins that read rows or tokens. It imports numpy and Arrow, and no torch."""

from .data.pairs import render_pairs
from .tokens.store import Tokens
from .tokens.tokenizer import Tokenizer

__all__ = ["Tokenizer", "Tokens", "render_pairs"]
