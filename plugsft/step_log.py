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
from .ranks.step_numbers import Numbers, can_skip_steps

if TYPE_CHECKING:
    from .ranks.load_batches import GlobalBatch
    from .run import OpenRun


class StepLog:
    """The numbers of the last finished step, until they are logged."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._unread: Any = None
        self.is_late = can_skip_steps(run.optimizer) and not run.recipe.provides("early_stop")
        """Whether a step's numbers are read while the next step runs."""

    def keep(self, batch: GlobalBatch, numbers: Numbers, learning_rate: float) -> None:
        """Keep the numbers of a finished step."""
        facts = {"learning_rate": learning_rate, "memory_gib": round(memory_gib(), 3)}
        self._unread = batch, numbers, facts

    def write(self, meanwhile: GlobalBatch | None = None) -> None:
        """Notify plugins and record of the last step's metrics, unless that is done.

        `meanwhile`: the step that the device computes; logging does not count as its time.
        """
        if self._unread is None:
            return
        metrics = self._read(meanwhile)
        logging = time.perf_counter()
        self._run.notify("logged", step=self._run.step, metrics=metrics)
        if meanwhile:
            meanwhile.started += time.perf_counter() - logging

    def write_alone(self) -> None:
        """Record the last step on this rank; other ranks may be elsewhere, and so may plugins."""
        if self._unread:
            self._run.record.logged(self._run.step, self._read(compare=False))

    def is_finite(self, batch: GlobalBatch, numbers: dict[str, float]) -> bool:
        """Tell whether the norm is finite; refuse one that is not, unless the loss is scaled.

        Nothing is saved yet. The weights have not changed, except under DeepSpeed, which steps in
        the last backward.
        """
        loss, grad_norm = numbers["loss"], numbers["grad_norm"]
        finite = math.isfinite(grad_norm)
        if not (math.isfinite(loss) and (finite or self._run.loss_scale.on)):
            self._run.step = batch.step - 1
            raise TrainError(
                f"step {batch.step}: loss {loss}, gradient norm {grad_norm}. Nothing of this step "
                f"is saved, and earlier checkpoints stand. Rows of this step: {batch.rows()}. A "
                "lower learning rate or a longer warm-up usually helps"
            )
        return finite

    def _read(self, meanwhile: GlobalBatch | None = None, compare: bool = True) -> dict[str, Any]:
        """Wait for the numbers of the last step; return its metrics, or refuse broken numbers."""
        (batch, numbers, facts), self._unread = self._unread, None
        sums, run, plan = numbers.read(compare), self._run, batch.plan
        self.is_finite(batch, sums)
        # The time until the loop asked for the next batch, or has read these numbers.
        seconds = (meanwhile.started if meanwhile else time.perf_counter()) - batch.started
        computed, waited = sums.pop("computed_tokens"), sums.pop("data_wait_seconds")
        core = {name: sums.pop(name) for name in ("loss", "grad_norm")}
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
