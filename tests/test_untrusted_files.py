"""Runs, models and records that someone else wrote: nothing outside of them is read or changed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run_plugsft, tiny_tables, write_recipe

from plugsft.lab.trials.runner import run_process
from plugsft.plugins.push.uploads import Uploads


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
    (output / ".lock").symlink_to(thesis)
    assert f"{output}: cannot be written" in refused(made / "recipe.toml", f"output={output}")
    assert thesis.read_text() == "years of work"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_export_copies_no_file_from_outside_of_the_model(run, tmp_path, kind):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key.pem").write_text("private")
    (run / "model/more").symlink_to(secret / "key.pem" if kind == "file" else secret)
    assert "more: leads out of the model's folder" in refused("export", run, "--to", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("command", ["check", "train"])
def test_an_index_of_weights_names_only_files_of_its_folder(made, run, tmp_path, absolute, command):
    model, outside = run / "model", tmp_path / "run/outside.safetensors"
    (model / "model.safetensors").rename(outside)
    name = str(outside) if absolute else "../outside.safetensors"
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}}))
    tables = tiny_tables(tmp_path / "next") | {"model": {"path": str(model)}}
    error = refused(command, write_recipe(tmp_path / "next.toml", tables))
    assert f"{index}: cannot be used: it names {name}, outside of its folder" in error


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
