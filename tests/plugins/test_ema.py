"""ema: the model is the average of the weights, and training does not notice."""

import json
import shutil

import pytest
import torch
from conftest import only_full, read_metrics, run_launch, run_plugsft
from launching import config
from plugin_packages import activate, install
from safetensors.torch import load_file
from saved_runs import (
    assert_close,
    assert_equal,
    checkpoint,
    evaluations,
    initial_weights,
    model_of,
    read,
    resume,
    train,
)

from plugsft.checkpoint.final_model import name_in_file

DECAY, STEPS = 0.3, 6
TRAIN = {"batch_size": 8, "micro_batch": 2, "steps": STEPS, "learning_rate": 3e-3}
TABLES = {
    "train": TRAIN,
    "eval": {"split": "train[:5]", "every": 2},
    "checkpoint": {"every": 1, "keep": STEPS},
}
EMA = {"ema": {"decay": DECAY}}
LOOKS = """
    @plugin(before=["ema"])
    class Looks:
        @hookimpl
        def logged(self, run, metrics):
            if "eval_loss" in metrics:
                run.model.generate(["a lazy dog"], max_tokens=2)

        @hookimpl(wrapper=True)
        def use_weights(self, run, purpose):
            from safetensors.torch import save_file
            save_file(run.model.shards(), run.output / f"{purpose}-{run.step}.safetensors")
            return (yield)
"""


def read_average(folder):
    return read(folder, "plugins/ema/average")


def average_at(first, run, step):
    """Compute the average as docs/optimizers.md gives it, from checkpoints, in float64."""
    average = {name: DECAY**step * part.double() for name, part in first.items()}
    for at in range(1, step + 1):
        share = (1 - DECAY) * DECAY ** (step - at)
        weights = read(checkpoint(run, at))
        for name in average:
            average[name] += share * weights[name].double()
    return average


def assert_averages(run):
    """Compare the average of each checkpoint, and the model, with an independent computation."""
    first = initial_weights(run)
    for step in range(1, STEPS + 1):
        assert_close(read_average(checkpoint(run, step)), average_at(first, run, step))
    assert_close(model_of(run), average_at(first, run, STEPS))


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A run of one process, without a stop."""
    return train(tmp_path_factory.mktemp("averaged"), **TABLES, plugins=EMA)


def test_the_model_is_the_average_and_training_does_not_notice(averaged, tmp_path):
    assert_averages(averaged)
    plain = train(tmp_path, name="plain", **TABLES)
    for step in range(1, STEPS + 1):
        assert_equal(read(checkpoint(averaged, step)), read(checkpoint(plain, step)))
    losses = [[line["loss"] for line in read_metrics(run)] for run in (averaged, plain)]
    assert losses[0] == losses[1]
    # An evaluation of model/ by itself gives what the run's last one gave.
    tables = {**TABLES, "train": TRAIN | {"steps": 1, "learning_rate": 0.0}}
    again = train(tmp_path, name="again", **tables, model={"path": str(averaged / "model")})
    assert evaluations(again)[-1] == pytest.approx(evaluations(averaged)[-1], rel=1e-6)
    assert abs(evaluations(averaged)[-1] - evaluations(plain)[-1]) > 1e-3
    [record] = json.loads((averaged / "run.json").read_text())["plugins"]
    assert record["summary"].startswith(f"model/ is an average over {STEPS} steps")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["fsdp2", *(pytest.param(kind, marks=only_full) for kind in ("cpu2", "zero3"))]
)
def test_two_ranks_average_their_shards_and_one_rank_goes_on(averaged, tmp_path, kind):
    run, recipe = tmp_path / "run", averaged.with_suffix(".toml")
    code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe, f"output={run}")
    assert code == 0, err
    assert_averages(run)
    assert evaluations(run) == pytest.approx(evaluations(averaged), rel=1e-5)
    if kind != "cpu2":
        assert len(list(checkpoint(run, 3).glob("rank-*"))) == 2
    resume(run, recipe, after=3)
    assert_averages(run)
    assert_close(model_of(run), model_of(averaged), atol=1e-6)


def test_a_resumed_run_ends_bit_for_bit_as_one_without_a_stop(averaged, tmp_path):
    run, recipe = shutil.copytree(averaged, tmp_path / "run"), averaged.with_suffix(".toml")
    resume(run, recipe, after=2)
    assert_equal(model_of(run), model_of(averaged))
    assert evaluations(run) == evaluations(averaged)
    # Another decay would not give the same model.
    off = run_plugsft(recipe, f"output={run}", "--resume", "--without=ema")
    assert "plugins.ema.enabled was True and is not set" in off.stderr
    refused = run_plugsft(recipe, f"output={run}", "--resume", "plugins.ema.decay=0.5")
    assert refused.returncode == 2
    assert "plugins.ema.decay was 0.3 and is 0.5" in refused.stderr


def test_of_adapters_only_what_is_trained_is_averaged(tmp_path):
    plugins = {**EMA, "lora": {"r": 2}}
    run = train(tmp_path, **TABLES, plugins=plugins)
    average = read_average(checkpoint(run, 1))
    assert all("lora_" in name for name in average)
    # Adapters start with B = 0, and their A is not stored: compare B.
    zeros = {name: torch.zeros_like(part) for name, part in average.items() if "lora_B" in name}
    for step in range(1, STEPS + 1):
        average = read_average(checkpoint(run, step))
        assert_close({name: average[name] for name in zeros}, average_at(zeros, run, step))
    model = load_file(run / "model/adapter_model.safetensors")
    assert_close(model, {name_in_file(name): part for name, part in average.items()})


def test_the_best_model_is_the_average_of_the_best_checkpoint(tmp_path, monkeypatch):
    activate(install(tmp_path / "site", looks=LOOKS), monkeypatch)
    tables = {
        **TABLES,
        "eval": {"split": "train[:5]", "every": 1},
        # All are equal: the first is the best.
        "checkpoint": {"keep": 1, "keep_best": "eval_tokens", "best": "lowest"},
    }
    run = train(tmp_path, **tables, plugins={**EMA, "looks": {}})
    best = json.loads((run / "run.json").read_text())["best"]
    assert best["step"] == 1 < STEPS
    average = read_average(checkpoint(run, best["step"]))
    assert_equal(model_of(run), average)
    for used in (f"evaluate-{best['step']}", f"generate-{best['step']}", f"save-{STEPS}"):
        assert_equal(load_file(run / f"{used}.safetensors"), average)
