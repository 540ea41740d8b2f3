"""Open a run: prepare everything that the loop needs, in order."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, set_seed
from torch.nn import Module
from torch.optim import Optimizer

from .base.atomic import damage, step_folder
from .base.build_once import once
from .base.checksums import digest
from .base.console import format_count, say
from .base.errors import PluginError, Stopped
from .base.machine import Machine
from .batches.defaults import BatchDefaults
from .batches.plan import Plan, small_data
from .checkpoint.final_model import ensure_saveable, save_model
from .checkpoint.save import Checkpoints, ensure_one_output
from .checkpoint.state import train_state
from .data.defaults import DataDefaults
from .data.load_tokenizer import new_ids, pad_id
from .data.prepare import Prepared, prepare
from .model.checks import check_recipe, check_weights
from .model.config import check_ids
from .model.defaults import ModelDefaults
from .model.load import make_load, make_scratch_model
from .model.schedule import Schedule, long_warmup
from .model.tensor_shards import num_weights
from .output.record import Record, data_facts
from .ranks.agree import RankGroup, agreed, ending_together, ensure_alike, is_known_to_all
from .ranks.failures import keep_beating
from .ranks.launch import connect, gradient_sync, prepare_gpu, silence_libraries, strategy_name
from .ranks.load_batches import BatchLoader, GlobalBatch, explain_out_of_memory_in_loading
from .ranks.loss_scale import LossScale
from .ranks.optimizer_checks import ensure_uses_settings
from .ranks.precision import describe_dtypes, dtypes_of
from .ranks.same_inputs import MODEL_FILES, SAME_INPUTS, model_facts, recipe_facts
from .ranks.sharding import is_sharded, loads_in_bfloat16, shard_model, weights_of
from .ranks.step_numbers import can_skip_steps
from .ranks.stopping import Stopping
from .ranks.trained_model import TrainedModel, work_with_weights
from .recipe.capabilities import Capability
from .recipe.tables import LOSSY, Recipe
from .registry.active import Active


def open(
    recipe: Recipe, active: Active, machine: Machine, checkpoints: Sequence[Path] = ()
) -> "OpenRun":
    """Open a run at step 1, or after the first undamaged one of `checkpoints`."""
    silence_libraries()
    # Plugins that check the recipe ask the GPU, which starts CUDA.
    prepare_gpu(recipe)
    keep_beating()
    run = OpenRun(recipe, active, machine)
    run.checkpoints.restore(checkpoints)
    run.step = run.checkpoints.saved
    describe(run)
    return run


class OpenRun:
    """A run: its data, ranks, model, optimizer, plan, checkpoints and record.

    Plugins see it as `Run`, its `model` as `RunModel`, its `ranks` as `Ranks`.
    """

    def __init__(self, recipe: Recipe, active: Active, machine: Machine) -> None:
        self.recipe, self.output, self.is_main = recipe, recipe.folder, machine.is_main
        self.step = 0
        """The last finished step."""
        self.unread: Any = None
        """The last finished step's batch, numbers and facts, until they are logged."""
        self.stopping = Stopping(self.describe_stop)
        self.record = Record(recipe, machine, active)
        self.facts = self.record.run
        """The content of run.json. A plugin may add a table under its own name."""
        self.packing = recipe.provides("packed_rows")
        defaults = DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults()
        self.active = active.attach(*defaults, self.record)
        self.hooks = active.hooks
        check_recipe(recipe, active, machine)
        # Before there is a process group: preparing may take hours, and transformers lets only
        # rank 0 of a group save a model.
        data = prepare(recipe, active)
        check_ids(recipe, data.largest_id)
        for tokens in filter(None, (data.tokens, data.evaluation)):
            check_weights(recipe, active, tokens)
        self.tokenizer = data.tokenizer
        scratch = save_scratch_model(recipe, data)

        self.accelerator = connect(recipe, machine)
        facts = recipe_facts(recipe) | active.facts() | data.facts()
        ensure_alike(self.accelerator, facts, SAME_INPUTS)
        ensure_one_output(self.accelerator, recipe)
        sharded, device = is_sharded(self.accelerator), self.accelerator.device
        self.load = make_load(recipe.model, scratch, sharded, device)
        self.load.new_tokens = new_ids(recipe.model, self.tokenizer)
        self.module, self.optimizer = self._load_model()
        # Whether a step's numbers are read while the next step runs.
        self.reads_late = can_skip_steps(self.optimizer) and not recipe.provides("early_stop")
        self.weights = weights_of(self.accelerator, self.module, self.optimizer)
        self.loss_scale = LossScale(self.accelerator)
        self.loader = BatchLoader(
            self.hooks, self.accelerator, pad_id(self.tokenizer), bool(self.packing)
        )
        self.ranks = RankGroup(self.accelerator, self.hooks)
        self.model = TrainedModel(self, self.module, self.loader, self.load, self.weights)
        add_columns = partial(self.hooks.add_columns, model=self.model, ranks=self.ranks)
        self.tokens = add_columns(tokens=data.tokens)
        self.evaluation_tokens: Any = data.evaluation and add_columns(tokens=data.evaluation)
        self.plan, self.schedule = self._plan_steps()
        # What a resume must find again: a checkpoint has neither rows nor frozen weights.
        inputs = {
            "the data, its options or the tokenizer": self.tokens.facts["index"],
            "the weights in the model's files": self._files,
        }
        state = train_state(self.weights, self.optimizer, self.loss_scale)
        self.checkpoints = Checkpoints(
            recipe, active, self.accelerator, state, self.plan.steps, inputs
        )

    @property
    def steps(self) -> int:
        """The number of steps of the whole run."""
        return self.plan.steps

    @property
    def epoch(self) -> float:
        """The epochs done so far."""
        return self.step / self.plan.per_epoch

    def stop(self, reason: str) -> None:
        """End the run after this step, with checkpoint, model and report."""
        self.stopping.request(reason)

    def describe_stop(self, at_once: bool) -> str:
        """Describe what ends the run at a signal, and what it loses if it ends at once."""
        saved = self.checkpoints.published
        lost = f"{format_count(self.step - saved, 'step')} since " + (
            f"the checkpoint of step {saved}, from which --resume goes on"
            if saved
            else "the beginning: there is no checkpoint to resume from"
        )
        if at_once:
            return f"ended at once: lost {lost}"
        seconds = self.record.step_seconds()
        work = f"step (about {seconds:.1f} s)" if seconds else "step"
        work = "micro-batch of the evaluation" if self.evaluation_due() else work
        return (
            f"stopping after this {work}; then the run is saved, and can be resumed. A second "
            f"signal ends it at once, and loses {lost}"
        )

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call a notice of all plugins; if one fails, all ranks end at their next agreement."""
        for plugin, error in self.active.notify(hook, run=self, **arguments):
            if is_known_to_all(error):
                raise error
            # If a plugin with state failed, a checkpoint could save a half-updated state.
            keeps_state = plugin in self.active.plugins and self.active.implements(
                plugin, ["state_dict"]
            )
            self.stopping.fail(error, fatal=keeps_state)

    def agreed(self, operation: str) -> AbstractContextManager[None]:
        """Run a block on all ranks; agree on failures and on stopping before going on."""
        return self.stopping.agreed(self.accelerator, operation)

    @contextmanager
    def lifecycle(self) -> Iterator[None]:
        """End the run, however it ends: notify the plugins, and close the record."""
        notified = False
        try:
            with (
                self.stopping,
                ending_together(self.recipe.output),
                self.active.name_failing_plugin(),
            ):
                self._begin()
                yield
                with self.agreed("ending the run"):
                    self.record.end("completed", self.stopping.reason or None)
                    notified = True
                    self.notify("finished", status="completed")
                with self.agreed("notifying plugins of the end"):
                    self.record.close()
        except BaseException as error:
            self._end_early(error, notified)
            raise

    def _begin(self) -> None:
        """Notify the plugins, then start the record in place of an earlier run's results."""
        with self.agreed("notifying plugins that the run is ready"):
            self.facts["steps"] = {
                "done": self.step,
                "total": self.steps,
                "per_epoch": self.plan.per_epoch,
            }
            self.notify("ready")
            if self.packing and "packed_rows" not in self.facts:
                raise PluginError(
                    f"{self.packing.table} packs rows, and has not proved that the model computes "
                    "their documents apart: its class must inherit `Packer` of "
                    f"{Capability.bundled('packed_rows').table}, and its hooks call super()'s"
                )
        with self.agreed("beginning the record"):
            self.record.open(self.step, evaluates=self.evaluation_due())

    def _end_early(self, error: BaseException, notified: bool) -> None:
        """Record how the run failed or was stopped; errors in here must not hide the reason.

        `notified`: the plugins were notified of the end already.
        """
        status = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
        try:
            self.record.end(status, describe_error(error))
            if not notified:
                for _, plugin_error in self.active.notify("finished", run=self, status=status):
                    error.add_note(f"then, as the run ended: {describe_error(plugin_error)}")
            self.record.close()
        except Exception as closing_error:  # a full disk, or a plugin's summary
            error.add_note(f"then, as the record was closed: {describe_error(closing_error)}")

    def global_batches(self) -> Generator[GlobalBatch, None, None]:
        """Load the global batches of the remaining steps, until a stop."""
        steps = range(self.checkpoints.saved + 1, self.plan.steps + 1)
        batches = self.loader.load(self.plan.plan_step, self.tokens, steps, self.agreed)
        with closing(batches):
            for batch in batches:
                if self.stopping.reason:
                    return
                yield batch

    def evaluation_batches(self) -> Generator[GlobalBatch, None, None]:
        """Load the evaluation data once."""
        with self.agreed("planning the evaluation"):
            ranks = self.accelerator.num_processes
            plan = Plan.once_through(self.evaluation_tokens, self.recipe, ranks, self.hooks)
        return self.loader.load(
            plan.plan_step, plan.tokens, range(1, plan.steps + 1), self.ranks.agree
        )

    def evaluation_due(self) -> bool:
        """Tell whether the model is evaluated after this step, and has not been yet."""
        due = self.recipe.evaluates(self.step, self.plan.steps)
        return due and self.checkpoints.evaluated < self.step

    def save_checkpoint(self) -> None:
        """Begin a checkpoint of the last finished step, which is written in the background."""
        if self.step > self.checkpoints.saved:
            self.publish_checkpoint(wait=True)
            with self.agreed(f"preparing the checkpoint of step {self.step}"):
                pass  # a plugin that failed in this step may have lost its state
            self.checkpoints.begin(self.step)

    def publish_checkpoint(self, wait: bool = False) -> None:
        """Publish a checkpoint that all ranks have written; notify the plugins."""
        if step := self.checkpoints.publish(wait):
            folder = step_folder(self.checkpoints.folder, step)
            self.notify("saved", folder=folder, kind="checkpoint", step=step)

    def save_model(self) -> None:
        """Write the best or last model, with the weights that plugins want saved."""
        folder, best = self.output / "model", self.checkpoints.best
        keep_best = self.recipe.checkpoint.keep_best

        def work() -> Path:
            save_model(self.accelerator, self.weights, self.tokenizer, self.recipe)
            return folder

        if keep_best and best is None:
            say(
                f"warning: no evaluation had a finite {keep_best}; "
                "model/ has the weights of the last step"
            )
        with self.checkpoints.best_restored(self.step) as step:
            if keep_best and best is not None:
                self.facts["best"] = {"step": step, keep_best: best.value}
                say(f"best: {keep_best} {best.value:.4g} at step {step}; model/ has its weights")
            work_with_weights(self.hooks, self, "save", work)
        self.notify("saved", folder=folder, kind="model", step=step)

    def gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Reduce gradients in a step's last backward pass only, or in each if sharded."""
        whole = self.recipe.train.keep_whole_gradients
        return gradient_sync(self.accelerator, self.module, last, whole)

    def _load_model(self) -> tuple[Module, Optimizer]:
        """Load the model, shard it over the ranks, and make its optimizer."""
        accelerator, recipe = self.accelerator, self.recipe
        set_seed(recipe.train.seed)
        if loads_in_bfloat16(accelerator):
            self.load.kwargs["dtype"] = torch.bfloat16

        def make_optimizer(model: Module) -> Optimizer:
            with agreed(accelerator, "making the optimizer"):
                optimizer = self.hooks.optimizer(model=model, train=recipe.train)
                ensure_uses_settings(optimizer, recipe.train, self.active.having("optimizer"))
                return optimizer

        with explain_out_of_memory_in_loading(recipe, accelerator.process_index):
            # DeepSpeed scatters each tensor as it is made, so there ranks cannot agree afterwards.
            scatters = accelerator.distributed_type == DistributedType.DEEPSPEED
            with nullcontext() if scatters else agreed(accelerator, "loading the model"):
                model = self.hooks.optimize_model(load=self.load)
                ensure_saveable(model)
                model.train()
                facts = model_facts(model, self.load)
                self._files = facts[MODEL_FILES]
            ensure_alike(accelerator, facts, SAME_INPUTS)
            return shard_model(accelerator, self.load, model, make_optimizer)

    def _plan_steps(self) -> tuple[Plan, Schedule]:
        """Plan steps and learning rates, the same on every rank."""
        with agreed(self.accelerator, "planning the steps"):
            plan = Plan(self.tokens, self.recipe, self.accelerator.num_processes, self.hooks)
            factor = self.hooks.schedule(train=self.recipe.train, steps=plan.steps)
            schedule = Schedule(factor, self.optimizer, plan.steps)
            facts = plan.facts() | schedule.facts()
        ensure_alike(self.accelerator, facts, SAME_INPUTS)
        return plan, schedule


