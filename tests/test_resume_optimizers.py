"""Runs with a plugin's optimizer: resumed equals uninterrupted, on the same ranks and others."""

import json
import shutil

import pytest
import torch
from conftest import ROOT, only_full, run_launch, run_plugsft, tiny_tables, write_recipe
from plugin_packages import activate, install
from saved_runs import stored

PLUGIN = """
from typing import Any

import schedulefree
import torch


class MuonAndAdamW(torch.optim.Optimizer):
    def __init__(self, weights, lr):
        matrices = [weight for weight in weights if weight.dim() == 2]
        vectors = [weight for weight in weights if weight.dim() != 2]
        self.inner = torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(vectors, lr=lr)
        super().__init__([group for inner in self.inner for group in inner.param_groups], {})
        for inner in self.inner:
            inner.state = self.state

    def step(self, closure=None):
        for inner in self.inner:
            inner.step()


def make_schedule_free(weights, lr):
    optimizer = schedulefree.AdamWScheduleFree(weights, lr=lr, warmup_steps=3)
    optimizer.train()
    return optimizer


COUNTERS = "k", "weight_sum", "lr_max", "scheduled_lr", "train_mode"


@plugin()
class Chosen:
    made: Any = state()

    @hookimpl
    def optimizer(self, model, train):
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        lr = train.learning_rate
        self.made = OPTIMIZER
        return self.made

    @hookimpl
    def state_dict(self):
        return {"groups": [{key: group[key] for key in COUNTERS} for group in self.groups()]}

    @hookimpl
    def load_state_dict(self, state):
        for group, counters in zip(self.groups(), state["groups"], strict=True):
            group.update(counters)

    def groups(self):
        return [group for group in self.made.param_groups if "weight_sum" in group]
"""
# Two ranks write their weights and optimizer state at step 3; one process takes them over.
TAKE_OVER = """
import torch


@plugin()
class TakeOver:
    file: str

    @hookimpl(wrapper=True)
    def optimizer(self, model):
        self.model, self.made = model, (yield)
        return self.made

    def tensors(self):
        for name, weight in self.model.named_parameters():
            yield name, weight
            for key, values in self.made.state[weight].items():
                if isinstance(values, torch.Tensor):
                    yield f"{name}/{key}", values

    @hookimpl
    @torch.no_grad()
    def stepped(self, run):
        if run.step != 3:
            return
        if run.ranks.size == 1:
            taken = torch.load(self.file)
            for name, values in self.tensors():
                values.copy_(taken.pop(name))
            assert not taken
            return
        whole = {
            name: values.full_tensor() if hasattr(values, "full_tensor") else values
            for name, values in self.tensors()
        }
        if run.is_main:
            torch.save(whole, self.file)
"""
OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(weights, lr=lr, weight_decay=0.1)",
    "sgd": "torch.optim.SGD(weights, lr=lr, momentum=0.9)",
    "adafactor": "torch.optim.Adafactor(weights, lr=lr)",
    "muon": "MuonAndAdamW(weights, lr)",
    "schedule_free": "make_schedule_free(weights, lr)",
    "corrected": "",  # low_memory_adam's
}
STEPS = 6
REFUSED = {
    ("zero3", "adafactor"): "Adafactor is not known to update each number on its own",
    ("zero3", "muon"): "the plugin's optimizer failed on the empty weights of ZeRO-3",
    ("zero3", "schedule_free"): "AdamWScheduleFree is not known to update each number on its own",
    ("fsdp2", "adafactor"): "Adafactor failed on the DTensors of FSDP2",
    ("zero3", "corrected"): "ZeRO-3 stores and updates weights in float32",
}
# Each rank rounds its part of Muon's products, or of gradients in bfloat16, so even uninterrupted
# runs differ by 1e-4 from one process. The measure: one process that takes over weights and state.
ROUNDS = {("fsdp2", "muon"), ("fsdp2", "corrected"), ("cpu2", "corrected")}


