"""The stages between prepared data and step 1, in order: connect, load, plan.

Each returns what the next ones need. Plugins see the run from the moment when its model is loaded
(run.py); steps are planned after plugins have added columns that need the model.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import Module
from torch.optim import Optimizer

from .base.atomic import damage
from .base.build_once import once
from .base.checksums import digest
from .base.machine import Machine
from .batches.plan import Plan
from .checkpoint.final_model import ensure_saveable
from .checkpoint.save import ensure_one_output
from .hooks import with_plugins
from .model.load import ModelLoad, make_load, make_scratch_model
from .model.schedule import Schedule, factors_of
from .ranks.agree import agreed, ensure_alike
from .ranks.connect import connect
from .ranks.load_batches import explain_out_of_memory_in_loading
from .ranks.optimizer_checks import ensure_uses_settings
from .ranks.same_inputs import SAME_INPUTS, compared_model, compared_recipe
from .ranks.sharding import (
    is_sharded,
    is_zero3,
    loads_in_bfloat16,
    shard_model,
    weights_of,
)
from .ranks.weights import Weights
from .recipe.tables import Recipe
from .registry.active import Active
from .tokens.ends import new_ids
from .tokens.store import Prepared, Tokens


@dataclass(frozen=True)
class Loaded:
    """The model of a run, sharded or copied over the ranks, with its optimizer."""

    load: ModelLoad
    """How it was loaded."""
    module: Module
    optimizer: Any
    weights: Weights


def connect_ranks(recipe: Recipe, active: Active, machine: Machine, data: Prepared) -> Accelerator:
    """Connect the ranks; refuse other recipes, plugins, data or outputs on some of them."""
    accelerator = connect(recipe, machine)
    compared = compared_recipe(recipe) | active.compared() | data.compared()
    ensure_alike(compared, SAME_INPUTS)
    ensure_one_output(recipe)
    return accelerator


def load_model(
    recipe: Recipe, active: Active, accelerator: Accelerator, data: Prepared, scratch: Path
) -> Loaded:
    """Load the model, shard it over the ranks, and make its optimizer."""
    load = make_load(recipe.model, scratch, is_sharded(accelerator), accelerator.device)
    load.new_tokens = new_ids(recipe.model, data.tokenizer)
    set_seed(recipe.train.seed)
    if loads_in_bfloat16(accelerator):
        load.kwargs["dtype"] = torch.bfloat16

    def make_optimizer(model: Module) -> Optimizer:
        with agreed("making the optimizer"):
            optimizer = active.hooks.optimizer(model=model, train=recipe.train)
            ensure_uses_settings(optimizer, recipe.train, active.having("optimizer"))
            return optimizer

    with explain_out_of_memory_in_loading(recipe, accelerator.process_index):
        # DeepSpeed scatters each tensor as it is made. A rank that fails there leaves the others in
        # a collective, where no agreement would reach them; `ending_together` ends them.
        with nullcontext() if is_zero3(accelerator) else agreed("loading the model"):
            model = active.hooks.optimize_model(load=load)
            ensure_saveable(model)
            if accelerator.is_main_process:
                load.kept.open()
            model.train()
            compared = compared_model(model, load)
        ensure_alike(compared, SAME_INPUTS)
        module, optimizer = shard_model(accelerator, load, model, make_optimizer)
        load.files.close()
    weights = weights_of(accelerator, module, optimizer)
    return Loaded(load, module, optimizer, weights)


def plan_steps(
    recipe: Recipe, active: Active, accelerator: Accelerator, tokens: Tokens, optimizer: Any
) -> tuple[Plan, Schedule]:
    """Plan steps and learning rates, the same on every rank."""
    with agreed("planning the steps"):
        plan = Plan(tokens, recipe, accelerator.num_processes, active.hooks)
        factor = active.hooks.schedule(train=recipe.train, steps=plan.steps)
        factors = factors_of(factor, plan.steps, with_plugins(active.hooks.schedule))
        schedule = Schedule(factors, optimizer)
        compared = plan.compared() | schedule.compared()
    ensure_alike(compared, SAME_INPUTS)
    return plan, schedule


def save_scratch_model(recipe: Recipe, data: Prepared) -> Path:
    """Save the recipe's new model once; return its folder, which is loaded like any model."""
    scratch = recipe.model.scratch
    if scratch is None:
        return Path()
    key = {
        "scratch": scratch.model_dump(),
        "seed": recipe.train.seed,
        "tokenizer": data.tokenizer_folder.name,
    }

    def fill(folder: Path) -> None:
        make_scratch_model(scratch, data.tokenizer, recipe.train.seed).save_pretrained(folder)

    folder = recipe.folder / "scratch" / f"model-{digest(key)}"
    # Its checksums are compared: a resume with frozen weights reads them again.
    once(folder, lambda made: damage(made) is None, fill=fill)
    return folder
