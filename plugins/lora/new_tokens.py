"""Rows of the embeddings and the head that are trained: those of added tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugsft import ModelLoad, RecipeError

from .targets import head_and_embeddings, is_tied, name_of, reward_head

if TYPE_CHECKING:
    from . import Lora


def trained_rows(
    plugin: Lora, load: ModelLoad, model: Any, adapted: list[str]
) -> dict[str, list[int]] | None:
    """Return peft's setting: module -> the rows that are trained; None for no rows."""
    rows = sorted({*load.new_tokens}) if plugin.train_new_tokens else []
    if not rows:
        return None
    if plugin.strategy == "zero3" or (plugin.strategy and is_tied(model)):
        raise RecipeError(
            "plugins.lora.train_new_tokens: the rows are written into whole embeddings"
            + (", which are the head too" if is_tied(model) else "")
            + ", and ranks shard them; launch with DDP"
            + ("" if is_tied(model) else " or FSDP2")
            + " (recipes/accelerate/)"
        )
    head, embeddings = (name_of(module, model) for module in head_and_embeddings(model))
    # The head of a reward model has no rows of tokens.
    weights = [embeddings] if reward_head(model) is not None else [embeddings, head]
    if both := [name for name in weights if name in adapted]:
        raise RecipeError(
            f"plugins.lora.train_new_tokens: {both[0]} is in targets or modules_to_save, which "
            "train all of its rows; remove one of them"
        )
    return dict.fromkeys(weights[:1] if is_tied(model) else weights, rows)


def describe_frozen_rows(plugin: Lora, load: ModelLoad) -> str:
    """Describe the rows of new tokens, if they are frozen."""
    if not load.new_tokens or plugin.train_new_tokens or plugin.modules_to_save:
        return ""
    return (
        f"rows of {len({*load.new_tokens})} new tokens are frozen; train_new_tokens = true in "
        "[plugins.lora] trains them"
    )
