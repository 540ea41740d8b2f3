"""float16: the loss is scaled, and steps whose gradients overflow are skipped exactly."""

import json
import math
import os
import shutil

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import (
    chats,
    must_succeed,
    only_full,
    read_metrics,
    read_record,
    run_launch,
    run_plugsft,
)
from launching import config
from plugin_packages import SEES, activate, install
from saved_runs import checkpoint, read

from plugsft.audit.check_recipe import gpu_without_bfloat16
from plugsft.base.errors import LaunchError, TrainError
from plugsft.ranks.loss_scale import LossScale
from plugsft.ranks.precision import mixed_precision
from plugsft.recipe.tables import Model
from plugsft.registry.load import load

PLANT = """
    import os
    import signal

    import torch
    from plugsft.ranks import loss_scale

    class Overflow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.inf

    @plugin()
    class Plant:
        overflows: str = ""
        initial: float = 65536.0
        patience: int = 2000
        small: float = 1.0
        run: object = state()

        @hookimpl
        def check(self):
            loss_scale.INITIAL, loss_scale.DOUBLES_AFTER = self.initial, self.patience

        @hookimpl
        def ready(self, run):
            self.run = run

        @hookimpl(wrapper=True)
        def step(self, model):
            if model.training and os.environ.get("DIES") == str(self.run.step + 1):
                self.run.checkpoints.publish(wait=True)
                os.kill(os.getpid(), signal.SIGKILL)
            loss = yield
            planned = str(self.run.step + 1) in self.overflows.split()
            # One rank's gradients overflow; all ranks skip the step.
            overflow = model.training and planned and self.run.ranks.rank == 0
            return (Overflow.apply(loss) if overflow else loss) * self.small
"""
PROMPT = PLANT.replace("@plugin()", '@plugin(provides={"early_stop": None})')
PROMPT = PROMPT.replace("class Plant", "class Prompt")


@pytest.fixture
def plants(tiny, tmp_path, monkeypatch):
    """Return a function that writes a recipe in float16 with planted overflows."""
    activate(install(tmp_path / "site", plant=PLANT, prompt=PROMPT, sees=SEES), monkeypatch)

    def make(name="plant", dtype="float16", plugins=None, steps=6, train=None, **options):
        return tiny(
            rows=chats(43),
            model={"scratch": {"hidden": 32, "layers": 1, "heads": 2, "vocab": 400}}
            | {"dtype": dtype},
            train={"steps": steps, "max_grad_norm": 0.5, **(train or {})},
            checkpoint={"every": 1, "keep": 99},
            plugins={name: options, **(plugins or {})},
        )

    return make


def saved(run, step):
    """Return a checkpoint's description, and the bytes of its tensors."""
    folder = run / f"checkpoints/step-{step:06d}"
    description = json.loads((folder / "state.json").read_text())
    return description, [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]


def scaling(run):
    return [(line["loss_scale"], line["skipped_steps"]) for line in read_metrics(run)]


@pytest.mark.parametrize("name", ["plant", "prompt"])
def test_an_overflow_skips_its_step_and_a_resumed_run_scales_alike(plants, tmp_path, name):
    """On the device, or on the host, where a plugin must hear of each step at once."""
    recipe, run = plants(name, overflows="3 6", patience=2, plugins={"sees": {}}), tmp_path / "run"
    done = must_succeed(recipe)
    assert "weights float32, computed in float16, gradients summed in float32" in done.stdout
    summary = read_record(run)["plugins"]
    assert [each["summary"] for each in summary if each["name"] == "sees"] == [
        "head: torch.float16, torch.float32; torch.float32"
    ]
    scale = 65536.0
    wanted = [scale, scale, 2 * scale, scale, scale, 2 * scale]
    assert scaling(run) == [*zip(wanted, [0, 0, 1, 1, 1, 2], strict=True)]
    norms = [line["grad_norm"] for line in read_metrics(run)]
    assert [norm is None or not math.isfinite(norm) for norm in norms] == [
        step in (3, 6) for step in range(1, 7)
    ]
    before, skipped, after = (saved(run, step) for step in (2, 3, 4))
    assert skipped[1] == before[1] != after[1], "weights and moments"
    assert skipped[0]["optimizer_states"] == before[0]["optimizer_states"], "AdamW's count"
    assert skipped[0]["loss_scale"] == {"scale": scale, "steps": 0, "skipped": 1}
    # The schedule counts skipped steps.
    rates = [line["learning_rate"] for line in read_metrics(run)]
    assert rates == sorted(rates, reverse=True) and len({*rates}) == 6

    end, curve = saved(run, 6), [(line["loss"], line["grad_norm"]) for line in read_metrics(run)]
    for step in (5, 6):
        shutil.rmtree(run / f"checkpoints/step-{step:06d}")
    must_succeed(recipe, "--resume")
    assert saved(run, 6)[1] == end[1] and saved(run, 6)[0]["loss_scale"] == end[0]["loss_scale"]
    assert [(line["loss"], line["grad_norm"]) for line in read_metrics(run)] == curve
    assert scaling(run) == [*zip(wanted, [0, 0, 1, 1, 1, 2], strict=True)]


