"""Measure start-up times, and the cost of hooks, notices and agreement relative to a step.

    .venv/bin/python tools/bench/core.py

Prints medians with their spread. Targets: import 150 ms, --help 600 ms, hooks 0.5 % of a step;
notices and agreement 0.5 % of the quickstart's step in one process, 1 % on two.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from plugsft import loop, run
from plugsft.base.machine import look
from plugsft.hooks import hookimpl, plugin
from plugsft.registry.active import Active
from plugsft.registry.discover import FoundPlugin
from plugsft.registry.load import load

ROOT = Path(__file__).parents[2]
ROUNDS, STEPS = 15, 40
CALLS = 500
"""Notices, and agreements, whose mean is one measurement."""


class EmptyHooks:
    """Hook implementations that do nothing, to measure the calls alone."""

    @hookimpl
    def step(self, model, batch, denominator, token_nll):
        return 0

    @hookimpl
    def collate(self, tokens, examples, pad):
        return 0


@plugin()
class Listener:
    """Hears what a step tells, and measures before step 1 what hearing and agreeing cost."""

    folder: str

    @hookimpl
    def stepped(self, run):
        pass

    @hookimpl
    def logged(self, run, step, metrics):
        pass

    @hookimpl
    def evaluated(self, run, metrics):
        pass

    @hookimpl
    def ready(self, run):
        costs = {"notices": [], "agreement": []}
        for _ in range(5):
            with run.agreed("measuring"):
                pass
            started = time.perf_counter()
            for _ in range(CALLS):
                # Like "stepped" and "logged", but the record does not listen.
                run.notify("evaluated", metrics={})
                run.notify("evaluated", metrics={})
            middle = time.perf_counter()
            for _ in range(CALLS):
                with run.agreed("measuring"):
                    pass
            costs["notices"].append((middle - started) / CALLS)
            costs["agreement"].append((time.perf_counter() - middle) / CALLS)
        Path(self.folder, f"costs-{run.ranks.rank}.json").write_text(json.dumps(costs))


def format_spread(times):
    low, high = min(times), max(times)
    return f"median {statistics.median(times) * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})"


def time_process(*words):
    started = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.perf_counter() - started


def time_start_up():
    times = {"bare": [], "import": [], "help": []}
    for _ in range(ROUNDS):  # interleaved: the machine's speed drifts
        times["bare"].append(time_process("-c", "pass"))
        times["import"].append(time_process("-c", "import plugsft"))
        times["help"].append(time_process("-m", "plugsft", "--help"))
    import_times = [a - b for a, b in zip(times["import"], times["bare"], strict=True)]
    print(f"import plugsft, beyond a bare interpreter: {format_spread(import_times)}")
    print(f"plugsft --help, whole process: {format_spread(times['help'])}")


def time_hook_calls(calls=20_000):
    """Return the extra seconds of a step's hook calls, compared with plain calls."""
    implementation = EmptyHooks()
    hook = Active({}, {}).attach(implementation).hooks

    def through_hooks():
        for _ in range(calls):
            hook.collate(tokens=0, examples=0, pad=0)
            hook.step(model=0, batch=0, denominator=0, token_nll=0)

    def plain():
        for _ in range(calls):
            implementation.collate(0, 0, 0)
            implementation.step(0, 0, 0, 0)

    costs = []
    for _ in range(5):
        started = time.perf_counter()
        through_hooks()
        middle = time.perf_counter()
        plain()
        ended = time.perf_counter()
        costs.append(((middle - started) - (ended - middle)) / calls)
    return costs


def train_with_listener(folder):
    """Train the quickstart on this rank, with a plugin that hears every notice."""
    words = [f"output={folder}/run", f"train.steps={STEPS}"]
    recipe, active = load(ROOT / "recipes/quickstart.toml", words)
    active.plugins["listener"] = Listener(folder=folder)
    found = FoundPlugin("listener", "bundled", __name__, Path(__file__))
    active.found = {**active.found, "listener": found}
    loop.train(run.open(recipe, active, look()))


def measure_quickstart(ranks):
    """Return the seconds of a step, and those of its notices and of an agreement."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
        words = [sys.executable, "-m", *words, folder]
        # Several ranks share the cores: each computes with one thread.
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(words, check=True, cwd=ROOT, capture_output=True, env=env)
        costs = json.loads(Path(folder, "costs-0.json").read_text())
        record = json.loads(Path(folder, "run/run.json").read_text())
        return record["throughput"]["step_seconds_median"], costs


def main():
    time_start_up()
    costs = time_hook_calls()
    for ranks in (1, 2):
        step, measured = measure_quickstart(ranks)
        print(f"a step of the quickstart on {ranks} rank{'s' * (ranks > 1)}: {step * 1e3:.1f} ms")
        print_share("hooks", costs, step)
        print_share("notices", measured["notices"], step)
        print_share("agreement", measured["agreement"], step)
        both = [sum(pair) for pair in zip(*measured.values(), strict=True)]
        print_share("notices and agreement", both, step)


def print_share(name, costs, step):
    median, low, high = statistics.median(costs), min(costs), max(costs)
    print(
        f"  {name}: {median * 1e6:.1f} us a step ({low * 1e6:.1f} to {high * 1e6:.1f}), "
        f"{median / step:.2%} of it"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train_with_listener(sys.argv[1])
    else:
        main()
