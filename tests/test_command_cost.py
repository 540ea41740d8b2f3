"""Short commands answer soon: they import no torch. Times are only printed."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from plugsft.registry.discover import find

QUICKSTART, TULU = "recipes/quickstart.toml", "recipes/tulu_sft_lora.toml"
HEAVY = {"torch", "transformers", "datasets", "accelerate", "peft"}
TOKENIZING = HEAVY - {"transformers"}
"""transformers holds the tokenizer's class, and imports no torch for it."""


def imported(*words):
    """Run a command; return its exit code, and the packages that it has imported."""
    return run_python("-m", "plugsft", *map(str, words))


def run_python(*words):
    command = [sys.executable, "-X", "importtime", *words]
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    after = os.times()
    print(f"\n{sum(after[2:4]) - sum(before[2:4]):.2f} s of the processor")
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done.returncode, {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        ([QUICKSTART, "output={run}", "train.batchsize=4"], 2),
        ([TULU, "output={run}", "plugins.lora.rr=4"], 2),
        (["check", QUICKSTART, "train.batchsize=4"], 2),
        (["prepare", QUICKSTART, "train.batchsize=4"], 2),
        (["inspect", QUICKSTART, "train.batchsize=4"], 2),
        (["bench", QUICKSTART, "train.batchsize=4"], 2),
        (["tune", QUICKSTART, "train.batchsize=4"], 2),
        (["plan", QUICKSTART, "train.batchsize=4"], 2),
        (["nowhere.toml"], 2),
        (["show", TULU], 0),
        (["plugins", TULU], 0),
        (["plugins"], 0),
        (["schema"], 0),
        (["cache", "ls", "--folder", "{run}"], 0),
        (["chat", "{run}"], 2),
        (["export", "{run}", "--to", "{run}/copy"], 2),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_short_answer_imports_nothing_heavy(words, code, tmp_path):
    done, packages = imported(*(word.format(run=tmp_path / "run") for word in words))
    assert done == code and packages & HEAVY == set()


def test_preparing_and_checking_a_model_from_scratch_imports_no_torch(tmp_path):
    words = QUICKSTART, f"output={tmp_path / 'run'}"
    for command in ("check", "prepare", "prepare"):
        done, packages = imported(command, *words)
        assert done == 0 and packages & TOKENIZING == set()


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda it: it.stem
)
def test_reading_a_shipped_recipe_imports_nothing_heavy(recipe):
    assert imported("show", recipe)[1] & HEAVY == set()


@pytest.mark.parametrize("name", [plugin.name for plugin in find().values()])
def test_importing_a_plugin_imports_nothing_heavy(name):
    done, packages = run_python("-c", f"import {find()[name].target.partition(':')[0]}")
    assert done == 0 and packages & HEAVY == set()
