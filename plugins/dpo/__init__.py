"""Learn which of two answers is preferred (DPO): affects results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from plugsft import (
    Batch,
    Data,
    DataError,
    Feed,
    Ints,
    Place,
    Prelude,
    Recipe,
    RecipeError,
    Rendered,
    Row,
    Score,
    TrainError,
    hookimpl,
    plugin,
    state,
)
from plugsft.kit.tokens import Tokenizer, Tokens, render_pairs

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

SIDES = ("chosen", "rejected")
OF_SIDES = [f"{name}_{side}" for name in ("reward", "logp") for side in SIDES]
MEASURES = ("accuracy", "margin", *OF_SIDES)
BEGINS = {True: 1e-3, False: 5e-2}
"""Allowed relative error of the first loss, where policy and reference are the same model: in
float32 (True), or not."""


@plugin(learns=["loss", "beta", "label_smoothing", "nll", "reference"], tokens=[])
class Dpo:
    """Learn which of two answers is preferred (DPO): affects results.

    A row has a prompt, a chosen and a rejected answer; the loss of a step is the mean over its
    pairs. The reference is the model before training: with adapters the base, else a frozen copy.
    With [plugins.dpo_reference] its log-probabilities are computed once, and no copy is loaded.
    """

    loss: Literal["sigmoid", "length_normalized", "hinge", "ipo"] = "sigmoid"
    """length_normalized is sigmoid with log-probabilities per token (Tulu 3); ipo takes them per
    token, too, as its authors did."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the model stays near the reference; with ipo, 1 / (2 x the wanted margin)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs that are taken to be the wrong way round (sigmoid, length_normalized)."""
    nll: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the chosen answer's mean loss per token, added to that of its pair."""
    reference: Place | None = None
    """Another model to compare with: a folder or a name on the hub."""
    share_prompt: bool = False
    """Compute the prompt of a pair once, for both answers; for packed rows."""

    computed: bool = state(False)
    """Whether the reference's log-probabilities are there before step 1."""
    refer: Callable[..., Any] | None = state()
    """What computes them in each step, else."""
    referred: str = state("")
    saved: str = state("")
    first: int = state(0)
    """The first step of this run; 1 if it does not resume."""
    exact: bool = state(True)
    sums: dict[str, Any] = state({})
    """Tensors, by the names of metrics."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse what would not be heard, or not be what it says."""
        self.computed = recipe.has("dpo_reference")
        if self.label_smoothing and self.loss not in ("sigmoid", "length_normalized"):
            raise RecipeError(f'label_smoothing has no effect with loss = "{self.loss}"; remove it')
        named = self.reference and (self.reference[0] in "./" or self.reference.count("/") > 1)
        if named and not Path(str(self.reference)).exists():
            raise RecipeError(f"reference: {self.reference}: no such folder")
        if recipe.data.train_on == "all":
            raise RecipeError('compares answers, not prompts; remove data.train_on = "all"')
        packing = recipe.plugins.get("bfd_packing", {})
        if packing.get("overlong", "error") != "error":
            raise RecipeError(
                "a pair is compared whole, so bfd_packing must not cut it; remove its overlong, "
                'and raise its capacity, or lower data.max_length with data.too_long = "truncate"'
            )
        if self.share_prompt and not recipe.has("bfd_packing"):
            raise RecipeError("share_prompt is for packed rows; add [plugins.bfd_packing]")
        kernel = recipe.plugins.get("flash_attention", {}).get("kernel")
        if self.share_prompt and kernel in ("fa2", "fa3"):
            raise RecipeError(
                f"share_prompt: the kernel {kernel} of [plugins.flash_attention] cannot; set its "
                'kernel to "torch" or "sdpa"'
            )

    @hookimpl
    def render(self, rows: list[Row], tokenizer: Tokenizer, data: Data) -> Rendered:
        """Render each row as two texts with the same prompt."""
        return render_pairs(rows, tokenizer, data)

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Leave out the model's dropout: it would be taken for a difference to the reference."""
        from torch.nn import Dropout

        model = yield
        for name, module in model.named_modules():
            if isinstance(module, Dropout) and "lora_" not in name:
                module.p = 0.0
            if isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.0
        return model

    @hookimpl(wrapper=True)
    def annotate(
        self, model: Any, tokens: Tokens, prelude: Prelude
    ) -> Generator[None, Tokens, Tokens]:
        """Count pairs, share their prompts, and get the reference ready."""
        from .losses import prove_shared

        plain = yield
        if plain.facts["pairs"] < len(plain):
            raise DataError(
                "plugins.dpo: not all of the examples are pairs; they were prepared without it"
            )
        tokens = copy.copy(plain.share_prompts() if self.share_prompt else plain)
        tokens.denominators = np.ones(len(tokens), np.int64)
        if self.share_prompt and not self.saved:
            self.saved = prove_shared(model, plain, tokens, prelude)
        if not self.referred:
            self.exact = prelude.exact
            self.referred = self.find_reference(model, prelude)
        return tokens

    def find_reference(self, model: Any, prelude: Prelude) -> str:
        """Make ready what computes the reference's log-probabilities; name it."""
        base = getattr(model, "module", model)
        adapted = hasattr(base, "disable_adapter")
        name = self.reference or ("the base without adapters" if adapted else "the model as it was")
        if self.computed:
            return f"{name}, computed before step 1"
        if self.reference or not adapted:
            try:
                frozen = prelude.frozen(self.reference or "")
            except RecipeError as error:
                raise RecipeError(f"plugins.dpo.reference: {error}") from error
            self.refer = lambda _model, inputs, score: score(
                model=frozen, batch=inputs, summed=False
            )
            return self.reference or "a frozen copy"

        def bare(model: Any, inputs: Batch, score: Score) -> Tensor:
            with base.disable_adapter():
                return score(model=model, batch=inputs, summed=False)

        self.refer = bare
        return name

    @hookimpl(wrapper=True)
    def collate(self, tokens: Tokens, examples: Ints) -> Generator[None, Batch, Batch]:
        """Say which targets are whose, and what the reference made of them."""
        import torch

        batch = yield
        batch["_targets"] = torch.from_numpy(tokens.sequence_targets(examples))
        if "reference" in tokens.columns:
            batch["_reference"] = torch.from_numpy(tokens.columns["reference"][examples])
        return batch

    @hookimpl(wrapper=True)
    def feed(self, steps: range) -> Generator[None, Feed, Feed]:
        """Note the first step of this run."""
        self.first = self.first or steps.start
        return (yield)

    @hookimpl
    def step(self, model: Module, batch: Batch, total: int, score: Score) -> Tensor:
        """Compare the answers of each pair, as the model and the reference see them."""
        import torch

        from .losses import summed

        targets = batch["_targets"]
        logps = summed(score(model=model, batch=batch, summed=False), targets)
        reference = batch.get("_reference")
        if reference is None:
            assert self.refer is not None
            with torch.no_grad():
                reference = summed(self.refer(model, batch, score), targets)
        losses = self.losses(logps, reference, targets.view(-1, 2))
        if self.first == 1 and model.training:
            self.first = -1
            self.ensure_begun(losses.detach())
        if self.nll:
            mine = -logps[:, 0] / targets[::2]
            self.note(nll=mine)
            losses = losses + self.nll * mine
        return losses.sum() / total

    def losses(self, logps: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
        """Return the loss of each pair; logps are of the chosen and of the rejected answers."""
        from .losses import compared

        scores = logps - reference
        # Whole, as TRL has them, whatever the loss compares.
        rewards = self.beta * scores.detach()
        self.note(
            accuracy=(rewards[:, 0] > rewards[:, 1]).float(),
            margin=rewards[:, 0] - rewards[:, 1],
            **{f"reward_{side}": rewards[:, place] for place, side in enumerate(SIDES)},
            **{f"logp_{side}": logps[:, place] for place, side in enumerate(SIDES)},
        )
        if self.loss in ("length_normalized", "ipo"):
            scores = scores / lengths
        return compared(self, scores[:, 0] - scores[:, 1])

    def note(self, **values: Tensor) -> None:
        """Add to what is measured."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach().sum()

    @hookimpl
    def measure(self) -> dict[str, Tensor]:
        """Return sums over pairs."""
        import torch

        sums, self.sums = self.sums, {}
        names = (*MEASURES, "nll") if self.nll else MEASURES
        return {name: sums.get(name, torch.zeros(())) for name in names}

    def ensure_begun(self, losses: Tensor) -> None:
        """Make sure that the first loss is what it must be where policy and reference are one."""
        import torch

        from .losses import compared

        if self.reference or not len(losses):
            return
        wanted, found = float(compared(self, torch.zeros(()))), float(losses.mean())
        if not abs(found - wanted) <= BEGINS[self.exact] * wanted:
            raise TrainError(
                f"plugins.dpo: the first loss is {found:.6g}, and must be {wanted:.6g}, as the "
                "model and the reference are one before the first step. Most likely the "
                "model is not the same each time that it is called (a dropout or a router of its "
                "own code), or the log-probabilities that were kept are of other weights or of "
                "another kernel (remove the folder that plugins.dpo_reference names)"
            )

    @hookimpl
    def verdict(self) -> str:
        """Name the loss and the reference, and say what sharing saves."""
        smooth = f", label smoothing {self.label_smoothing:g}" if self.label_smoothing else ""
        nll = f", {self.nll:g} x the chosen answer's loss per token" if self.nll else ""
        loss = f"{self.loss} loss, beta {self.beta:g}{smooth}{nll}"
        reference = f"reference: {self.referred}" if self.referred else ""
        return "; ".join(filter(None, [loss, reference, self.saved]))
