"""Metrics by name: plugins declare theirs, so that a recipe can name only those that will exist."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import PluginError, RecipeError
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
    plugins: Mapping[str, Any], recipe: Recipe, path: str | Path
) -> dict[str, list[str]]:
    """Return plugin -> the names of its metrics; refuse names that are taken."""
    declared: dict[str, list[str]] = {}
    owners = dict.fromkeys(METRICS, "plugsft")
    problems = []
    for name, plugin in plugins.items():
        names = contract_of(plugin).metrics
        if callable(names):
            try:
                names = names(plugin, recipe)
            except Exception as error:
                error.add_note(f"raised by plugin '{name}', in the metrics of its @plugin")
                raise
        if not isinstance(names, list | tuple) or not all(isinstance(one, str) for one in names):
            raise PluginError(f"plugin '{name}': metrics are {short(names)}; give a list of names")
        declared[name] = [*names]
        own = f"plugin '{name}'"
        for metric in names:
            if metric.startswith("eval_"):
                owner = "an evaluation"
            else:
                owner = owners.setdefault(metric, own)
            if owner != own:
                problems.append(
                    f"{path}: plugins.{name}: its metric '{metric}' has the name of a metric of "
                    f"{owner}; rename it, or switch the plugin off with --without"
                )
    if len(owners) > MOST_METRICS:
        problems.append(f"{path}: plugins have {len(owners)} metrics, of {MOST_METRICS} at most")
    if problems:
        raise RecipeError(problems)
    return declared
