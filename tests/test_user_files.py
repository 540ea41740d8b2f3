"""Files of the user in a folder that plugsft writes to are never lost."""

import json
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import FULL, run_plugsft, tiny_tables, write_recipe

from plugsft.base.atomic import MANIFEST, damage, discard, publish
from plugsft.base.errors import DiskError, PlugsftError, RecipeError
from plugsft.output import folder as places
from plugsft.output import record

FOREIGN_MANIFESTS = ['{"name": "a web app"}', "{}", '{"thesis.txt": [6, "abc"]}', "[]", "{", ""]
NAMES = ["thesis.txt", "notes/deep/a.md", "config.json", "step-000001", ".hidden", "data-1.arrow"]
PLACES = ["", "model", "model/sub", "checkpoints", "checkpoints/step-000002", "tokens", "scratch"]
PLACES += ["checkpoints/step-000009", "checkpoints/step-best", "merged", "step-000001"]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def make_run(folder: Path) -> None:
    """Write what a finished run leaves, as small as may be."""
    for name in ("model", "checkpoints/step-000001", "checkpoints/step-000002"):
        with publish(folder / name) as building:
            (building / "config.json").write_text("{}")
            (building / "weights").write_text(name)
    (folder / "run.json").write_text('{"format": 1, "status": "completed"}')
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (folder / "recipe.toml").write_text('output = "there"\n')
    (folder / "report.html").write_text('<meta name="generator" content="plugsft">')


def run_over(folder: Path) -> None:
    """Do to a folder what a new run does: refuse, clear, write, and prune."""
    places.ensure_ours(folder)
    record.clear(folder)
    for step in (1, 2, 3, 9):
        with publish(folder / f"checkpoints/step-{step:06d}", replace=True) as building:
            (building / "weights").write_text("new")
    discard(folder / "checkpoints/step-000001")
    with publish(folder / "model", replace=True) as building:
        (building / "weights").write_text("new")
    for name in places.FILES:
        (folder / name).write_text("new")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(1000 if FULL else 40))
def test_no_file_of_a_user_is_ever_lost(tmp_path, seed, late):
    """Whether it lies there before the run, or is put there as it trains."""
    rng, run = random.Random(seed), tmp_path / "run"
    if rng.random() < 0.8:
        make_run(run)
    theirs = {}
    ours = files(run) if run.exists() else {}
    for number in range(rng.randint(1, 4)):
        name = rng.choice([*NAMES, *places.FILES])
        path = run / rng.choice(PLACES) / name
        if str(path.relative_to(run)) in ours and rng.random() < 0.5:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"the user's {number}")
        except OSError:
            continue  # what was planted first is in the way
        theirs[str(path.relative_to(run))] = path.read_bytes()
        if rng.random() < 0.3 and not (path.parent / MANIFEST).exists():
            (path.parent / MANIFEST).write_text(rng.choice(FOREIGN_MANIFESTS))
    # A changed file of a checkpoint is a damaged one. Beside the folders, and in model/, changed
    # files are looked at before a run only.
    known = {*ours, *places.FILES} if late else {name for name in ours if "checkpoints/" in name}
    theirs = {name: text for name, text in theirs.items() if name not in known}
    before = files(run) if run.exists() else {}
    try:
        if late:
            record.clear(run)
            discard(run / "checkpoints/step-000002")
            with publish(run / "model", replace=True):
                pass
        else:
            run_over(run)
    except RecipeError as error:
        assert files(run) == before, "who refuses has changed nothing"
        assert any(str(run / name) in str(error) for name in theirs), str(error)
    except DiskError as error:
        assert late and "move the folder away" in str(error)
        assert all(files(run)[name] == text for name, text in theirs.items())
    else:
        kept = {*files(run).values()}
        assert all(text in kept for text in theirs.values())


