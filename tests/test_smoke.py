"""A tiny run, from the command line to the model."""

import gc
import re
import subprocess
import sys

from conftest import ROOT, read_metrics, run_plugsft
from forks import FORKS, start_fork_server


def test_a_tiny_run_trains_and_leaves_everything_behind(tiny, tmp_path):
    result = run_plugsft(tiny(train={"epochs": 3}))
    assert result.returncode == 0, result.stderr
    run = tmp_path / "run"
    losses = [line["loss"] for line in read_metrics(run)]
    assert len(losses) == 9 and losses[-1] < losses[0]
    for name in ("recipe.toml", "run.json", "metrics.jsonl", "report.html", "model/config.json"):
        assert (run / name).is_file(), name
    assert (run / "checkpoints/step-000009/manifest.json").is_file()


def test_a_run_imports_no_package_that_it_does_not_use(tiny):
    words = [sys.executable, "-X", "importtime", "-m", "plugsft", tiny(train={"steps": 1})]
    result = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-2000:]
    imported = {*re.findall(r"\| +([a-z_0-9]+)", result.stderr)}
    # accelerate imports DeepSpeed where it is installed, and DeepSpeed mlflow: two seconds.
    # transformers.optimization imports peft: half a second.
    assert "torch" in imported and not imported & {"deepspeed", "mlflow", "peft", "wandb", "trl"}


def _end_if_preloaded():
    sys.exit(0 if "preloaded" in sys.modules and gc.get_freeze_count() > 100_000 else 1)


def test_forks_have_imported_everything():
    """A fork server passes over a module that it cannot import: all tests would be slower."""
    start_fork_server()
    process = FORKS.Process(target=_end_if_preloaded)
    process.start()
    process.join()
    assert process.exitcode == 0
