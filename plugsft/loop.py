"""The loop: a whole run, from its first step to its last."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from transformers import set_seed

from .base.build_once import once
from .base.checksums import digest
from .base.console import say
from .base.errors import TrainError
from .base.machine import Machine
from .base.types import Batch, Window
from .batches.defaults import BatchDefaults
from .batches.plan import Plan
from .data.defaults import DataDefaults
from .data.load_tokenizer import pad_id
from .data.prepare import Prepared, prepare
from .hooks import Hooks
from .model.config import check_context, check_ids
from .model.defaults import ModelDefaults
from .model.load import Load, load_of, make_model
from .model.schedule import Schedule, check_schedule
from .output.checkpoint import Checkpoints
from .output.final_model import ensure_saveable, save_model
from .output.record import Record, data_facts, memory_gib
from .ranks.agree import agreed, ending_together, ensure_alike
from .ranks.columns import Prelude
from .ranks.launch import connect, disconnect, exchange, name_of, quiet, seed_step
from .ranks.load_batches import Feeder, rows_of
from .ranks.out_of_memory import fitting, loading
from .ranks.precision import truth
from .ranks.same_inputs import CURE, ensure_same_inputs, model_facts, plan_facts
from .ranks.sharding import casts, is_sharded, spread
from .ranks.signals import Stop
from .ranks.state import Held, held_by
from .recipe.tables import LOSSY, Recipe
from .registry.active import Active, check
from .tokens.store import Tokens


def train(recipe: Recipe, active: Active, machine: Machine, resume: Sequence[Path] = ()) -> None:
    """Train a recipe, from step 1 or from the first undamaged checkpoint."""
    quiet()
    record = Record(recipe, machine, active)
    hook = active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults(), record).hook
    ensure_sound(recipe, active, machine)
    data = prepare(recipe, active)
    check_ids(recipe, data.largest_id)
    scratch = scratch_model(recipe, data)

    accelerator = connect(recipe, machine)
    ensure_same_inputs(accelerator, recipe, active, data)
    how, model, optimizer = load(recipe, hook, scratch, accelerator)
    feeder = Feeder(hook, accelerator, pad_id(data.tokenizer))
    prelude = Prelude(accelerator, hook, feeder, how)
    tokens = prelude.annotate(model, data.tokens)
    held_out = data.held_out and prelude.annotate(model, data.held_out)
    plan, schedule = plan_steps(accelerator, recipe, hook, tokens, optimizer)
    held = held_by(accelerator, model, optimizer)
    checkpoints = Checkpoints(recipe, active, tokens, accelerator, held, plan.steps)
    checkpoints.restore(resume)
    describe(record, recipe, accelerator, held, tokens, held_out, plan, checkpoints)
    windows = feeder.feed(plan.window, tokens, range(checkpoints.saved + 1, plan.steps + 1))
    with Stop() as stop, record, stop.raised(), closing(windows), ending_together(recipe.output):
        clock = time.perf_counter()
        for fed in windows:
            window, waited = fed.window, time.perf_counter() - clock
            parts: list[Tensor] = []
            seed_step(recipe.train.seed, window.step, accelerator.process_index)
            rate = schedule.set(window.step)
            with fitting(recipe, window, held.rank, tokens, parts):
                for number, batch in enumerate(fed.batches, start=1):
                    last, whole = number == len(fed.batches), recipe.train.keep_whole_gradients
                    with exchange(accelerator, model, last, whole):
                        part = loss_of(hook, model, batch, window.total)
                        # The total counts every rank, but ranks average their gradients: undo that.
                        accelerator.backward(part * accelerator.num_processes)
                    parts.append(part.detach())
            counts = {"asked": stop.asked, "slots": fed.slots, "waited": waited}
            loss, sums = together(accelerator, parts, noted(hook), counts)
            norm = clip(accelerator, model, recipe.train.max_grad_norm)
            ensure_finite(loss, norm, window, tokens)
            with fitting(recipe, window, held.rank, tokens, parts):
                optimizer.step()
            model.zero_grad()  # the optimizer would zero only the gradients of its own weights
            metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate}
            stopping = sums.pop("asked") > 0
            metrics |= measure(window, plan, sums, time.perf_counter() - clock)
            tell(hook, accelerator, stop, window.step, metrics)
            last = window.step == plan.steps
            if held_out is not None and (last or recipe.evaluates(window.step)):
                metrics = evaluate(accelerator, model, hook, feeder, held_out, recipe)
                tell(hook, accelerator, stop, window.step, metrics)
            if last or stopping or checkpoints.due(window.step):
                checkpoints.save(window.step)
            if stopping:
                stop.end(accelerator, window.step, recipe.output)
            clock = time.perf_counter()
        save_model(accelerator, model, held, data.tokenizer, recipe)
    disconnect(accelerator, model)


def ensure_sound(
    recipe: Recipe, active: Active, machine: Machine, hooks: Sequence[str] | None = None
) -> None:
    """Refuse settings that would fail, before anything is loaded."""
    check(active, recipe, machine, hooks)
    check_context(recipe)
    check_schedule(recipe.train)


def load(
    recipe: Recipe, hook: Hooks, scratch: Path, accelerator: Accelerator
) -> tuple[Load, Module, Optimizer]:
    """Load the model and make its optimizer, over the ranks; return how it was loaded, too."""
    set_seed(recipe.train.seed)
    how = load_of(recipe.model, scratch, empty=is_sharded(accelerator))
    if casts(accelerator):
        how.kwargs["dtype"] = torch.bfloat16

    def make(held: Module) -> Optimizer:
        with agreed(accelerator, "making the optimizer"):
            return hook.optimizer(model=held, train=recipe.train)

    with loading(recipe, accelerator.process_index):
        # DeepSpeed divides each tensor among the ranks as it is made: that cannot be agreed on.
        alone = accelerator.distributed_type != DistributedType.DEEPSPEED
        with agreed(accelerator, "loading the model") if alone else nullcontext():
            model = hook.optimize_model(load=how)
            ensure_saveable(model)
            model.train()
            facts = model_facts(model, how)
        ensure_alike(accelerator, facts, CURE)
        return how, *spread(accelerator, how, model, make)


def plan_steps(
    accelerator: Accelerator, recipe: Recipe, hook: Hooks, tokens: Tokens, optimizer: Optimizer
) -> tuple[Plan, Schedule]:
    """Lay out the run's steps and learning rates, the same on every rank."""
    with agreed(accelerator, "planning the steps"):
        plan = Plan(tokens, recipe, accelerator.num_processes, hook)
        schedule = Schedule(recipe.train, optimizer, plan.steps)
        facts = plan_facts(plan)
    ensure_alike(accelerator, facts, CURE)
    return plan, schedule


