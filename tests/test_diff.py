"""plugsft diff: the differences of two runs, in lines."""

import json
import re
import shutil

import pytest
from conftest import (
    chats,
    must_succeed,
    read_metrics,
    read_record,
    run_plugsft,
    tiny_tables,
    write_jsonl,
    write_recipe,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Give a folder of runs: `one`, `twin` that is the same, and `other`, of other steps."""
    folder = tmp_path_factory.mktemp("runs")
    tables = tiny_tables(folder) | {"eval": {"split": "train[:4]"}}
    tables["train"]["steps"] = 4
    write_jsonl(folder / "other.jsonl", chats(30, seed=1))
    path = write_recipe(folder / "recipe.toml", tables)
    write_recipe(folder / "packed.toml", tables | {"plugins": {"length_group": {}}})
    more = ["train.steps=6", "train.learning_rate=1e-3", "data.train_on=all"]
    for name, recipe, overrides in [
        ("one", path, []),
        ("twin", path, []),
        ("other", folder / "packed.toml", [*more, f"data.source={folder / 'other.jsonl'}"]),
    ]:
        must_succeed(recipe, f"output={folder / name}", *overrides)
    return folder


@pytest.fixture
def runs(made, tmp_path):
    """Give copies of them, to be harmed."""
    for name in ("one", "twin", "other"):
        kept = shutil.ignore_patterns("checkpoints", "model", "scratch", "tokens")
        shutil.copytree(made / name, tmp_path / name, ignore=kept)
    return tmp_path


def told(done):
    """Return what was printed, by section: its lines, without the first words of the runs."""
    assert done.returncode == 0, done.stderr
    first, *sections = done.stdout.replace("\nthe same: ", "\nsame\n").split("\n\n")
    parts = {section.split()[0]: section.splitlines()[1:] for section in sections}
    return first.splitlines(), parts


def cells(lines):
    return {re.split(r" {2,}", line)[0]: re.split(r" {2,}", line)[1:] for line in lines}


def test_runs_that_differ(runs):
    heads, parts = told(run_plugsft("diff", runs / "one", runs / "other"))
    assert [line[:2] for line in heads] == ["A ", "B "]
    assert "completed, 4 of 4 steps" in heads[0] and "completed, 6 of 6 steps" in heads[1]
    keys = {"data.source", "data.train_on", "train.learning_rate", "train.steps"}
    assert {*cells(parts["recipe"])} - {""} == keys
    assert cells(parts["recipe"])["train.learning_rate"] == ["0.003", "0.001", "-66.7%"]
    assert cells(parts["plugins"])["length_group"] == ["-", "on"]
    summary = read_record(runs / "other")["plugins"][0]["summary"]
    assert any(summary in line for line in parts["plugins"])
    data = cells(parts["data"])
    assert data["examples"] == ["24", "30", "+25%"]
    assert any(line.startswith("the tokens differ in data, options.train_on") for line in data)
    assert {"versions", "machine", "precision"} <= {*parts["same"][0].split(", ")}


def test_results_are_compared_where_both_were(runs):
    _, parts = told(run_plugsft("diff", runs / "one", runs / "other"))
    results = cells(parts["results"])
    one, other = (read_metrics(runs / name) for name in ("one", "other"))
    assert results["steps"] == ["4", "6", "+50%"]
    assert results["loss"][:2] == [f"{run[-1]['loss']:.5g}" for run in (one, other)]
    assert results["loss at step 4"][:2] == [f"{run[3]['loss']:.5g}" for run in (one, other)]
    change = 100 * (other[-1]["loss"] / one[-1]["loss"] - 1)
    assert float(results["loss"][2].rstrip("%")) == pytest.approx(change, abs=0.5)
    assert len(results["eval loss"]) == 3
    assert "tokens per second" in results
    parting = [str(run[0]["loss"]) for run in (one, other)]
    assert f"losses diverge at step 1: {' and '.join(parting)}" in parts["results"]


def test_diff_reports_equal_runs_as_equal(runs):
    result = run_plugsft("diff", runs / "one", runs / "twin")
    _, parts = told(result)
    assert parts.keys() == {"results", "same"}
    same = "recipe, plugins, versions, machine, model, precision, data, eval"
    assert result.stdout.endswith(f"\nthe same: {same}\n")
    assert "losses are the same in all 4 common steps" in parts["results"]
    assert cells(parts["results"])["loss"][0] == cells(parts["results"])["loss"][1]


def test_rounding_is_no_divergence(runs):
    shutil.copytree(runs / "twin", runs / "rounded")
    edited = runs / "rounded/metrics.jsonl"
    twin = [json.loads(line) for line in edited.read_text().splitlines()]
    for change, last, told_losses in (
        (1e-7, "rounding", "losses are the same in all 4 common steps, but for rounding"),
        (1e-5, "+0.001%", "losses diverge at step 2: "),
    ):
        lines = [dict(line) for line in twin]
        for line in lines:
            if "loss" in line and line["step"] > 1:
                line["loss"] *= 1 + change
        edited.write_text("".join(json.dumps(line) + "\n" for line in lines))
        _, parts = told(run_plugsft("diff", runs / "one", runs / "rounded"))
        assert any(line.startswith(told_losses) for line in parts["results"])
        assert cells(parts["results"])["loss"][2] == last


def test_a_plugin_has_other_options_another_version_and_another_summary(runs):
    shutil.copytree(runs / "other", runs / "more")
    facts = read_record(runs / "other")
    for name, origin, size in (("other", "site 1.2", 7), ("more", "site 1.3", [7, 8])):
        options = {"size": size, "deep": {"x": 1}}
        plugin = {"name": "loud", "origin": origin, "options": options, "summary": f"heard {size}"}
        changed = facts | {"plugins": [plugin], "versions": facts["versions"] | {"torch": origin}}
        (runs / name / "run.json").write_text(json.dumps(changed))
    _, parts = told(run_plugsft("diff", runs / "other", runs / "more"))
    assert cells(parts["plugins"]) == {
        "loud.size": ["7", "7, 8"],
        "loud: from": ["site 1.2", "site 1.3"],
        "loud: summary": ["heard 7", "heard [7, 8]"],
    }
    assert cells(parts["versions"]) == {"torch": ["site 1.2", "site 1.3"]}


def test_times_in_summaries_are_no_difference(runs):
    shutil.copytree(runs / "one", runs / "later")
    facts = read_record(runs / "one")
    for name, hit, built in (("one", "2 ms", "0.41 s"), ("later", "1,310 ms", "3.00 s")):
        plugins = [
            {"name": "cache", "options": {}, "summary": f"hit: abc, opened in {hit}"},
            {"name": "ahead", "options": {"wait": hit}, "summary": f"{name}, built in {built}"},
        ]
        (runs / name / "run.json").write_text(json.dumps(facts | {"plugins": plugins}))
    _, parts = told(run_plugsft("diff", runs / "one", runs / "later"))
    assert cells(parts["plugins"]) == {
        "ahead.wait": ["2 ms", "1,310 ms"],
        "ahead: summary": ["one, built in …", "later, built in …"],
    }


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("missing", "missing: no such folder"),
        ("file", "file: is a file; name a run's output folder"),
        ("empty", "empty: is no run's output: it has no readable run.json"),
        ("half", "half/run.json: is damaged: Unterminated"),
        ("list", "list/run.json: is damaged: a JSON object was expected"),
        ("shapes", "was not written by this plugsft: steps: Input should be"),
        ("no recipe", "is missing: a run keeps its recipe there; copy it back, or run again with"),
        ("again", "is the same run; name another run's output folder"),
    ],
)
def test_diff_refuses_a_folder_without_a_run_in_one_line(runs, harm, said):
    texts = {"half": '{"status": "fin', "list": "[1]"}
    texts["shapes"] = '{"status": "finished", "plugins": [{"nam": 1}], "steps": 3}'
    if harm == "file":
        (runs / harm).write_text("")
    elif harm == "no recipe":
        shutil.copytree(runs / "twin", runs / harm)
        (runs / harm / "recipe.toml").unlink()
    elif harm == "again":
        (runs / harm).symlink_to(runs / "one")
    elif harm != "missing":
        (runs / harm).mkdir()
    if harm in texts:
        (runs / harm / "run.json").write_text(texts[harm])
    result = run_plugsft("diff", runs / "one", runs / harm)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr and result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


def test_what_a_killed_run_left_is_compared(runs):
    facts = read_record(runs / "other")
    gone = ("throughput", "batches", "memory", "final", "seconds")
    facts = {key: value for key, value in facts.items() if key not in gone} | {"status": "running"}
    (runs / "other/run.json").write_text(json.dumps(facts))
    metrics = runs / "other/metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*lines[:2], "\udc00".encode("utf8", "replace").decode(), '{"st']))
    heads, parts = told(run_plugsft("diff", runs / "one", runs / "other"))
    assert "killed, 2 of 6 steps" in heads[1]
    assert cells(parts["results"])["steps"] == ["4", "2", "-50%"]
    assert cells(parts["results"])["tokens per second"][1] == "-"
    metrics.unlink()
    _, parts = told(run_plugsft("diff", runs / "other", runs / "one"))
    assert cells(parts["results"])["loss"][0] == "-"
