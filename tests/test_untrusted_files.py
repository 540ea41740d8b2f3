"""Runs, models and records that someone else wrote: nothing outside of them is read or changed."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from conftest import ROOT, only_full, run_plugsft, tiny_tables, write_recipe

from plugsft.base.errors import RecipeError
from plugsft.lab.trials import run_process
from plugsft.model.load import ModelLoad
from plugsft.output.folder import ensure_inputs, lock_output
from plugsft.output.metrics import read_metrics
from plugsft.output.record import keep_lines
from plugsft.plugins.push.uploads import Uploads
from plugsft.registry.load import load


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder of a recipe and its run of two steps."""
    folder = tmp_path_factory.mktemp("made")
    tables = tiny_tables(folder)
    tables["train"]["steps"] = 2
    result = run_plugsft(write_recipe(folder / "recipe.toml", tables))
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def run(made, tmp_path):
    """Return a copy of the run."""
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


def refused(*words, **options):
    """Return the message of a command that refuses its input."""
    result = run_plugsft(*words, **options)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    return result.stderr


def test_the_lock_is_not_written_through_a_link(made, tmp_path):
    thesis, output = tmp_path / "thesis.txt", tmp_path / "run"
    thesis.write_text("years of work")
    output.mkdir()
    (output / ".plugsft.lock").symlink_to(thesis)
    assert f"{output}: cannot be written" in refused(made / "recipe.toml", f"output={output}")
    assert thesis.read_text() == "years of work"


def test_no_plugin_writes_through_a_link(made, run, tmp_path):
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work")
    words = [made / "recipe.toml", f"output={run}", "--overwrite", "train.steps=6"]
    for name in ("trackers.json", "profile.json"):
        (run / name).symlink_to(thesis)
    done = run_plugsft(*words, 'plugins.tracker.to=["tensorboard"]', "plugins.profiler={}")
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "profile.json").read_text())["steps"]
    assert thesis.read_text() == "years of work" and not (run / "trackers.json").is_symlink()


@pytest.mark.parametrize("kind", ["file", "folder", "itself"])
def test_export_copies_no_file_from_outside_of_the_model(run, tmp_path, kind):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key.pem").write_text("private")
    more, says = run / "model/more", "more: leads out of the model's folder"
    if kind == "itself":
        more.symlink_to(more)
        says = "too many levels of symbolic links"
    else:
        more.symlink_to(secret / "key.pem" if kind == "file" else secret)
    assert says in refused("export", run, "--to", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("command", ["check", "train", "chat", "export"])
def test_an_index_of_weights_names_only_files_of_its_folder(made, run, tmp_path, absolute, command):
    model, outside = run / "model", tmp_path / "run/outside.safetensors"
    (model / "model.safetensors").rename(outside)
    name = str(outside) if absolute else "../outside.safetensors"
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}}))
    tables = tiny_tables(tmp_path / "next") | {"model": {"path": str(model)}}
    words = [write_recipe(tmp_path / "next.toml", tables)]
    if command in ("chat", "export"):  # adapters for that model
        words = [tmp_path / "adapters", *(["--merge"] if command == "export" else ["--ask", "hi"])]
        words[0].mkdir()
        settings = {"base_model_name_or_path": str(model), "peft_type": "LORA"}
        (words[0] / "adapter_config.json").write_text(json.dumps(settings))
    says = f"{index}: cannot be used: it names {name}, outside of its folder"
    assert says in refused(command, *words)
    with pytest.raises(RecipeError, match=re.escape(says)):  # as a plugin loads a reference
        ModelLoad(str(model)).load_model()


