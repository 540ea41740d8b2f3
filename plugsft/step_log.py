"""Logs a step's numbers, which are read while the device computes the next step.

Reading a number makes the host wait for the device, which then has nothing to do. So the loop keeps
the numbers of a step, and reads them when the next backward pass is under way. By then the
optimizer has stepped; torch's fused optimizers skip a step on the device if its loss or norm is not
finite. With all others, and with plugins that stop early, a step's numbers are read at once.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from .base.errors import TrainError
from .output.record import memory_gib
from .ranks.step_numbers import Numbers, can_skip_steps, means_of

if TYPE_CHECKING:
    from .ranks.load_batches import GlobalBatch
    from .run import Run


SLOW = 2.0
"""Seconds of a step whose line nobody should wait for."""


class StepLog:
    """The numbers of the last finished step, until they are logged."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._unread: Any = None
        self.reads_later = can_skip_steps(run.optimizer) and not run.recipe.provides("early_stop")
        """Whether a step's numbers are read while the next step runs."""

    def is_slow(self, batch: GlobalBatch) -> bool:
        """Tell whether a step took so long that reading its numbers at once costs nothing.

        Other ranks would have to agree.
        """
        return self._run.plan.ranks == 1 and time.perf_counter() - batch.started > SLOW

    def keep(self, batch: GlobalBatch, numbers: Numbers, learning_rate: float) -> None:
        """Keep the numbers of a finished step."""
        of_host = {"learning_rate": learning_rate, "memory_gib": round(memory_gib(), 3)}
        self._unread = batch, numbers, of_host

    def write(self, meanwhile: GlobalBatch | None = None) -> None:
        """Notify plugins and record of the last step's metrics, unless that is done.

        `meanwhile`: the step that the device computes; logging does not count as its time.
        """
        if self._unread is None:
            return
        metrics = self._read(meanwhile)
        begun = time.perf_counter()
        self._run.notify("logged", step=self._run.step, metrics=metrics)
        if meanwhile:
            meanwhile.logging = time.perf_counter() - begun

    def write_alone(self) -> None:
        """Record the last step on this rank; other ranks may be elsewhere, and so may plugins."""
        if self._unread:
            self._run.record.logged(self._run.step, self._read(compare=False))

    def refuse_broken(self, batch: GlobalBatch, numbers: dict[str, float]) -> None:
        """Refuse a loss or norm that is not finite, but for a norm that a scaled loss overflows.

        The optimizer has skipped the step, so the last finished one is the step before. (DeepSpeed
        steps in the last backward, and has changed the weights.) Nothing of it is saved.
        """
        loss, grad_norm = numbers["loss"], numbers["grad_norm"]
        if math.isfinite(loss) and (math.isfinite(grad_norm) or self._run.loss_scale.on):
            return
        self._run.step = batch.step - 1
        raise TrainError(
            f"step {batch.step}: loss {loss}, gradient norm {grad_norm}. Nothing of this step "
            f"is saved, and earlier checkpoints stand. Rows of this step: {batch.rows()}. A "
            "lower learning rate or a longer warm-up usually helps"
        )

    def _read(self, meanwhile: GlobalBatch | None = None, compare: bool = True) -> dict[str, Any]:
        """Wait for the numbers of the last step; return its metrics, or refuse broken numbers."""
        (batch, numbers, of_host), self._unread = self._unread, None
        sums, run, plan = numbers.read(compare), self._run, batch.plan
        self.refuse_broken(batch, sums)
        # A step ends when the loop asks for the next batch, or has read these numbers.
        ended = meanwhile.started if meanwhile else time.perf_counter()
        seconds = ended - batch.started - batch.logging
        computed, waited = sums.pop("computed_tokens"), sums.pop("data_wait_seconds")
        core = {name: sums.pop(name) for name in ("loss", "grad_norm")}
        scale = run.loss_scale.count(plan.step, sums.pop("loss_scale"), core["grad_norm"])
        return {
            **core,
            **scale,
            **of_host,
            **means_of(sums, plan.denominator),  # of plugins
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
