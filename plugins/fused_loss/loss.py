"""The fused loss of a model's head, and its proof on a few tokens."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Linear, Module
from torch.nn.functional import cross_entropy, pad

from plugsft import Batch, RecipeError
from plugsft.kit.model import Behind, Positions, documents_of, fused_loss, model_inputs

if TYPE_CHECKING:
    from . import FusedLoss

IGNORED = -100
"""The label of a token that is not trained."""
ROOM = {"cpu": 2**28, "cuda": 2**30}
"""Bytes of logits at a time. A GPU wants more: with each part it reads and writes the gradient of
the whole head."""
LIGER = "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy", "liger-kernel"
CUT = "cut_cross_entropy", "linear_cross_entropy", "cut-cross-entropy"
PACKAGES = {"cut_cross_entropy": CUT, "liger": LIGER}
"""Kernels of others: the module, its function, and what to install."""
REFUSED = "this model's loss cannot be fused; remove [plugins.fused_loss]"
TOKENS = 16
"""Tokens on which the fused loss is compared with the plain one."""


def score(plugin: FusedLoss, model: Module, batch: Batch, summed: bool) -> Tensor:
    """Return the losses of a batch, from a call of the model whose head returns them."""
    found: list[Tensor] = []
    head = head_of(causal_of(model))
    if head not in plugin.heads:
        prove(plugin, model)  # another model than the run's: a reference
    behind = plugin.heads[head]

    def forward(hidden: Tensor) -> Tensor:
        result = losses(plugin, head, behind, hidden, batch["labels"], summed)
        found.append(result.detach())
        # Not a view: what is wrapped around the head marks its output.
        share = result.new_full((1, 1, len(result)), 1 / behind.slope)
        return share * (result - result.detach())

    with replaced(head, forward):
        nothing = called(model, batch).flatten()
    result = found[0] + nothing
    return result.sum() if summed else result


def losses(
    plugin: FusedLoss, head: Any, behind: Behind, hidden: Tensor, labels: Tensor, summed: bool
) -> Tensor:
    """Return the losses of hidden states that have targets: of each, or one that is all."""
    if hidden.shape[:2] != labels.shape:
        raise RecipeError(f"{REFUSED}: its head does not get one hidden state for each token")
    # Their number comes from the device: the one wait for it in a micro-batch.
    rows = pad(labels[:, 1:] != IGNORED, (0, 1)).flatten().nonzero().squeeze(1)
    targets = labels.flatten()[rows + 1]
    plugin.trained, plugin.places = plugin.trained + len(rows), plugin.places + labels.numel()
    kept = hidden.flatten(0, 1).index_select(0, rows)
    weight, bias = head.weight, head.bias
    dtype = type_of(kept, weight)
    plugin.exact = dtype == torch.float32
    if plugin.package and len(rows):
        bias = bias if bias is None else bias.to(dtype)
        given = (kept.to(dtype), weight.to(dtype), bias, targets, behind, summed)
        return from_package(plugin.package, *given)
    room = ROOM.get(kept.device.type, ROOM["cpu"])
    chunk = plugin.chunk or max(1, room // (4 * len(weight)))
    return fused_loss(Positions(kept, weight, bias, targets, behind, chunk, dtype), summed)


@torch.no_grad()
def prove(plugin: FusedLoss, model: Module) -> None:
    """Read what is behind the head, and compare the fused loss of a few tokens with the plain.

    Logits are taken where the model gives them: what is wrapped around it may round them.
    """
    causal = causal_of(model)
    head = head_of(causal)
    if plugin.package == "cut_cross_entropy" and head.bias is not None:
        if plugin.kernel != "auto":
            raise RecipeError('the head has a bias, unknown to the kernel: kernel = "auto"')
        plugin.package, plugin.chosen = "", "torch kernel (cut_cross_entropy takes no bias)"
    batch, counted = few_tokens(causal, plugin.packed), (plugin.trained, plugin.places)
    seen: list[Tensor] = []
    catch = causal.register_forward_hook(
        lambda _module, _inputs, output: seen.append(output.logits), prepend=True
    )
    try:
        probes = torch.tensor(Behind.PROBES, device=batch["labels"].device).view(1, 1, -1)
        with replaced(head, lambda hidden: probes):
            called(model, batch)
        plugin.heads[head] = Behind.fit(seen.pop())
        ours = score(plugin, model, batch, summed=True)
        called(model, batch)
        predictions = seen.pop()[0, :-1].float()
        theirs = cross_entropy(
            predictions, batch["labels"][0, 1:], ignore_index=IGNORED, reduction="sum"
        )
    except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
        raise RecipeError(f"{REFUSED}: {error}") from error
    finally:
        catch.remove()
        for part in model.modules():
            # FSDP2 leaves the head's weight gathered until a backward, and here is none.
            if isinstance(part, FSDPModule):
                part.reshard()
    plugin.trained, plugin.places = counted
    off = abs(float(ours / theirs) - 1)
    if not off <= (1e-4 if plugin.exact else 2e-2):
        raise RecipeError(
            f"{REFUSED}: on {TOKENS} tokens it is {float(ours):.6g}, and the plain one "
            f"{float(theirs):.6g}. What its forward does with the head is unknown here"
        )
    plugin.proved = plugin.proved or f"proved on {TOKENS} tokens ({off:.0e} off the plain loss)"


def type_of(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the type that a head computes in."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def from_package(
    name: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    behind: Behind,
    summed: bool,
) -> Tensor:
    """Return the losses from a kernel of others."""
    place, function, _ = PACKAGES[name]
    kernel: Any = getattr(importlib.import_module(place), function)
    if behind.slope != 1:
        hidden, bias = hidden * behind.slope, bias if bias is None else bias * behind.slope
    more: dict[str, Any] = {"bias": bias, "accum_dtype": torch.float32} if name == "liger" else {}
    more |= {"softcap": behind.cap, "reduction": "sum" if summed else "none"}
    losses: Tensor = kernel(hidden, weight, targets, **more)
    return losses.flatten()


def cannot_run(kernel: str) -> str:
    """Say why a kernel cannot run on this machine, if so."""
    module, _, package = PACKAGES[kernel]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return f"{kernel} is not installed: pip install {package}"
    return "" if torch.cuda.is_available() else f"{kernel} needs a GPU"


def causal_of(model: Any) -> Any:
    """Return the model itself, out of what ranks and adapters have put around it."""
    plain = getattr(model, "module", model)
    return getattr(plain, "get_base_model", lambda: plain)()


def head_of(causal: Any) -> Any:
    """Return a model's head, which must be a plain matrix product."""
    head = causal.get_output_embeddings()
    if head is None:
        raise RecipeError(f"{REFUSED}: it has no head")
    if type(head).forward is not Linear.forward or "forward" in vars(head):
        raise RecipeError(
            f"{REFUSED}, or keep other plugins (lora's targets, modules_to_save) from its head: "
            f"that is a {type(head).__name__}, and the loss would read the raw weight below it"
        )
    return head


def few_tokens(causal: Any, packed: bool) -> Batch:
    """Return a batch of a few random tokens, some of them trained, as this run's batches are."""
    device = next(causal.parameters()).device
    vocabulary = causal.config.get_text_config().vocab_size
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, (1, TOKENS)))
    labels = ids.clone()
    labels[:, ::3] = IGNORED
    more = documents_of(np.array([TOKENS])) if packed else {"attention_mask": torch.ones_like(ids)}
    batch = {"input_ids": ids, "labels": labels, **more}
    return {name: one.to(device) if isinstance(one, Tensor) else one for name, one in batch.items()}


def called(model: Module, batch: Batch) -> Tensor:
    """Return what a model gives as logits. A cache has no use, and harms packed rows."""
    logits: Tensor = model(**model_inputs(batch), use_cache=False).logits
    return logits


@contextmanager
def replaced(head: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let the head do something else; its hooks stay, and gather the weight where it is spread."""
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
