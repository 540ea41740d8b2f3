"""Short commands and refusals answer soon: they import no torch. Times are only printed."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, tiny_tables, write_jsonl, write_recipe
from other_tools import save_model
from plugin_packages import LOUD, activate, install

from plugsft.base.atomic import publish
from plugsft.registry.discover import find

QUICKSTART, TULU = "recipes/quickstart.toml", "recipes/tulu_sft_lora.toml"
HEAVY = {"torch", "transformers", "datasets", "accelerate", "peft"}
TOKENIZING = HEAVY - {"transformers"}
"""transformers holds the tokenizer's class, and imports no torch for it."""


def imported(*words):
    """Run a command; return its exit code, and the packages that it has imported."""
    return run_python("-m", "plugsft", *map(str, words))


def run_python(*words):
    done, packages = run_with_imports(*words)
    return done.returncode, packages


def run_with_imports(*words):
    command = [sys.executable, "-X", "importtime", *words]
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    after = os.times()
    print(f"\n{sum(after[2:4]) - sum(before[2:4]):.2f} s of the processor")
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done, {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


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


def files_of_a_new_user(folder):
    """Make files about which a run is refused, and folders that hold results."""
    write_jsonl(folder / "columns.jsonl", [{"question": "a", "answer": "b"}])
    write_jsonl(folder / "pairs.jsonl", [{"chosen": "a", "rejected": "b"}])
    (folder / "empty.jsonl").touch()
    (folder / "foreign/model").mkdir(parents=True)
    (folder / "foreign/model/notes.txt").write_text("mine")
    (folder / "short").mkdir()
    (folder / "short/config.json").write_text(json.dumps({"max_position_embeddings": 100}))
    with publish(folder / "finished/model") as model:
        (model / "config.json").write_text("{}")
    with publish(folder / "other/checkpoints/step-000002") as checkpoint:
        state = {"format": 3, "step": 2, "recipe": {"train.seed": 7}, "plugins": {}}
        (checkpoint / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["output={place}/finished"], "/finished holds a finished run: start again with"),
        (["output={place}/foreign"], "notes.txt was not written by plugsft"),
        (["output={place}/other"], "holds checkpoints up to step-000002"),
        (["output={place}/other", "--resume"], "belongs to another recipe"),
        (["--resume"], "there is no checkpoint in"),
        (["--resume-from={place}/short"], "is no checkpoint"),
        (["--resume", "--overwrite"], "choose one of them"),
        (["train.schedule=constant"], "the schedule 'constant' has no warm-up"),
        (["train.schedule=warmup_stable_decay"], "num_decay_steps"),
        (["data.max_length=257"], "the model's context is 256 tokens"),
        (["model={{path = '{place}/short'}}"], "the model's context is 100 tokens"),
        (["data.source={place}/nowhere.jsonl"], "no such file"),
        (["data.source={place}/empty.jsonl"], "the file is empty"),
        (["data.source={place}/columns.jsonl"], "no format has these columns: answer, question"),
        (["data.source={place}/pairs.jsonl"], "add [plugins.dpo]"),
        (["eval.source={place}/columns.jsonl"], "no format has these columns: answer, question"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_mistake_is_refused_before_anything_heavy_is_imported(words, says, tmp_path):
    files_of_a_new_user(tmp_path)
    words = [f"output={tmp_path}/run", *(word.format(place=tmp_path) for word in words)]
    done, packages = run_with_imports("-m", "plugsft", QUICKSTART, *words)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and says in errors[0], errors
    assert packages & HEAVY == set() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_refuses_a_finished_run_before_anything_heavy(rank, tmp_path, monkeypatch):
    files_of_a_new_user(tmp_path)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, packages = imported(QUICKSTART, f"output={tmp_path / 'finished'}")
    assert code == 2 and packages & HEAVY == set()


@pytest.mark.parametrize(
    "words",
    [
        [QUICKSTART, "train.batchsize=4"],
        [TULU, "plugins.lora.rr=4"],
        *(
            [name, QUICKSTART, "train.batchsize=4"]
            for name in ("check", "prepare", "bench", "plan")
        ),
    ],
    ids=lambda words: " ".join(words),
)
def test_a_mistake_in_a_recipe_is_told_before_arrays_are_imported(words):
    done, packages = imported(*words)
    assert done == 2 and packages & {*HEAVY, "numpy", "pyarrow", "jinja2", "tokenizers"} == set()


def test_preparing_and_checking_a_model_from_scratch_imports_no_torch(tmp_path):
    words = QUICKSTART, f"output={tmp_path / 'run'}"
    for command in ("check", "prepare", "prepare"):
        done, packages = imported(command, *words)
        assert done == 0 and packages & TOKENIZING == set()


PAIR = {"prompt": "Say a letter.", "chosen": "This is a.", "rejected": "I say no."}
RATED = {"prompt": "Say a letter.", "completion": "This is a.", "label": True}


@pytest.mark.parametrize(
    ("objective", "rows"),
    [(None, None), ("dpo", [PAIR] * 24), ("reward", [PAIR] * 24), ("kto", [RATED] * 24)],
)
def test_prepare_imports_no_torch_for_a_model_and_a_run_finds_its_tokens(objective, rows, tmp_path):
    save_model(tmp_path / "model")
    tables = tiny_tables(tmp_path, rows) | {"model": {"path": str(tmp_path / "model")}}
    tables["plugins"] = {objective: {}} if objective else {}
    words = "prepare", str(write_recipe(tmp_path / "recipe.toml", tables))
    done, packages = run_with_imports("-m", "plugsft", *words)
    assert done.returncode == 0 and packages & TOKENIZING == set() and "24 rows" in done.stdout
    code = "import torch; from plugsft.cli import main; main()"
    done, packages = run_with_imports("-c", code, *words)
    assert done.returncode == 0 and "torch" in packages and "from cache" in done.stdout


def test_prepare_hides_no_torch_from_the_plugins_of_others(tmp_path, monkeypatch):
    with_torch = LOUD.replace("rendered = yield", "rendered = yield\n            import torch")
    activate(install(tmp_path / "site", loud=with_torch), monkeypatch)
    tables = tiny_tables(tmp_path) | {"plugins": {"loud": {}}}
    done, packages = imported("prepare", write_recipe(tmp_path / "recipe.toml", tables))
    assert done == 0 and "torch" in packages


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda it: it.stem
)
def test_reading_a_shipped_recipe_imports_nothing_heavy(recipe):
    assert imported("show", recipe)[1] & HEAVY == set()


@pytest.mark.parametrize("name", [plugin.name for plugin in find().values()])
def test_importing_a_plugin_imports_nothing_heavy(name):
    done, packages = run_python("-c", f"import {find()[name].target.partition(':')[0]}")
    assert done == 0 and packages & HEAVY == set()
