"""Open a run: prepare everything that the loop needs, in order."""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, set_seed
from torch.nn import Module
from torch.optim import Optimizer

from .base.build_once import once
from .base.checksums import digest
from .base.console import say
from .base.machine import Machine
from .batches.defaults import BatchDefaults
from .batches.plan import Plan, small_data
from .data.defaults import DataDefaults
from .data.load_tokenizer import pad_id
from .data.prepare import Prepared, prepare
from .model.checks import check_recipe
from .model.config import check_ids
from .model.defaults import ModelDefaults
from .model.load import make_load, make_scratch_model
from .model.schedule import Schedule
from .output.checkpoint import Checkpoints
from .output.final_model import ensure_saveable
from .output.record import Record, data_facts
from .ranks.agree import agreed, ensure_alike
from .ranks.launch import connect, gradient_sync, silence_libraries, strategy_name
from .ranks.load_batches import BatchLoader, GlobalBatch
from .ranks.out_of_memory import explain_out_of_memory_in_loading
from .ranks.precision import describe_dtypes, dtypes_of
from .ranks.prelude import RunPrelude
from .ranks.same_inputs import SAME_INPUTS, model_facts, recipe_facts
from .ranks.sharding import is_sharded, loads_in_bfloat16, shard_model, train_state_of
from .ranks.signals import Stop
from .recipe.tables import LOSSY, Recipe
from .registry.active import Active


def open(
    recipe: Recipe, active: Active, machine: Machine, checkpoints: Sequence[Path] = ()
) -> "OpenRun":
    """Open a run, at step 1 or after the first undamaged checkpoint."""
    silence_libraries()
    run = OpenRun(recipe, active, machine)
    run.checkpoints.restore(checkpoints)
    describe(run)
    with agreed(run.accelerator, "beginning the record"):
        steps = {"total": run.plan.steps, "per_epoch": run.plan.per_epoch}
        run.record.open(steps, run.checkpoints.saved)
    return run