def scratch_model(recipe: Recipe, data: Prepared) -> Path:
    """Make the recipe's new model, once, as a folder that is loaded like any other.

    Before the process group: in one, transformers lets nobody but rank 0 save.
    """
    scratch = recipe.model.scratch
    if scratch is None:
        return Path()
    key = {
        "scratch": scratch.model_dump(),
        "seed": recipe.train.seed,
        "tokenizer": data.tokenizer_folder.name,
    }

    def build(folder: Path) -> None:
        make_model(scratch, data.tokenizer, recipe.train.seed).save_pretrained(folder)

    return once(recipe.folder / "scratch" / f"model-{digest(key)}", build)


def loss_of(hook: Hooks, model: Module, batch: Batch, total: int) -> Tensor:
    """Return a micro-batch's loss."""
    return hook.step(model=model, batch=batch, total=total, score=hook.score)


def noted(hook: Hooks) -> dict[str, Tensor]:
    """Return this rank's plugin metrics since the last call."""
    measured: Any = hook.measure()  # a notice returns a list
    return {name: value for metrics in measured for name, value in metrics.items()}


def together(
    accelerator: Accelerator,
    parts: list[Tensor],
    sums: Mapping[str, Tensor],
    counts: Mapping[str, float],
) -> tuple[float, dict[str, float]]:
    """All-reduce the loss, metrics and counters at once."""
    # Counts need float64, which Apple's GPUs do not have.
    exact = torch.float32 if accelerator.device.type == "mps" else torch.float64
    loss = torch.stack(parts).to(exact).sum()
    metrics = torch.stack([loss, *(value.to(loss) for value in sums.values())])
    local = torch.cat([metrics, loss.new_tensor([*counts.values()])])
    total, *rest = accelerator.reduce(local, reduction="sum").tolist()
    return total, dict(zip([*sums, *counts], rest, strict=True))


def clip(accelerator: Accelerator, model: Module, limit: float) -> float:
    """Clip gradients to a norm (0: no limit); return the norm before."""
    norm = accelerator.clip_grad_norm_(model.parameters(), limit or math.inf)
    return float("nan") if norm is None else float(norm)


