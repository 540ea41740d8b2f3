"""The first plugin of plugins/README.md and the plugins of docs/worked_plugins.md run."""

import json
import re

import pytest
from conftest import ROOT, chats, read_metrics, run_plugsft, run_ranks
from pages import in_a_shell
from plugin_packages import activate, install

README = (ROOT / "plugins/README.md").read_text(encoding="utf8")
PAGE = (ROOT / "docs/worked_plugins.md").read_text(encoding="utf8")
CODES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NAMES = ["time_limit", "unlikelihood", "smooth_labels", "averaged_sgd", "reviews"]
TRAIN = {"batch_size": 8, "micro_batch": 4, "steps": 4, "learning_rate": 1e-2}


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    site = install(tmp_path / "site", **dict(zip(NAMES, CODES, strict=True)))
    activate(site, monkeypatch)


def test_the_first_plugin_runs_as_it_is_pasted(tmp_path):
    section = README.split("\n## Your first plugin\n")[1].split("\n## ")[0]
    code, shell = re.findall(r"```(?:python|sh)\n(.*?)```", section, re.DOTALL)
    (tmp_path / "focal_loss.py").write_text(code)
    done = in_a_shell(tmp_path, shell)
    assert done.returncode == 0, done.stderr
    losses = [[*map(float, line.split()[2:])] for line in done.stdout.splitlines()[-3:]]
    # The focal loss is the smaller one, and both have a curve.
    assert all(0 < focal < usual for focal, usual in losses), done.stdout
    report = (tmp_path / "runs/focal/report.html").read_text()
    assert '"nll": {"x": ' in report


def test_each_is_a_whole_class():
    assert len(CODES) == len(NAMES)
    for code in CODES:
        compile(code, "README", "exec")
        assert code.count("@plugin(") == 1


def test_a_loss_with_labels_an_averaging_optimizer_and_a_time_limit_on_two_ranks(
    tiny, tmp_path, recipes
):
    rows = [{**row, "label": number % 3 > 0} for number, row in enumerate(chats(24))]
    plugins = {"time_limit": {"hours": 0.0}, "averaged_sgd": {}, "unlikelihood": {"strength": 0.5}}
    recipe = tiny(rows=rows, train=TRAIN, eval={"every": 2, "split": "train[:8]"}, plugins=plugins)
    run = tmp_path / "run"
    stopped = run_ranks(2, recipe)
    assert stopped.returncode == 0, stopped.stderr
    assert json.loads((run / "run.json").read_text())["reason"] == "0.0 hours are over"
    assert [line["step"] for line in read_metrics(run)] == [1]
    done = run_plugsft(recipe, "--resume", "plugins.time_limit.hours=1.0")
    assert done.returncode == 0, done.stderr
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    # A third of the answers is bad, and becomes less likely.
    assert all(line["bad_nll"] > 0 for line in lines)
    # The average of a resumed run has all steps.
    state = json.loads((run / "checkpoints/step-000004/state.json").read_text())
    assert state["plugin_states"]["averaged_sgd"]["dict"]["steps"] == 4
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert [line["eval_bad_nll"] > 0 for line in lines if "eval_loss" in line] == [True, True]


def test_a_row_format_with_a_label_column(tiny, tmp_path, recipes):
    rows = [{"review": f"good soup {number}", "stars": number % 5} for number in range(16)]
    bad = [{"review": None, "stars": 1}, {"review": "good soup", "stras": 1}]
    recipe = tiny(
        rows=[*rows, *bad],
        train=TRAIN | {"steps": 1},
        data={"on_bad_row": "drop"},
        plugins={"reviews": {}},
    )
    done = run_plugsft(recipe)
    assert done.returncode == 0, done.stderr
    [facts] = (tmp_path / "run/tokens").glob("*/facts.json")
    assert json.loads(facts.read_text())["columns"] == {"stars": "int64"}
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["data"]["bad_rows"] == {
        "no 'review' as text, or no number of 'stars'": {"count": 2, "rows": [16, 17]}
    }


def test_a_loss_that_needs_the_logits(tiny, tmp_path, recipes):
    """Padded and packed; without smoothing it is the core's loss."""
    tables = {"rows": chats(24), "train": {**TRAIN, "steps": 2, "micro_batch": 1}}
    runs = {
        "padded": {"smooth_labels": {"share": 0.2}},
        "packed": {"smooth_labels": {"share": 0.2}, "bfd_packing": {}},
        "unsmoothed": {"smooth_labels": {"share": 0.0}},
        "core": {},
    }
    metrics = {}
    for name, plugins in runs.items():
        words = [] if name == "packed" else ["train.micro_batch=4"]
        result = run_plugsft(tiny(plugins=plugins, output=str(tmp_path / name), **tables), *words)
        assert result.returncode == 0, result.stderr
        metrics[name] = [
            value
            for line in read_metrics(tmp_path / name)
            for value in (line["loss"], line["grad_norm"])
        ]
    assert metrics["packed"] == pytest.approx(metrics["padded"], rel=1e-4)
    assert metrics["unsmoothed"] == pytest.approx(metrics["core"], rel=1e-4)
    assert metrics["padded"] != pytest.approx(metrics["core"], rel=1e-3)
    refused = run_plugsft(tiny(plugins=runs["padded"] | {"fused_loss": {}}, **tables))
    assert refused.returncode == 2
    assert "it needs the logits; remove [plugins.fused_loss], which computes none" in refused.stderr


def test_a_row_without_a_label_is_refused(tiny, recipes):
    rows = [{**row, "label" if number else "lable": True} for number, row in enumerate(chats(8))]
    result = run_plugsft(tiny(rows=rows, train=TRAIN, plugins={"unlikelihood": {}}))
    assert result.returncode == 2
    assert "line 1: no 'label' that is true or false" in result.stderr
