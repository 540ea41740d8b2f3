"""Where a run starts; imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path

from ..base.errors import RecipeError


@dataclass(frozen=True)
class Resume:
    """Where a run starts: at step 1, or at a checkpoint."""

    latest: bool = False
    auto: bool = False
    """Resume from the latest checkpoint, or start if there is none."""
    path: Path | None = None
    overwrite: bool = False
    """Remove the results of an earlier run, once this one has loaded (Record.open)."""

    def ensure_possible(self) -> None:
        """Refuse options that contradict each other."""
        if (self.latest or self.path or self.auto) and self.overwrite:
            raise RecipeError("--resume needs what --overwrite removes; choose one of them")
        if self.auto and self.path:
            raise RecipeError("--resume-auto takes the latest checkpoint; leave out --resume-from")
