"""Traces of single steps, for ui.perfetto.dev."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch.profiler import profile


class Tracer:
    """Writes a trace of each chosen step into a folder."""

    def __init__(self, folder: Path, steps: Collection[int], rank: int) -> None:
        self.active: Any = None
        self._folder, self._steps, self._rank = folder, steps, rank
        self._file = ""

    def start(self, step: int) -> None:
        """Start the trace of a step, if it is chosen."""
        if step in self._steps:
            # Without this setting, Kineto prints to the console.
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")
            self._file = f"step-{step:06d}-rank-{self._rank}.json.gz"
            self.active = profile(record_shapes=True)
            self.active.start()

    def stop(self) -> None:
        """Write the trace of the current step, if it is traced."""
        if self.active is not None:
            self.active.stop()
            self._folder.mkdir(exist_ok=True)
            self.active.export_chrome_trace(str(self._folder / self._file))
            self.active = None
