"""Measure start-up times, and the hook calls of a step relative to a training step.

    .venv/bin/python tools/bench/core.py

Prints medians with their spread. Targets: import 150 ms, --help 600 ms, hooks 0.5 % of a step.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from plugsft.hooks import hookimpl
from plugsft.registry.active import Active

ROOT = Path(__file__).parents[2]
ROUNDS = 15


class EmptyHooks:
    """Hook implementations that do nothing, to measure the calls alone."""

    @hookimpl
    def step(self, model, batch, total, score):
        return 0

    @hookimpl
    def collate(self, tokens, examples, pad):
        return 0

    @hookimpl
    def logged(self, step, metrics):
        return None


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
            hook.logged(step=0, metrics=0)

    def plain():
        for _ in range(calls):
            implementation.collate(0, 0, 0)
            implementation.step(0, 0, 0, 0)
            implementation.log(0, 0)

    costs = []
    for _ in range(5):
        started = time.perf_counter()
        through_hooks()
        middle = time.perf_counter()
        plain()
        ended = time.perf_counter()
        costs.append(((middle - started) - (ended - middle)) / calls)
    return costs


def measure_step_seconds():
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "plugsft", "recipes/quickstart.toml", f"output={folder}/run"]
        subprocess.run(
            [sys.executable, *words, "train.steps=40"], check=True, cwd=ROOT, capture_output=True
        )
        return json.loads(Path(folder, "run/run.json").read_text())["throughput"][
            "step_seconds_median"
        ]


if __name__ == "__main__":
    time_start_up()
    costs, step = time_hook_calls(), measure_step_seconds()
    median = statistics.median(costs)
    print(
        f"hooks: {median * 1e6:.1f} us a step ({min(costs) * 1e6:.1f} to {max(costs) * 1e6:.1f}), "
        f"a quickstart step takes {step * 1e3:.0f} ms: {median / step:.4%} of it"
    )
