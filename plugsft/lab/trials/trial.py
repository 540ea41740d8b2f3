"""One trial of a recipe: python -m plugsft.lab.trials.trial RECIPE.

A process of its own for each, so that none inherits what another has loaded, warmed up or filled.
`accelerate launch -m plugsft.lab.trials.trial` makes it one of several ranks.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from ... import loop
from ...base.errors import PlugsftError
from ...base.machine import look, peak_memory
from ...base.types import Feed
from ...hooks import hookimpl, plugin, state
from ...ranks.precision import on_cpu
from ...registry.active import load
from ...registry.discover import FoundPlugin
from ...run import open as open_run


class Over(PlugsftError):
    """All steps of the trial are made: before the one that would save checkpoint and model."""


@plugin()
class Trial:
    """Ends the run before its last step."""

    last: int
    limit: int = state(0)
    """Bytes that it may take of a GPU."""
    before: int = state(0)
    """Bytes that the process held before the model was loaded."""

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Any:
        """Look at what is held before; of a GPU, take no more than the limit."""
        self.before = psutil.Process().memory_info().rss
        if self.limit:
            total = torch.cuda.get_device_properties().total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit / total))
        return (yield)

    @hookimpl(wrapper=True)
    def feed(self) -> Any:
        """Feed so many steps."""
        feed = yield
        return self._until(feed)

    def _until(self, feed: Feed) -> Feed:
        for fed in feed:
            if fed.window.step == self.last:
                raise Over
            yield fed


def run(path: Path, limit: int) -> dict[str, Any]:
    """Train all steps of a recipe but the last; return what this rank held, and what went wrong."""
    recipe, active = load(path)
    trial = Trial(last=recipe.train.steps or 0)
    active.plugins["trial"] = trial
    active.found = {
        **active.found,
        "trial": FoundPlugin("trial", "bundled", __name__, Path(__file__)),
    }
    found: dict[str, Any] = {"error": ""}
    try:
        if on_cpu(recipe):
            confine(limit)
        else:
            trial.limit = limit
        with active.name_failing_plugin():
            loop.train(open_run(recipe, active, look()))
    except Over:
        pass
    except (PlugsftError, MemoryError, RuntimeError) as error:
        found["error"] = str(error) or type(error).__name__
    found["before"] = trial.before
    found["host"] = peak_memory()
    if torch.cuda.is_available():
        found["device"] = torch.cuda.max_memory_allocated()
        found["reserved"] = torch.cuda.max_memory_reserved()
        found["total"] = torch.cuda.get_device_properties().total_memory
    return found


def confine(limit: int) -> None:
    """Let this process hold no more bytes than the limit (0: as many as there are)."""
    held = psutil.Process().memory_info()
    if limit and sys.platform == "linux":
        # Libraries set gigabytes aside that they never touch: these cost nothing.
        most = max(0, limit + held.data - held.rss)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main() -> None:
    """Run a trial, and write what this rank found beside the recipe."""
    path, limit = Path(sys.argv[1]), int(sys.argv[2])
    found = run(path, limit)
    rank = os.environ.get("RANK", "0")
    path.with_name(f"rank-{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    # Other ranks may wait for this one in an exchange: they end with it.
    os._exit(1 if found["error"] else 0)


if __name__ == "__main__":
    main()
