"""Tools for plugin authors. A name of `plugsft.kit` imports torch or Arrow only if it needs it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches.labels import model_inputs, trained_rows
    from .batches.packed_rows import attend_per_document, documents_of, pack, single_document
    from .data.pairs import render_pairs
    from .model import fused_head
    from .model.answer_loss import AnswerLoss
    from .model.answers import lay_out
    from .model.for_plugins import decay_groups, decoder_layers
    from .model.meta_model import find_modules, meta_model
    from .model.tensor_shards import num_weights, shard_of, whole_shape
    from .model.weight_files import meta_copy
    from .tokens.store import Tokens
    from .tokens.tokenizer import Tokenizer

__all__ = [
    "AnswerLoss",
    "Tokenizer",
    "Tokens",
    "attend_per_document",
    "decay_groups",
    "decoder_layers",
    "documents_of",
    "find_modules",
    "fused_head",
    "lay_out",
    "meta_copy",
    "meta_model",
    "model_inputs",
    "num_weights",
    "pack",
    "render_pairs",
    "shard_of",
    "single_document",
    "trained_rows",
    "whole_shape",
]

DATA = ("Tokenizer", "Tokens", "render_pairs")
"""Names that need numpy, Arrow and tokenizers, but not torch."""


def _import_name(name: str) -> Any:
    """Import the modules of a name's group; return its value."""
    modules: tuple[Any, ...]
    if name == "AnswerLoss":
        from .model import answer_loss

        modules = (answer_loss,)
    elif name in DATA:
        from .data import pairs
        from .tokens import store, tokenizer

        modules = pairs, store, tokenizer
    else:
        from .batches import labels, packed_rows
        from .model import (
            answers,
            for_plugins,
            fused_head,
            meta_model,
            tensor_shards,
            weight_files,
        )

        if name == "fused_head":
            return fused_head
        modules = (
            labels,
            packed_rows,
            answers,
            for_plugins,
            meta_model,
            tensor_shards,
            weight_files,
        )
    return next(getattr(module, name) for module in modules if hasattr(module, name))


if not TYPE_CHECKING:  # a type checker reads the imports above

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, _import_name(name))
