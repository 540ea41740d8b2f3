"""Stop a run when its average loss is low enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plugsft import Run, hookimpl, plugin, say, state


@plugin(affects_results=["below", "patience"])
class MyPlugin:
    """Stop a run when its average loss is low enough."""

    below: float
    """The run stops when the average loss is below this."""
    patience: int = 10
    """About how many steps the average covers."""

    average: float | None = state()
    checkpoint: str | None = state()
    status: str | None = state()

    @hookimpl
    def logged(self, run: Run, metrics: dict[str, Any]) -> None:
        """Average the losses of the steps, which are the same on every rank."""
        if "eval_loss" in metrics:
            say(f"evaluation after step {run.step}: loss {metrics['eval_loss']:.4f}")
            return
        loss = metrics["loss"]
        if self.average is None:
            self.average = loss
        self.average += (loss - self.average) / self.patience
        if self.average < self.below:
            run.stop(f"the average loss is below {self.below}")

    @hookimpl
    def saved(self, run: Run, folder: Path, kind: str, step: int) -> None:
        """Remember the last checkpoint; `folder` could be copied to another place here."""
        if kind == "checkpoint":
            self.checkpoint = folder.name

    @hookimpl
    def finished(self, run: Run, status: str) -> None:
        """Remember how the run ended: "completed", "stopped" or "failed"."""
        self.status = status

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"average": self.average}

    @hookimpl
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self.average = state["average"]

    @hookimpl
    def summary(self) -> str | None:
        """Report the average loss at the end."""
        if self.average is None:
            return None
        return f"average loss {self.average:.4f}, saved as {self.checkpoint}, {self.status}"