def test_what_a_run_wrote_is_replaced(tmp_path):
    make_run(tmp_path / "run")
    run_over(tmp_path / "run")
    assert {*files(tmp_path / "run").values()} >= {b"new"}
    assert b"model" not in files(tmp_path / "run").values()
    assert not list(tmp_path.rglob(".*.tmp"))


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("sizes", ["right", "wrong"])
def test_a_manifest_never_removes_a_file_outside_of_its_folder(tmp_path, absolute, sizes):
    """As another user of a shared cache, or of a run's folder, could write it."""
    thesis = tmp_path / "precious/thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    make_run(tmp_path / "run")
    for name in ("model", "checkpoints/step-000001", "checkpoints/step-000002"):
        folder = tmp_path / "run" / name
        manifest = json.loads((folder / MANIFEST).read_text())
        outside = str(thesis) if absolute else os.path.relpath(thesis, folder)
        manifest[outside] = [13, "0" * 32]
        if sizes == "wrong":
            manifest["weights"][0] += 1
        (folder / MANIFEST).write_text(json.dumps(manifest))
        assert "outside of its folder" in damage(folder)
    with suppress(RecipeError, DiskError):
        record.clear(tmp_path / "run")
        run_over(tmp_path / "run")
    assert thesis.read_text() == "years of work"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    tables = tiny_tables(folder)
    tables["train"]["steps"] = 2
    recipe = write_recipe(folder / "recipe.toml", tables)
    assert run_plugsft(recipe).returncode == 0
    return recipe, folder / "run"


@pytest.mark.parametrize("words", [["--overwrite"], ["--resume"]])
def test_a_user_s_files_beside_a_run_s_are_named(finished, tmp_path, words):
    recipe, source = finished
    for number, (name, text) in enumerate(
        {
            "model/thesis.txt": "years of work",
            "report.html": "<title>my own report</title>",
            "recipe.toml": "# my notes\n" + (source / "recipe.toml").read_text(),
            "checkpoints/step-000002/thesis.txt": "years of work",
            "model/config.json": (source / "model/config.json").read_text() + " ",
        }.items()
    ):
        run = shutil.copytree(source, tmp_path / f"{number}")
        (run / name).write_text(text)
        before = files(run)
        done = run_plugsft(recipe, f"output={run}", *words)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert f"output: {run / name}: not written by plugsft" in done.stderr
        assert {k: v for k, v in files(run).items() if k != ".plugsft.lock"} == {
            k: v for k, v in before.items() if k != ".plugsft.lock"
        }


def test_a_run_writes_again_what_a_run_has_written(finished, tmp_path):
    recipe, source = finished
    run = shutil.copytree(source, tmp_path / "run")
    best = shutil.copytree(run / "checkpoints/step-000002", run / "checkpoints/step-best")
    (run / "notes.txt").write_text("mine")
    done = run_plugsft(recipe, f"output={run}", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert (run / "notes.txt").read_text() == "mine" and (best / MANIFEST).is_file()


def test_a_page_of_someone_else_is_never_replaced(finished, tmp_path):
    recipe, _ = finished
    mine = tmp_path / "page.html"
    words = ["inspect", recipe, "--html", mine]
    mine.write_text("<title>my own page</title>")
    done = run_plugsft(*words)
    assert done.returncode == 2, done.stdout
    assert f"{mine} exists and was not written by plugsft" in done.stderr
    assert mine.read_text() == "<title>my own page</title>"
    mine.unlink()
    for _ in range(2):  # our own is written again
        assert run_plugsft(*words).returncode == 0


def test_figures_of_someone_else_are_never_replaced(finished, tmp_path):
    words = ["bench", finished[0], "plugins.async_collate.depth=2", f"output={tmp_path}/my"]
    (tmp_path / "my-bench").mkdir()
    (tmp_path / "my-bench/bench.json").write_text("mine")
    done = run_plugsft(*words, "--overwrite")
    assert done.returncode == 2 and "bench.json was not written by plugsft" in done.stderr
    assert (tmp_path / "my-bench/bench.json").read_text() == "mine"


def test_a_folder_that_appears_as_a_model_is_exported_is_left(finished, tmp_path):
    with pytest.raises(PlugsftError), publish(tmp_path / "to") as building:
        (building / "weights").write_text("new")
        (tmp_path / "to").mkdir()
        (tmp_path / "to/thesis.txt").write_text("years of work")
        raise PlugsftError("anything")
    assert (tmp_path / "to/thesis.txt").read_text() == "years of work"
