"""The recipe for a T4 with weights of Qwen3 8B's shape: its memory, beside the forecast's.

    python3 tools/bench/gpu_t4.py --out FILE [--steps 12]
    python3 tools/bench/gpu_t4.py --out FILE --dry-run      (a tiny model, on a CPU)

Needs bitsandbytes. The weights are random. The process of the run may take the 15 GB of a T4, less
0.5 GiB for CUDA itself: it fails if loading, a step or saving needs more. The speed is this GPU's.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import shared
from gpu_cases import OVERHEAD, Case, Shape, count_words, make_model, shrink

SHAPE = Shape("qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936, False)
CASE = Case(SHAPE, lora=True, batch=16, micro=1, steps=0, dtype="float16", longest=1024)
LIMIT = int(15e9) - 2**29
"""Bytes of GPU memory that PyTorch may take."""
LIMITED = (
    "import runpy, sys, torch; _, limit, *words = sys.argv; sys.argv = ['plugsft', *words];"
    "whole = torch.cuda.mem_get_info()[1];"
    "torch.cuda.set_per_process_memory_fraction(int(limit) / whole);"
    "runpy.run_module('plugsft', run_name='__main__')"
)
"""Run plugsft in a process whose GPU memory is limited."""


def main() -> None:
    """Forecast, run, and write both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, on a CPU")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="plugsft-t4-") as folder:
        report = measure(Path(folder), options.steps, options.dry_run)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"forecast {report['forecast_gib']:.1f} GiB; ", end="")
    if report["exit_code"]:
        raise SystemExit(f"the run failed with exit code {report['exit_code']}")
    print(f"peak of the run {report['peak_gib']:.1f} GiB, {report['limit_gib']:.1f} GiB allowed")


def measure(folder: Path, steps: int, dry_run: bool) -> dict[str, Any]:
    """Make a model and chats, forecast the run, and train."""
    case, run = shrink(CASE) if dry_run else CASE, folder / "run"
    make_model({"case": asdict(case), "folder": str(folder)})
    write_chats(folder / "chats.jsonl", CASE.batch * steps, case)
    start(folder, "-m", "plugsft", "init", "t4_qlora")
    words = ["recipes/t4_qlora.toml", f"model.path={folder / 'model'}", f"output={run}"]
    words += [f"data.source={folder / 'chats.jsonl'}", "train.log_every=1", "checkpoint.every=0"]
    plan = start(folder, "-m", "plugsft", "plan", *words, "--gpu=T4", "--memory=15GB")
    print(plan.stdout, plan.stderr, flush=True)
    [total, unit] = re.findall(r"^total +([\d.]+) (GiB|MiB)", plan.stdout, re.M)[0]
    limited = ["-m", "plugsft"] if dry_run else ["-c", LIMITED, str(LIMIT)]
    done = start(folder, *limited, *words)
    print(done.stdout, done.stderr, flush=True)
    report = shared.head("bitsandbytes") | {
        "forecast": plan.stdout,
        "forecast_gib": float(total) / (1 if unit == "GiB" else 1024),
        "limit_gib": LIMIT / 2**30,
        "exit_code": done.returncode,
    }
    if done.returncode == 0:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        facts = json.loads((run / "run.json").read_text())
        report |= {"peak_gib": facts["memory"]["peak_gib"], "precision": facts["precision"]}
        report["steps"] = [json.loads(line) for line in lines]
    return report


def start(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in a folder; return what it printed."""
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False
    )


def write_chats(path: Path, count: int, case: Case) -> None:
    """Write chats of random words, some of the greatest length."""
    dice = np.random.default_rng(0)
    with path.open("w") as file:
        for length in shared.draw_lengths(
            count, np.log(case.median), 0.8, 12, case.longest
        ).tolist():
            numbers = dice.integers(0, count_words(case.shape), length - OVERHEAD)
            words = [f"w{number}" for number in numbers]
            parts = {"user": words[: length // 3], "assistant": words[length // 3 :]}
            turns = [{"role": role, "content": " ".join(part)} for role, part in parts.items()]
            file.write(json.dumps({"messages": turns}) + "\n")


if __name__ == "__main__":
    main()
