"""Measure the processor seconds of short commands, with their child processes.

    python tools/bench/command_cost.py [--rounds 5] [--only NAME ...] [--python .venv/bin/python]

Processor seconds grow when other processes share a core: measure on a quiet machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = "recipes"


def list_commands(folder: Path) -> dict[str, tuple[float, list[str]]]:
    """Return each command's bar, in processor seconds, and its arguments."""
    quickstart, tulu = f"{RECIPES}/quickstart.toml", f"{RECIPES}/tulu_sft_lora.toml"
    output = f"output={folder / 'run'}"
    return {
        "misspelt key": (0.6, [quickstart, output, "train.batchsize=4"]),
        "misspelt option of a plugin": (0.6, [tulu, output, "plugins.lora.rr=4"]),
        "misspelt key, bench": (0.6, ["bench", quickstart, "train.batchsize=4"]),
        "misspelt key, tune": (0.6, ["tune", quickstart, "train.batchsize=4"]),
        "misspelt key, plan": (0.6, ["plan", quickstart, "train.batchsize=4"]),
        "show": (1.0, ["show", tulu]),
        "plugins": (1.0, ["plugins", tulu]),
        "check": (2.0, ["check", quickstart, output]),
        "prepare, in cache": (1.5, ["prepare", quickstart, output]),
        "missing recipe": (0.8, ["check", str(folder / "none.toml")]),
        "cache ls": (0.8, ["cache", "ls", "--folder", str(folder)]),
        "schema": (0.8, ["schema"]),
        "export of a missing folder": (0.8, ["export", str(folder / "none"), "--to", str(folder)]),
        "chat of a missing folder": (0.8, ["chat", str(folder / "none")]),
        "--help": (0.6, ["--help"]),
    }


def measure_seconds(python: str, words: list[str]) -> float:
    """Run a command; return its processor seconds, with those of its children."""
    before = os.times()
    subprocess.run([python, "-m", "plugsft", *words], cwd=ROOT, capture_output=True, check=False)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    """Print a table: each command's median, its bar, and all measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = list_commands(Path(folder))
        unknown = {*options.only} - {*table}
        if unknown:
            parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(table)}")
        measure_seconds(options.python, table["prepare, in cache"][1])
        print(f"{'command':<28}  {'median':>7}  {'bar':>5}  all rounds")
        for name, (bar, words) in table.items():
            if options.only and name not in options.only:
                continue
            times = [measure_seconds(options.python, words) for _ in range(options.rounds)]
            rounds = " ".join(f"{time:.2f}" for time in times)
            print(f"{name:<28}  {statistics.median(times):>5.2f} s  {bar:>5}  {rounds}", flush=True)


if __name__ == "__main__":
    main()
