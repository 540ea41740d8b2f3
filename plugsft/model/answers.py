"""What losses over whole answers compute with: log-probabilities, and the reference."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Dropout, Module

from ..base.types import Batch, Ints, TokenNll
from ..hooks import RunModel
from ..tokens.store import Tokens


class Reference:
    """A model that is not trained: with adapters the base without them, else a frozen copy.

    `path`: another model. `stored`: batches have its log-probabilities, and no model is loaded.
    """

    def __init__(self, model: RunModel, path: str = "", stored: bool = False) -> None:
        module: Any = getattr(model.module, "module", model.module)
        self._stored = stored
        self._adapted: Any = None
        self._frozen: Module | None = None
        if not path and hasattr(module, "disable_adapter"):
            self._adapted = module
            self.name = "the base without adapters"
            if getattr(module, "initial_digest", ""):
                self.name = "the model with the adapters before training"
        else:
            self.name = path or ("the initial model" if stored else "a frozen copy")
            if not stored:
                self._frozen = model.load_frozen(path)
        if stored:
            self.name += ", computed before step 1"

    @contextmanager
    def in_place(self, model: Module) -> Iterator[Module]:
        """Yield the module that computes the reference; `model` is the trained one."""
        if self._frozen is not None:
            yield self._frozen
        else:
            with self._adapted.disable_adapter():
                yield model

    @torch.no_grad()
    def log_probs(self, model: Module, batch: Batch, token_nll: TokenNll) -> Tensor:
        """Return the log-probability of each answer by the reference."""
        if self._stored:
            stored: Tensor = batch["_reference"]
            return stored.flatten()
        with self.in_place(model) as module:
            return log_probs(module, batch, token_nll)


def log_probs(model: Module, batch: Batch, token_nll: TokenNll) -> Tensor:
    """Return the log-probability of each answer of a micro-batch."""
    losses = token_nll(model=model, batch=batch, summed=False)
    counts = batch["_targets"]  # of each answer
    return -torch.segment_reduce(losses, "sum", lengths=counts, unsafe=True, initial=0)


def count_examples(tokens: Tokens) -> Tokens:
    """Return tokens whose loss is divided by the number of examples, not of targets."""
    examples = copy.copy(tokens)
    examples.denominators = np.ones(len(tokens), np.int64)
    return examples


def answer_columns(tokens: Tokens, examples: Ints) -> Batch:
    """Return the targets of each answer, the weight of each example, and stored references."""
    one_each = tokens.targets[examples].astype(np.int64)
    targets = tokens.sequence_targets(examples) if tokens.facts["pairs"] else one_each
    columns = {
        "_targets": torch.from_numpy(targets),
        "_weights": torch.from_numpy(tokens.weights(examples)),
    }
    if "reference" in tokens.columns:
        columns["_reference"] = torch.from_numpy(tokens.columns["reference"][examples])
    return columns


def lay_out(sizes: Ints, most: int, padded: bool) -> list[Ints]:
    """Return micro-batches of at most `most` tokens, the longest examples first.

    `padded`: each example takes as many tokens as the longest one of its micro-batch.
    """
    order = np.argsort(-sizes, kind="stable")
    ends = np.cumsum(sizes[order])
    micro_batches, start = [], 0
    while start < len(order):
        longest = int(sizes[order[start]])
        if padded:
            stop = start + most // longest
        else:
            stop = int(np.searchsorted(ends, ends[start] - longest + most, "right"))
        stop = max(stop, start + 1)
        micro_batches.append(order[start:stop])
        start = stop
    return micro_batches


def has_dropout(model: Module) -> bool:
    """Tell whether a forward pass is random."""
    return any(isinstance(part, Dropout) and part.p > 0 for part in model.modules())


def remove_dropout(model: Module) -> None:
    """Turn off the model's dropout; that of adapters stays."""
    for name, module in model.named_modules():
        if isinstance(module, Dropout) and "lora_" not in name:
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
