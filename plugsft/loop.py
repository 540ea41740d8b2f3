"""The loop: global batches, gradients, optimizer steps, metrics, evaluations, checkpoints."""

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn.functional import pad

from .base.errors import PluginError, TrainError
from .base.types import Batch
from .output.record import memory_gib
from .ranks.agree import ensure_alike
from .ranks.launch import disconnect, seed_step
from .ranks.load_batches import GlobalBatch
from .ranks.out_of_memory import explain_out_of_memory
from .ranks.sharded_optimizers import explain_optimizer
from .ranks.trained_model import evaluating, work_with_weights
from .run import OpenRun

MOST_METRICS = 240
"""Most metrics of plugins in a step."""
NUMBERS = MOST_METRICS + 16
"""Numbers in the reduction of a step; the others are the core's."""
SAME_CALLS = "'order_examples', 'plan_batches' and 'add_metrics' give the same on all ranks"


def train(run: OpenRun) -> None:
    """Train to the last step, from step 1 or from the step after a checkpoint."""
    with run.lifecycle(), closing(run.global_batches()) as global_batches, saving_at_failure(run):
        for batch in global_batches:
            seed_step(run.recipe.train.seed, batch.step, batch.rank)
            learning_rate = run.schedule.set(batch.step)
            losses = forward_backward(run, batch)
            loss, sums = all_reduce(run, losses, batch)
            grad_norm = clip_gradients(run)
            ensure_finite(batch, loss, grad_norm)
            with (
                explain_out_of_memory(run.recipe, batch, losses),
                explain_optimizer(run.accelerator, type(run.optimizer).__name__),
            ):
                run.optimizer.step()
            run.module.zero_grad()  # the optimizer would zero only its own weights' gradients

            run.step = batch.step
            run.notify("stepped")
            metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate}
            log_metrics(run, metrics | step_metrics(run, batch, sums))
            if run.evaluation_due():
                log_metrics(run, evaluation := evaluate(run))
                run.checkpoints.compare(run.step, evaluation)
                run.notify("evaluated", metrics=evaluation)
            if run.checkpoint_due():
                run.save_checkpoint()
        run.save_checkpoint()  # if the run stops before its last step
        run.stopping.raise_stopped(run.step, run.recipe.output)
        run.save_model()
    disconnect(run.accelerator, run.module)


@contextmanager
def saving_at_failure(run: OpenRun) -> Iterator[None]:
    """Save the last finished step if a notice fails, which leaves the weights valid."""
    try:
        yield
    except Exception:
        if run.stopping.can_save:
            run.checkpoints.save(run.step)
        raise


def forward_backward(run: OpenRun, batch: GlobalBatch) -> list[Tensor]:
    """Accumulate the gradients of a global batch; return this rank's micro-batch losses."""
    losses: list[Tensor] = []
    with explain_out_of_memory(run.recipe, batch, losses):
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            with run.gradient_sync(last=number == len(batch.micro_batches)):
                loss = compute_loss(run, micro_batch, batch.denominator)
                # The denominator counts targets of all ranks, but ranks average their gradients.
                run.accelerator.backward(loss * run.accelerator.num_processes)
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


def all_reduce(
    run: OpenRun, losses: list[Tensor], batch: GlobalBatch | None = None
) -> tuple[float, dict[str, float]]:
    """Sum losses, a batch's counts and the plugins' metrics over all ranks, in one reduction."""
    metrics, counts = plugin_metrics(run), batch.counts() if batch else {}
    facts = {
        **(batch.facts() if batch else {}),
        "the names that 'add_metrics' gave": ", ".join(metrics) or "none",
    }
    checksum = xxhash.xxh32_intdigest(repr(facts).encode()) % 2**24  # exact in float32
    # Counts need float64, which Apple's GPUs do not have.
    dtype = torch.float32 if run.accelerator.device.type == "mps" else torch.float64
    loss = torch.stack(losses).to(dtype).sum()
    own = [
        torch.as_tensor(value, dtype=dtype, device=loss.device).reshape(1)
        for value in (loss, *metrics.values())
    ]
    local = torch.cat([loss.new_tensor([checksum, *counts.values()]), *own])
    # Its size is the same on all ranks, even if their metrics are not.
    local = pad(local, (0, NUMBERS - len(local)))
    checksums, *sums = run.accelerator.reduce(local, reduction="sum").tolist()
    if checksums != checksum * run.accelerator.num_processes:
        ensure_alike(run.accelerator, facts, SAME_CALLS)
    summed = dict(zip([*counts, "loss", *metrics], sums, strict=False))
    return summed.pop("loss"), summed