class OpenRun:
    """A run: its data, ranks, model, optimizer, plan, checkpoints and record."""

    def __init__(self, recipe: Recipe, active: Active, machine: Machine) -> None:
        self.recipe, self.stop = recipe, Stop()
        self.record = Record(recipe, machine, active)
        defaults = DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults()
        self.hooks = active.attach(*defaults, self.record).hooks
        check_recipe(recipe, active, machine)
        # Before there is a process group: preparing may take hours, and transformers lets only
        # rank 0 of a group save a model.
        data = prepare(recipe, active)
        check_ids(recipe, data.largest_id)
        self.tokenizer = data.tokenizer
        scratch = save_scratch_model(recipe, data)

        self.accelerator = connect(recipe, machine)
        facts = recipe_facts(recipe) | active.facts() | data.facts()
        ensure_alike(self.accelerator, facts, SAME_INPUTS)
        self.load = make_load(recipe.model, scratch, empty=is_sharded(self.accelerator))
        self.model, self.optimizer = self._load_model()
        self.loader = BatchLoader(self.hooks, self.accelerator, pad_id(self.tokenizer))
        prelude = RunPrelude(self.accelerator, self.hooks, self.loader, self.load)
        self.tokens = prelude.add_columns(self.model, data.tokens)
        self.evaluation_tokens = data.evaluation and prelude.add_columns(
            self.model, data.evaluation
        )
        self.plan, self.schedule = self._plan_steps()
        self.train_state = train_state_of(self.accelerator, self.model, self.optimizer)
        self.checkpoints = Checkpoints(
            recipe, active, self.tokens, self.accelerator, self.train_state, self.plan.steps
        )

    def global_batches(self) -> Generator[GlobalBatch, None, None]:
        """Load the global batches of all steps that are still to train."""
        steps = range(self.checkpoints.saved + 1, self.plan.steps + 1)
        return self.loader.load(self.plan.plan_step, self.tokens, steps)

    def evaluation_batches(self) -> Generator[GlobalBatch, None, None]:
        """Load the evaluation data once."""
        assert self.evaluation_tokens is not None
        ranks = self.accelerator.num_processes
        plan = Plan.once_through(self.evaluation_tokens, self.recipe, ranks, self.hooks)
        return self.loader.load(plan.plan_step, plan.tokens, range(1, plan.steps + 1))

    def evaluation_due(self, step: int) -> bool:
        """Tell whether the model is evaluated after this step."""
        due = step == self.plan.steps or self.recipe.evaluates(step)
        return due and self.evaluation_tokens is not None

    def checkpoint_due(self, step: int) -> bool:
        """Tell whether a checkpoint is written after this step."""
        return step == self.plan.steps or self.checkpoints.due(step)

    def gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Reduce gradients over ranks in the last backward of a step, or in each if sharded."""
        whole = self.recipe.train.keep_whole_gradients
        return gradient_sync(self.accelerator, self.model, last, whole)

    def _load_model(self) -> tuple[Module, Optimizer]:
        """Load the model, shard it over the ranks, and make its optimizer."""
        accelerator, recipe = self.accelerator, self.recipe
        set_seed(recipe.train.seed)
        if loads_in_bfloat16(accelerator):
            self.load.kwargs["dtype"] = torch.bfloat16

        def make_optimizer(model: Module) -> Optimizer:
            with agreed(accelerator, "making the optimizer"):
                return self.hooks.optimizer(model=model, train=recipe.train)

        with explain_out_of_memory_in_loading(recipe, accelerator.process_index):
            # DeepSpeed scatters each tensor as it is made, so there ranks cannot agree afterwards.
            scatters = accelerator.distributed_type == DistributedType.DEEPSPEED
            with nullcontext() if scatters else agreed(accelerator, "loading the model"):
                model = self.hooks.optimize_model(load=self.load)
                ensure_saveable(model)
                model.train()
                facts = model_facts(model, self.load)
            ensure_alike(accelerator, facts, SAME_INPUTS)
            return shard_model(accelerator, self.load, model, make_optimizer)

    def _plan_steps(self) -> tuple[Plan, Schedule]:
        """Plan steps and learning rates, the same on every rank."""
        with agreed(self.accelerator, "planning the steps"):
            plan = Plan(self.tokens, self.recipe, self.accelerator.num_processes, self.hooks)
            schedule = Schedule(self.recipe.train, self.optimizer, plan.steps)
            facts = plan.facts()
        ensure_alike(self.accelerator, facts, SAME_INPUTS)
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

    def build(folder: Path) -> None:
        make_scratch_model(scratch, data.tokenizer, recipe.train.seed).save_pretrained(folder)

    return once(recipe.folder / "scratch" / f"model-{digest(key)}", build)


def describe(run: OpenRun) -> None:
    """Print the model, data, plan and plugins, and put them into the record."""
    recipe, record, plan = run.recipe, run.record, run.plan
    ranks, strategy = run.accelerator.num_processes, strategy_name(run.accelerator)
    dtypes = dtypes_of(run.accelerator, run.train_state)
    model = describe_model(run)
    record.run["machine"] |= {
        "device": str(run.accelerator.device.type),
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "ranks": ranks,
        "launcher": strategy,
    }
    record.run |= {
        "precision": describe_dtypes(dtypes, run.accelerator.device),
        "dtypes": dtypes,
        "model": model,
        "data": data_facts(run.tokens),
        "eval": None if run.evaluation_tokens is None else data_facts(run.evaluation_tokens),
        "plugins": record.plugins(),
    }
    say(
        f"model: {model['type']} ({model['source']}), {model['parameters']:,} parameters, "
        f"{strategy}" + (f" of {ranks}" if ranks > 1 else "")
    )
    say(f"precision: {record.run['precision']}")
    if recipe.model.weights == "bfloat16":
        say(f"warning: {LOSSY}")
    for plugin in record.run["plugins"]:
        say(f"plugin {plugin['name']}: {plugin['summary']}")
    saved = run.checkpoints.saved
    say(
        f"steps: {plan.steps} of {plan.describe_step()}, {plan.per_epoch} an epoch"
        + recipe.train.replaced_epochs()
        + (f"; going on after step {saved}" if saved else "")
    )
    if warning := small_data(recipe.train, plan.examples):
        say(f"warning: {warning}")
    say(f"checkpoints: {recipe.checkpoint.describe(plan.steps)}")


def describe_model(run: OpenRun) -> dict[str, Any]:
    """Return the model's source, type, sizes and number types for the record."""
    plain: Any = run.train_state.plain
    sizes = [
        (getattr(parameter, "ds_numel", parameter.numel()), parameter.requires_grad)
        for parameter in plain.parameters()
    ]
    return {
        "source": run.recipe.model.path or "scratch",
        "type": plain.config.model_type,
        "parameters": sum(size for size, _ in sizes),
        "trained_parameters": sum(size for size, trained in sizes if trained),
        "dtype": run.recipe.model.dtype,
        "weights": run.recipe.model.weights,
    }
