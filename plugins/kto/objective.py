"""The loss and the metrics of answers, and the KL of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import Dropout, Module

from plugsft import Batch, Ints, PluginError, Ranks, RecipeError, RunModel, TokenNll
from plugsft.kit import Reference, Tokens

from .labels import LABEL
from .steps import Mismatched, lay_out

if TYPE_CHECKING:
    from . import Kto

NAMES = {True: "desirable", False: "undesirable"}
INITIAL_TOLERANCE = {True: 1e-4, False: 2e-2}
"""Allowed relative change of log-probabilities before step 1, in float32 (True) or not."""


def answer_columns(tokens: Tokens, examples: Ints) -> Batch:
    """Return the label, the weight and the number of targets of each example, and its tokens."""
    return {
        "_tokens": tokens,
        "_targets": torch.from_numpy(tokens.targets[examples].astype(np.int64)),
        "_labels": torch.from_numpy(tokens.columns[LABEL][examples].astype(np.bool_)),
        "_weights": torch.from_numpy(tokens.weights(examples)),
    }


class Objective:
    """The losses of examples, and the sums of their metrics."""

    def __init__(self, plugin: Kto, model: RunModel, ranks: Ranks) -> None:
        self._plugin, self._recipe, self._model, self._ranks = plugin, plugin.recipe, model, ranks
        try:
            self.reference = Reference(model, plugin.reference)
        except RecipeError as error:
            raise RecipeError(f"plugins.kto.reference: {error}") from error
        self.is_untrained = False
        """Whether the first log-probabilities are still to be checked."""
        self._sums: dict[str, Tensor] = {}

    def losses(self, model: Module, batch: Batch, token_nll: TokenNll) -> Tensor:
        """Return the loss of each example times its weights, and add up the metrics."""
        plugin, step = self._plugin, batch["_step"]
        # First, so that plugins which observe the model see this pass before the others.
        log_probs = sum_per_answer(token_nll(model=model, batch=batch, summed=False), batch)
        if step.kl is None:
            step.kl = self._kl(batch["_tokens"], step.examples)
        with torch.no_grad(), self.reference.in_place(model) as module:
            nll = token_nll(model=module, batch=batch, summed=False)
            reference = sum_per_answer(nll, batch)
        gains, labels = log_probs - reference, batch["_labels"]
        if self.is_untrained and model.training:
            # Dropout is that of adapters; they may not begin at 0.
            dropout = any(isinstance(part, Dropout) and part.p for part in model.modules())
            self.is_untrained = False
            if not (plugin.reference or dropout):
                self._ensure_unchanged(gains.detach(), reference)
        signs = torch.where(labels, 1.0, -1.0)
        factors = torch.where(labels, plugin.desirable_weight, plugin.undesirable_weight)
        losses = torch.sigmoid(-plugin.beta * signs * (gains - step.kl))
        examples = step.examples if model.training else np.arange(len(batch["_tokens"]))
        scales = scales_of(batch["_tokens"], examples)
        metrics = {"reward": plugin.beta * gains.detach(), "logp": log_probs.detach()}
        self._add_metrics(metrics, batch, scales)
        if plugin.loss == "kto":
            self._add("kl", (batch["_weights"] * step.kl).sum())
        weighted: Tensor = batch["_weights"] * factors * losses
        return weighted

    def take_sums(self) -> dict[str, Tensor]:
        """Return a sum for every metric, and forget it."""
        sums, self._sums = self._sums, {}
        rewards = [sums.get(f"reward_{name}") for name in NAMES.values()]
        if rewards[0] is not None and rewards[1] is not None:
            sums["margin"] = rewards[0] - rewards[1]
        return sums

    def _ensure_unchanged(self, gains: Tensor, reference: Tensor) -> None:
        """Check the first log-probabilities: those of the reference, if it is the initial model."""
        tolerance = INITIAL_TOLERANCE[self._model.exact]
        if not gains.norm() <= tolerance * reference.norm():
            raise PluginError(
                f"plugins.kto: log-probabilities differ by {gains.abs().max():.3g} from the "
                "reference's, but both are the same model before step 1. Most likely the model is "
                "random: a dropout or a router of its own code"
            )

    def _add_metrics(
        self, metrics: dict[str, Tensor], batch: Batch, scales: dict[bool, float]
    ) -> None:
        for label, scale in scales.items():
            weights = scale * batch["_weights"] * (batch["_labels"] == label)
            for metric, values in metrics.items():
                self._add(f"{metric}_{NAMES[label]}", (weights * values).sum())

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0) + value

    def _kl(self, tokens: Tokens, examples: Ints) -> Tensor | float:
        """Return the mean gain of a step's mismatched answers over all ranks, at least 0."""
        if self._plugin.loss != "kto" or not len(examples):
            return 0.0
        capacity, rows = self._recipe.packed_capacity(), self._recipe.train.micro_batch
        packed = self._recipe.provides("packed_rows") is not None
        longest = min(self._recipe.data.max_length, capacity)
        texts = Mismatched(tokens, examples, longest)
        micro_batches = lay_out(texts.lengths, rows, capacity if packed else None)
        own = micro_batches[self._ranks.data_rank :: self._ranks.data_size]
        # All ranks take part in the collectives of a sharded model.
        count = -(-len(micro_batches) // self._ranks.data_size)
        own += [micro_batches[0][:0]] * (count - len(own))
        total = torch.stack([self._gain(texts, numbers) for numbers in own]).sum()
        mean = self._ranks.reduce(total) / len(texts)
        return mean.clamp(min=0)

    def _gain(self, texts: Tokens, numbers: Ints) -> Tensor:
        """Return how much likelier some texts have become, in all."""
        nll = self._model.score(texts, numbers)
        with self.reference.in_place(self._model.module) as module:
            reference = self._model.score(texts, numbers, module)
        return (reference - nll).sum()


def sum_per_answer(losses: Tensor, batch: Batch) -> Tensor:
    """Return the log-probability of each answer."""
    targets = batch["_targets"]
    return -torch.segment_reduce(losses, "sum", lengths=targets, unsafe=True, initial=0)


def scales_of(tokens: Tokens, examples: Ints) -> dict[bool, float]:
    """Return the weight of examples of either label over that of each label that has any."""
    weights, labels = tokens.weights(examples), tokens.columns[LABEL][examples]
    parts = {label: float(weights[labels == label].sum()) for label in NAMES}
    return {label: float(weights.sum()) / part for label, part in parts.items() if part}
