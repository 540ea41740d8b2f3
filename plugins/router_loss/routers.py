"""The routers of a model, and the probabilities that they choose by."""

import copy
from collections.abc import Iterator
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from plugsft import RecipeError
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
    modules = [module for module in model.modules() if classes and isinstance(module, classes)]
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
