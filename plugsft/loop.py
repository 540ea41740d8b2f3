"""The loop: global batches, gradients, optimizer steps, metrics, evaluations, checkpoints."""

import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .base.console import progress
from .base.errors import PluginError, TrainError
from .base.types import Batch
from .output.record import memory_gib
from .ranks.launch import disconnect, seed_step
from .ranks.load_batches import GlobalBatch, explain_out_of_memory
from .ranks.optimizer_checks import explain_optimizer
from .ranks.step_numbers import MOST_METRICS, Numbers
from .ranks.trained_model import evaluating, work_with_weights
from .run import OpenRun


def train(run: OpenRun) -> None:
    """Train to the last step, from step 1 or from the step after a checkpoint."""
    with run.lifecycle(), closing(run.global_batches()) as global_batches, saving_at_failure(run):
        evaluate(run)  # if a stop cut the last evaluation short
        for batch in global_batches:
            seed_step(run.recipe.train.seed, batch.step, batch.rank)
            learning_rate = run.schedule.set(batch.step)
            losses = forward_backward(run, batch)
            numbers = all_reduce(run, losses, batch).send(
                clip_gradients(run), run.loss_scale.factor
            )
            log_step(run, meanwhile=batch)  # the step before, while the device computes this one
            with (
                explain_out_of_memory(run.recipe, batch, losses),
                explain_optimizer(run.accelerator, type(run.optimizer).__name__),
            ):
                update_weights(run, batch, numbers)
            run.module.zero_grad()  # the optimizer would zero only its own weights' gradients

            run.step = batch.step
            facts = {"learning_rate": learning_rate, "memory_gib": round(memory_gib(), 3)}
            run.unread = batch, numbers, facts
            run.notify("stepped")
            if not run.reads_late or run.evaluation_due() or run.checkpoints.due(run.step):
                log_step(run)
            evaluate(run)
            if run.checkpoints.due(run.step):
                run.save_checkpoint()
            run.publish_checkpoint()  # once all ranks have written it
        log_step(run)
        run.save_checkpoint()  # if the run stops before its last step
        run.publish_checkpoint(wait=True)
        run.stopping.raise_stopped(run.step, run.recipe.output)
        run.save_model()
    disconnect(run.accelerator, run.module)


@contextmanager
def saving_at_failure(run: OpenRun) -> Iterator[None]:
    """Log the last finished step; save it if a notice failed, which leaves the weights valid."""
    try:
        yield
    except BaseException as error:
        with suppress(Exception):
            if run.stopping.can_save:
                with run.agreed("logging the last step"):
                    log_step(run)
            elif run.unread:  # other ranks may be elsewhere, and so may plugins
                run.record.logged(run.step, read_numbers(run))
        if run.stopping.can_save:
            run.checkpoints.save(run.step)
        elif isinstance(error, Exception):  # a second signal ends the run at once
            run.checkpoints.rescue()
        raise


def forward_backward(run: OpenRun, batch: GlobalBatch) -> list[Tensor]:
    """Accumulate the gradients of a global batch; return this rank's micro-batch losses."""
    losses: list[Tensor] = []
    with explain_out_of_memory(run.recipe, batch, losses):
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            with run.gradient_sync(last=number == len(batch.micro_batches)):
                loss = compute_loss(run, micro_batch, batch.plan.denominator)
                # The denominator counts targets of all ranks, but ranks average their gradients.
                ranks, scale = run.accelerator.num_processes, run.loss_scale.factor
                run.accelerator.backward(loss * (ranks * scale))
            losses.append(loss.detach())
    return losses


def compute_loss(run: OpenRun, micro_batch: Batch, denominator: float) -> Tensor:
    """Return a micro-batch's loss: its sum over targets, divided by the global batch's targets."""
    hooks = run.hooks  # without plugins, model/defaults.py answers
    loss = hooks.step(
        model=run.module, batch=micro_batch, denominator=denominator, token_nll=hooks.token_nll
    )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise PluginError(
            "'step' gave no tensor of one number; it must give the micro-batch's loss"
        )
    return loss


def all_reduce(run: OpenRun, losses: list[Tensor], batch: GlobalBatch | None = None) -> Numbers:
    """Sum losses, a batch's counts and the plugins' metrics over all ranks, in one reduction."""
    metrics, counts = plugin_metrics(run), batch.counts() if batch else {}
    facts = {
        **(batch.facts() if batch else {}),
        "the names that 'add_metrics' gave": ", ".join(metrics) or "none",
    }
    return Numbers(run.accelerator, losses, {**counts, **metrics}, facts)


def plugin_metrics(run: OpenRun) -> dict[str, Tensor | float]:
    """Return this rank's sums of the plugins' metrics, sorted by name."""
    metrics = run.active.metrics()
    if len(metrics) > MOST_METRICS:
        raise PluginError(f"'add_metrics' gave more than {MOST_METRICS} metrics in all")
    return dict(sorted(metrics.items()))


def clip_gradients(run: OpenRun) -> Tensor | float | None:
    """Clip gradients to the recipe's norm (0: no limit); return the norm before clipping."""
    limit = run.recipe.train.max_grad_norm or math.inf
    run.loss_scale.unscale(run.module.parameters())
    norm: Tensor | float | None = run.accelerator.clip_grad_norm_(run.module.parameters(), limit)
    return norm


