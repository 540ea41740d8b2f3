"""The loss and the metrics of answers, and the KL of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import Dropout, Module

from plugsft import Batch, Ints, PluginError
from plugsft.kit import Tokens, lay_out

from .labels import LABEL
from .steps import Mismatched

if TYPE_CHECKING:
    from . import Kto

NAMES = {True: "desirable", False: "undesirable"}
INITIAL_TOLERANCE = {True: 1e-4, False: 2e-2}
"""Allowed relative change of log-probabilities before step 1, in float32 (True) or not."""


def answer_columns(tokens: Tokens, examples: Ints) -> Batch:
    """Return the label of each example, and the tokens of all."""
    labels = tokens.columns[LABEL][examples].astype(np.bool_)
    return {"_tokens": tokens, "_labels": torch.from_numpy(labels)}


def compare(
    plugin: Kto, batch: Batch, log_probs: Tensor, gains: Tensor, training: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each example, and its metrics.

    `gains`: log-probabilities, less those of the reference.
    """
    step, tokens, labels = batch["_step"], batch["_tokens"], batch["_labels"]
    if step.kl is None:
        step.kl = kl_of(plugin, tokens, step.examples)
    signs = torch.where(labels, 1.0, -1.0)
    factors = torch.where(labels, plugin.desirable_weight, plugin.undesirable_weight)
    losses = factors * torch.sigmoid(-plugin.beta * signs * (gains - step.kl))
    examples = step.examples if training else np.arange(len(tokens))
    metrics = {"kl": step.kl} if plugin.loss == "kto" else {}
    for label, scale in scales_of(tokens, examples).items():
        shares = scale * (labels == label)
        metrics[f"reward_{NAMES[label]}"] = shares * (plugin.beta * gains)
        metrics[f"logp_{NAMES[label]}"] = shares * log_probs
    rewards = [metrics.get(f"reward_{name}") for name in NAMES.values()]
    if rewards[0] is not None and rewards[1] is not None:
        metrics["margin"] = rewards[0] - rewards[1]
    return losses, metrics


def ensure_unchanged(plugin: Kto, model: Module, log_probs: Tensor, gains: Tensor) -> None:
    """Check the first log-probabilities: those of the reference, if it is the initial model."""
    # Dropout is that of adapters; they may not begin at 0.
    dropout = any(isinstance(part, Dropout) and part.p for part in model.modules())
    tolerance = INITIAL_TOLERANCE[plugin.model.exact]
    if not (plugin.reference or dropout or gains.norm() <= tolerance * log_probs.norm()):
        raise PluginError(
            f"plugins.kto: log-probabilities differ by {gains.abs().max():.3g} from the "
            "reference's, but both are the same model before step 1. Most likely the model is "
            "random: a dropout or a router of its own code"
        )


def kl_of(plugin: Kto, tokens: Tokens, examples: Ints) -> Tensor:
    """Return the mean gain of a step's mismatched answers over all ranks, at least 0."""
    if plugin.loss != "kto" or not len(examples):
        return torch.zeros(())
    recipe, ranks = plugin.recipe, plugin.ranks
    capacity, padded = recipe.packed_capacity(), recipe.provides("packed_rows") is None
    texts = Mismatched(tokens, examples, min(recipe.data.max_length, capacity))
    rows = recipe.train.micro_batch if padded else 1
    micro_batches = lay_out(texts.lengths, rows * capacity, padded)
    own = micro_batches[ranks.data_rank :: ranks.data_size]
    # All ranks take part in the collectives of a sharded model.
    count = -(-len(micro_batches) // ranks.data_size)
    own += [micro_batches[0][:0]] * (count - len(own))
    total = torch.stack([gain_of(plugin, texts, numbers) for numbers in own]).sum()
    mean = ranks.reduce(total) / len(texts)
    return mean.clamp(min=0)


def gain_of(plugin: Kto, texts: Tokens, numbers: Ints) -> Tensor:
    """Return how much likelier some texts have become, in all."""
    model = plugin.model
    nll = model.score(texts, numbers)
    with plugin.reference_model.in_place(model.module) as module:
        reference = model.score(texts, numbers, module)
    return (reference - nll).sum()


def scales_of(tokens: Tokens, examples: Ints) -> dict[bool, float]:
    """Return the weight of examples of either label over that of each label that has any."""
    weights, labels = tokens.weights(examples), tokens.columns[LABEL][examples]
    parts = {label: float(weights[labels == label].sum()) for label in NAMES}
    return {label: float(weights.sum()) / part for label, part in parts.items() if part}