@pytest.fixture
def recipe(tmp_path, monkeypatch, request):
    """Return a recipe with the optimizer of a plugin."""
    name = request.param
    source = PLUGIN.replace("OPTIMIZER", OPTIMIZERS[name])
    activate(install(tmp_path, **{name: source, "take_over": TAKE_OVER}), monkeypatch)
    tables = tiny_tables(tmp_path) | {"plugins": {name: {}}}
    if name == "corrected":
        tables["plugins"] = {"low_memory_adam": {"kind": "corrected"}}
        tables["model"] |= {"dtype": "bfloat16", "weights": "bfloat16"}
    tables["train"] |= {"steps": STEPS, "learning_rate": 1e-3}
    tables["checkpoint"] = {"every": STEPS // 2, "keep": 9}
    return write_recipe(tmp_path / "recipe.toml", tables)


def resume_at_half(recipe, source, target):
    """Resume from the middle checkpoint of a run, in a copy of its folder."""
    shutil.copytree(source, target)
    shutil.rmtree(checkpoint(target))
    done = run_plugsft(recipe, "--resume", f"output={target}")
    assert done.returncode == 0 and "going on after step 3" in done.stdout, (
        done.stdout + done.stderr
    )


def checkpoint(run):
    """Return the last checkpoint of a run."""
    return run / f"checkpoints/step-{STEPS:06}"


@pytest.mark.parametrize("recipe", OPTIMIZERS, indirect=True)
def test_an_optimizer_of_a_plugin_resumes_bit_for_bit(recipe, tmp_path):
    whole = tmp_path / "run"
    done = run_plugsft(recipe)
    assert done.returncode == 0, done.stdout + done.stderr
    resume_at_half(recipe, whole, tmp_path / "resumed")
    expected, resumed = stored(checkpoint(whole)), stored(checkpoint(tmp_path / "resumed"))
    assert expected.keys() == resumed.keys()
    for name, values in expected.items():
        assert torch.equal(values, resumed[name]), name
    states = [
        json.loads((checkpoint(run) / "state.json").read_text())
        for run in (whole, tmp_path / "resumed")
    ]
    for key in ("optimizer", "optimizer_states", "plugin_states"):
        assert states[0][key] == states[1][key], key


ONLY_OPTIMIZER = PLUGIN.split("    @hookimpl\n    def state_dict")[0]


@pytest.mark.parametrize("recipe", ["schedule_free"], indirect=True)
def test_an_optimizer_that_counts_in_its_groups_needs_a_plugin_that_keeps_them(
    recipe, tmp_path, monkeypatch
):
    source = ONLY_OPTIMIZER.replace("OPTIMIZER", OPTIMIZERS["schedule_free"])
    activate(install(tmp_path, forgetful=source), monkeypatch)
    recipe.write_text(recipe.read_text().replace("plugins.schedule_free", "plugins.forgetful"))
    done = run_plugsft(recipe)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert (
        "'optimizer' of plugin 'forgetful': AdamWScheduleFree changes param_groups[0]['k'], "
        in done.stderr
    )
    assert "Return it from the plugin's state_dict()" in done.stderr
    assert not (tmp_path / "run/checkpoints").exists()


@only_full
@pytest.mark.parametrize("launcher", ["cpu2", "fsdp2", "zero3"])
@pytest.mark.parametrize("recipe", OPTIMIZERS, indirect=True)
def test_one_process_resumes_what_two_ranks_saved(recipe, tmp_path, launcher, request):
    name = request.node.callspec.params["recipe"]
    config = ROOT / f"recipes/accelerate/{launcher}.yaml"
    file = f"plugins.take_over.file={tmp_path / 'state.pt'}"
    options = [file] if (launcher, name) in ROUNDS else []
    words = ("--config_file", config, "--num_processes", 2, "-m", "plugsft", recipe)
    code, out, err = run_launch(*words, *options)
    if reason := REFUSED.get((launcher, name)):
        assert code == 2 and reason in err and "Traceback" not in err, out + err
        return
    assert code == 0, out + err
    resume_at_half(recipe, tmp_path / "run", tmp_path / "resumed")
    whole = tmp_path / "run"
    if options:
        whole = tmp_path / "taken over"
        done = run_plugsft(recipe, *options, f"output={whole}")
        assert done.returncode == 0, done.stdout + done.stderr
    expected, resumed = stored(checkpoint(whole)), stored(checkpoint(tmp_path / "resumed"))
    worst = max(
        float((values - resumed[key]).abs().max())
        for key, values in expected.items()
        if key.startswith("model/")
    )
    print(f"\n{name}, {launcher}: {worst:.1e}")
    assert worst < 1e-6
