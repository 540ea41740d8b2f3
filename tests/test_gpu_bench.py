"""tools/bench/gpu.py without a GPU: its checks, and a tiny case."""

import ast
import importlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, only_full
from transformers import AutoModelForCausalLM

BENCH = ROOT / "tools/bench"


@pytest.fixture
def bench(monkeypatch):
    """Give a function that imports a module of the bench."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.mark.parametrize("name", ["0.6b-lora", "1b-full", "8b-full"])
def test_weights_are_counted_as_the_model_has_them(bench, name):
    cases = bench("gpu_cases")
    shape = cases.CASES[name].shape
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config())
    model.tie_weights()
    matrices = {id(weight): weight.numel() for weight in model.parameters() if weight.ndim > 1}
    if not shape.tied:
        matrices.pop(id(model.get_input_embeddings().weight))
    assert shape.multiplied == sum(matrices.values())


def test_operations_are_six_or_four_a_weight_and_those_of_attention(bench):
    cases = bench("gpu_cases")
    shape = cases.Shape("llama", 8, 16, 3, 2, 1, 4, 10, tied=True)
    weights = 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 8 * 10
    # Each layer has two products of 8 numbers for every pair, of 2 operations, 3 times.
    pairs = (20**2 + 40**2) / 2 / 60
    attention = 3 * 2 * 8 * 2 * 3 * pairs
    lengths = np.array([20, 40])
    assert shape.multiplied == weights
    assert cases.flops_per_token(shape, lengths, lora=False) == pytest.approx(
        6 * weights + attention
    )
    assert cases.flops_per_token(shape, lengths, lora=True) == pytest.approx(
        4 * weights + attention
    )


def test_a_loss_that_differs_is_reported(bench):
    compare_losses = bench("gpu").compare_losses
    runs = {"plain": [{"loss": 2.0}], "one": [{"loss": 2.0001}], "two": [{"reason": "none"}]}
    assert compare_losses(runs, "bfloat16") == []
    [message] = compare_losses(runs, "float32")
    assert message == "one: the first step's loss is 2.0001, and 2 for the plain run"
    assert compare_losses(runs | {"one": [{"loss": float("nan")}]}, "bfloat16")


def test_only_expected_failures_have_a_reason(bench):
    explain_failure = bench("gpu").explain_failure
    assert explain_failure("torch.OutOfMemoryError: CUDA out of memory.") == {
        "reason": "out of memory"
    }
    assert explain_failure("  error: no GPU\n", refused=True) == {
        "reason": "error: no GPU",
        "refused": True,
    }
    with pytest.raises(SystemExit, match="a run failed:\nKeyError"):
        explain_failure("KeyError: 'x'")


def test_mfu_is_of_gpus_whose_peak_is_known(bench):
    peak_of = bench("gpu").peak_flops
    assert peak_of("NVIDIA H200") == peak_of("NVIDIA H100 80GB HBM3") == 989e12
    for other in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-80GB", ""):
        assert peak_of(other) is None


def test_the_kernels_of_this_machine_compute_what_float32_does():
    process = subprocess.run(
        [sys.executable, BENCH / "gpu.py", "--child", "checks:{}"],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    checks = json.loads(process.stdout.splitlines()[-1])
    assert len([check for check in checks if check["error"] is not None]) >= 12
    assert not any(check["failed"] for check in checks)


@pytest.mark.parametrize("path", sorted(BENCH.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_finds_what_it_imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("plugsft"):
            exec(ast.unparse(node), {})


@only_full
@pytest.mark.timeout(1800)
def test_the_checks_and_a_tiny_case_run(tmp_path):
    result = tmp_path / "result.json"
    only = "trl-best,plain,+fused_loss,+liger"
    words = ["--case", "1b-full", "--shapes", "cpu", "--rounds", "1", "--steps", "1"]
    words += ["--only", only, "--seconds", "1500", "--times"]
    process = subprocess.run(
        [sys.executable, BENCH / "gpu.py", *words, "--json", result],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads(result.read_text())
    finished = [figures for figures in report["checks"] if figures["error"] is not None]
    assert len(finished) >= 12 and not any(figures["failed"] for figures in finished)
    assert all(figures["reason"] for figures in report["checks"] if figures not in finished)
    assert {figures["kernel"] for figures in report["times"] if "seconds" in figures} == {
        "sdpa", "plain", "torch"
    }  # fmt: skip
    assert all("seconds" in figures or figures["reason"] for figures in report["times"])
    summary = report["summary"]
    assert {*summary} == {"trl-best", "plain", "+fused_loss"}
    assert all(
        figures["mfu"] is None and figures["tokens_per_second"] > 0 for figures in summary.values()
    )
    assert "need a GPU" in report["runs"]["+liger"][0]["reason"]
    assert "NOT MEASURED" in process.stdout and "MFU n/a" in process.stdout
    assert report["machine"]["torch"] and report["date"]


@only_full
@pytest.mark.timeout(2400)
def test_preferences_are_measured_against_trl(tmp_path):
    result = tmp_path / "result.json"
    words = ["--case", "0.6b-dpo", "--shapes", "cpu", "--rounds", "1", "--steps", "2"]
    process = subprocess.run(
        [sys.executable, BENCH / "gpu.py", *words, "--skip-checks", "--json", result],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    [figures] = json.loads(result.read_text())["rounds"]
    assert (
        figures["shared+cached"]["positions"]
        < figures["shared"]["positions"]
        < figures["trl"]["positions"]
    )
    assert figures["shared+reference"]["pass"] > 0 < figures["trl precomputed"]["pass"]
    assert (
        all(contender["step"] > 0 for contender in figures.values())
        and "against TRL's best" in process.stdout
    )
