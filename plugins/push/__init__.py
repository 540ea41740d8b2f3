"""Upload the model, or each checkpoint's, to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat

from plugsft import Machine, Run, hookimpl, plugin, say, state


@plugin(provides={"external_reports": None})
class Push:
    """Upload the model, or each checkpoint's, to the Hugging Face hub.

    Another process uploads while the training goes on. A failed upload never fails the run: it is
    tried again, and the message at the end has the command that uploads later.
    """

    to: Annotated[str, Field(min_length=1)]
    """The repository: "owner/name", or a name of your own."""
    every: Literal["model", "checkpoint"] = "model"
    """What to upload: the "model" at the end, or the model of every "checkpoint" as well, if the
    one before has arrived. Making a checkpoint's model takes host memory for the whole model."""
    private: bool = True
    """Whether the repository is private."""
    wait_minutes: NonNegativeFloat = 60
    """Most minutes that the run waits for its last upload, after its end."""

    warning: str = state("")
    """Why the hub could not be asked before the run."""
    uploads: Any = state()
    """The uploads of this run, on the main process."""

    @hookimpl
    def check(self, machine: Machine) -> None:
        """Refuse a wrong name, and a token that may not write."""
        from .requirements import ask_hub, ensure_name

        ensure_name(self.to)
        if machine.is_main:
            self.warning = ask_hub(self.to, self.private)

    @hookimpl
    def ready(self, run: Run) -> None:
        """Upload again what a killed run has not."""
        from .uploads import Uploads

        if run.is_main:
            if self.warning:
                say(f"warning: push: {self.warning}; each upload tries again")
            options = [] if self.private else ["--public"]
            if run.recipe.model.trust_remote_code:
                options.append("--trust-remote-code")
            self.uploads = Uploads(run.output, self.to, options, self.wait_minutes * 60)
            self.uploads.resume(run.step)

    @hookimpl
    def saved(self, folder: Path, kind: str) -> None:
        """Upload what was saved, unless only the model is asked for."""
        if self.uploads and kind in ("model", self.every):
            self.uploads.add(folder)

    @hookimpl
    def finished(self, status: str) -> None:
        """Let the process wait for the last upload of a completed run."""
        if self.uploads:
            self.uploads.end(wait=status == "completed")

    @hookimpl
    def summary(self) -> str | None:
        """Report what has arrived so far."""
        return self.uploads.describe() if self.uploads else None
