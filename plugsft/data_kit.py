"""Tools for plugins that read rows or tokens. It imports numpy and Arrow, and no torch."""

from .data.pairs import render_pairs
from .tokens.store import Tokens
from .tokens.tokenizer import Tokenizer
from .tokens.views import cut, share_prompts

__all__ = ["Tokenizer", "Tokens", "cut", "render_pairs", "share_prompts"]