@pytest.mark.parametrize(
    "kind", [None, *(pytest.param(kind, marks=only_full) for kind in ("cpu2", "fsdp2"))]
)
def test_a_run_that_is_killed_beside_skipped_steps_goes_on_bit_for_bit(plants, tmp_path, kind):
    """Killed after a saved skipped step, after one that is not saved, and before a doubling."""
    recipe = plants(overflows="2 5", patience=2, steps=8, train={"micro_batch": 2})

    def train(folder, *words, dies=""):
        options = (recipe, "checkpoint.every=2", f"output={folder}", *words)
        if kind:
            return run_launch(*config(kind), "-m", "plugsft", *options, env={"DIES": dies})
        done = run_plugsft(*options, env={"DIES": dies})
        return done.returncode, done.stdout, done.stderr

    whole, run = tmp_path / "whole", tmp_path / "run"
    code, _, err = train(whole)
    assert code == 0, err
    for last, dies in [(2, "3"), (4, "6"), (6, "7")]:
        assert train(run, "--resume-auto", dies=dies)[0] != 0
        assert max((run / "checkpoints").iterdir()).name == f"step-{last:06d}"
        assert saved(run, last)[0]["loss_scale"] == saved(whole, last)[0]["loss_scale"]
    assert saved(run, 6)[0]["loss_scale"] == {"scale": 32768, "steps": 1, "skipped": 2}
    code, _, err = train(run, "--resume-auto")
    assert code == 0, err
    assert scaling(run) == scaling(whole)
    assert scaling(run)[-2:] == [(32768, 2), (65536, 2)], "it doubles after step 7"
    for name in ("loss", "grad_norm", "learning_rate"):
        curves = [[str(line[name]) for line in read_metrics(folder)] for folder in (run, whole)]
        assert curves[0] == curves[1]
    assert saved(run, 8)[1] == saved(whole, 8)[1], "weights and moments"
    assert saved(run, 8)[0]["loss_scale"] == saved(whole, 8)[0]["loss_scale"]
    ends = [(folder / "model/model.safetensors").read_bytes() for folder in (run, whole)]
    assert ends[0] == ends[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("cpu2", marks=only_full), "fsdp2"])
def test_all_ranks_skip_the_step_of_one(plants, tmp_path, kind):
    recipe = plants(overflows="3", train={"micro_batch": 2})
    must_succeed(recipe, f"output={tmp_path / 'alone'}")
    code, out, err = run_launch(*config(kind), "-m", "plugsft", recipe)
    assert code == 0, err
    assert "computed in float16, gradients summed in float32" in out
    run, alone = tmp_path / "run", tmp_path / "alone"
    assert scaling(run) == scaling(alone) == [(65536, 0), (65536, 0), (65536, 1), *[(32768, 1)] * 3]
    for name in ("loss", "grad_norm"):
        curves = [[line[name] for line in read_metrics(folder)] for folder in (run, alone)]
        assert curves[0][2] is curves[1][2] is None or name == "loss"
        assert [*filter(None, curves[0])] == pytest.approx([*filter(None, curves[1])], rel=1e-2)
    assert saved(run, 3)[1] == saved(run, 2)[1] != saved(run, 4)[1]


def test_small_gradients_are_learned_from_only_with_scaling(plants, tmp_path):
    """The gradients are a millionth of what they were; AdamW divides by their size."""
    curves, norms = {}, {}
    train = {"eps": 1e-18, "max_grad_norm": 0.0, "schedule": "constant", "micro_batch": 8}
    for name, dtype, initial in [
        ("float32", "float32", 1.0),
        ("scaled", "float16", 65536.0),
        ("unscaled", "float16", 1.0),
    ]:
        recipe = plants(dtype=dtype, small=1e-6, initial=initial, steps=110, train=train)
        must_succeed(recipe, "checkpoint.every=0", f"output={tmp_path / name}")
        norms[name] = [line["grad_norm"] for line in read_metrics(tmp_path / name)]
        curves[name] = [1e6 * line["loss"] for line in read_metrics(tmp_path / name)]
    learned = {name: curve[0] - sum(curve[-10:]) / 10 for name, curve in curves.items()}
    print(learned)
    assert curves["scaled"] == pytest.approx(curves["float32"], rel=3e-2)
    assert learned["scaled"] == pytest.approx(learned["float32"], rel=2e-2)
    assert norms["scaled"][:20] == pytest.approx(norms["float32"][:20], rel=0.05)
    assert learned["unscaled"] < 0.5 * learned["float32"]
    scaled, exact = (read(checkpoint(tmp_path / name, 110)) for name in ("scaled", "float32"))
    assert scaled.keys() == exact.keys()