def update_weights(run: OpenRun, batch: GlobalBatch, numbers: Numbers) -> None:
    """Step the optimizer, but not by a loss or norm that is not finite."""
    optimizer: Any = run.optimizer
    broken = numbers.are_broken()
    if run.reads_late:
        optimizer.found_inf = broken  # with it, torch's fused optimizers skip a step
    if run.reads_late or is_finite(run, batch, numbers.read()):
        optimizer.step()
    vars(optimizer).pop("found_inf", None)  # it is no state of the optimizer
    run.loss_scale.update(broken)


def is_finite(run: OpenRun, batch: GlobalBatch, numbers: dict[str, float]) -> bool:
    """Tell whether the norm is finite; refuse one that is not, unless the loss is scaled.

    Nothing is saved yet. The weights have not changed, except under DeepSpeed, which steps in the
    last backward.
    """
    loss, grad_norm = numbers["loss"], numbers["grad_norm"]
    finite = math.isfinite(grad_norm)
    if not (math.isfinite(loss) and (finite or run.loss_scale.on)):
        run.step = batch.step - 1
        raise TrainError(
            f"step {batch.step}: loss {loss}, gradient norm {grad_norm}. Nothing of this step is "
            f"saved, and earlier checkpoints stand. Rows of this step: {batch.rows()}. A lower "
            "learning rate or a longer warm-up usually helps"
        )
    return finite


def log_step(run: OpenRun, meanwhile: GlobalBatch | None = None) -> None:
    """Read and log the numbers of the last step, unless that is done.

    `meanwhile`: the step that the device computes; logging does not count as its time.
    """
    if run.unread is None:
        return
    metrics = read_numbers(run, meanwhile)
    logging = time.perf_counter()
    run.notify("logged", step=run.step, metrics=metrics)
    if meanwhile:
        meanwhile.started += time.perf_counter() - logging


def read_numbers(run: OpenRun, meanwhile: GlobalBatch | None = None) -> dict[str, Any]:
    """Wait for the numbers of the last step; return its metrics, or refuse broken numbers."""
    (batch, numbers, facts), run.unread = run.unread, None
    sums = numbers.read()
    is_finite(run, batch, sums)
    # The time until the loop asked for the next batch, or has read these numbers.
    seconds = (meanwhile.started if meanwhile else time.perf_counter()) - batch.started
    computed, waited = sums.pop("computed_tokens"), sums.pop("data_wait_seconds")
    plan, core = batch.plan, {name: sums.pop(name) for name in ("loss", "grad_norm")}
    return {
        **core,
        **run.loss_scale.count(plan.step, sums.pop("loss_scale"), core["grad_norm"]),
        **facts,
        **{name: value / plan.denominator for name, value in sums.items()},
        "epoch": round(plan.step / run.plan.per_epoch, 4),
        "trained_tokens": plan.targets,
        "tokens": plan.tokens,
        "tokens_per_second": round(plan.tokens / seconds, 1),
        "step_seconds": round(seconds, 5),
        "data_wait_seconds": round(waited / run.plan.ranks, 5),
        "padding": round(1 - plan.tokens / computed, 4),
        "examples_per_micro_batch": round(plan.examples / plan.micro_batches, 2),
        "imbalance": round(plan.imbalance, 4),
    }


def evaluate(run: OpenRun) -> None:
    """Evaluate after the last finished step, if that is due; a signal cuts it short."""

    def work() -> dict[str, Any]:
        with evaluating(run.module):
            losses = evaluation_losses(run)
            return {} if run.stopping.signal else evaluation_metrics(run, losses)

    if not run.evaluation_due():
        return
    with torch.no_grad():
        metrics = work_with_weights(run.hooks, run, "evaluate", work)
    if metrics:
        run.notify("logged", step=run.step, metrics=metrics)
        run.checkpoints.compare(run.step, metrics)
        run.notify("evaluated", metrics=metrics)


def evaluation_losses(run: OpenRun) -> list[Tensor]:
    """Return this rank's losses of the evaluation data, summed over targets."""
    losses: list[Tensor] = []
    with (
        closing(run.evaluation_batches()) as global_batches,
        progress("evaluation", len(run.evaluation_tokens), "examples") as advance,
    ):
        for batch in global_batches:
            batch_losses: list[Tensor] = []
            with explain_out_of_memory(run.recipe, batch, batch_losses, "evaluation, "):
                for micro_batch in batch.micro_batches:
                    with run.agreed("evaluating a micro-batch"):
                        pass  # the ranks stop before the same one
                    if run.stopping.signal:
                        return losses
                    batch_losses.append(compute_loss(run, micro_batch, denominator=1))
            losses += batch_losses
            advance(batch.plan.examples, f"after step {run.step}")
    return losses


def evaluation_metrics(run: OpenRun, losses: list[Tensor]) -> dict[str, Any]:
    """Sum losses and metrics over all ranks; return their means over the targets."""
    tokens = run.evaluation_tokens
    sums = all_reduce(run, losses).send().read()
    del sums["grad_norm"], sums["loss_scale"]
    denominator = tokens.divisor()
    return {
        **{f"eval_{name}": value / denominator for name, value in sums.items()},
        "eval_tokens": int(tokens.targets[tokens.weighted(np.arange(len(tokens)))].sum()),
    }
