"""`--resume-auto`: one command for a job that restarts itself."""

import json
import os
import shutil
import signal
import time

import pytest
from conftest import (
    chats,
    must_succeed,
    read_metrics,
    run_plugsft,
    start_plugsft,
    start_ranks,
    tiny_tables,
    write_recipe,
)
from plugin_packages import activate, install

from plugsft.base.atomic import is_published


def test_one_command_brings_a_run_to_its_end_through_every_kill(tiny, tmp_path):
    recipe, run = (
        tiny(rows=chats(43), train={"steps": 30}, checkpoint={"every": 5}),
        tmp_path / "run",
    )
    words = (recipe, "--resume-auto", "train.log_every=50")
    for reached in (2, 12):
        running = start_plugsft(*words)
        while (
            not run.exists()
            or not (run / "metrics.jsonl").exists()
            or not any(line["step"] >= reached for line in read_metrics(run))
        ):
            assert running.process.is_alive()
            time.sleep(0.01)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
    done = run_plugsft(*words)
    assert done.returncode == 0 and "going on after step " in done.stdout, done.stderr
    assert [line["step"] for line in read_metrics(run)] == [*range(1, 31)]
    straight = run_plugsft(recipe, f"output={tmp_path}/straight", "--resume-auto")
    assert straight.returncode == 0, straight.stderr
    assert [line["loss"] for line in read_metrics(run)] == [
        line["loss"] for line in read_metrics(tmp_path / "straight")
    ]
    again = run_plugsft(*words)
    assert again.returncode == 0 and "nothing to resume" in again.stdout
    assert [line["step"] for line in read_metrics(run)] == [*range(1, 31)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    tables = tiny_tables(folder) | {"checkpoint": {"every": 1}}
    tables["train"]["steps"] = 3
    recipe = write_recipe(folder / "recipe.toml", tables)
    assert run_plugsft(recipe).returncode == 0
    return recipe, folder / "run"


def spoil(run, steps):
    for step in steps:
        path = run / f"checkpoints/step-{step:06d}/rank-00000-000.safetensors"
        path.write_bytes(path.read_bytes()[:-4] + b"abcd")


def test_what_was_lost_is_never_started_over_in_silence(finished, tmp_path):
    recipe, source = finished

    def stopped(name):
        run = shutil.copytree(source, tmp_path / name)
        facts = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(facts | {"status": "running"}))
        shutil.rmtree(run / "model")
        return run

    def ended(run, *words):
        return run_plugsft(recipe, f"output={run}", "--resume-auto", *words)

    one, every, gone, bare, torn = map(stopped, ("one", "every", "gone", "bare", "torn"))
    spoil(one, [3])
    spoil(every, [1, 2, 3])
    shutil.rmtree(gone / "checkpoints")
    (bare / "checkpoints/step-000003/manifest.json").unlink()
    state = torn / "checkpoints/step-000003/state.json"
    state.write_text(state.read_text()[:-9])
    for run in (one, bare, torn):
        done = ended(run)
        assert done.returncode == 0 and "going on after step 2" in done.stdout, done.stderr
    for run, says in (
        (every, "damaged"),
        (gone, "reached step 3, and its checkpoints are missing"),
    ):
        done = ended(run)
        assert done.returncode == 2 and says in done.stderr, done.stdout + done.stderr
        assert len(read_metrics(run)) == 3 and not is_published(run / "model")


def test_a_finished_run_ends_with_0_though_its_checkpoints_were_removed(finished, tmp_path):
    recipe, source = finished
    run = shutil.copytree(source, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    words = [recipe, f"output={run}", "--resume-auto"]
    # Its recipe names the folder that it was made in.
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text.replace(f'"{source}"', f'"{run}"'))
    done = run_plugsft(*words)
    assert done.returncode == 0 and "nothing to resume" in done.stdout, done.stderr
    other = run_plugsft(*words, "train.steps=4")
    assert other.returncode == 2 and "another recipe's finished run: train.steps" in other.stderr
    for word in ("--overwrite", f"--resume-from={source}/checkpoints/step-000003"):
        assert run_plugsft(*words, word).returncode == 2


def test_ranks_go_on_from_one_checkpoint_or_not_at_all(finished, tmp_path):
    """As on nodes that do not share a file system."""
    recipe, source = finished
    run = shutil.copytree(source, tmp_path / "run")
    (run / "run.json").write_text('{"format": 1, "status": "running"}')
    shutil.rmtree(run / "checkpoints/step-000003")
    shutil.rmtree(run / "model")
    here, there = run, tmp_path / "there"
    words = [(recipe, f"output={folder}", "--resume-auto") for folder in (here, there)]
    ended = [one.wait() for one in start_ranks(2, words=words)]
    said = "".join(one.stderr for one in ended)
    assert all(one.returncode == 2 for one in ended), said
    assert "the ranks differ in the lock of the output folder: rank 0 has " in said
    assert "Give an output on a file system that all machines share" in said


MARKS = """
    @plugin(affects_results=["mark"])
    class Marks:
        mark: int = 1

        @hookimpl
        def stepped(self):
            pass
"""


def test_a_resume_without_a_plugin_whose_option_affected_results_is_refused(
    tiny, tmp_path, monkeypatch
):
    activate(install(tmp_path / "site", marks=MARKS), monkeypatch)
    options = {"train": {"steps": 4}, "checkpoint": {"every": 2}}
    must_succeed(tiny(**options, plugins={"marks": {"mark": 2}}))
    checkpoint = tmp_path / "run/checkpoints/step-000002"
    for plugins in ({}, {"marks": {}}):
        result = run_plugsft(tiny(**options, plugins=plugins), "--resume-from", checkpoint)
        assert result.returncode == 2
        assert "plugins.marks.mark was 2 and is not set" in result.stderr
