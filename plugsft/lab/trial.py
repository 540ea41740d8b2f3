"""One trial of a recipe: python -m plugsft.lab.trial RECIPE BYTES.

Each trial is a fresh process, so that it inherits no loaded modules, caches or memory.
`accelerate launch -m plugsft.lab.trial` starts several ranks.
"""

import json
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from .. import loop
from ..base.errors import PlugsftError, out_of_memory
from ..base.machine import look, peak_memory
from ..base.types import LoadedSteps
from ..hooks import hookimpl, plugin, state
from ..ranks.precision import on_cpu
from ..registry.discover import FoundPlugin
from ..registry.load import load
from ..start.guards import police
from ..start.open import open_recipe
from ..tokens.store import Tokens

NO_STACK = "can't start new thread"
"""Python's message when a memory limit leaves no space for a thread's stack."""


class TrialOver(PlugsftError):
    """All steps of the trial are done; the next would save checkpoint and model."""


@plugin()
class ShortRun:
    """Ends the run before its last step."""

    last: int
    limit: int = state(0)
    """Bytes of a GPU that the trial may take."""
    before: int = state(0)
    """Memory of the process before the model is loaded."""

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Any:
        """Record the memory before loading; limit the GPU's memory."""
        self.before = psutil.Process().memory_info().rss
        if self.limit:
            total = torch.cuda.get_device_properties().total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit / total))
        return (yield)

    @hookimpl(wrapper=True)
    def load_batches(self) -> Any:
        """Load the steps of the trial."""
        feed = yield
        return self._until(feed)

    @hookimpl(wrapper=True)
    def order_examples(self, tokens: Tokens) -> Any:
        """Keep the order in which the examples are stored: the caller has chosen it."""
        with suppress(Exception):  # plugins do not know these examples
            yield
        return np.arange(len(tokens))

    def _until(self, feed: LoadedSteps) -> LoadedSteps:
        for loaded in feed:
            if loaded.plan.step == self.last:
                raise TrialOver
            yield loaded


def run(path: Path, limit: int) -> dict[str, Any]:
    """Train all steps of a recipe but the last; return this rank's peak memory and error."""
    recipe, active = load(path)
    trial = ShortRun(last=recipe.train.steps or 0)
    active.plugins["trial"] = trial
    active.found = {
        **active.found,
        "trial": FoundPlugin("trial", "bundled", __name__, Path(__file__)),
    }
    result: dict[str, Any] = {"error": "", "out_of_memory": False}
    try:
        if on_cpu(recipe):
            limit_memory(limit)
        else:
            trial.limit = limit
        police(active)
        loop.train(open_recipe(recipe, active, look()))
    except TrialOver:
        pass
    except (PlugsftError, MemoryError, RuntimeError) as error:
        result["error"] = str(error) or type(error).__name__
        no_stack = limit and NO_STACK in str(error)
        result["out_of_memory"] = no_stack or out_of_memory(error)
    result["before"] = trial.before
    result["host"] = peak_memory()
    if torch.cuda.is_available():
        result["device"] = torch.cuda.max_memory_allocated()
        result["total"] = torch.cuda.get_device_properties().total_memory
    return result


def limit_memory(limit: int) -> None:
    """Limit the memory of this process (0: no limit)."""
    used = psutil.Process().memory_info()
    if limit:
        if used.rss >= limit:  # a thread that gets no memory would be waited for, for ever
            raise MemoryError
        # Libraries reserve gigabytes that they never touch; these do not count.
        data = limit + used.data - used.rss
        resource.setrlimit(resource.RLIMIT_DATA, (data, data))


def main() -> None:
    """Run a trial; write this rank's results next to the recipe."""
    path = Path(sys.argv[1])
    result = run(path, int(sys.argv[2]))
    rank = os.environ.get("RANK", "0")
    path.with_name(f"rank-{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    # Other ranks may wait for this one in a collective: they end with it.
    os._exit(1 if result["error"] else 0)


if __name__ == "__main__":
    main()
