"""Take the loss from hidden states, in parts: the logits of a micro-batch are never held."""

import importlib
import importlib.util
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.nn import Linear, Module
from torch.nn.functional import cross_entropy, pad

from plugsft import Batch, Recipe, RecipeError, Tokens, documents_of, hookimpl, plugin, state

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
PROBES = (0.0, 2.0**-10, -(2.0**-10), 0.75, -3.0, 20.0, -64.0, 2.0**20)
"""Put in place of logits, they show what the model does to them: its slope, and where it ends."""


@dataclass(frozen=True)
class Behind:
    """What a model does to what its head gives: x -> cap * tanh(slope * x / cap)."""

    slope: float = 1.0
    cap: float | None = None

    def __str__(self) -> str:
        slope = f"logits scaled by {self.slope:.6g}" if self.slope != 1 else ""
        cap = f"soft cap {self.cap:g}" if self.cap else ""
        return ", ".join(filter(None, [slope, cap]))

    @classmethod
    def read(cls, seen: Tensor) -> "Behind":
        """Find the function that made of PROBES what is seen."""
        given = torch.tensor(PROBES, dtype=torch.float64)
        if seen.numel() == len(PROBES):
            seen = seen.flatten().double().cpu()
            slope, last = float(seen[1] / given[1]), float(seen[-1])
            capped = not abs(last / given[-1] - slope) < 1e-3 * slope
            found = cls(_shorter(slope), _shorter(last) if capped else None)
            if found.slope > 0 and torch.allclose(found.of(given), seen, rtol=1e-5, atol=1e-9):
                return found
        raise RecipeError(f"{REFUSED}: behind its head it does to the logits what is unknown here")

    def of(self, logits: Tensor) -> Tensor:
        """Do it."""
        scaled = logits * self.slope
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


def _shorter(number: float) -> float:
    """Return the number that was rounded to this one in float32, most likely."""
    short = float(f"{number:.6g}")
    return short if abs(short - number) <= 3e-7 * abs(number) else number


