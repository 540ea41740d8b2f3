"""Weights, compute and states: what the run says is what it does, and a contradiction stops it."""

import json

import pytest
import torch
from conftest import chats, only_full, read_metrics, run_plugsft
from making import activate, install
from safetensors import safe_open
from test_launch import config, finish, launch

from plugsft import LaunchError
from plugsft.precision import ensure_no_other, mixed, on_cpu
from plugsft.reading import read, validate

SEES = """
    import torch

    @plugin()
    class Sees:
        '''Note the types that really meet.'''

        seen: list = state([])

        @hookimpl(wrapper=True)
        def step(self, model):
            def note(module, given, made):
                self.seen = sorted({str(one.dtype) for one in (given[0], made)})
            head = getattr(model, "module", model).get_output_embeddings()
            handle = head.register_forward_hook(note)
            loss = yield
            handle.remove()
            return loss

        @hookimpl
        def verdict(self):
            return "head: " + ", ".join(self.seen)
"""


def verdict(run):
    record = json.loads((run / "run.json").read_text())
    return record["precision"], record["plugins"][0]["verdict"]


def dtype_of(run):
    with safe_open(run / "model/model.safetensors", "pt") as file:
        return {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118  # no dict


@pytest.mark.parametrize(
    "dtype, launcher, says, computes",
    [
        (
            "float32",
            "no",
            "weights float32, computed in float32, optimizer states float32",
            "float32",
        ),
        (
            "float32",
            "bf16",
            "weights float32, computed in bfloat16, optimizer states float32",
            "bfloat16",
        ),
        (
            "bfloat16",
            "no",
            "weights bfloat16, computed in bfloat16, optimizer states bfloat16",
            "bfloat16",
        ),
        (
            "bfloat16",
            "bf16",
            "weights bfloat16, computed in bfloat16, optimizer states bfloat16",
            "bfloat16",
        ),
    ],
)
def test_one_line_of_truth(tiny, tmp_path, monkeypatch, dtype, launcher, says, computes):
    activate(install(tmp_path / "site", sees=SEES), monkeypatch)
    recipe = tiny(train={"steps": 2}, plugins={"sees": {}})
    env = {"ACCELERATE_MIXED_PRECISION": launcher}
    done = run_plugsft(recipe, f"model.dtype={dtype}", env=env)
    assert done.returncode == 0, done.stderr
    assert f"precision: {says}, on cpu" in done.stdout
    told, seen = verdict(tmp_path / "run")
    assert told == f"{says}, on cpu"
    assert f"torch.{computes}" in seen
    assert dtype_of(tmp_path / "run") == {getattr(torch, dtype)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, dtype, launcher, says",
    [
        (
            "fsdp2",
            "float32",
            "bf16",
            "weights float32, computed in bfloat16, optimizer states float32",
        ),
        pytest.param(
            "fsdp2",
            "bfloat16",
            "bf16",
            "weights bfloat16, computed in bfloat16, optimizer states bfloat16",
            marks=only_full,
        ),
        (
            "zero3",
            "bfloat16",
            "no",
            "weights bfloat16, updated in float32, computed in bfloat16, optimizer states float32",
        ),
    ],
)
def test_sharded_runs_tell_the_truth_too(tiny, tmp_path, kind, dtype, launcher, says):
    train = {"steps": 4, "max_grad_norm": 0.5, "micro_batch": 1}
    # The probe of packing leaves some weights whole under FSDP2, in the type of computing.
    recipe = tiny(rows=chats(21), train=train, plugins={"bfd_packing": {}})
    assert run_plugsft(recipe, f"output={tmp_path / 'alone'}").returncode == 0
    words = ("--mixed_precision", launcher, "-m", "plugsft", recipe, f"model.dtype={dtype}")
    code, out, err = finish(launch(*config(kind), *words))
    assert code == 0, err
    assert f"precision: {says}, on cpu" in out
    curves = [[line["loss"] for line in read_metrics(tmp_path / name)] for name in ("run", "alone")]
    assert curves[0] == pytest.approx(curves[1], rel=2e-2)
    assert curves[0] != curves[1], "computed in less than float32"
    assert dtype_of(tmp_path / "run") == {getattr(torch, dtype)}


@pytest.mark.parametrize("asked", ["fp16", "fp8"])
def test_numbers_that_nobody_computes_in_are_refused(tiny, asked):
    done = run_plugsft(tiny(), env={"ACCELERATE_MIXED_PRECISION": asked})
    assert done.returncode == 2 and f"mixed_precision {asked}" in done.stderr
    assert "Traceback" not in done.stderr


def test_weights_of_float16_are_refused(tiny):
    done = run_plugsft(tiny(), "model.dtype=float16")
    assert done.returncode == 2 and "model.dtype" in done.stderr and "bfloat16" in done.stderr


def test_a_deepspeed_file_that_wants_other_numbers_is_refused():
    ensure_no_other({"bf16": {"enabled": "auto"}, "fp16": {}}, "bf16")
    ensure_no_other({"bf16": {"enabled": True}}, "bf16")
    for config_, numbers in (
        ({"fp16": {"enabled": True}}, "no"),
        ({"bf16": {"enabled": False}}, "bf16"),
    ):
        with pytest.raises(LaunchError, match=r"enabled = .* wants"):
            ensure_no_other(config_, numbers)


def test_a_gpu_is_not_left_idle_unless_the_recipe_says_so(tiny, monkeypatch):
    recipe, _ = validate(read(tiny()), "recipe")
    quiet, _ = validate(read(tiny(device="cpu")), "recipe")
    assert on_cpu(recipe), "there is no GPU here"
    # What torch answers where there is one; nothing of it is touched before the refusal.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not on_cpu(recipe) and on_cpu(quiet)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert on_cpu(quiet)
    with pytest.raises(LaunchError, match='device = "cpu"'):
        on_cpu(recipe)


def test_deepspeed_is_told_of_bfloat16_and_the_others_are_not(monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert mixed("bfloat16", deepspeed=True) == "bf16"
    assert mixed("bfloat16", deepspeed=False) == mixed("float32", deepspeed=True) == "no"
