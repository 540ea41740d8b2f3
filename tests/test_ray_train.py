"""recipes/launch/ray_train.py: two workers of Ray Train learn what two ranks do."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, only_full, read_metrics, run_launch

SCRIPT = ROOT / "recipes/launch/ray_train.py"


@only_full
def test_two_workers_learn_what_accelerate_launch_learns(tiny, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    recipe = tiny(train={"steps": 4}, device="cpu")
    by_ray, by_accelerate = tmp_path / "ray", tmp_path / "accelerate"
    command = [sys.executable, SCRIPT, recipe, f"output={by_ray}", "--workers=2", "--cpu"]
    environment = {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*map(str, command)],
        env=os.environ | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    config = ROOT / "recipes/accelerate/cpu2.yaml"
    words = ("-m", "plugsft", recipe, f"output={by_accelerate}")
    code, _, err = run_launch("--config_file", config, "--num_processes", 2, *words)
    assert code == 0, err
    weights = [run / "model/model.safetensors" for run in (by_ray, by_accelerate)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    losses = [[line["loss"] for line in read_metrics(run)] for run in (by_ray, by_accelerate)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