def describe_error(error: BaseException) -> str:
    """Return an error's message with its notes, which name the plugin."""
    return "; ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])


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


def describe(run: OpenRun) -> None:
    """Print the model, data, plan and plugins, and put them into the record."""
    recipe, record, plan = run.recipe, run.record, run.plan
    ranks, strategy = run.accelerator.num_processes, strategy_name(run.accelerator)
    dtypes = dtypes_of(run.accelerator, run.weights, run.optimizer)
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
        "eval": run.evaluation_tokens and data_facts(run.evaluation_tokens),
        "plugins": record.plugins(),
    }
    say(
        f"model: {model['type']} ({model['source']}), {model['parameters']:,} parameters, "
        f"{strategy}" + (f" of {ranks}" if ranks > 1 else "")
    )
    say(f"precision: {record.run['precision']}")
    if recipe.loses_small_steps:
        say(f"warning: {LOSSY}")
    for plugin in record.run["plugins"]:
        say(f"plugin {plugin['name']}: {plugin['summary']}")
    saved = run.checkpoints.saved
    say(
        f"steps: {plan.steps} of {plan.describe_step()}, {plan.per_epoch} an epoch"
        + recipe.train.replaced_epochs()
        + (f"; going on after step {saved}" if saved else "")
    )
    warnings = long_warmup(recipe.train, plan.steps), small_data(recipe.train, plan.examples)
    for warning in filter(None, warnings):
        say(f"warning: {warning}")
    say(f"checkpoints: {recipe.checkpoint.describe(plan.steps)}")


def describe_model(run: OpenRun) -> dict[str, Any]:
    """Return the model's source, type, sizes and number types for the record."""
    plain: Any = run.weights.plain
    sizes = [(num_weights(weight), weight.requires_grad) for weight in plain.parameters()]
    return {
        "source": run.recipe.model.path or "scratch",
        "type": plain.config.model_type,
        "parameters": sum(size for size, _ in sizes),
        "trained_parameters": sum(size for size, trained in sizes if trained),
        "dtype": run.recipe.model.dtype,
        "weights": run.recipe.model.weights,
    }