@plugin()
class FusedLoss:
    """Take the loss from hidden states, in parts: the logits of a micro-batch are never held.

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
    head: Any = state()
    behind: Behind = state(Behind())
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
    def step(self, model: Module, batch: Batch, total: int) -> Tensor:
        """Let the head return the loss in place of logits.

        The model is called as ever: all that wraps it does its work, and gathers the head's weight.
        What the head returns is zero and has the loss's gradient, so that neither a cap nor
        rounding behind the head changes either; the loss itself goes past them.
        """
        found: list[Tensor] = []
        share = 1 / (self.behind.slope * total)

        def forward(hidden: Tensor) -> Tensor:
            loss = self.loss(hidden, batch["labels"])
            found.append(loss.detach() / total)
            # Not a view: what is wrapped around the head marks its output.
            return loss.new_full((1, 1, 1), share) * (loss - loss.detach())

        with replaced(self.head, forward):
            nothing = called(model, batch).sum()
        return found[0] + nothing

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of hidden states, summed over their targets."""
        if hidden.shape[:2] != labels.shape:
            raise RecipeError(f"{REFUSED}: its head does not get one hidden state for each token")
        # Their number comes from the device: the one wait for it in a micro-batch.
        rows = pad(labels[:, 1:] != IGNORED, (0, 1)).flatten().nonzero().squeeze(1)
        targets = labels.flatten()[rows + 1]
        self.trained, self.places = self.trained + len(rows), self.places + labels.numel()
        kept = hidden.flatten(0, 1).index_select(0, rows)
        weight, bias = self.head.weight, self.head.bias
        self.exact = type_of(kept, weight) == torch.float32
        if self.package and len(rows):
            given = cast_as_head(kept, weight, bias)
            return from_package(self.package, *given, targets, self.behind)
        room = ROOM.get(kept.device.type, ROOM["cpu"])
        chunk = self.chunk or max(1, room // (4 * len(weight)))
        return fused_loss(kept, weight, bias, targets, self.behind, chunk)

    @torch.no_grad()
    def prove(self, model: Module) -> None:
        """Read what is behind the head, and compare the fused loss of a few tokens with the plain.

        Logits are taken where the model gives them: what is wrapped around it may round them.
        """
        plain: Any = getattr(model, "module", model)
        causal = getattr(plain, "get_base_model", lambda: plain)()
        self.head = head_of(causal)
        if self.package == "cut_cross_entropy" and self.head.bias is not None:
            if self.kernel != "auto":
                raise RecipeError('the head has a bias, unknown to the kernel: kernel = "auto"')
            self.package, self.chosen = "", "torch kernel (cut_cross_entropy takes no bias)"
        batch = few_tokens(causal, self.packed)
        seen: list[Tensor] = []
        catch = causal.register_forward_hook(
            lambda _module, _inputs, output: seen.append(output.logits), prepend=True
        )
        try:
            probes = torch.tensor(PROBES, device=batch["labels"].device).view(1, 1, -1)
            with replaced(self.head, lambda hidden: probes):
                called(model, batch)
            self.behind = Behind.read(seen.pop())
            ours = self.step(model, batch, 1)
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
        self.trained = self.places = 0
        off = abs(float(ours / theirs) - 1)
        if not off <= (1e-4 if self.exact else 2e-2):
            raise RecipeError(
                f"{REFUSED}: on {TOKENS} tokens it is {float(ours):.6g}, and the plain one "
                f"{float(theirs):.6g}. What its forward does with the head is unknown here"
            )
        self.proved = f"proved on {TOKENS} tokens ({off:.0e} off the plain loss)"

    @hookimpl
    def verdict(self) -> str:
        """Say how the loss is computed, and of how many positions."""
        said = [self.chosen, str(self.behind), self.proved]
        if self.places:
            said.append(f"{self.trained / self.places:.0%} of the positions reach the head")
        return "; ".join(filter(None, said))


class _Fused(torch.autograd.Function):
    """The loss, with gradients that are there when it is."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        loss, ctx.gradients = compute(ctx.needs_input_grad[:3], *given)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, ()
        return *(None if one is None else one.mul_(scale) for one in gradients), None, None, None


def fused_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, behind: Behind, chunk: int
) -> Tensor:
    """Return the summed cross-entropy of hidden states, with its gradient where one is wanted."""
    if torch.is_grad_enabled():
        fused: Any = _Fused.apply  # untyped upstream
        loss: Tensor = fused(hidden, weight, bias, targets, behind, chunk)
        return loss
    return compute((False,) * 3, hidden, weight, bias, targets, behind, chunk)[0]


@torch.no_grad()
def compute(
    wanted: Sequence[bool],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    behind: Behind,
    chunk: int,
) -> tuple[Tensor, list[Tensor | None]]:
    """Go through the positions in parts; return the loss, and gradients that are wanted.

    Each part has the whole vocabulary: what it learns of a position is final, and rounded once.
    The head's own gradient is summed up in float32.
    """
    source, table, _ = cast_as_head(hidden, weight, bias)
    full = partial(torch.zeros, dtype=torch.float32, device=hidden.device)
    of_hidden = torch.empty_like(source) if wanted[0] else None
    of_weight, of_bias = (
        full(one.shape) if want and one is not None else None
        for one, want in zip((weight, bias), wanted[1:], strict=True)
    )
    losses = full(len(targets))
    room = losses.new_empty(min(chunk, len(targets)), len(weight))
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            rows = source[part]
            tile = product(rows, table.t(), room[: len(rows)])
            if bias is not None:
                tile += bias
            losses[part] = score(tile, targets[part], behind, any(wanted))
            narrow = tile.to(table.dtype) if any(wanted) else tile
            if of_hidden is not None:
                torch.mm(narrow, table, out=of_hidden[part])
            if of_weight is not None:
                add_product(of_weight, tile, narrow, rows)
            if of_bias is not None:
                of_bias += tile.sum(0)
    # autograd rounds them to the types of what they are gradients of.
    return losses.sum(), [of_hidden, of_weight, of_bias]


def score(tile: Tensor, targets: Tensor, behind: Behind, differentiate: bool) -> Tensor:
    """Return -log p of each target; what the head gave becomes, in place, the gradient of that."""
    places = targets[:, None]
    bent = None
    if behind.slope != 1:
        tile *= behind.slope
    if behind.cap is not None:
        tile.div_(behind.cap).tanh_()
        bent = tile.square().neg_().add_(1) if differentiate else None
        tile *= behind.cap
    tile -= tile.amax(1, keepdim=True)
    picked = tile.gather(1, places)
    sums = tile.exp_().sum(1, keepdim=True)
    if differentiate:
        tile /= sums
        tile.scatter_add_(1, places, tile.new_full(places.shape, -1.0))
        if bent is not None:
            tile *= bent
        if behind.slope != 1:
            tile *= behind.slope
    return (sums.log() - picked).squeeze(1)


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Multiply into a place of float32, unrounded where the device can."""
    if left.dtype == torch.float32:
        return torch.mm(left, right, out=out)
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    return out.copy_(left @ right)


def add_product(total: Tensor, exact: Tensor, narrow: Tensor, right: Tensor) -> None:
    """Add to a sum in float32 the product of a tile, which is there in two types."""
    if narrow.dtype != torch.float32 and narrow.device.type == "cuda":
        torch.addmm(total, narrow.t(), right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(exact.t(), right.float())


def type_of(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the type that a head computes in."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def cast_as_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return them in that type."""
    dtype = type_of(hidden, weight)
    return hidden.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)


def from_package(
    name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, behind: Behind
) -> Tensor:
    """Return the summed loss from a kernel of others."""
    place, function, _ = PACKAGES[name]
    kernel: Any = getattr(importlib.import_module(place), function)
    if behind.slope != 1:
        hidden, bias = hidden * behind.slope, bias if bias is None else bias * behind.slope
    more = {"bias": bias, "accum_dtype": torch.float32} if name == "liger" else {}
    loss: Tensor = kernel(hidden, weight, targets, softcap=behind.cap, reduction="sum", **more)
    return loss


def cannot_run(kernel: str) -> str:
    """Say why a kernel cannot run on this machine, if so."""
    module, _, package = PACKAGES[kernel]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return f"{kernel} is not installed: pip install {package}"
    return "" if torch.cuda.is_available() else f"{kernel} needs a GPU"


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
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits


@contextmanager
def replaced(head: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let the head do something else; its hooks stay, and gather the weight where it is spread."""
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
