"""The loss and the metrics of answers, and the KL of a step: over the examples of all ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from plugsft import Batch, Ints, LoadedStep, PluginError
from plugsft.data_kit import Tokens
from plugsft.kit import lay_out

from .labels import LABEL

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
    scales = scales_of(tokens, examples)
    for label, scale in scales.items():
        shares = scale * (labels == label)
        metrics[f"reward_{NAMES[label]}"] = shares * (plugin.beta * gains)
        metrics[f"logp_{NAMES[label]}"] = shares * log_probs
    if len(scales) == len(NAMES):
        metrics["margin"] = metrics["reward_desirable"] - metrics["reward_undesirable"]
    return losses, metrics


def ensure_unchanged(plugin: Kto, log_probs: Tensor, gains: Tensor) -> None:
    """Check the first log-probabilities: those of the reference, if it is the initial model."""
    tolerance = INITIAL_TOLERANCE[plugin.model.exact]
    if not (plugin.reference or gains.norm() <= tolerance * log_probs.norm()):
        raise PluginError(
            f"plugins.kto: log-probabilities differ by {gains.abs().max():.3g} from the "
            "reference's, but both are the same model before step 1. Most likely the model is "
            "random: a dropout or a router of its own code"
        )


def kl_of(plugin: Kto, tokens: Tokens, examples: Ints) -> Tensor:
    """Return the mean gain of a step's mismatched answers over all ranks, at least 0."""
    # A lone example has no other's answer.
    if plugin.loss != "kto" or len(np.unique(examples)) < 2:
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


@dataclass(eq=False)
class StepExamples:
    """The examples that all ranks compute in a step."""

    examples: Ints
    """Numbers of the examples; one may come several times."""
    kl: Any = None
    """The step's KL, once it is computed."""


def name_examples(steps: Iterator[LoadedStep]) -> Iterator[LoadedStep]:
    """Add the examples of the whole step to each of its micro-batches."""
    try:
        for loaded in steps:
            layout = loaded.plan.layout
            step = StepExamples(np.concatenate([part for rank in layout for part in rank]))
            for batch in loaded.batches:
                batch["_step"] = step
            yield loaded
    finally:
        if isinstance(steps, Generator):
            steps.close()


class Mismatched(Tokens):
    """Each prompt of a step, with the answer of the example before it.

    Examples are in the order of the data, and the first one gets the last one's answer. So the
    texts follow from the step's examples alone. An answer begins at its first trained token. Texts
    are cut to `max_length` tokens.
    """

    def __init__(self, tokens: Tokens, examples: Ints, max_length: int) -> None:
        examples = np.unique(examples)
        ids, mask = tokens.gather(examples)
        # Of each text a row of ids, and a row of its mask.
        texts = np.split(np.stack([ids, mask]), np.cumsum(tokens.lengths[examples])[:-1], 1)
        starts = [int(text[1].argmax()) for text in texts]
        self._texts = []
        for number, text in enumerate(texts):
            prompt = text[:, : starts[number]]
            answer = texts[number - 1][:, starts[number - 1] :]
            self._texts.append(np.concatenate([prompt, answer], 1)[:, :max_length])
        self.lengths = np.array([text.shape[1] for text in self._texts], np.int64)
        self.targets = np.array([text[1].sum() for text in self._texts], np.int64)
        self.denominators = np.ones(len(self._texts), np.int64)
        self.columns = {"label": tokens.columns["label"][examples]}
        self.facts = {**tokens.facts, "pairs": 0}

    def gather(self, examples: Ints) -> tuple[Any, Any]:
        """Return the concatenated tokens of texts and their loss mask."""
        none = np.zeros((2, 0), np.int32)
        ids, mask = np.concatenate([none, *(self._texts[number] for number in examples)], 1)
        return ids, mask.astype(np.bool_)
