"""Metrics by name: plugins declare theirs, so that a recipe can name only those that will exist."""

from collections.abc import Mapping
from typing import Any

from ..base.errors import PluginError
from ..recipe.tables import Recipe, short
from .contracts import MOST_METRICS, contract_of

OF_STEPS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "trained_tokens",
    "tokens",
    "tokens_per_second",
    "step_seconds",
    "data_wait_seconds",
    "padding",
    "examples_per_micro_batch",
    "imbalance",
    "memory_gib",
)
OF_FLOAT16 = ("loss_scale", "skipped_steps")
OF_EVALUATIONS = ("eval_loss", "eval_tokens")
METRICS = {*OF_STEPS, *OF_FLOAT16, "step", "stop", "computed_tokens"}
"""The core's metrics, and what is summed or logged with them; no plugin may use these names."""


def declared_metrics(
    plugins: Mapping[str, Any], recipe: Recipe
) -> tuple[dict[str, list[str]], list[str]]:
    """Return plugin -> the names of its metrics; and which of them are taken already."""
    declared: dict[str, list[str]] = {}
    owners: dict[str, str] = {}
    problems = []
    for name, plugin in plugins.items():
        declared[name] = _names(plugin, recipe, name)
        for metric in declared[name]:
            if problem := _why_taken(metric, owners.setdefault(metric, name), name):
                problems.append(f"plugins.{name}: its metric '{metric}' {problem}")
    if len(owners) > MOST_METRICS:
        problems.append(f"plugins declare {len(owners)} metrics; they may have {MOST_METRICS}")
    return declared, problems


def _names(plugin: Any, recipe: Recipe, name: str) -> list[str]:
    """The names that a plugin declares."""
    names = contract_of(plugin).metrics
    if callable(names):
        names = names(plugin, recipe)
    if not isinstance(names, list | tuple) or not all(isinstance(one, str) for one in names):
        raise PluginError(f"plugin '{name}': metrics are {short(names)}; give a list of names")
    return list(names)


def _why_taken(metric: str, owner: str, plugin: str) -> str:
    """Say why a plugin's metric needs another name, or nothing."""
    if metric in METRICS:
        return "has the name of a metric of plugsft; rename it"
    if metric.startswith("eval_"):
        return "begins with 'eval_', which plugsft adds to metrics of an evaluation; rename it"
    if owner != plugin:
        return (
            f"has the name of a metric of plugin '{owner}'; rename it, or switch one of them off "
            "with --without"
        )
    return ""
