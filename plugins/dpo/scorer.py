"""Log-probabilities of pairs of answers, by the model and by the reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from plugsft import Batch, RecipeError, RunModel, TokenNll
from plugsft.kit import Reference


class Pairs(NamedTuple):
    """The answers of a micro-batch's pairs; column 0: chosen, column 1: rejected."""

    log_probs: Tensor
    """Log-probability of each answer by the model."""
    reference: Tensor | None
    """The same by the reference; None for a loss without one."""
    lengths: Tensor
    """Number of targets of each answer."""
    weights: Tensor
    """The weight of each pair."""


class Scorer:
    """Scores answers by the model and the reference, whose scores may be precomputed.

    `reference`: another reference than the model before training; None for no reference.
    """

    def __init__(self, model: RunModel, reference: str | None, precomputed: bool) -> None:
        self.has_reference = reference is not None
        self._reference: Reference | None = None
        if reference is None:
            self.name = "none"
        elif precomputed:
            base = Reference.without_adapters(model) or "the initial model"
            self.name = f"{reference or base}, computed before step 1"
        else:
            try:
                self._reference = Reference(model, reference)
            except RecipeError as error:
                raise RecipeError(f"plugins.dpo.reference: {error}") from error
            self.name = self._reference.name

    def score(self, model: Module, batch: Batch, token_nll: TokenNll) -> Pairs:
        """Compute the log-probability of each answer by the model and by the reference."""
        targets = batch["_targets"]
        log_probs = sum_per_answer(token_nll(model=model, batch=batch, summed=False), targets)
        known = batch.get("_reference") if self.has_reference else None
        if self._reference is not None:
            with torch.no_grad(), self._reference.in_place(model) as module:
                nll = token_nll(model=module, batch=batch, summed=False)
                known = sum_per_answer(nll, targets)
        return Pairs(log_probs, known, targets.view(-1, 2), batch["_pair_weights"])


def sum_per_answer(losses: Tensor, targets: Tensor) -> Tensor:
    """Return log-probabilities, [pair, answer]; `targets` counts each answer's targets."""
    sums = torch.segment_reduce(losses, "sum", lengths=targets, unsafe=True, initial=0)
    return -sums.view(-1, 2)
