"""Real launches by accelerate with our files, and what their runs learn."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, read_metrics, run_launch, run_plugsft

NUMBERS = ("loss", "grad_norm", "eval_loss")
TRAIN = {"batch_size": 8, "micro_batch": 2, "steps": 7, "learning_rate": 1e-3, "max_grad_norm": 0.5}


def launch(*words, env=None):
    """Start `accelerate launch` with these words."""
    return subprocess.Popen(
        [Path(sys.executable).with_name("accelerate"), "launch", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=ROOT,
    )


def finish(process, timeout=240):
    """Wait for a launch; return its exit code and output."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def config(name, ranks=2):
    """Return the words that name one of our files for accelerate."""
    return ("--config_file", ROOT / f"recipes/accelerate/{name}.yaml", "--num_processes", ranks)


def curve(run):
    """Return losses, gradient norms and evaluation losses of a run."""
    return [line[name] for name in NUMBERS for line in read_metrics(run) if name in line]


def learns_what_one_does_without(plugin, name, recipe, folder):
    """Train on two ranks, and on one process without a plugin; return the ranks' folder, output."""
    alone, run = folder / "alone", folder / name
    done = run_plugsft(recipe, f"output={alone}", "--without", plugin)
    assert done.returncode == 0, done.stderr
    code, out, err = run_launch(*config(name), "-m", "plugsft", recipe, f"output={run}")
    assert code == 0, err
    assert curve(run) == pytest.approx(curve(alone), rel=1e-5)
    return run, out
