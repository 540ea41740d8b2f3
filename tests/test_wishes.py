"""What people ask for is a plugin: each of tests/wishes.py trains a tiny model for real."""

import json
import re

import pytest
import torch
import wishes
from conftest import ROOT, read_metrics, run_plugsft, tiny_tables, write_recipe
from plugin_packages import activate, install
from safetensors.torch import load_file

NAMES = [name.lower() for name in vars(wishes) if name.isupper()]
TRAIN = {"batch_size": 8, "micro_batch": 4, "steps": 4, "learning_rate": 1e-2}


def test_the_table_of_wishes_names_all_of_these_and_files_that_exist():
    page = (ROOT / "docs/worked_plugins.md").read_text(encoding="utf8")
    table = page.split("\n| wish |")[1].split("\n\n")[0]
    classes = {"".join(word.capitalize() for word in name.split("_")) for name in NAMES}
    seen = [line.split("|")[3] for line in table.splitlines()[2:]]
    assert len(seen) == 23
    assert {word for cell in seen for word in re.findall(r"`([A-Z]\w+)`", cell)} == classes
    for link in re.findall(r"\]\((.+?)\)", table):
        assert (ROOT / "docs" / link.partition("#")[0]).exists(), link


@pytest.fixture
def installed(tmp_path, monkeypatch):
    sources = {name: getattr(wishes, name.upper()) for name in NAMES}
    activate(install(tmp_path / "site", **sources), monkeypatch)


def train(folder, plugins, *words, rows=None, **tables):
    """Train a tiny recipe; return its output folder and the losses of its steps."""
    recipe = write_recipe(
        folder / "recipe.toml",
        tiny_tables(folder, rows) | {"train": TRAIN, "plugins": plugins} | tables,
    )
    done = run_plugsft(recipe, *words)
    assert done.returncode == 0, done.stderr
    return folder / "run", [line["loss"] for line in read_metrics(folder / "run")]


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_frozen_layers_8_bit_states_gradient_noise_mirrored_checkpoints_and_a_quiz(
    tmp_path, installed
):
    hub = tmp_path / "hub"
    plugins = {
        "freeze": {"layers": 1},
        "low_memory_adam": {"kind": "adamw_8bit"},
        "gradient_noise": {"size": 0.02},
        "mirror": {"to": str(hub)},
        "quiz": {"questions": {"What is 1 + 1?": "2", "Who?": "owls"}},
    }
    more = {"eval": {"every": 2, "split": "train[:8]"}, "checkpoint": {"every": 2}}
    run, losses = train(tmp_path, plugins, **more)
    assert [path.name for path in sorted(hub.iterdir())] == [
        "checkpoint-2",
        "checkpoint-4",
        "model-4",
    ]
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if 0 <= line.get("eval_quiz", -1) <= 1] == [2, 4]
    [initial] = (run / "scratch").glob("model-*")
    before, after = weights(initial), weights(run / "model")
    frozen = {name for name in before if "embed" in name or ".layers.0." in name}
    frozen -= {"lm_head.weight"}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert frozen and changed.isdisjoint(frozen) and any(".layers.1." in name for name in changed)
    # The codes and the count of the noise come back: a resumed run ends bit-equal.
    words = (f"output={tmp_path / 'again'}", "--resume-from", hub / "checkpoint-2")
    train(tmp_path, plugins, *words, **more)
    resumed = weights(tmp_path / "again/model")
    assert all(torch.equal(after[name], resumed[name]) for name in after)
    assert losses[-2:] == [line["loss"] for line in read_metrics(tmp_path / "again")]
    # Noise alone makes the difference to a run without it.
    quiet = plugins | {"gradient_noise": {"size": 0.0}}
    _, others = train(tmp_path, quiet, "--overwrite", **more)
    assert others[0] == losses[0] and others[1] != losses[1]