def test_a_run_whose_every_step_overflows_ends_with_the_cure(plants, tmp_path):
    done = run_plugsft(plants(overflows="1 2 3 4 5 6", initial=4.0))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "step 3: gradients overflow float16 even without loss scaling" in done.stderr
    assert 'Set model.dtype = "bfloat16" or "float32"' in done.stderr


def test_many_skipped_steps_in_a_row_give_one_warning(capsys):
    AcceleratorState._reset_state(reset_partial_state=True)
    scale = LossScale(Accelerator(cpu=True, mixed_precision="fp16"))
    AcceleratorState._reset_state(reset_partial_state=True)
    for step in range(1, 13):
        metrics = scale.count(step, 2.0 ** (16 - step), math.nan)
    assert metrics == {"loss_scale": 16.0, "skipped_steps": 12}
    assert capsys.readouterr().out.count("8 steps in a row are skipped, as gradients") == 1
    with pytest.raises(TrainError, match="13 steps in a row were skipped"):
        scale.count(13, 1.0, math.inf)
    assert scale.count(14, 1.0, 3.0)["skipped_steps"] == 13


def test_check_warns_of_bfloat16_on_a_gpu_without_it(plants, tmp_path, monkeypatch):
    """The driver's program answers for GPUs that are not here."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\n[ "$3" = --id=1 ] || echo "8.6, NVIDIA A10"\necho "7.5, Tesla T4"\n'
    )
    program.chmod(0o755)
    recipe, _ = load(plants(dtype="bfloat16"))
    assert gpu_without_bfloat16(recipe) is None
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_without_bfloat16(recipe) is None  # they are hidden
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu_without_bfloat16(recipe) == "Tesla T4"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_without_bfloat16(recipe) == "Tesla T4"
    assert gpu_without_bfloat16(recipe.model_copy(update={"device": "cpu"})) is None
    program.write_text('#!/bin/sh\necho "8.6, NVIDIA A10"\n')
    assert gpu_without_bfloat16(recipe) is None


def test_float16_is_refused_under_zero3():
    with pytest.raises(LaunchError, match="ZeRO-3 scales the loss by rules"):
        mixed_precision(Model(path="x", dtype="float16"), deepspeed=True)
    assert mixed_precision(Model(path="x", dtype="float16"), deepspeed=False) == "fp16"


ALTOGETHER = {"lora": {}, "fused_loss": {}, "bfd_packing": {}, "gradient_checkpointing": {}}


@pytest.mark.parametrize(
    ("plugins", "kind"),
    [
        (ALTOGETHER, None),
        *(
            pytest.param(each, kind, marks=only_full)
            for kind in (None, "cpu2", "fsdp2")
            for each in ({}, *({name: {}} for name in ALTOGETHER))
        ),
    ],
)
def test_float16_learns_what_float32_learns_with_any_plugin(plants, tmp_path, plugins, kind):
    """Within what bfloat16 misses: 1.2e-5 to 4e-5 of the loss, 7e-4 to 3e-3 of the norm."""
    train = {"learning_rate": 1e-3, "batch_size": 8, "micro_batch": 2}
    if "bfd_packing" in plugins:
        train["micro_batch"] = 1
    curves = {}
    for dtype in ("float32", "float16"):
        recipe, run = plants(dtype=dtype, train=train, plugins=plugins), tmp_path / dtype
        words = (recipe, "checkpoint.every=0", f"output={run}")
        if kind:
            code, _, err = run_launch(*config(kind), "-m", "plugsft", *words)
            assert code == 0, err
        else:
            must_succeed(*words)
        curves[dtype] = [(line["loss"], line["grad_norm"]) for line in read_metrics(run)]
    times = 5 if kind == "fsdp2" else 1  # FSDP2 casts norms and embeddings, too
    for half, single in zip(curves["float16"], curves["float32"], strict=True):
        assert half[0] == pytest.approx(single[0], rel=times * 1e-5)
        assert half[1] == pytest.approx(single[1], rel=times * 5e-4)
    assert curves["float16"] != curves["float32"]
