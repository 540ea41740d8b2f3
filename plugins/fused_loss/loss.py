"""The fused loss of a model's head, and its comparison with the plain loss."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Linear, Module
from torch.nn.functional import cross_entropy

from plugsft import Batch, RecipeError
from plugsft.kit import fused_head, model_inputs, target_places

LogitTransform = fused_head.LogitTransform
IGNORED = -100
"""The label of a token that is not trained."""
CHUNK_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""Bytes of logits per chunk. Each chunk reads and writes the head's whole gradient, so a GPU needs
larger chunks."""
PACKAGES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "cut_cross_entropy": (
        "cut_cross_entropy",
        "linear_cross_entropy",
        '"cut-cross-entropy @ git+https://github.com/apple/ml-cross-entropy"',
        {"accum_e_fp32": True, "accum_c_fp32": True},
    ),
    "liger": (
        "liger_kernel.transformers.functional",
        "liger_fused_linear_cross_entropy",
        "liger-kernel",
        {"accum_dtype": torch.float32},
    ),
}
"""Kernels of other packages: module, function, the package to install, and the arguments by which
gradients are summed in float32."""
REFUSED = "this model's loss cannot be fused; remove [plugins.fused_loss]"
TOKENS = 16
"""Number of tokens on which the fused loss is compared with the plain loss."""


class HeadLoss:
    """The loss inside a model's head, compared with the plain loss on each model."""

    def __init__(self, package: str, chunk: int | None) -> None:
        self._package, self._chunk = package, chunk
        self.transforms: WeakKeyDictionary[Any, LogitTransform] = WeakKeyDictionary()
        """Head -> transform of its logits; the first head is that of the run's model."""
        self.exact = True
        """Whether the head computes in float32; set inside its forward, where autocast is known."""
        self.proved = ""
        self.counts = not package
        """Whether to count the targets whose token is the likeliest, where losses are summed."""
        self.hits: Tensor | None = None
        """Their number so far."""

    def token_nll(self, model: Module, batch: Batch, summed: bool) -> Tensor:
        """Return the losses of a batch, computed inside the model's head."""
        results: list[Tensor] = []
        head = head_of(unwrap(model))
        if head not in self.transforms:
            self.prove(model)  # not the run's model, but a reference
        transform, places = self.transforms[head], target_places(batch)

        def forward(hidden: Tensor) -> Tensor:
            losses = self.compute(head, transform, hidden, batch["labels"], summed, places)
            results.append(losses.detach())
            # Zero, with the losses' gradients. Not a view: wrappers of the head mark its output.
            factor = losses.new_full((1, 1, len(losses)), 1 / transform.slope)
            return factor * (losses - losses.detach())

        with replaced_forward(head, forward):
            zeros = logits_of(model, batch).flatten()
        losses = results[0] + zeros
        return losses.sum() if summed else losses

    def compute(
        self,
        head: Any,
        transform: LogitTransform,
        hidden: Tensor,
        labels: Tensor,
        summed: bool,
        places: Tensor,
    ) -> Tensor:
        """Return the loss of each target, or their sum as one element."""
        if hidden.shape[:2] != labels.shape:
            raise RecipeError(f"{REFUSED}: its head does not get one hidden state for each token")
        targets = labels.flatten()[places + 1]
        trained = hidden.flatten(0, 1).index_select(0, places)
        weight, bias = head.weight, head.bias
        dtype = compute_dtype(trained, weight)
        self.exact = dtype == torch.float32
        if self._package and len(places):
            bias = bias if bias is None else bias.to(dtype)
            inputs = (trained.to(dtype), weight.to(dtype), bias, targets, transform, summed)
            return call_package(self._package, *inputs)
        chunk_bytes = CHUNK_BYTES.get(trained.device.type, CHUNK_BYTES["cpu"])
        chunk = self._chunk or max(1, chunk_bytes // (4 * len(weight)))
        if summed and self.counts and self.hits is None:
            self.hits = targets.new_zeros(())
        hits = self.hits if summed else None
        positions = (trained, weight, bias, targets, transform, chunk, dtype, hits)
        return fused_head.fused_loss(fused_head.Positions(*positions), summed)

    def take_hits(self) -> dict[str, Tensor]:
        """Return how many targets had the likeliest token, and start counting again."""
        hits, self.hits = self.hits, None
        return {} if hits is None else {"mean_token_accuracy": hits}

    @torch.no_grad()
    def prove(self, model: Module) -> None:
        """Measure the transform of the logits, and compare fused and plain loss on a few tokens.

        Logits are taken from the model itself: its wrappers may round them.
        """
        causal, training = unwrap(model), model.training
        head, batch, outputs = head_of(causal), random_batch(causal), list[Tensor]()
        hook = causal.register_forward_hook(
            lambda _module, _inputs, output: outputs.append(output.logits), prepend=True
        )
        model.eval()
        try:
            probes = batch["labels"].new_tensor(LogitTransform.PROBES, dtype=torch.float32)
            with replaced_forward(head, lambda hidden: probes.view(1, 1, -1)):
                logits_of(model, batch)
            self.transforms[head] = LogitTransform.fit(outputs.pop())
            fused = self.token_nll(model, batch, summed=True)
            logits_of(model, batch)
            logits, targets = outputs.pop()[0, :-1].float(), batch["labels"][0, 1:]
            plain = cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        # The model's code and the kernel refuse by any of these: no `logits` is an AttributeError.
        except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
            raise RecipeError(f"{REFUSED}: {error}") from error
        finally:
            hook.remove()
            model.train(training)
            for module in model.modules():
                # FSDP2 frees the head's gathered weight in a backward pass, which does not come.
                if isinstance(module, FSDPModule):
                    module.reshard()
        self.take_hits()
        difference = abs(float(fused / plain) - 1)
        if not difference <= (1e-4 if self.exact else 2e-2):
            raise RecipeError(
                f"{REFUSED}: on {TOKENS} tokens it is {float(fused):.6g}, but the plain loss is "
                f"{float(plain):.6g}. The model uses its head in an unsupported way"
            )
        proof = f"proved on {TOKENS} tokens ({difference:.0e} off the plain loss)"
        self.proved = self.proved or proof


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype that a head computes in."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def call_package(
    name: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    summed: bool,
) -> Tensor:
    """Return the losses from another package's kernel."""
    module, function, _, precision = PACKAGES[name]
    kernel: Any = getattr(importlib.import_module(module), function)
    if transform.slope != 1:
        hidden, bias = hidden * transform.slope, bias if bias is None else bias * transform.slope
    options = {"bias": bias, "softcap": transform.cap, "reduction": "sum" if summed else "none"}
    losses: Tensor = kernel(hidden, weight, targets, **options, **precision)
    return losses.flatten()


