"""Compute the loss from hidden states in chunks, without a micro-batch's whole logits."""

import importlib
import importlib.util
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Linear, Module
from torch.nn.functional import cross_entropy, pad

from plugsft import (
    Batch,
    Behind,
    Positions,
    Recipe,
    RecipeError,
    Tokens,
    documents_of,
    fused_loss,
    heard,
    hookimpl,
    plugin,
    state,
)

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
"""So many show that the fused loss is the plain one."""


@plugin()
class FusedLoss:
    """Compute the loss from hidden states in chunks, without a micro-batch's whole logits.

    Only trained positions reach the head, and the gradient is computed on the way. What the model
    does to its logits behind the head (a soft cap, a scale) is measured, and done in the loss.
    At the start the loss is proved equal to the plain one on the run's own model.
    """

    kernel: Literal["auto", "torch", "cut_cross_entropy", "liger"] = "auto"
    """auto takes cut_cross_entropy where it is installed and there is a GPU, and else torch. It
    leaves out liger, which published figures have behind torch's matrix products."""
    chunk: Annotated[int, Field(ge=1)] | None = None
    """Positions at a time (of torch): as many as have 256 MiB of logits, 1 GiB on a GPU."""

    packed: bool = state(False)
    """Whether the model wants to hear where documents stand."""
    package: str = state("")
    """Whose kernel it is, if not ours."""
    chosen: str = state("torch kernel")
    """Which kernel it is, and why."""
    heads: WeakKeyDictionary[Module, Behind] = state(WeakKeyDictionary())
    """What each living model does to the logits of its head; the run's own head comes first."""
    exact: bool = state(True)
    """Whether the head computes in float32: only inside it all that is wrapped around it shows."""
    proved: str = state("")
    trained: int = state(0)
    """Positions that reached the head, and all."""
    places: int = state(0)

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse a kernel that cannot run here, and what would be left unheard."""
        self.packed = recipe.has("bfd_packing")
        if self.kernel == "liger" and recipe.has("dpo"):
            raise RecipeError(
                'kernel = "liger" takes all positions alike, and [plugins.dpo] weighs each '
                'answer; set kernel = "auto"'
            )
        if self.kernel == "liger" and recipe.has("lora"):
            raise RecipeError(
                'kernel = "liger" is for full fine-tuning: it slows LoRA down; set kernel = "auto"'
            )
        name = "cut_cross_entropy" if self.kernel == "auto" else self.kernel
        if name == "torch":
            return
        why = cannot_run(name)
        if self.kernel == "auto" and (why or self.chunk):
            self.chosen = f"torch kernel ({why or 'chunk is set'})"
            return
        if why:
            raise RecipeError(f'kernel = "{name}" cannot run: {why}; or set kernel = "auto"')
        if self.chunk:
            raise RecipeError(f'chunk is for kernel = "torch", and {name} has its own parts')
        self.package, self.chosen = name, f"{name} kernel"

    @hookimpl(wrapper=True)
    def annotate(self, model: Module) -> Generator[None, Tokens, Tokens]:
        """Find the head and what is behind it, and prove the loss, on all ranks together."""
        if not self.proved:
            training = model.training
            model.eval()
            try:
                self.prove(model)
            finally:
                model.train(training)
        return (yield)

    @hookimpl
    def score(self, model: Module, batch: Batch, summed: bool) -> Tensor:
        """Let the head return losses in place of logits.

        The model is called as ever: all that wraps it does its work, and gathers the head's weight.
        What the head returns is zero and has the losses' gradients, so that neither a cap nor
        rounding behind the head changes either; the losses themselves go past them.
        """
        found: list[Tensor] = []
        head = head_of(causal_of(model))
        if head not in self.heads:
            self.prove(model)  # another model than the run's: a reference
        behind = self.heads[head]

        def forward(hidden: Tensor) -> Tensor:
            losses = self.losses(head, behind, hidden, batch["labels"], summed)
            found.append(losses.detach())
            # Not a view: what is wrapped around the head marks its output.
            share = losses.new_full((1, 1, len(losses)), 1 / behind.slope)
            return share * (losses - losses.detach())

        with replaced(head, forward):
            nothing = called(model, batch).flatten()
        losses = found[0] + nothing
        return losses.sum() if summed else losses

    def losses(
        self, head: Any, behind: Behind, hidden: Tensor, labels: Tensor, summed: bool
    ) -> Tensor:
        """Return the losses of hidden states that have targets: of each, or one that is all."""
        if hidden.shape[:2] != labels.shape:
            raise RecipeError(f"{REFUSED}: its head does not get one hidden state for each token")
        # Their number comes from the device: the one wait for it in a micro-batch.
        rows = pad(labels[:, 1:] != IGNORED, (0, 1)).flatten().nonzero().squeeze(1)
        targets = labels.flatten()[rows + 1]
        self.trained, self.places = self.trained + len(rows), self.places + labels.numel()
        kept = hidden.flatten(0, 1).index_select(0, rows)
        weight, bias = head.weight, head.bias
        dtype = type_of(kept, weight)
        self.exact = dtype == torch.float32
        if self.package and len(rows):
            bias = bias if bias is None else bias.to(dtype)
            given = (kept.to(dtype), weight.to(dtype), bias, targets, behind, summed)
            return from_package(self.package, *given)
        room = ROOM.get(kept.device.type, ROOM["cpu"])
        chunk = self.chunk or max(1, room // (4 * len(weight)))
        return fused_loss(Positions(kept, weight, bias, targets, behind, chunk, dtype), summed)

    @torch.no_grad()
    def prove(self, model: Module) -> None:
        """Read what is behind the head, and compare the fused loss of a few tokens with the plain.

        Logits are taken where the model gives them: what is wrapped around it may round them.
        """
        causal = causal_of(model)
        head = head_of(causal)
        if self.package == "cut_cross_entropy" and head.bias is not None:
            if self.kernel != "auto":
                raise RecipeError('the head has a bias, unknown to the kernel: kernel = "auto"')
            self.package, self.chosen = "", "torch kernel (cut_cross_entropy takes no bias)"
        batch, counted = few_tokens(causal, self.packed), (self.trained, self.places)
        seen: list[Tensor] = []
        catch = causal.register_forward_hook(
            lambda _module, _inputs, output: seen.append(output.logits), prepend=True
        )
        try:
            probes = torch.tensor(Behind.PROBES, device=batch["labels"].device).view(1, 1, -1)
            with replaced(head, lambda hidden: probes):
                called(model, batch)
            self.heads[head] = Behind.fit(seen.pop())
            ours = self.score(model, batch, summed=True)
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
        self.trained, self.places = counted
        off = abs(float(ours / theirs) - 1)
        if not off <= (1e-4 if self.exact else 2e-2):
            raise RecipeError(
                f"{REFUSED}: on {TOKENS} tokens it is {float(ours):.6g}, and the plain one "
                f"{float(theirs):.6g}. What its forward does with the head is unknown here"
            )
        self.proved = self.proved or f"proved on {TOKENS} tokens ({off:.0e} off the plain loss)"

    @hookimpl
    def verdict(self) -> str:
        """Say how the loss is computed, and of how many positions."""
        said = [self.chosen, *map(str, [*self.heads.values()][:1]), self.proved]
        if self.places:
            said.append(f"{self.trained / self.places:.0%} of the positions reach the head")
        return "; ".join(filter(None, said))


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
    logits: Tensor = model(**heard(batch), use_cache=False).logits
    return logits


@contextmanager
def replaced(head: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let the head do something else; its hooks stay, and gather the weight where it is spread."""
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
