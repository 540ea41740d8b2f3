"""Families of decoders, from tiny configurations: what one model passes, every model passes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import FULL, ROOT
from families import build

# Their files name tensors otherwise than the models do, but for the last.
RENAMED = ["mixtral", "qwen3_moe", "deepseek_v3", "minimax", "llama"]


def save_all(families, folder: Path):
    """Write tiny models, each tensor of them unlike the others."""
    for family in families:
        model = build(family)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        model.save_pretrained(folder / family)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_ranks_read_what_plain_transformers_loads(tiny, tmp_path, kind):
    """Again and again in one pair of processes, where ids and memory of freed tensors come back."""
    save_all(RENAMED, tmp_path / "models")
    done = subprocess.run(
        [
            *(Path(sys.executable).with_name("accelerate"), "launch"),
            *("--config_file", ROOT / f"recipes/accelerate/{kind}.yaml", "--num_processes", "2"),
            *(ROOT / "tests/loading_ranks.py", tiny(), tmp_path / "models"),
            *("50" if FULL else "2", tmp_path / "report"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"report-{rank}").read_text())
        assert found == {family: {"empty": True, "wrong": []} for family in RENAMED}
