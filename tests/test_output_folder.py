"""The output folder and the recipe's paths: nothing that was there is lost."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from conftest import (
    chats,
    must_succeed,
    read_metrics,
    run_plugsft,
    start_plugsft,
    tiny_tables,
    write_recipe,
)

from plugsft.base.errors import RecipeError
from plugsft.output import folder as places
from plugsft.registry.load import load

LONG = {"steps": 4000, "log_every": 4000}


def content(folder: Path) -> dict[str, bytes]:
    """Return every file that a run leaves behind, without its lock and what it prepared."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
        and path.relative_to(folder).parts[0] not in ("tokens", "scratch", ".plugsft.lock")
    }


def killed(recipe: Path, run: Path, *words: str) -> None:
    """Start a run, and kill it after some steps."""
    running = start_plugsft(recipe, *words)
    while not (run / "metrics.jsonl").is_file() or (run / "metrics.jsonl").stat().st_size < 2000:
        assert running.process.is_alive()
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, and the recipe that made it."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = write_recipe(folder / "recipe.toml", tiny_tables(folder))
    must_succeed(recipe)
    return recipe, folder / "run"


def test_a_refused_run_leaves_the_one_it_would_overwrite(finished, tmp_path):
    recipe, run = finished
    before = content(run)
    broken = tmp_path / "model"
    broken.mkdir()
    for path in (run / "model").iterdir():
        (broken / path.name).write_bytes(path.read_bytes()[:3000])
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (broken / name).write_bytes((run / "model" / name).read_bytes())
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"other": 1}\n')
    text = recipe.read_text()
    other = tmp_path / "other.toml"
    start = text.index("[model.scratch]")
    stop = text.index("[data]")
    other.write_text(f'{text[:start]}[model]\npath = "{broken}"\n{text[stop:]}')
    for words, says in (
        ([recipe, "data.max_length=9999"], "the model's context is 256 tokens"),
        ([recipe, f"data.source={bad}"], "no format has these columns"),
        ([recipe, "train.schedule=wsd"], "decay"),
        ([other], "model.safetensors: cannot be read"),
    ):
        result = run_plugsft(*words, "--overwrite")
        assert result.returncode == 2 and says in result.stderr, result.stderr
        assert content(run) == before, says


def test_overwriting_leaves_nothing_of_the_old_run(tiny, tmp_path):
    recipe, run = tiny(), tmp_path / "run"
    must_succeed(recipe, "train.steps=9", "checkpoint.every=1")
    must_succeed(recipe, "train.steps=2", "--overwrite")
    assert sorted(os.listdir(run / "checkpoints")) == ["step-000001", "step-000002"]
    assert len(read_metrics(run)) == 2


@pytest.mark.parametrize(
    "key",
    [
        *("model.path", "model.tokenizer", "model.chat_template"),
        *("data.source", "eval.source", "plugins.dpo.reference"),
    ],
)
def test_what_a_run_would_remove_is_no_input_of_it(finished, tmp_path, key):
    _, run = finished
    before = content(run)
    place = {"model.chat_template": run / "model/chat_template.jinja"}.get(
        key, run / "metrics.jsonl" if "source" in key else run / "model"
    )
    # By another way to the same place.
    (tmp_path / "link").symlink_to(run)
    given = tmp_path / "link" / place.relative_to(run)
    tables = tiny_tables(tmp_path) | {"output": str(run)}
    if key == "model.path":
        tables["model"] = {}
    *above, name = key.split(".")
    table = tables
    for one in above:
        table = table.setdefault(one, {})
    table[name] = str(given)
    path = write_recipe(tmp_path / "second.toml", tables)
    for words in (["check"], ["train", "--overwrite"]):
        result = run_plugsft(*words, path)
        assert result.returncode == 2
        assert f"{key}: {given} is a result in this recipe's own output" in result.stderr
    assert content(run) == before


@pytest.mark.parametrize(
    "name", ["model/config.json", "checkpoints/step-000003/a.txt", *places.FILES, "checkpoints"]
)
def test_what_plugsft_did_not_write_is_never_replaced(tiny, tmp_path, name):
    mine = tmp_path / "run" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("{}")
    recipe = tiny(train={"steps": 1})
    for words in ([recipe], [recipe, "--overwrite"], [recipe, "--resume"], ["check", recipe]):
        result = run_plugsft(*words)
        assert result.returncode == 2, result.stdout
        assert f"output: {mine}" in result.stderr and "not written by plugsft" in result.stderr
        assert mine.read_text() == "{}"


