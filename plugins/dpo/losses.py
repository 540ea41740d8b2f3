"""The table of losses, and the options that have an effect. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from plugsft import Capability, Recipe, RecipeError

if TYPE_CHECKING:
    from torch import Tensor

    from . import Dpo

LossName = Literal[
    "sigmoid",
    "length_normalized",
    "hinge",
    "ipo",
    "cpo",
    "cpo_hinge",
    "cpo_ipo",
    "simpo",
    "orpo",
]


class Options(NamedTuple):
    """The numbers in a loss; one that it does not use is 0."""

    beta: float
    gamma: float = 0.0
    alpha: float = 0.0
    label_smoothing: float = 0.0
    nll: float = 0.0


class Loss(NamedTuple):
    """A loss of pairs."""

    formula: Callable[[Tensor, Options], Tensor]
    """The loss of each pair, from its scores, [pair, answer]; column 0 is the chosen answer."""
    defaults: Mapping[str, float]
    """Each option that the loss uses, and its default."""
    per_token: bool = False
    """Whether a score is divided by the answer's length."""
    reference: bool = True
    """Whether a score is the log-probability less that of the reference."""


def sigmoid(scores: Tensor, options: Options) -> Tensor:
    """Bradley-Terry's loss, with a target margin and label smoothing."""
    logits = options.beta * (scores[:, 0] - scores[:, 1]) - options.gamma
    smoothing = options.label_smoothing
    return -log_sigmoid(logits) * (1 - smoothing) - log_sigmoid(-logits) * smoothing


def hinge(scores: Tensor, options: Options) -> Tensor:
    """Linear up to a margin of 1 / beta, then 0."""
    return (1 - options.beta * (scores[:, 0] - scores[:, 1])).relu()


def ipo(scores: Tensor, options: Options) -> Tensor:
    """Squared distance to the wanted margin, 1 / (2 beta)."""
    return (scores[:, 0] - scores[:, 1] - 1 / (2 * options.beta)) ** 2


def simpo(scores: Tensor, options: Options) -> Tensor:
    """Bradley-Terry's loss of scores, which AlphaPO bends: (1 - p^-alpha) / alpha."""
    if options.alpha:
        scores = -(-options.alpha * scores).expm1() / options.alpha
    return sigmoid(scores, options)


def odds_ratio(scores: Tensor, options: Options) -> Tensor:
    """-log sigmoid of the log odds ratio; odds are p / (1 - p)."""
    # p = 1 has infinite odds, and a gradient that is no number.
    scores = scores.clamp(max=-1e-6)
    log_odds = scores - (-scores.expm1()).log()
    return -options.beta * log_sigmoid(log_odds[:, 0] - log_odds[:, 1])


def log_sigmoid(logits: Tensor) -> Tensor:
    """Log of the sigmoid, without underflow."""
    return -(-logits).logaddexp(logits.new_zeros(()))


LOSSES: dict[LossName, Loss] = {
    "sigmoid": Loss(sigmoid, {"beta": 0.1, "label_smoothing": 0.0, "nll": 0.0}),
    "length_normalized": Loss(
        sigmoid, {"beta": 5.0, "label_smoothing": 0.0, "nll": 0.0}, per_token=True
    ),
    "hinge": Loss(hinge, {"beta": 0.1, "nll": 0.0}),
    "ipo": Loss(ipo, {"beta": 0.1, "nll": 0.0}, per_token=True),
    "cpo": Loss(sigmoid, {"beta": 0.1, "label_smoothing": 0.0, "nll": 1.0}, reference=False),
    "cpo_hinge": Loss(hinge, {"beta": 0.1, "nll": 1.0}, reference=False),
    "cpo_ipo": Loss(ipo, {"beta": 0.1, "nll": 1.0}, per_token=True, reference=False),
    "simpo": Loss(
        simpo,
        {"beta": 2.0, "gamma": 1.0, "alpha": 0.0, "label_smoothing": 0.0, "nll": 0.0},
        per_token=True,
        reference=False,
    ),
    "orpo": Loss(odds_ratio, {"beta": 0.1, "nll": 1.0}, per_token=True, reference=False),
}


def options_of(plugin: Dpo) -> Options:
    """Return the options of the plugin's loss: as set, else its defaults."""
    values = dict(LOSSES[plugin.loss].defaults)
    for name in values:
        value = getattr(plugin, name)
        if value is not None:
            values[name] = value
    return Options(**values)


def metrics_of(plugin: Dpo, recipe: Recipe) -> list[str]:
    """Name the metrics of the plugin's loss."""
    names = ["accuracy", "margin"]
    for side in ("chosen", "rejected"):
        names += [f"reward_{side}", f"logp_{side}"]
    return [*names, "nll"] if options_of(plugin).nll else names


def describe(plugin: Dpo) -> str:
    """Name the loss, and its options that have an effect."""
    options = options_of(plugin)
    words = {
        "beta": f"beta {options.beta:g}",
        "gamma": f"gamma {options.gamma:g}",
        "alpha": f"alpha {options.alpha:g}",
        "label_smoothing": f"label smoothing {options.label_smoothing:g}",
        "nll": f"{options.nll:g} x the chosen answer's loss per token",
    }
    used = [text for name, text in words.items() if getattr(options, name)]
    none = "" if LOSSES[plugin.loss].reference else "; reference: none"
    return ", ".join([f"{plugin.loss} loss", *used]) + none


def ensure_options_work(plugin: Dpo, recipe: Recipe) -> None:
    """Refuse options that would have no effect."""
    loss = LOSSES[plugin.loss]
    for name in Options._fields:
        if getattr(plugin, name) is not None and name not in loss.defaults:
            users = ", ".join(other for other in LOSSES if name in LOSSES[other].defaults)
            raise RecipeError(
                f'{name} has no effect with loss = "{plugin.loss}"; remove it (losses that use '
                f"it: {users})"
            )
    stored = recipe.provides("stored_reference")
    if not loss.reference and (plugin.reference or stored):
        useless = "reference" if plugin.reference else str(stored and stored.table)
        raise RecipeError(
            f'{useless} has no effect with loss = "{plugin.loss}", which has no reference; '
            "remove it"
        )
    if plugin.share_prompt and not recipe.provides("packed_rows"):
        packing = Capability.bundled("packed_rows").table
        raise RecipeError(f"share_prompt is for packed rows; add {packing}")
