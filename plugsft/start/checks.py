"""The checks of a recipe before step 1: one list, in order, each with what it needs.

A run makes those of each stage at once, and is refused with all that they find; `plugsft check`
makes every one. What comes with its stage stands there: a row that is read, a weight that is
loaded, ranks that are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from ..base.errors import RecipeError, choices, reason_of
from ..base.machine import Machine
from ..hooks import is_core
from ..output.folder import ensure_ours, wrong_inputs
from ..ranks.launcher import ensure_environment, started_too_few
from ..recipe.tables import Recipe
from ..registry import active as registry
from ..registry.active import Active
from ..registry.contracts import contract_of
from ..registry.metrics import OF_EVALUATIONS, OF_FLOAT16, OF_STEPS
from ..tokens.schema import WEIGHT

if TYPE_CHECKING:
    from ..tokens.store import Tokens

Needs: TypeAlias = Literal[
    "nothing", "launcher", "plugins", "model", "weights", "reference", "tokens"
]
"""What a check needs beside the recipe: what a launcher has set, what plugins import, a model's
config.json, its weights and torch, those of a reference, prepared tokens."""
KEEP_BEST = "checkpoint.keep_best"


@dataclass
class Case:
    """What is checked."""

    recipe: Recipe
    active: Active
    machine: Machine
    path: Path = Path("recipe.toml")
    """The recipe's file."""
    hooks: Sequence[str] | None = None
    """Only plugins with one of these hooks are asked."""
    tokens: Tokens | None = None

    @cached_property
    def wrong_inputs(self) -> dict[str, str]:
        """The problems of what the recipe reads, by file name."""
        return wrong_inputs(self.recipe, self.path)


class Check(NamedTuple):
    """A check; it returns what `plugsft check` says where all is well."""

    needs: Needs
    subject: str
    make: Callable[[Case], str]


def ensure(case: Case, *needs: Needs) -> None:
    """Make the checks of a stage, which has what they need; refuse a recipe with all problems."""
    problems: list[str] = []
    for check in CHECKS:
        if check.needs in needs:
            try:
                check.make(case)
            except RecipeError as error:
                problems += error.problems
    if problems:
        # A config.json that cannot be read is found twice.
        raise RecipeError([*dict.fromkeys(problems)])


def check_paths(case: Case) -> str:
    """Refuse paths that cannot be read."""
    if case.wrong_inputs:
        raise RecipeError([*case.wrong_inputs.values()])
    return f"relative to {Path.cwd()}"


def check_output(case: Case) -> str:
    """Refuse an output folder that cannot be written, or that holds files of others."""
    folder = case.recipe.folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise RecipeError(f"output: {existing} is no folder to write to; name another folder")
    ensure_ours(case.recipe.folder)
    return case.recipe.output


def check_metrics(case: Case) -> str:
    """Refuse a metric that `keep_best` or a plugin watches, and that the run will not have."""
    recipe, active = case.recipe, case.active
    own = [metric for names in active.declared_metrics.values() for metric in names]
    float16 = OF_FLOAT16 if recipe.model.dtype == "float16" else ()
    known = {
        "steps": [*OF_STEPS, *float16, *own],
        "evaluations": [*OF_EVALUATIONS, *(f"eval_{metric}" for metric in own)],
    }
    watched = {KEEP_BEST: recipe.checkpoint.keep_best}
    for name, plugin in active.plugins.items():
        for option in contract_of(plugin).watches:
            watched[f"plugins.{name}.{option}"] = getattr(plugin, option)
    problems, direction = [], "best" in recipe.checkpoint.model_fields_set
    for key, value in watched.items():
        if value is None:
            continue
        metric = str(value)  # a plugin may watch an option that is no text
        kind = "evaluations" if key == KEEP_BEST or metric.startswith("eval_") else "steps"
        if kind == "evaluations" and recipe.eval is None:
            problems.append(
                f"{key}: '{metric}' comes from evaluations, and there are none; add [eval]"
            )
        elif metric not in known[kind]:
            hint = choices(metric, known[kind], "they have:")
            problems.append(f"{key}: {kind} have no metric '{metric}'{hint}")
        elif key == KEEP_BEST and not (direction or metric.endswith("loss")):
            problems.append(
                f"checkpoint.best: '{metric}' is no loss; set the value that is the best, "
                '"highest" or "lowest"'
            )
    if problems:
        raise RecipeError(problems)
    return ""


