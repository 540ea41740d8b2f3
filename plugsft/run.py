"""A run, as the loop and plugins see it; and how it is opened, stage by stage."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from .base.atomic import step_folder
from .base.console import format_count, say
from .base.errors import PluginError, Stopped
from .batches.plan import Plan, small_data
from .checkpoint.contents import contents_of
from .checkpoint.final_model import save_model
from .checkpoint.save import Checkpoints
from .checkpoint.state import TrainState
from .model.published import taken_out
from .model.schedule import without_peak
from .model.tensor_shards import num_weights
from .output.record import Record, data_facts
from .ranks.agree import Ranks, agreed, ending_together, is_known_to_all
from .ranks.connect import strategy_name
from .ranks.failures import describe_failure
from .ranks.load_batches import BatchLoader, GlobalBatch
from .ranks.loss_scale import LossScale
from .ranks.precision import describe_dtypes, dtypes_of
from .ranks.stopping import Stopping
from .ranks.trained_model import RunModel, work_with_weights
from .recipe.capabilities import Capability
from .recipe.tables import LOSSY, Recipe
from .registry.active import Active
from .stages import (
    Loaded,
    connect_ranks,
    load_model,
    plan_steps,
    save_scratch_model,
)
from .step_log import StepLog
from .tokens.ends import pad_id
from .tokens.store import Prepared


def open_run(record: Record, data: Prepared, checkpoints: Sequence[Path] = ()) -> "Run":
    """Open a run at step 1, or after the first undamaged one of `checkpoints`."""
    recipe, active = record.recipe, record.active
    scratch = save_scratch_model(recipe, data)
    accelerator = connect_ranks(recipe, active, record.machine, data)
    loaded = load_model(recipe, active, accelerator, data, scratch)
    run = Run(recipe, active, record, accelerator, data.tokenizer, loaded)
    run.make_plan(data)
    run.checkpoints.restore(checkpoints)
    run.step = run.checkpoints.published
    describe(run)
    return run


@dataclass(eq=False)
class Run:
    """A run: its ranks, model, optimizer, data, plan, checkpoints and record.

    Plugins see it as `Run`, its `model` as `RunModel`, its `ranks` as `Ranks`.
    """

    recipe: Recipe
    active: Active
    record: Record
    accelerator: Accelerator
    tokenizer: Any
    loaded: Loaded
    step: int = 0
    """The last finished step."""

    def __post_init__(self) -> None:
        recipe, accelerator, self.hooks = self.recipe, self.accelerator, self.active.hooks
        self.output, self.is_main = recipe.folder, accelerator.is_main_process
        self.facts = self.record.run
        """The content of run.json. A plugin may add a table under its own name."""
        self.module, self.optimizer = self.loaded.module, self.loaded.optimizer
        self.weights = self.loaded.weights
        self.loss_scale = LossScale(accelerator)
        self.packing = recipe.provides("packed_rows")
        pad = pad_id(self.tokenizer, self.weights.plain.config)
        self.loader = BatchLoader(self.hooks, accelerator, pad, bool(self.packing))
        self.ranks = Ranks(accelerator, self.hooks)
        self.model = RunModel(self)
        self.stopping = Stopping(self.describe_stop)
        self.log = StepLog(self)

    def make_plan(self, data: Prepared) -> None:
        """Let plugins add columns to the tokens, plan the steps, and make ready to save."""
        recipe, accelerator = self.recipe, self.accelerator
        add_columns = partial(self.hooks.add_columns, model=self.model, ranks=self.ranks)
        self.tokens = add_columns(tokens=data.tokens)
        self.evaluation_tokens: Any = data.evaluation and add_columns(tokens=data.evaluation)
        self.plan, self.schedule = plan_steps(
            recipe, self.active, accelerator, self.tokens, self.optimizer
        )
        self.contents = contents_of(self)
        state = TrainState(self.weights, self.optimizer, self.loss_scale)
        self.checkpoints = Checkpoints(
            recipe,
            self.active,
            accelerator,
            state,
            self.plan.steps,
            self.plan.per_epoch,
            self.contents,
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
        published = self.checkpoints.published
        lost = f"{format_count(self.step - published, 'step')} since " + (
            f"the checkpoint of step {published}, from which --resume goes on"
            if published
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
            keeps_state = plugin in self.active.having("state_dict")
            self.stopping.fail(error, fatal=keeps_state)

    def agreed(self, operation: str) -> AbstractContextManager[None]:
        """Run a block on all ranks; agree on failures and on stopping before going on."""
        return agreed(operation, self.stopping)

    @contextmanager
    def lifecycle(self) -> Iterator[None]:
        """End the run, however it ends: notify the plugins, and close the record."""
        notified = False
        try:
            with self.stopping, ending_together(self.recipe.output):
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
            self.record.end(status, describe_failure(error))
            if not notified:
                for _, plugin_error in self.active.notify("finished", run=self, status=status):
                    error.add_note(f"then, as the run ended: {describe_failure(plugin_error)}")
            self.record.close()
        except Exception as closing_error:  # a full disk, or a plugin's summary
            error.add_note(f"then, as the record was closed: {describe_failure(closing_error)}")

    def global_batches(self) -> Generator[GlobalBatch, None, None]:
        """Load the global batches of the remaining steps, until a stop."""
        steps = range(self.step + 1, self.plan.steps + 1)
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
            plan = Plan(self.evaluation_tokens, self.recipe, ranks, self.hooks, evaluates=True)
        return self.loader.load(plan.plan_step, plan.tokens, range(1, plan.steps + 1), self.agreed)

    def evaluation_due(self) -> bool:
        """Tell whether the model is evaluated after this step, and has not been yet."""
        due = self.recipe.evaluates(self.step, self.plan.steps, self.plan.per_epoch)
        return due and self.checkpoints.evaluated < self.step

    def try_checkpoint(self) -> None:
        """Refuse after step 1 what no checkpoint could hold, rather than after hours."""
        with self.agreed("trying a checkpoint"):
            pass  # a plugin that failed in this step says so first
        self.checkpoints.describe()

    def begin_checkpoint(self) -> None:
        """Begin a checkpoint of the last finished step, which is written in the background."""
        if self.step > self.checkpoints.begun:
            self.publish_checkpoint(wait=True)
            with self.agreed(f"preparing the checkpoint of step {self.step}"):
                pass  # a plugin that failed in this step may have lost its state
            self.checkpoints.begin(self.step)

    def publish_checkpoint(self, wait: bool = False) -> None:
        """Publish a checkpoint that all ranks have written; notify the plugins."""
        if step := self.checkpoints.publish(wait):
            folder = step_folder(self.checkpoints.folder, step)
            self.notify("saved", folder=folder, kind="checkpoint", step=step)

    def save_final_model(self) -> None:
        """Write the best or last model, with the weights that plugins want saved."""
        folder, best = self.output / "model", self.checkpoints.best
        keep_best = self.recipe.checkpoint.keep_best

        def work() -> Path:
            save_model(self)
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
            work_with_weights(self, "save", work)
        self.notify("saved", folder=folder, kind="model", step=step)


def describe(run: Run) -> None:
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
    if model["kept"]:
        parts = (f"{name} {count:,} weights" for name, count in model["kept"].items())
        say(f"kept as they are, and not trained: {', '.join(parts)}")
    say(f"precision: {record.run['precision']}")
    if recipe.loses_small_steps:
        say(f"warning: {LOSSY}")
    for plugin in record.run["plugins"]:
        say(f"plugin {plugin['name']}: {plugin['summary']}")
    done = run.checkpoints.published
    say(
        f"steps: {plan.steps} of {plan.describe_step()}, {plan.per_epoch} an epoch"
        + recipe.train.replaced_epochs()
        + (f"; going on after step {done}" if done else "")
    )
    for warning in (
        without_peak(recipe.train, plan.steps),
        small_data(recipe.train, plan.examples),
    ):
        if warning:
            say(f"warning: {warning}")
    say(f"checkpoints: {recipe.checkpoint.describe(plan.steps, plan.per_epoch)}")


def describe_model(run: Run) -> dict[str, Any]:
    """Return the model's source, type, sizes and number types for the record."""
    plain, model = run.weights.plain, run.recipe.model
    trained = [weight for weight in plain.parameters() if weight.requires_grad]
    return {
        "source": model.path or "scratch",
        "type": plain.config.model_type,
        "parameters": sum(map(num_weights, plain.parameters())),
        "trained_parameters": sum(map(num_weights, trained)),
        "dtype": model.dtype,
        "weights": model.weights,
        "sees": bool(taken_out(plain)),
        "kept": run.loaded.load.kept.counts(),
        "unused": run.loaded.load.kept.unused,
    }
