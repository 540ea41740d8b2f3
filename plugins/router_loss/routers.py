"""The routers of a model, and the loss of each sequence, by how evenly they use the experts."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import pad

from plugsft import Batch, Ints, PluginError, RecipeError
from plugsft.data_kit import Tokens
from plugsft.kit import whole_shape

PROBE = 4
"""Tokens of the test of a router."""


class Router(NamedTuple):
    """A module that chooses experts, and whether sigmoids give its probabilities."""

    module: Module
    sigmoid: bool
    top_k: int

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each expert, for each token."""
        if not self.sigmoid:
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)


def find_routers(model: Any) -> list[Router]:
    """Return the routers that transformers declares; refuse a model without any."""
    classes = tuple(router_classes(model))
    modules = [module for module in model.modules() if isinstance(module, classes)]
    if not modules:
        raise RecipeError(
            f"plugins.router_loss: transformers knows no routers in a model of type "
            f"'{model.config.model_type}'; remove [plugins.router_loss]"
        )
    width = model.config.get_text_config().hidden_size
    kinds = {type(module): probe(module, width) for module in modules}
    return [Router(module, *kinds[type(module)]) for module in modules]


def router_classes(model: Module) -> Iterator[type[Module]]:
    """Yield the classes of modules that record `router_logits` in transformers."""
    for module in model.modules():
        recorders = (getattr(type(module), "_can_record_outputs", None) or {}).get("router_logits")
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            kind = getattr(recorder, "target_class", recorder)
            if isinstance(kind, type):
                yield kind


@torch.no_grad()
def probe(module: Module, width: int) -> tuple[bool, int]:
    """Call a small copy of a router; tell whether it uses sigmoids, and how many it chooses.

    A router gives the logits of all experts first, then the weights of the chosen ones, and their
    numbers last.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        # The model's own weights may be empty here, or sharded.
        tensors: dict[int, Any] = {
            id(buffer): torch.zeros(buffer.shape) for buffer in module.buffers()
        }
        for weight in module.parameters():
            noise = torch.randn(whole_shape(weight), generator=generator)
            tensors[id(weight)] = Parameter(noise)
        router = copy.deepcopy(module, tensors).eval()
        # Some routers get the correction of their choices from the layer around them.
        more = len(signature(router.forward).parameters) - 1
        corrections = [torch.zeros(len(next(router.parameters())))] * more
        hidden = torch.randn(PROBE, width, generator=generator)
        logits, weights, chosen = router(hidden, *corrections)
        weights, logits = weights / weights.sum(-1, keepdim=True), logits.float()
        for sigmoid in (False, True):
            probabilities = Router(router, sigmoid, 0).probabilities(logits).gather(1, chosen)
            expected = probabilities / probabilities.sum(-1, keepdim=True)
            if torch.allclose(weights.float(), expected, rtol=1e-3):
                return sigmoid, chosen.shape[-1]
    except Exception as error:  # whatever the router's own code raises
        raise _unknown(module, f"{type(error).__name__}: {error}") from error
    raise _unknown(module, "its weights follow neither a softmax nor sigmoids of its logits")


def _unknown(module: Module, reason: str) -> RecipeError:
    return RecipeError(
        f"plugins.router_loss: a {type(module).__name__} does not give logits, weights and chosen "
        f"experts as other routers do ({reason}); remove [plugins.router_loss]"
    )


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
            sums = {
                "router_loss": (shares * torch.stack(losses).mean(0)).sum(),
                "busiest_expert": (shares * torch.stack(busiest).mean(0)).sum(),
            }
        self._outputs.clear()
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach()
        loss: Tensor = sums["router_loss"]
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