def ensure_finite(loss: float, norm: float, window: Window, tokens: Tokens) -> None:
    """Stop before a broken gradient reaches the weights."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    rows = rows_of(tokens, [part for rank in window.layout for part in rank])
    raise TrainError(
        f"step {window.step}: loss {loss}, gradient norm {norm}. Nothing of this step is saved, "
        f"and earlier checkpoints stand. Rows of this step: {rows}. A lower learning rate or a "
        "longer warm-up usually helps"
    )


def measure(window: Window, plan: Plan, sums: dict[str, float], seconds: float) -> dict[str, Any]:
    """Return a step's metrics: speed, batches, and plugins'."""
    waited, slots = (sums.pop(name) for name in ("waited", "slots"))
    return {
        **{name: value / window.total for name, value in sums.items()},
        "epoch": round(window.step / plan.per_epoch, 4),
        "trained_tokens": window.trained,
        "tokens": window.tokens,
        "tokens_per_second": round(window.tokens / seconds, 1),
        "step_seconds": round(seconds, 5),
        "wait_seconds": round(waited / plan.ranks, 5),
        "fill": round(window.tokens / slots, 4),
        "documents": round(window.examples / window.parts, 2),
        "imbalance": round(window.imbalance, 4),
        "memory_gib": round(memory_gib(), 3),
    }


def tell(
    hook: Hooks, accelerator: Accelerator, stop: Stop, step: int, metrics: dict[str, Any]
) -> None:
    """Log metrics. A plugin's error there ends all ranks after saving."""
    if accelerator.is_main_process:
        with stop.kept():
            hook.log(step=step, metrics=metrics)


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: Module,
    hook: Hooks,
    feeder: Feeder,
    held_out: Tokens,
    recipe: Recipe,
) -> dict[str, Any]:
    """Return the mean loss per target on the evaluation data."""
    plan = Plan.once_through(held_out, recipe, accelerator.num_processes, hook)
    parts: list[Tensor] = []
    model.eval()
    with closing(feeder.feed(plan.window, held_out, range(1, plan.steps + 1))) as windows:
        for fed in windows:
            done: list[Tensor] = []
            rank = accelerator.process_index
            with fitting(recipe, fed.window, rank, held_out, done, "evaluation, "):
                for batch in fed.batches:
                    done.append(loss_of(hook, model, batch, 1))
            parts += done
    model.train()
    total = int(held_out.units.sum())
    loss, sums = together(accelerator, parts, noted(hook), {})
    return {
        "eval_loss": loss / total,
        **{f"eval_{name}": value / total for name, value in sums.items()},
        "eval_tokens": int(held_out.trained.sum()),
    }


def describe(
    record: Record,
    recipe: Recipe,
    accelerator: Accelerator,
    held: Held,
    tokens: Tokens,
    held_out: Tokens | None,
    plan: Plan,
    checkpoints: Checkpoints,
) -> None:
    """Print and record model, data, plan and plugins."""
    plain: Any = held.plain
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in plain.parameters()]
    ranks = accelerator.num_processes
    facts = {
        "source": recipe.model.path or "scratch",
        "type": plain.config.model_type,
        "parameters": sum(size for size, _ in sizes),
        "trained_parameters": sum(size for size, trained in sizes if trained),
        "dtype": recipe.model.dtype,
        "weights": recipe.model.weights,
    }
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    record.run["machine"] |= {
        "device": str(accelerator.device.type),
        "gpus": gpus,
        "ranks": ranks,
        "launcher": name_of(accelerator),
    }
    record.run |= {
        "precision": truth(accelerator, held),
        "model": facts,
        "data": data_facts(tokens),
        "eval": data_facts(held_out) if held_out is not None else None,
        "plugins": record.plugins(),
    }
    say(
        f"model: {facts['type']} ({facts['source']}), {facts['parameters']:,} parameters, "
        f"{name_of(accelerator)}" + (f" of {ranks}" if ranks > 1 else "")
    )
    say(f"precision: {record.run['precision']}")
    if recipe.model.weights == "bfloat16":
        say(f"warning: {LOSSY}")
    for plugin in record.run["plugins"]:
        say(f"plugin {plugin['name']}: {plugin['verdict']}")
    say(
        f"steps: {plan.steps} of {plan.examples_in_a_step}, {plan.per_epoch} an epoch"
        + (f"; going on after step {checkpoints.saved}" if checkpoints.saved else "")
    )
    say(f"checkpoints: {checkpoints.rhythm}")
    with agreed(accelerator, "beginning the record"):
        record.open({"total": plan.steps, "per_epoch": plan.per_epoch}, checkpoints.saved)
