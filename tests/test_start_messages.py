"""What a run, `check` and a resumed run say about steps, earlier results and checkpoints."""

import os
import shutil
import subprocess
import sys
import time

import pytest
from conftest import bare_tables, chats, run_plugsft, tiny_tables, write_jsonl, write_recipe


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Give the recipe of a finished run, its folder, and what it said."""
    folder = tmp_path_factory.mktemp("finished")
    tables = tiny_tables(folder, chats(20)) | {"checkpoint": {"every": 1}}
    tables["train"] |= {"batch_size": 64, "epochs": 3, "steps": 2}
    recipe = write_recipe(folder / "recipe.toml", tables)
    result = run_plugsft(recipe)
    assert result.returncode == 0, result.stderr
    return recipe, folder / "run", result.stdout


@pytest.fixture
def stopped(finished, tmp_path):
    """Give a recipe and the folder of its run, which has checkpoints and no model."""
    run = shutil.copytree(finished[1], tmp_path / "run")
    shutil.rmtree(run / "model")
    return finished[0], run


REPLACED = "; train.steps = 2 replaces train.epochs = 3"
SMALL = "train.batch_size = 64 is larger than the data: each step trains on all 20 examples"


def test_a_run_says_how_many_examples_a_step_has_and_what_replaces_epochs(finished):
    lines = finished[2].splitlines()
    assert f"steps: 2 of 20 examples, 1 an epoch{REPLACED}" in lines
    assert any(line.startswith(f"warning: {SMALL}") for line in lines)


def test_check_says_the_same_and_names_the_command_that_works(finished, stopped):
    recipe = finished[0]
    result = run_plugsft("check", recipe)
    assert result.returncode == 0 and REPLACED in result.stdout and SMALL in result.stdout, (
        result.stderr
    )
    last = result.stdout.splitlines()[-1]
    assert last == f"ready to replace a finished run: plugsft {recipe} --overwrite"
    words = recipe, f"output={stopped[1]}"
    last = run_plugsft("check", *words).stdout.splitlines()[-1]
    command = f"plugsft {recipe} output={stopped[1]}"
    assert last == f"ready to continue after step-000002: {command} --resume"
    assert run_plugsft(*words, "--resume").returncode == 0
    shutil.rmtree(stopped[1] / "model")
    last = run_plugsft("check", *words, "train.seed=7").stdout.splitlines()[-1]
    command += " train.seed=7 --overwrite"
    assert last == f"ready to replace checkpoints up to step-000002: {command}"


def test_only_a_recipe_with_both_is_warned_that_steps_replace_epochs(tiny):
    said = run_plugsft("check", tiny(train={"steps": 2})).stdout
    assert "ok    steps" in said and "replaces" not in said
    assert "replaces" not in run_plugsft("check", tiny(train={"epochs": 2})).stdout


def test_a_tokenizer_from_the_cache_is_not_reported_as_trained(finished):
    recipe, _, first = finished
    assert "tokenizer: trained on the data, " in first
    again = run_plugsft("prepare", recipe).stdout
    assert "tokenizer: from cache, trained on the data before" in again
    assert "tokenizer: trained" not in again


def test_a_finished_run_says_that_nothing_is_to_be_resumed_and_the_cure(finished):
    recipe, run, _ = finished
    for words in (["--resume"], ["--resume-auto"]):
        result = run_plugsft(recipe, *words)
        assert result.returncode == 0, result.stderr
        says = f"{run} is finished; nothing to resume. Start again with --overwrite, or choose"
        assert result.stdout.startswith(says), result.stdout


@pytest.mark.parametrize("place", ["run", "run/checkpoints", "elsewhere"])
def test_a_wrong_checkpoint_folder_is_answered_with_those_that_exist(stopped, tmp_path, place):
    recipe, run = stopped
    result = run_plugsft(recipe, f"output={run}", f"--resume-from={tmp_path / place}")
    names = ", ".join(f"{run}/checkpoints/step-00000{step}" for step in (1, 2))
    says = f"error: --resume-from {tmp_path / place}: is no checkpoint folder; name one of {names}"
    assert result.returncode == 2 and result.stderr == f"{says}\n"
    result = run_plugsft(recipe, f"output={tmp_path}/new", f"--resume-from={tmp_path}/nowhere")
    assert result.returncode == 2 and "start without it: there is none" in result.stderr


@pytest.mark.parametrize("word", ["--resum", "--resume-fro", "--auto"])
def test_a_wrong_option_is_answered_with_visible_ones(tiny, word):
    result = run_plugsft(tiny(), word)
    assert result.returncode == 2
    assert ("--resume-from" in result.stderr) == (word != "--auto")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "gpt2"])
def test_a_hub_that_cannot_be_reached_is_not_asked_again_and_again(tmp_path, model):
    tables = bare_tables(tmp_path / "run", {})
    tables["model"] = {"path": model}
    tables["data"]["source"] = str(write_jsonl(tmp_path / "chats.jsonl", chats(2)))
    command = [sys.executable, "-m", "plugsft", "check", write_recipe(tmp_path / "r.toml", tables)]
    env = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    started = time.monotonic()
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 2 and time.monotonic() - started < 60
    first, *lines = (result.stdout + result.stderr).splitlines()
    assert first == (
        "127.0.0.1 cannot be reached (Connection refused); models and data come from its cache"
    )
    assert len(lines) < 20 and result.stderr.count("the hub cannot be reached. Name a folder") == 2
