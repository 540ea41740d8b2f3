"""The loop: global batches, gradients, optimizer steps, metrics, evaluations, checkpoints."""

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from .base.console import progress
from .base.types import Batch
from .ranks.connect import disconnect, gradient_sync, seed_step
from .ranks.failures import describe_failure
from .ranks.load_batches import GlobalBatch, explain_out_of_memory
from .ranks.optimizer_checks import explain_optimizer
from .ranks.step_numbers import Numbers, means_of
from .ranks.trained_model import evaluating, work_with_weights
from .run import Run


def train(run: Run) -> None:
    """Train to the last step, from step 1 or from the step after a checkpoint."""
    # At the end, however it comes: save, stop loading batches, then close the record.
    with run.lifecycle(), closing(run.global_batches()) as global_batches, saving_at_failure(run):
        evaluate(run)  # before step 1, or where a stop cut the last evaluation short
        for batch in global_batches:
            seed_step(run.recipe.train.seed, batch.step, batch.rank)
            learning_rate = run.schedule.set(batch.step)
            losses = forward_backward(run, batch)
            numbers = all_reduce(run, losses, batch)
            numbers.add(grad_norm=clip_gradients(run), loss_scale=run.loss_scale.factor)
            numbers.send()
            run.log.write(meanwhile=batch)  # the step before, while the device computes this one
            with explain_out_of_memory(run.recipe, batch, losses):
                update_weights(run, batch, numbers)

            run.step = batch.step
            run.log.keep(batch, numbers, learning_rate)
            run.notify("stepped")
            at_once = not run.log.reads_later or run.log.is_slow(batch)
            if at_once or run.evaluation_due() or run.checkpoints.due(run.step):
                run.log.write()
            evaluate(run)
            if run.step == 1:
                run.try_checkpoint()
            if run.checkpoints.due(run.step):  # as the best evaluation so far may have made it
                run.begin_checkpoint()
            run.publish_checkpoint()  # once all ranks have written it
        run.log.write()
        run.begin_checkpoint()  # if the run stops before its last step
        run.publish_checkpoint(wait=True)
        run.stopping.raise_if_stopped(run.step, run.recipe.output)
        run.save_final_model()
    disconnect(run.accelerator, run.module)


@contextmanager
def saving_at_failure(run: Run) -> Iterator[None]:
    """Log the last finished step; save it if a notice failed, which leaves the weights valid."""
    try:
        yield
    except BaseException as error:
        # Another notice may fail in here. So the ranks agree again, on this failure and on the
        # first; that decides once more whether they `all_can_save`.
        with suppress(Exception):
            if run.stopping.all_can_save:
                with run.agreed("logging the last step"):
                    run.log.write()
            else:
                run.log.write_alone()
        if run.stopping.all_can_save:
            try:
                run.checkpoints.save(run.step)
            except Exception as failed:  # must not hide the reason
                error.add_note(f"then, as it was saved: {describe_failure(failed)}")
        elif isinstance(error, Exception):  # a second signal ends the run at once
            run.checkpoints.rescue()
        raise


def forward_backward(run: Run, batch: GlobalBatch) -> list[Tensor]:
    """Accumulate the gradients of a global batch; return this rank's micro-batch losses."""
    losses: list[Tensor] = []
    whole = run.recipe.train.keep_whole_gradients
    with explain_out_of_memory(run.recipe, batch, losses):
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            last = number == len(batch.micro_batches)
            with gradient_sync(run.accelerator, run.module, last, whole):
                loss = compute_loss(run, micro_batch, batch.plan.denominator)
                # The denominator counts targets of all ranks, but ranks average their gradients.
                ranks, scale = run.accelerator.num_processes, run.loss_scale.factor
                run.accelerator.backward(loss * (ranks * scale))
            losses.append(loss.detach())
    return losses


def compute_loss(run: Run, micro_batch: Batch, denominator: float) -> Tensor:
    """Return a micro-batch's loss: its sum over targets, divided by the global batch's targets."""
    hooks = run.hooks  # without plugins, model/defaults.py answers
    return hooks.step(
        model=run.module, batch=micro_batch, denominator=denominator, token_nll=hooks.token_nll
    )


def all_reduce(run: Run, losses: list[Tensor], batch: GlobalBatch | None = None) -> Numbers:
    """Sum losses, a batch's counts and the plugins' metrics over all ranks, in one reduction."""
    given = run.active.metrics(run)
    metrics = {name: given[name] for name in sorted(given, key=str)}
    counts, facts = (batch.counts(), batch.compared()) if batch else ({}, {})
    facts["the names that 'add_metrics' gave"] = ", ".join(map(str, metrics)) or "none"
    return Numbers(run.accelerator, losses, {**counts, **metrics}, facts)


def clip_gradients(run: Run) -> Any:
    """Undo the loss's scale; clip to the recipe's norm (0: no limit); return the one before."""
    limit = run.recipe.train.max_grad_norm or math.inf
    run.loss_scale.unscale(run.module.parameters())
    return run.accelerator.clip_grad_norm_(run.module.parameters(), limit)


def update_weights(run: Run, batch: GlobalBatch, numbers: Numbers) -> None:
    """Step the optimizer, but not by a loss or norm that is not finite; forget the gradients."""
    optimizer: Any = run.optimizer
    broken = numbers.are_broken()
    with explain_optimizer(run.accelerator, type(optimizer).__name__):
        if run.log.reads_later:
            # With it, torch's fused optimizers skip a step; the log refuses it as it reads it.
            optimizer.found_inf = broken
            optimizer.step()
            del optimizer.found_inf  # a step without it is never skipped
        else:
            known = numbers.read()
            run.log.refuse_broken(batch, known)
            if math.isfinite(known["grad_norm"]):  # with a scaled loss, it may overflow
                optimizer.step()
    run.loss_scale.update(broken)
    run.module.zero_grad()  # the optimizer would zero only its own weights' gradients


def evaluate(run: Run) -> None:
    """Evaluate after the last finished step, or before the first, if that is due.

    A signal cuts it short.
    """
    if not run.evaluation_due():
        return

    def work() -> dict[str, Any]:
        with evaluating(run.module):
            losses = evaluation_losses(run)
            return {} if run.stopping.agreed_signal else evaluation_metrics(run, losses)

    with torch.no_grad():
        metrics = work_with_weights(run, "evaluate", work)
    if metrics:
        run.notify("logged", step=run.step, metrics=metrics)
        run.checkpoints.compare(run.step, metrics)


def evaluation_losses(run: Run) -> list[Tensor]:
    """Return this rank's losses of the evaluation data, as shares of the mean over its targets."""
    losses: list[Tensor] = []
    denominator = run.evaluation_tokens.divisor()
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
                    if run.stopping.agreed_signal:
                        return losses
                    batch_losses.append(compute_loss(run, micro_batch, denominator))
            losses += batch_losses
            advance(batch.plan.examples, f"after step {run.step}")
    return losses


def evaluation_metrics(run: Run, losses: list[Tensor]) -> dict[str, Any]:
    """Sum losses and metrics over all ranks; return their means over the targets."""
    tokens = run.evaluation_tokens
    numbers = all_reduce(run, losses)
    numbers.send()
    sums = numbers.read()
    means = {"loss": sums.pop("loss"), **means_of(sums, tokens.divisor())}
    return {
        **{f"eval_{name}": value for name, value in means.items()},
        "eval_tokens": int(tokens.targets.sum()),
    }
