"""Log-probabilities of pairs of answers, by the model and by the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Dropout, Module

from plugsft import Batch, RecipeError, RunModel, TokenNll


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
        self.frozen: Module | None = None
        self.adapted: Any = None
        module: Any = getattr(model.module, "module", model.module)
        has_adapters = hasattr(module, "disable_adapter")
        if reference is None:
            self.name = "none"
        elif precomputed:
            base = "the base without adapters" if has_adapters else "the initial model"
            self.name = f"{reference or base}, computed before step 1"
        elif reference or not has_adapters:
            self.name = reference or "a frozen copy"
            try:
                self.frozen = model.load_frozen(reference)
            except RecipeError as error:
                raise RecipeError(f"plugins.dpo.reference: {error}") from error
        else:
            self.name, self.adapted = "the base without adapters", module

    def score(self, model: Module, batch: Batch, token_nll: TokenNll) -> Pairs:
        """Compute the log-probability of each answer by the model and by the reference."""
        targets = batch["_targets"]
        log_probs = sum_per_answer(token_nll(model=model, batch=batch, summed=False), targets)
        known = batch.get("_reference") if self.has_reference else None
        if known is None and self.has_reference:
            with torch.no_grad():
                known = sum_per_answer(self._reference_nll(model, batch, token_nll), targets)
        return Pairs(log_probs, known, targets.view(-1, 2), batch["_pair_weights"])

    def _reference_nll(self, model: Module, batch: Batch, token_nll: TokenNll) -> Tensor:
        """Return the reference's -log p of each target."""
        if self.frozen is not None:
            return token_nll(model=self.frozen, batch=batch, summed=False)
        with self.adapted.disable_adapter():
            return token_nll(model=model, batch=batch, summed=False)


def sum_per_answer(losses: Tensor, targets: Tensor) -> Tensor:
    """Return log-probabilities, [pair, answer]; `targets` counts each answer's targets."""
    sums = torch.segment_reduce(losses, "sum", lengths=targets, unsafe=True, initial=0)
    return -sums.view(-1, 2)


def remove_dropout(model: Module) -> None:
    """Turn off the model's dropout; that of adapters stays."""
    for name, module in model.named_modules():
        if isinstance(module, Dropout) and "lora_" not in name:
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