def why_unavailable(kernel: str, asked: bool) -> str:
    """Return why a package's kernel cannot run on this machine, and the cure, or "".

    Where there is no GPU, only a user who asked for the kernel hears how to install it.
    """
    module, function, package, precision = PACKAGES[kernel]
    needs_gpu = "" if torch.cuda.is_available() else f"{kernel} needs a GPU"
    if needs_gpu and not asked:
        return needs_gpu
    install = f"pip install {package}"
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return f"{kernel} is not installed: {install}"
    try:
        parameters = inspect.signature(
            getattr(importlib.import_module(module), function)
        ).parameters
    except ImportError as error:  # a package that it needs is missing
        return f"{kernel} cannot be imported ({error}): {install}"
    if not {*precision} <= {*parameters}:
        return (
            f"this release of {kernel} sums gradients in bfloat16; install a newer one: {install}"
        )
    return needs_gpu


def unwrap(model: Any) -> Any:
    """Return the causal language model inside the wrappers of ranks and adapters."""
    module = getattr(model, "module", model)
    return getattr(module, "get_base_model", lambda: module)()


def head_of(causal: Any) -> Any:
    """Return a model's head, which must be a plain matrix product."""
    head = causal.get_output_embeddings()
    if head is None:
        raise RecipeError(f"{REFUSED}: it has no head")
    if type(head).forward is not Linear.forward or "forward" in vars(head):
        raise RecipeError(
            f"{REFUSED}, or train the head without an adapter: it is a "
            f"{type(head).__name__}, and the loss would read only the weight inside"
        )
    return head


def random_batch(causal: Any) -> Batch:
    """Return a few random tokens, a third of them not trained, as this run's batches are."""
    vocabulary = causal.config.get_text_config().vocab_size
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, (1, TOKENS)))
    ids = ids.to(next(causal.parameters()).device)
    labels = ids.clone()
    labels[:, ::3] = IGNORED
    return {"input_ids": ids, "labels": labels}


def logits_of(model: Module, batch: Batch) -> Tensor:
    """Return a model's logits. A key-value cache has no use here, and breaks packed rows."""
    logits: Tensor = model(**model_inputs(batch), use_cache=False).logits
    return logits


@contextmanager
def replaced_forward(head: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace a head's forward; its hooks stay, which gather a sharded weight."""
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
