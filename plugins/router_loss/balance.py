"""The router loss of each sequence, from the outputs of all routers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from plugsft import Batch, Ints, PluginError
from plugsft.kit import Tokens

from .routers import Router

LOSS, BUSIEST = "router_loss", "busiest_expert"


def sequence_shares(tokens: Tokens, examples: Ints) -> Tensor:
    """Return what each sequence adds to the denominator of the step's loss."""
    targets = tokens.sequence_targets(examples)
    totals = tokens.targets[examples]
    divisors = tokens.denominators[examples] * tokens.weights(examples) / np.maximum(totals, 1)
    per_example = len(targets) // max(len(examples), 1)
    return torch.from_numpy((targets * np.repeat(divisors, per_example)).astype(np.float32))


class Balance:
    """Records the outputs of routers, and computes how evenly they use the experts."""

    def __init__(self, routers: list[Router]) -> None:
        self._routers = routers
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}
        self._is_recording = False
        self._sums: dict[str, Any] = {}
        for number, router in enumerate(routers):
            router.module.register_forward_hook(partial(self._record, number))
        even = sorted({router.top_k for router in routers})
        self.description = (
            f"{len(routers)} routers; the loss of even use is {' or '.join(map(str, even))}"
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record in a forward pass of the loss, not in one that recomputes activations."""
        self._outputs.clear()
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def _record(self, number: int, module: Any, inputs: Any, output: Any) -> None:
        # A loss may call the model again, as a reference; its own pass comes first.
        if self._is_recording and number not in self._outputs:
            self._outputs[number] = (output[0], output[-1])

    def sum_losses(self, batch: Batch) -> Tensor:
        """Return the sum of share x router loss over a micro-batch's sequences."""
        if len(self._outputs) != len(self._routers):
            raise PluginError(
                f"plugins.router_loss: {len(self._outputs)} of {len(self._routers)} routers were "
                "called; a plugin replaces the layers that call them. Remove one of the two"
            )
        [logits, _] = self._outputs[0]
        # Autocast would round the sums.
        with torch.autocast(logits.device.type, enabled=False):
            sequences = one_hot_sequences(batch, logits.device)
            losses, busiest = zip(
                *(self._balance(number, sequences) for number in range(len(self._routers))),
                strict=True,
            )
            shares = batch["_router_shares"].to(logits.device)
            shares = pad(shares, (0, len(sequences) - len(shares)))
            sums = {LOSS: torch.stack(losses).mean(0), BUSIEST: torch.stack(busiest).mean(0)}
            sums = {name: (shares * values).sum() for name, values in sums.items()}
        self._outputs.clear()
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach()
        loss: Tensor = sums[LOSS]
        return loss

    def _balance(self, number: int, sequences: Tensor) -> tuple[Tensor, Tensor]:
        """Return a router's loss of each sequence, and its busiest expert's share of tokens."""
        logits, chosen = self._outputs[number]
        probabilities = self._routers[number].probabilities(logits.float())
        choices = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
        counts = sequences.sum(1, keepdim=True).clamp(min=1)
        shares, means = sequences @ choices / counts, sequences @ probabilities / counts
        return (shares * means).sum(1) * shares.shape[1], shares.amax(1)

    def take_sums(self) -> dict[str, Any]:
        """Return the sums of the metrics since the last call."""
        sums, self._sums = self._sums, {}
        return sums


def one_hot_sequences(batch: Batch, device: torch.device) -> Tensor:
    """Return which tokens belong to each sequence: [sequence, token], 1 or 0."""
    if "documents" not in batch:
        mask: Tensor = batch["attention_mask"].to(device)
        rows = torch.eye(len(mask), device=device)
        return (rows[:, :, None] * mask).flatten(1)
    # Counted on the host: a GPU would have to tell the length of the result.
    lengths = np.asarray(batch["documents"])
    numbers = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    return torch.eye(len(lengths), device=device)[:, numbers.to(device, non_blocking=True)]