PLANTED = "import pathlib; pathlib.Path('ran').touch()\n"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Return a working directory with modules that someone else wrote."""
    folder = tmp_path / "clone"
    for name in ("psutil.py", "plugsft/__init__.py", "plugsft/__main__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(PLANTED)
    monkeypatch.chdir(folder)
    return folder


def test_no_rank_imports_from_the_working_directory(made, clone):
    words = ["launch", made / "recipe.toml", "--ranks", "2", f"output={clone}/run"]
    command = [Path(sys.executable).parent / "plugsft", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert (clone / "run/model").is_dir() and not (clone / "ran").exists()


def test_no_trial_or_upload_imports_from_the_working_directory(clone):
    code, _ = run_process([sys.executable, "-m", "plugsft", "--help"], clone / "log")
    assert code == 0 and "Commands" in (clone / "log").read_text()
    assert Uploads(clone / "run", "me/tiny", [], 60)._run(clone / "none")
    assert not (clone / "ran").exists()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "1"}, "rank 1 of 1"),
        ({"RANK": "7", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "rank 7 of 2"),
        ({"RANK": "-1"}, "RANK='-1', and it should be a whole number, 0 or more"),
        ({"RANK": "x"}, "RANK='x'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0', and it should be a whole number, 1 or more"),
        ({"LOCAL_RANK": "5"}, "unset RANK, LOCAL_RANK and WORLD_SIZE"),
        ({"LOCAL_RANK": "0"}, "rank 0 of 1"),
        ({"WORLD_SIZE": "2"}, "rank 0 of 2"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE='x'"),
        ({"PLUGSFT_PROGRESS_SECONDS": "x"}, "PLUGSFT_PROGRESS_SECONDS='x'"),
        ({"ACCELERATE_USE_CPU": "]"}, "accelerate cannot use its settings: invalid truth value ]"),
        ({"ACCELERATE_DYNAMO_BACKEND": "x"}, "sets dynamo_backend = x (ACCELERATE_DYNAMO_BACKEND)"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "which plugsft (by DDP, FSDP2 or ZeRO-3) decides"),
        ({"ACCELERATE_USE_SAGEMAKER": "true"}, "use_sagemaker = true (ACCELERATE_USE_SAGEMAKER)"),
        ({"ACCELERATE_TORCH_DEVICE": "meta"}, "device (with CUDA_VISIBLE_DEVICES) decides: unset"),
        ({"ACCELERATE_TORCH_DEVICE": ""}, "torch_device =  (ACCELERATE_TORCH_DEVICE), which"),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_NODES": "0x10"}, "SLURM_STEP_NUM_NODES='0x10'"),
    ],
)
def test_a_wrong_number_of_the_environment_is_named(made, tmp_path, variables, says):
    words = ["launch"] if "SLURM_JOB_ID" in variables else ["train"]
    error = refused(*words, made / "recipe.toml", f"output={tmp_path}/run", env=variables)
    assert error.startswith("error: ") and says in error and error.count("\n") == 1
    assert not (tmp_path / "run/model").exists()


def test_a_rank_left_in_the_environment_silences_no_command(run):
    command = [sys.executable, "-m", "plugsft", "show", run]
    env = os.environ | {"RANK": "1"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True)
    assert done.returncode == 0 and b"completed" in done.stdout


def test_a_damaged_line_of_a_log_is_left_out(run):
    metrics = run / "metrics.jsonl"
    first, second = metrics.read_text().splitlines()
    for harmed in ('"stap"', '"step": null, "x"', '"step": "2", "x"'):
        metrics.write_text(f"{first}\n{second.replace(chr(34) + 'step' + chr(34), harmed)}\n")
        assert [line["step"] for line in read_metrics(metrics)] == [1]
        assert [line["step"] for line in keep_lines(metrics, 2)] == [1]


def test_an_output_that_is_moved_away_does_not_hide_the_reason(made, tmp_path):
    recipe = load(made / "recipe.toml", [f"output={tmp_path}/run"])[0]
    with pytest.raises(RecipeError, match="the reason"), lock_output(recipe):
        recipe.folder.rename(tmp_path / "moved")
        raise RecipeError("the reason")


def test_control_characters_of_rows_and_records_are_shown_and_not_obeyed(tmp_path, run):
    evil = "\x1b[2J\x1b]0;title\x07\x9b\r"
    rows = [{"text": f"{evil} a b c"}, {"text": "d e f"}]
    path = write_recipe(tmp_path / "evil.toml", tiny_tables(tmp_path / "evil", rows))
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"reason": evil, "status": evil}))
    for words in (
        ["inspect", path],
        ["show", run],
        ["diff", run, run.parent / "b"],
    ):
        if words[0] == "diff":
            shutil.copytree(run, run.parent / "b")
        result = run_plugsft(*words)
        assert result.returncode == 0, result.stderr
        assert not {*result.stdout} & {*"\x1b\x07\x9b\r"} and (
            words[0] == "inspect" or "␛" in result.stdout
        )


@pytest.mark.parametrize(("command", "place"), [("prepare", 3), ("prepare", -1), ("train", 3)])
def test_damaged_lists_of_tokens_are_named_with_their_file(run, tmp_path, command, place):
    rows = {"input_ids": [[1, 2, 3, 4, 5]] * 16, "labels": [[1, 2, 3, 4, 5]] * 16}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "ready")
    [file] = (tmp_path / "ready").glob("*.arrow")
    offsets = np.arange(0, 85, 5, np.int32)
    wrong = offsets.copy()
    wrong[place] = 105_000
    assert offsets.tobytes() in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(offsets.tobytes(), wrong.tobytes()))
    tables = tiny_tables(tmp_path / "tiny")
    tables["data"]["source"] = str(tmp_path / "ready")
    tables["model"]["tokenizer"] = str(run / "model")
    error = refused(command, write_recipe(tmp_path / "ready.toml", tables))
    assert f"{file}: its rows are damaged (" in error


def test_the_umask_decides_who_reads_a_model_and_its_checkpoints(made):
    folders = (made / "run/model", *(made / "run/checkpoints").glob("step-*"))
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {(made / "run/run.json").stat().st_mode}


@pytest.mark.parametrize(
    ("name", "old", "new", "is_refused"),
    [
        ("run.json", '"format": 1', '"format"; 1', True),
        ("recipe.toml", "[data]", "[data}", True),
        ("metrics.jsonl", '{"step": 1', '{"stap": 1', False),
    ],
)
def test_a_damaged_record_is_named_and_written_again(made, run, name, old, new, is_refused):
    shutil.rmtree(run / "model")  # it has not finished
    text = (run / name).read_text()
    assert text.count(old) == 1
    (run / name).write_text(text.replace(old, new))
    words = [made / "recipe.toml", f"output={run}", "--resume"]
    if is_refused:
        error = refused(*words)
        assert f"output: {run / name}: not written by plugsft, or changed since" in error
        (run / name).rename(run / "kept")
    again = run_plugsft(*words)
    assert again.returncode == 0, again.stderr
    assert ("lines that cannot be read are left out" in again.stdout) != is_refused
    written = (run / name).read_text()
    assert new not in written and (old in written) == is_refused


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_model_that_is_not_as_it_was_written_is_named(run, tmp_path, name):
    path = run / "model" / name
    path.write_bytes(path.read_bytes().replace(b"e", b"d", 1))
    tables = tiny_tables(tmp_path / "next") | {"model": {"path": str(run / "model")}}
    recipe = write_recipe(tmp_path / "next.toml", tables)
    for words in (["chat", run, "--ask", "hi"], ["check", recipe], ["train", recipe]):
        done = run_plugsft(*words)
        text = " ".join((done.stdout + done.stderr).split())
        assert f"warning: {run / 'model'}: {name} is not what was written" in text


def test_adapters_that_are_not_as_they_were_written_are_named(run, tmp_path, capsys):
    (run / "model/config.json").rename(run / "model/adapter_config.json")
    tables = tiny_tables(tmp_path / "next")
    tables["plugins"] = {"lora": {"adapter": str(run / "model")}}
    recipe = load(path := write_recipe(tmp_path / "next.toml", tables))[0]
    ensure_inputs(recipe, path)
    assert f"warning: {run / 'model'}: config.json is missing" in capsys.readouterr().out


def test_settings_of_other_types_are_refused_or_ignored(run, tmp_path):
    """A model may come from anyone."""
    model = run / "model"
    (model / "manifest.json").unlink()
    tables = tiny_tables(tmp_path / "next") | {"model": {"path": str(model)}}
    recipe = write_recipe(tmp_path / "next.toml", tables)
    for number, stops in enumerate(({}, [-1, 1 << 40])):
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        words = [f"output={tmp_path}/{number}", "train.steps=1"]
        done = run_plugsft("train", recipe, *words)
        assert done.returncode == 0, done.stderr
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = "1e-5"
    (model / "config.json").write_text(json.dumps(config))
    assert "no causal language model could be loaded" in refused("plan", recipe)


def test_words_that_change_nothing_are_refused(run):
    assert "whose results are fixed" in refused("show", run, "train.steps=3")


def test_an_export_to_a_folder_asks_no_hub(run, tmp_path):
    with (run / "recipe.toml").open("a") as recipe:
        recipe.write('\n[plugins.push]\nto = "me/tiny"\n')
    words = ["export", run / "checkpoints/step-000002", "--to", tmp_path / "model"]
    done = run_plugsft(*words, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr


FAILING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
static int fails(const char *call, const char *path) {
    if (strcmp(call, getenv("FAILS")) || !strstr(path, getenv("NAME"))) return 0;
    errno = atoi(getenv("ERRNO"));
    return 1;
}
int unlink(const char *path) {
    int (*next)(const char *) = dlsym(RTLD_NEXT, "unlink");
    return fails("unlink", path) ? -1 : next(path);
}
int rename(const char *old, const char *path) {
    int (*next)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    return fails("rename", path) ? -1 : next(old, path);
}
"""


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """Return a library that lets the system's unlink and rename fail, as a file server may."""
    folder = tmp_path_factory.mktemp("failing")
    (folder / "failing.c").write_text(FAILING)
    command = ["cc", "-shared", "-fPIC", "-o", folder / "failing.so", folder / "failing.c", "-ldl"]
    if not shutil.which("cc") or subprocess.run(command).returncode:
        pytest.skip("no compiler")
    return folder / "failing.so"


@pytest.mark.parametrize(
    ("call", "name", "words"),
    [
        ("rename", "run.json", []),
        pytest.param("rename", "checkpoints/step", ["--overwrite"], marks=only_full),
        pytest.param("rename", "run/model", ["--overwrite"], marks=only_full),
        pytest.param("unlink", "report.html", ["--overwrite"], marks=only_full),
    ],
)
@pytest.mark.parametrize("number", [errno.EIO, pytest.param(errno.ESTALE, marks=only_full)])
def test_a_file_server_that_fails_is_named_in_a_line(made, run, failing, call, name, words, number):
    where = [] if words else [f"output={run.with_name('new')}"]
    variables = {"LD_PRELOAD": str(failing), "FAILS": call, "NAME": name, "ERRNO": str(number)}
    command = [sys.executable, "-m", "plugsft", made / "recipe.toml", f"output={run}", *words]
    done = subprocess.run(
        [*command, *where], env=os.environ | variables, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert name in done.stderr and os.strerror(number)[1:] in done.stderr