def check_launch(case: Case) -> str:
    """Refuse a launch that the recipe contradicts."""
    ensure_environment(case.recipe)
    if case.machine.strategy or started_too_few():
        from ..ranks.connect import ensure_possible

        ensure_possible(case.recipe, case.machine)
    return ""


def check_plugins(case: Case) -> str:
    """Let plugins refuse the recipe."""
    registry.check(case.active, case.recipe, case.machine, case.hooks)
    return ", ".join(case.active.plugins) or "none"


def check_model(case: Case) -> str:
    """Refuse a model that cannot train this recipe."""
    from ..model.config import ensure_model_fits
    from ..output.disk_space import parameters

    ensure_model_fits(case.recipe)
    new = case.recipe.model.scratch
    name = f"new, at most {parameters(new):,} parameters" if new else case.recipe.model.path
    return f"{name}; max_length {case.recipe.data.max_length:,} fits its context"


def check_weights(case: Case) -> str:
    """Refuse a folder without weights, with a truncated file, or with tensors that do not fit.

    It reads headers only.
    """
    from safetensors import safe_open

    if case.recipe.model.path is None:
        return ""
    folder = Path(case.recipe.model.path)
    files = sorted(folder.glob("*.safetensors"))
    if folder.is_dir() and not files:
        raise RecipeError(f"model.path: '{folder}' holds no weights (*.safetensors)")
    for file in files:
        try:
            safe_open(file, framework="np")
        except Exception as error:  # safetensors raises its own errors and the system's
            raise RecipeError(f"model.path: {file}: cannot be read ({reason_of(error)})") from error
    # Only the model's class knows its tensors, and that imports torch.
    from ..model.for_plugins import ensure_tensors_fit

    ensure_tensors_fit(case.recipe)
    return ""


def check_reference(case: Case) -> str:
    """Refuse a reference that cannot be loaded, as a model is refused."""
    reference, recipe = case.recipe.provides("reference_model"), case.recipe
    if reference is None or not reference.value or reference.value in case.wrong_inputs:
        return ""
    # It is loaded as the model is, but for what says which model that is.
    named = {"path": reference.value, "scratch": None, "revision": None, "text_only": False}
    model = recipe.model.model_copy(update=named)
    try:
        ensure(replace(case, recipe=recipe.model_copy(update={"model": model})), "model", "weights")
    except RecipeError as error:
        raise error.of_model(reference.key) from error
    return ""


def check_token_ids(case: Case) -> str:
    """Refuse tokens that the model does not know."""
    from ..model.config import ensure_ids_known

    if case.tokens:
        ensure_ids_known(case.recipe, case.tokens.facts["largest_id"])
    return ""


def check_example_weights(case: Case) -> str:
    """Refuse weights of examples that the loss would ignore."""
    weights = case.tokens.columns.get(WEIGHT) if case.tokens else None
    if weights is None or (weights == 1).all():
        return ""
    providers = [capability.plugin for capability in case.recipe.providers("weighted_examples")]
    for name in case.active.answering("step"):
        if not is_core(name) and name not in providers:
            raise RecipeError(
                f"plugins.{name}: its loss may ignore the weights of the rows (column 'weight'); "
                'data.ignore = ["weight"] trains without them. A plugin that applies them says so: '
                'provides={"weighted_examples": None}'
            )
    return ""


CHECKS = (
    Check("nothing", "paths", check_paths),
    Check("nothing", "output", check_output),
    Check("nothing", "metrics", check_metrics),
    Check("launcher", "launch", check_launch),
    Check("plugins", "plugins", check_plugins),
    Check("model", "model", check_model),
    Check("weights", "weights", check_weights),
    Check("reference", "reference", check_reference),
    Check("tokens", "rows", check_token_ids),
    Check("tokens", "rows", check_example_weights),
)
