"""Runs of plugsft 0.1, with its names of metrics, are compared, drawn and resumed."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import read_metrics, run_plugsft, tiny_tables, write_recipe

from plugsft.output import report
from plugsft.output.old_names import rename_metrics
from plugsft.output.report import read_record

OLD = {"data_wait_seconds": "wait_seconds", "examples_per_micro_batch": "documents"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder of a recipe and its run of four steps."""
    folder = tmp_path_factory.mktemp("old")
    tables = tiny_tables(folder)
    tables["train"]["steps"], tables["checkpoint"] = 4, {"every": 2}
    result = run_plugsft(write_recipe(folder / "recipe.toml", tables))
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def old(made, tmp_path):
    """Return a copy of the run, as plugsft 0.1 would have written it."""
    folder = Path(shutil.copytree(made / "run", tmp_path / "old"))
    lines = [with_old_names(line) for line in read_metrics(folder)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = json.loads((folder / "run.json").read_text())
    batches = run.pop("batches")
    run["feeding"] = {**with_old_names(batches), "waited": batches["data_wait_share"]}
    del run["feeding"]["data_wait_share"]
    (folder / "run.json").write_text(json.dumps(run | {"status": "finished"}))
    return folder


def with_old_names(values):
    return {
        "fill" if name == "padding" else OLD.get(name, name): round(1 - value, 4)
        if name == "padding"
        else value
        for name, value in values.items()
    }


def test_metrics_have_plain_names(made):
    [line, *_] = read_metrics(made / "run")
    names = {"data_wait_seconds", "padding", "examples_per_micro_batch", "imbalance"}
    assert names <= {*line} and 0 < line["padding"] < 1
    run = json.loads((made / "run/run.json").read_text())
    assert {*run["batches"]} == names - {"data_wait_seconds"} | {"data_wait_share"}
    assert run["status"] == "completed" and "feeding" not in run


def test_an_old_run_is_read_under_the_names_of_today(made, old):
    assert report.read_metrics(old / "metrics.jsonl") == read_metrics(made / "run")
    assert read_record(old) == read_record(made / "run")
    report.write(old)
    page = (old / "report.html").read_text()
    assert '"padding": {' in page and "<dt>padding</dt>" in page
    assert '"fill"' not in page and "<dt>fill</dt>" not in page


def test_an_old_run_is_the_same_as_the_run_itself(made, old):
    result = run_plugsft("diff", made / "run", old)
    assert result.returncode == 0, result.stderr
    rows = {line.split("  ")[0]: line.split()[-2:] for line in result.stdout.splitlines()}
    for name in ("padding", "time waited for data"):
        a, b = rows[name]
        assert a == b != "-"
    assert "finished" not in result.stdout


def test_an_old_run_goes_on(made, old, tmp_path):
    shutil.rmtree(old / "model")
    shutil.rmtree(old / "checkpoints/step-000004")
    record = json.loads((old / "run.json").read_text())
    (old / "run.json").write_text(json.dumps(record | {"status": "stopped"}))
    result = run_plugsft(made / "recipe.toml", f"output={old}", "--resume")
    assert result.returncode == 0, result.stderr
    lines = read_metrics(old)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all("padding" in line and "fill" not in line for line in lines)
    before, after = (json.loads((run / "run.json").read_text()) for run in (made / "run", old))
    assert after["batches"]["padding"] == before["batches"]["padding"] and "feeding" not in after


def test_a_plugin_may_call_its_metric_as_plugsft_once_did():
    line = {"step": 1, "data_wait_seconds": 0.1, "fill": 0.3, "documents": 2.0}
    assert rename_metrics(line) == line
    assert rename_metrics({"step": 1, "eval_loss": 1.0, "fill": 0.3})["fill"] == 0.3