def plugin_metrics(run: OpenRun) -> dict[str, Tensor | float]:
    """Return this rank's sums of the plugins' metrics, by name."""
    per_plugin: Any = run.hooks.add_metrics()  # a notice returns a list
    metrics = {name: value for plugin in per_plugin for name, value in plugin.items()}
    if len(metrics) > MOST_METRICS:
        raise PluginError(f"'add_metrics' gave more than {MOST_METRICS} metrics in all")
    return dict(sorted(metrics.items()))


def clip_gradients(run: OpenRun) -> float:
    """Clip gradients to the recipe's norm (0: no limit); return the norm before clipping."""
    limit = run.recipe.train.max_grad_norm or math.inf
    norm = run.accelerator.clip_grad_norm_(run.module.parameters(), limit)
    return math.nan if norm is None else float(norm)


def ensure_finite(batch: GlobalBatch, loss: float, grad_norm: float) -> None:
    """Refuse a loss or norm that is not finite, before anything is saved.

    The weights have not changed yet, except under DeepSpeed, which steps in the last backward.
    """
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise TrainError(
            f"step {batch.step}: loss {loss}, gradient norm {grad_norm}. Nothing of this step is "
            f"saved, and earlier checkpoints stand. Rows of this step: {batch.rows()}. A lower "
            "learning rate or a longer warm-up usually helps"
        )


def step_metrics(run: OpenRun, batch: GlobalBatch, sums: dict[str, float]) -> dict[str, Any]:
    """Return a step's metrics of plugins, speed and the batch."""
    seconds, plan = batch.seconds(), batch.plan
    computed, waited = sums.pop("computed_tokens"), sums.pop("data_wait_seconds")
    return {
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
        "memory_gib": round(memory_gib(), 3),
    }


def log_metrics(run: OpenRun, metrics: dict[str, Any]) -> None:
    """Send metrics to the record and the plugins."""
    run.notify("logged", step=run.step, metrics=metrics)


@torch.no_grad()
def evaluate(run: OpenRun) -> dict[str, Any]:
    """Return the mean loss and metrics of the evaluation data."""

    def work() -> dict[str, Any]:
        with evaluating(run.module):
            losses = evaluation_losses(run)
        return evaluation_metrics(run, losses)

    metrics: dict[str, Any] = work_with_weights(run.hooks, run, "evaluate", work)
    return metrics


def evaluation_losses(run: OpenRun) -> list[Tensor]:
    """Return this rank's losses of the evaluation data, summed over targets."""
    losses: list[Tensor] = []
    with closing(run.evaluation_batches()) as global_batches:
        for batch in global_batches:
            batch_losses: list[Tensor] = []
            with explain_out_of_memory(run.recipe, batch, batch_losses, "evaluation, "):
                for micro_batch in batch.micro_batches:
                    batch_losses.append(compute_loss(run, micro_batch, denominator=1))
            losses += batch_losses
    return losses


def evaluation_metrics(run: OpenRun, losses: list[Tensor]) -> dict[str, Any]:
    """Sum losses and metrics over all ranks; return their means over the targets."""
    tokens = run.evaluation_tokens
    assert tokens is not None
    loss, sums = all_reduce(run, losses)
    denominator = tokens.divisor()
    return {
        "eval_loss": loss / denominator,
        **{f"eval_{name}": value / denominator for name, value in sums.items()},
        "eval_tokens": int(tokens.targets[tokens.weighted(np.arange(len(tokens)))].sum()),
    }
