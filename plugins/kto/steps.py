"""The examples of a whole step, and the mismatched pairs of its KL."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from plugsft import Ints, LoadedStep
from plugsft.kit import Tokens


class StepExamples:
    """The examples that all ranks compute in a step."""

    def __init__(self, examples: Ints) -> None:
        self.examples = examples
        """Numbers of the examples; one may come several times."""
        self.kl: Any = None
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
        bounds = np.cumsum(tokens.lengths[examples])[:-1]
        sequences = [*zip(np.split(ids, bounds), np.split(mask, bounds), strict=True)]
        starts = [int(own_mask.argmax()) for _, own_mask in sequences]
        self._texts = []
        for number, (text, text_mask) in enumerate(sequences):
            prompt, (answer, answer_mask) = starts[number], sequences[number - 1]
            start = starts[number - 1]
            joined = np.concatenate([text[:prompt], answer[start:]])
            joined_mask = np.concatenate([text_mask[:prompt], answer_mask[start:]])
            self._texts.append((joined[:max_length], joined_mask[:max_length]))
        self.lengths = np.array([len(text) for text, _ in self._texts], np.int64)
        self.targets = np.array([mask.sum() for _, mask in self._texts], np.int64)
        self.denominators = np.ones(len(self._texts), np.int64)
        self.columns = {"label": tokens.columns["label"][examples]}
        self.facts = {**tokens.facts, "pairs": 0}

    def gather(self, examples: Ints) -> tuple[Any, Any]:
        """Return the concatenated tokens of texts and their loss mask."""
        texts = [self._texts[number] for number in examples]
        ids = [np.zeros(0, np.int32), *(text for text, _ in texts)]
        masks = [np.zeros(0, np.bool_), *(mask for _, mask in texts)]
        return np.concatenate(ids), np.concatenate(masks)