@pytest.mark.parametrize("output", ["base", "base/run", "."])
def test_the_folder_of_the_model_is_no_output(tmp_path, monkeypatch, output):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    tables = tiny_tables(tmp_path) | {"model": {"path": "base"}, "output": output}
    path = write_recipe(tmp_path / "recipe.toml", tables)
    for recipe in (load(path)[0], load(path, [f"model.path={tmp_path}/base"])[0]):
        [said] = places.wrong_inputs(recipe, path).values()
        assert f"and output = {output} are one folder, or one is inside the other" in said
    assert not places.wrong_inputs(load(path, ["output=based"])[0], path)


def test_a_folder_of_data_holds_no_output(tmp_path, monkeypatch):
    """A resume would read the lines of metrics.jsonl as rows."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    tables = tiny_tables(tmp_path) | {"data": {"source": "data"}, "output": "data/run"}
    path = write_recipe(tmp_path / "recipe.toml", tables)
    [said] = places.wrong_inputs(load(path)[0], path).values()
    assert "data.source: data and output = data/run are one folder" in said
    assert not places.wrong_inputs(load(path, ["output=run"])[0], path)


def test_a_file_of_the_user_is_no_lock(tmp_path):
    recipe = load(write_recipe(tmp_path / "recipe.toml", tiny_tables(tmp_path)))[0]
    recipe.folder.mkdir(exist_ok=True)
    (recipe.folder / ".lock").write_text("mine")
    with places.lock_output(recipe):
        assert places.is_locked(recipe.folder)
    assert (recipe.folder / ".lock").read_text() == "mine"


def test_the_steps_of_a_killed_run_are_not_overwritten_in_silence(tiny, tmp_path):
    recipe, run = tiny(rows=chats(43), train=LONG, checkpoint={"every": 0}), tmp_path / "run"
    killed(recipe, run)
    steps, before = len(read_metrics(run)), (run / "metrics.jsonl").read_bytes()
    for words in ((), ("--resume",)):
        result = run_plugsft(recipe, *words)
        assert result.returncode == 2 and "--overwrite" in result.stderr
        assert (run / "metrics.jsonl").read_bytes() == before
    assert f"{steps} steps of a run without a checkpoint" in run_plugsft(recipe).stderr
    must_succeed(recipe, "train.steps=2", "--overwrite")


def test_a_run_saves_checkpoints_where_the_recipe_names_no_interval(tiny, tmp_path):
    recipe, run = tiny(rows=chats(43), train={"steps": 30}), tmp_path / "run"
    result = run_plugsft(recipe)
    assert "checkpoints: every 3 steps, the last 3 kept" in result.stdout
    assert sorted(os.listdir(run / "checkpoints")) == [f"step-0000{n}" for n in (24, 27, 30)]
    assert "every 3 steps" in run_plugsft("check", recipe, f"output={tmp_path}/new").stdout
    other = run_plugsft(recipe, f"output={tmp_path}/other", "checkpoint.every=0")
    assert "checkpoints: at the end only" in other.stdout
    assert os.listdir(tmp_path / "other/checkpoints") == ["step-000030"]
    table = load(recipe)[0].checkpoint
    totals = (1, 10, 11, 5000, 1_000_000)
    assert [table.interval(steps, 1) for steps in totals] == [1, 1, 2, 500, 500]


def test_a_finished_run_says_so_when_resumed_and_keeps_its_record(finished, tmp_path):
    recipe, run = finished
    before = content(run)
    result = must_succeed(recipe, "--resume")
    assert "nothing to resume" in result.stdout and f'model.path = "{run}/model"' in result.stdout
    more = run_plugsft(recipe, "train.epochs=2", "--resume")
    assert more.returncode == 2 and "train.epochs was 1 and is 2" in more.stderr
    assert f"plugsft export {run}/checkpoints/step-000003 --to FOLDER" in more.stderr
    again = run_plugsft(recipe)
    assert again.returncode == 2 and "--resume" not in again.stderr
    assert content(run) == before


def test_a_finished_run_without_its_recipe_is_refused_with_the_cure(finished, tmp_path):
    recipe, run = finished
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "recipe.toml").unlink()
    result = run_plugsft(recipe, f"output={copy}", "--resume")
    assert result.returncode == 2
    assert f"{copy}/recipe.toml: is missing" in result.stderr and "--overwrite" in result.stderr


def test_a_resolved_recipe_resumes_what_the_written_one_began(finished, tmp_path):
    _, run = finished
    tables = tiny_tables(tmp_path) | {"output": "run", "model": {"path": "base"}}
    tables["train"]["steps"] = 4
    (tmp_path / "base").symlink_to(run / "model")
    recipe = write_recipe(tmp_path / "recipe.toml", tables)
    must_succeed(recipe, cwd=tmp_path)
    for gone in ("checkpoints/step-000004", "model"):
        (tmp_path / "run" / gone / "manifest.json").unlink()
        for path in (tmp_path / "run" / gone).iterdir():
            path.unlink()
        (tmp_path / "run" / gone).rmdir()
    result = must_succeed(tmp_path / "run/recipe.toml", "--resume")
    assert "going on after step 3" in result.stdout


def test_a_checkpoint_from_elsewhere_does_not_mix_with_a_run(finished, tmp_path):
    recipe, run = finished
    there = run / "checkpoints/step-000003"
    here = run_plugsft(recipe, f"output={tmp_path}/other", "checkpoint.every=0")
    assert here.returncode == 0
    result = run_plugsft(recipe, f"output={tmp_path}/other", "--resume-from", there)
    assert result.returncode == 2 and "a finished run" in result.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./nowhere", ["no such file or folder"]),
        ("runs/quickstar", ["did you mean 'quickstart'", 'model.revision = "main"']),
        ("some/where/else", ["no such file or folder"]),
        ("runs/quickstart", ["is a run's folder; its model is runs/quickstart/model"]),
        ("runs/quickstart/model", []),
        ("Qwen/Qwen3-0.6B", []),
        ("gpt2", []),
    ],
)
def test_a_missing_model_folder_does_not_ask_the_hub(tmp_path, monkeypatch, name, says):
    run = tmp_path / "runs/quickstart"
    (run / "model").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "model/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    tables = tiny_tables(tmp_path) | {"model": {"path": name}}
    path = write_recipe(tmp_path / "recipe.toml", tables)
    found = places.wrong_inputs(load(path)[0], path)
    assert bool(found) == bool(says)
    for words in says:
        assert words in found[name] and found[name].startswith(f"model.path: {name}")
    if not (tmp_path / name).is_dir():
        # Who says which revision means the hub.
        hub = load(path, ["model.revision=main"])[0]
        assert bool(places.wrong_inputs(hub, path)) == (bool(says) and name != "runs/quickstar")


def test_a_missing_model_is_known_at_once_though_there_is_no_network(tmp_path):
    tables = tiny_tables(tmp_path) | {"model": {"path": "runs/none/model"}}
    path = write_recipe(tmp_path / "recipe.toml", tables)
    for command in ("check", "train", "prepare"):
        started = time.perf_counter()
        result = run_plugsft(command, path, env={"HF_HUB_OFFLINE": "0"}, cwd=tmp_path)
        assert result.returncode == 2 and time.perf_counter() - started < 60
        [line] = result.stderr.splitlines()
        assert line == "error: model.path: runs/none/model: no such file or folder"


def test_a_run_whose_rows_are_refused_leaves_only_what_it_has_prepared(tiny, tmp_path):
    refused = run_plugsft(tiny(), "data.max_length=5", "data.too_long=error")
    assert refused.returncode == 2 and "longer than 5 tokens" in refused.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["scratch"]


def test_a_missing_file_names_the_folder_of_relative_paths(tmp_path, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    tables = tiny_tables(home)
    tables["data"]["source"] = "data.jsonl"
    path = write_recipe(home / "recipe.toml", tables)
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(RecipeError) as caught:
        places.ensure_inputs(load(path)[0], path)
    assert str(caught.value) == (
        f"data.source: data.jsonl: no such file or folder in {elsewhere}, where relative paths "
        f"begin; did you mean '{home}/data.jsonl'?"
    )
    monkeypatch.chdir(home)
    places.ensure_inputs(load(path)[0], Path("recipe.toml"))


def test_only_what_can_be_read_is_suggested(tmp_path):
    path = write_recipe(tmp_path / "nofile.toml", tiny_tables(tmp_path))
    result = run_plugsft(path, f"data.source={tmp_path}/nofile.jsonl")
    assert result.stderr.endswith("nofile.jsonl: no such file or folder\n")
    result = run_plugsft(path, f"data.source={tmp_path}/date.jsonl")
    assert result.stderr.endswith("did you mean 'data.jsonl'?\n")


def test_show_distinguishes_a_running_run_from_a_killed_one(tiny, tmp_path):
    recipe, run = tiny(rows=chats(43), train=LONG, checkpoint={"every": 1}), tmp_path / "run"
    running = start_plugsft(recipe)
    while len(list(run.glob("checkpoints/step-*"))) < 2:
        time.sleep(0.02)
    shown = run_plugsft("show", run).stdout
    assert shown.split()[:2] == ["status", "running"]
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    shown = dict(line.split(maxsplit=1) for line in run_plugsft("show", run).stdout.splitlines())
    assert shown["status"] == f"killed: continue with plugsft {run}/recipe.toml --resume"
    assert shown["steps"].startswith(f"{len(read_metrics(run))} of 4,000")
