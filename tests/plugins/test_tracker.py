"""tracker: what four real trackers received, read back with their own readers."""

import json
import os
import shutil
import struct
import subprocess
import sys
from importlib.util import find_spec

import pytest
from conftest import (
    OFFLINE,
    ROOT,
    must_succeed,
    only_full,
    read_record,
    run_plugsft,
    run_ranks,
    tiny_tables,
    write_recipe,
)
from plugin_packages import activate, install

from plugsft import RecipeError, testing
from plugsft.base.machine import look
from plugsft.plugins.tracker.senders import Sender
from plugsft.plugins.tracker.values import describe_error
from plugsft.registry.active import check
from plugsft.registry.load import resolve

ALL = ["tensorboard", "wandb", "trackio", "mlflow"]
pytestmark = pytest.mark.skipif(
    None in map(find_spec, ALL), reason="needs the trackers: pip install 'plugsft[trackers]'"
)


def places(folder):
    """Return an environment in which every tracker keeps to a folder."""
    return {
        **OFFLINE,
        "HOME": str(folder),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": str(folder / "mlruns"),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }


def recipe_of(folder, options=None, **tables):
    """Write a tiny recipe of four steps that tells every tracker, or those of `options`."""
    made = tiny_tables(folder)
    made["train"] |= {"steps": 4}
    made["plugins"] = {"tracker": {"to": ALL, "project": "house"} | (options or {})}
    for name, table in tables.items():
        made[name] = made.get(name, {}) | table
    return write_recipe(folder / "recipe.toml", made)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Give the folder of a run that went on once: two steps of its four were lost."""
    folder = tmp_path_factory.mktemp("ran")
    recipe = recipe_of(
        folder,
        checkpoint={"every": 2},
        eval={"split": "train[:8]", "every": 2},
    )
    must_succeed(recipe, env=places(folder))
    for name in ("checkpoints/step-000004", "model"):
        shutil.rmtree(folder / "run" / name)
    result = must_succeed(recipe, "--resume", env=places(folder))
    assert "going on after step 2" in result.stdout
    return folder


def told_to(run):
    """Return what the run itself wrote: of steps, of evaluations, and at the end."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "loss" in line}
    evals = {line["step"]: line for line in lines if "eval_loss" in line}
    return steps, evals, read_record(run)


def read_with(script, folder, *words):
    """Return what a script prints, in a process that knows the trackers' places."""
    env = {**os.environ, **places(folder)}
    command = [sys.executable, "-c", script, *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def in_tensorboard(folder, name="run"):
    """Return {metric: {step: value}} and the configuration."""
    script = """
import json, sys, glob
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
def read(folder):
    found = EventAccumulator(folder, {"scalars": 0}); found.Reload(); return found
whole = read(sys.argv[1])
values = {tag: [[one.step, one.value] for one in whole.Scalars(tag)]
          for tag in whole.Tags()["scalars"]}
begun = glob.glob(sys.argv[1] + "/*/events.*")
config = {}
for one in begun:
    data = read(one).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for key, value in HParamsPluginData.FromString(data).session_start_info.hparams.items():
        config[key] = getattr(value, value.WhichOneof("kind"))
print(json.dumps([values, config, len(begun)]))
"""
    place = folder / "run/trackers/tensorboard" / name
    return read_with(script, folder, place)


def wandb_records(path):
    """Yield the records of a .wandb file: a log in blocks, as LevelDB writes it."""
    from wandb.proto import wandb_internal_pb2 as proto

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last of its parts
            yield proto.Record.FromString(parts)
            parts = b""


def in_wandb(folder):
    """Return {metric: [[step, value]]}, the configuration, and the ids of the runs."""
    values, config, ids, codes = {}, {}, [], []
    for path in sorted((folder / "run/trackers/wandb").glob("offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                ids.append(record.run.run_id)
            for update in record.run.config.update, record.config.update:
                config |= {one.key: json.loads(one.value_json) for one in update}
            if record.HasField("exit"):
                codes.append(record.exit.exit_code)
            items = record.history.item
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
            for name, value in row.items():
                values.setdefault(name, []).append([row["step"], value])
    return values, config, ids, codes


def in_trackio(folder):
    """Return {metric: [[step, value]]}, the configuration, and the number of runs."""
    script = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
runs = [*trackio.Api().runs("house")]
values = {}
for line in SQLiteStorage.get_logs("house", runs[0].name, run_id=runs[0].id):
    for name, value in line.items():
        values.setdefault(name, []).append([line["step"], value])
print(json.dumps([values, runs[0].config, len(runs)]))
"""
    return read_with(script, folder)


def in_mlflow(folder):
    """Return {metric: [[step, value]]}, the configuration, and the states of the runs."""
    script = """
import json
from mlflow import MlflowClient
client = MlflowClient()
runs = client.search_runs([client.get_experiment_by_name("house").experiment_id])
history = {name: [[one.step, one.value] for one in client.get_metric_history(runs[0].info.run_id,
           name)] for name in runs[0].data.metrics}
print(json.dumps([history, runs[0].data.params, [run.info.status for run in runs]]))
"""
    return read_with(script, folder)


def ensure_told(values, run):
    """Compare what a tracker holds with what the run wrote."""
    steps, evals, record = told_to(run)
    for lines in filter(None, (steps, evals)):
        for name in next(iter(lines.values())).keys() - {"step"}:
            held = {step: pytest.approx(value, rel=1e-6) for step, value in values[name]}
            assert held == {step: line[name] for step, line in lines.items()}, name
    for table in ("final", "throughput", "batches", "memory"):
        assert record[table]
        for name, value in record[table].items():
            assert values[f"{table}/{name}"][-1] == [4, pytest.approx(value, rel=1e-6)]
    assert values["seconds"][-1] == [4, pytest.approx(record["seconds"])]


def test_tensorboard_holds_all_and_goes_on(ran):
    values, config, begun = in_tensorboard(ran)
    ensure_told(values, ran / "run")
    assert [step for step, _ in values["loss"]] == [1, 2, 3, 4], "lost steps are left out"
    assert config["train.learning_rate"] == pytest.approx(3e-3)
    assert config["plugins.tracker.to"] == json.dumps(ALL)
    assert begun == 1


def test_wandb_holds_all_and_goes_on_offline(ran):
    values, config, ids, codes = in_wandb(ran)
    ensure_told(values, ran / "run")
    assert config["train.learning_rate"] == 3e-3
    assert len(set(ids)) == 1, "the second part belongs to the run of the first"
    assert codes == [0, 0]


def test_trackio_holds_all_and_goes_on(ran):
    values, config, runs = in_trackio(ran)
    ensure_told(values, ran / "run")
    assert config["train.learning_rate"] == 3e-3
    assert runs == 1


def test_mlflow_holds_all_and_goes_on(ran):
    values, config, states = in_mlflow(ran)
    ensure_told(values, ran / "run")
    assert config["train.learning_rate"] == "0.003"
    assert states == ["FINISHED"]


@only_full
def test_samples_come_as_texts(tmp_path):
    samples = {"prompts": ["Who | <b>?", "How?"], "every": 2}
    recipe = recipe_of(tmp_path, plugins={"samples": samples}, checkpoint={"every": 2})
    must_succeed(recipe, env=places(tmp_path))
    for name in ("checkpoints/step-000004", "model"):
        shutil.rmtree(tmp_path / "run" / name)
    result = run_plugsft(recipe, "--resume", env=places(tmp_path))
    assert result.returncode == 0 and "failed" not in result.stdout, result.stderr
    lines = map(json.loads, (tmp_path / "run/samples.jsonl").read_text().splitlines())
    rows = {step: [] for step in (2, 4)}
    for line in lines:
        rows[line["step"]].append([line["prompt"], line["answer"]])
    assert [len(answers) for answers in rows.values()] == [2, 2]
    # wandb: a table each time; the resumed run logs step 4 again.
    tables = sorted((tmp_path / "run/trackers/wandb").rglob("samples*.table.json"))
    assert [json.loads(path.read_text())["data"] for path in tables].count(rows[2]) >= 1
    assert len(tables) == 3
    texts = {path.name: path.read_text() for path in (tmp_path / "mlruns").rglob("step-*.md")}
    assert {*texts} == {"step-000002.md", "step-000004.md"}
    answer = f"Prompt:\n\n    Who | <b>?\n\nAnswer:\n\n    {rows[4][0][1]}"
    assert answer in texts["step-000004.md"]
    script = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1]); found.Reload()
[tag] = found.Tags()["tensors"]
print(json.dumps([[one.step, one.tensor_proto.string_val[0].decode()]
                  for one in found.Tensors(tag)]))
"""
    seen = read_with(script, tmp_path, tmp_path / "run/trackers/tensorboard/run")
    assert {step for step, _ in seen} == {2, 4} and seen[0][1] == texts["step-000002.md"]
    script = """
import json
from trackio.sqlite_storage import SQLiteStorage
import trackio
[run] = trackio.Api().runs("house")
logs = SQLiteStorage.get_logs("house", run.name, run_id=run.id)
print(json.dumps([[line["step"], line["samples"]] for line in logs if "samples" in line]))
"""
    seen = read_with(script, tmp_path)
    assert {step for step, _ in seen} == {2, 4} and "Who | <b>?" in json.dumps(seen)


def test_the_summary_counts_what_was_sent(ran):
    _, _, record = told_to(ran / "run")
    # Two steps, an evaluation, and the results.
    assert record["plugins"][0]["summary"] == "; ".join(f"{one}: 4 of 4 entries" for one in ALL)


def test_a_new_run_in_its_place_is_a_new_one_there(tmp_path):
    recipe = recipe_of(tmp_path, {"to": ["mlflow", "tensorboard"]}, train={"steps": 2})
    for more in [], ["--overwrite", "train.learning_rate=0.1"]:
        must_succeed(recipe, *more, env=places(tmp_path))
    assert in_mlflow(tmp_path)[2] == ["FINISHED", "FINISHED"]
    values = in_tensorboard(tmp_path)[0]
    assert [step for step, _ in values["loss"]] == [1, 2]


def test_only_the_main_rank_reports_to_the_tracker(tmp_path):
    recipe = recipe_of(tmp_path, {"to": ["tensorboard"], "name": "two"})
    result = run_ranks(2, recipe, env=places(tmp_path))
    assert result.returncode == 0, result.stderr
    values, _, begun = in_tensorboard(tmp_path, "two")
    ensure_told(values, tmp_path / "run")
    assert begun == 1 and len(list(tmp_path.rglob("events.out.*"))) == 2, "and the configuration's"


BREAKS = """
    import os
    from pathlib import Path

    @plugin()
    class Breaks:
        folder: str
        again: bool = True

        @hookimpl
        def logged(self, step: int) -> None:
            if step == 2:
                Path(self.folder).rename(self.folder + "-away")
            if step == 4 and self.again:
                Path(self.folder + "-away").rename(self.folder)
"""


@pytest.mark.parametrize("again", [True, False])
def test_one_that_fails_on_the_way_stops_nothing(tmp_path, monkeypatch, again):
    """Its store goes away at step 2, and comes back at 4, or never."""
    activate(install(tmp_path / "site", breaks=BREAKS), monkeypatch)
    more = {"breaks": {"folder": str(tmp_path / "mlruns"), "again": again}}
    recipe = recipe_of(tmp_path, {"to": ["tensorboard", "mlflow"]}, plugins=more)
    result = must_succeed(recipe, env=places(tmp_path))
    assert result.stdout.count("warning: mlflow failed, and the run continues without it") == 1
    steps, _, record = told_to(tmp_path / "run")
    assert len(steps) == 4
    summary = {plugin["name"]: plugin["summary"] for plugin in record["plugins"]}["tracker"]
    assert summary.startswith("tensorboard: 5 of 5 entries; mlflow: ")
    ensure_told(in_tensorboard(tmp_path)[0], tmp_path / "run")
    if again:
        assert summary.endswith("mlflow: 5 of 5 entries, late")
        ensure_told(in_mlflow(tmp_path)[0], tmp_path / "run")
    else:
        assert "of 5 entries, " in summary and summary.endswith("metrics.jsonl has all")


def test_a_run_that_fails_is_no_success_there(tmp_path, monkeypatch):
    fails = """
        @plugin()
        class Fails:
            @hookimpl
            def logged(self, step: int) -> None:
                raise PluginError("enough")
    """
    activate(install(tmp_path / "site", fails=fails), monkeypatch)
    to = {"to": ["wandb", "mlflow"]}
    result = run_plugsft(recipe_of(tmp_path, to, plugins={"fails": {}}), env=places(tmp_path))
    assert result.returncode == 2
    assert in_mlflow(tmp_path)[2] == ["FAILED"]
    assert in_wandb(tmp_path)[3] == [1]


def test_one_that_cannot_begin_stops_the_run_and_replaces_nothing(tmp_path):
    recipe = recipe_of(tmp_path, {"to": ["tensorboard"]}, train={"steps": 1})
    must_succeed(recipe, env=places(tmp_path))
    (tmp_path / "file").write_text("")
    other = f"plugins.tracker.folder={tmp_path / 'file'}"
    result = run_plugsft(recipe, other, "--overwrite", env=places(tmp_path))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "plugins.tracker: tensorboard cannot start: NotADirectoryError" in result.stderr
    assert (tmp_path / "run/model").is_dir(), "the earlier run's stands"


def refused(place, /, **options):
    """Return what the plugin says to a recipe."""
    tables = tiny_tables(place) | {"plugins": {"tracker": options}}
    recipe, active = resolve(tables)
    with pytest.raises(RecipeError) as refusal:
        check(active.attach(), recipe, look())
    return str(refusal.value)


@pytest.mark.parametrize("kind", ALL)
def test_a_package_that_is_missing_stops_the_run_with_the_cure(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(sys.modules, kind, None)
    assert refused(tmp_path, to=[kind]) == (
        f"plugins.tracker: to: {kind} is not installed: pip install 'plugsft[trackers]'"
    )


def test_no_login_stops_the_run_before_anything_is_read(tmp_path):
    env = places(tmp_path) | {"WANDB_MODE": "online", "WANDB_API_KEY": ""}
    result = run_plugsft(recipe_of(tmp_path, {"to": ["wandb"]}), env=env)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert 'to: "wandb" has no API key: run `wandb login`, or' in result.stderr
    assert "WANDB_MODE=offline" in result.stderr and "tokenizer" not in result.stdout


def test_a_server_that_does_not_answer_stops_the_run_before_anything_is_read(tmp_path):
    env = places(tmp_path) | {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    result = run_plugsft(recipe_of(tmp_path, {"to": ["mlflow"]}), env=env)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert 'to: "mlflow" cannot use http://127.0.0.1:9: MlflowException' in result.stderr
    assert "MLFLOW_TRACKING_URI" in result.stderr and "tokenizer" not in result.stdout


def test_unknown_trackers_are_refused(tmp_path):
    assert refused(tmp_path, to=["trackio"], folder="here") == (
        "plugins.tracker: folder: only tensorboard and wandb use it; remove it"
    )
    for to in [], ["tensorbord"]:
        with pytest.raises(RecipeError, match=r"plugins\.tracker\.to"):
            resolve(tiny_tables(tmp_path) | {"plugins": {"tracker": {"to": to}}})


def test_no_package_is_imported_that_was_not_asked_for(tmp_path):
    script = """
import sys
from plugsft.base.machine import look
from plugsft.registry.active import check
from plugsft.registry.load import load
recipe, active = load(sys.argv[1])
check(active.attach(), recipe, look())
print(*{"tensorboard", "wandb", "trackio", "mlflow"} & set(sys.modules))
"""
    recipe = recipe_of(tmp_path, {"to": ["trackio"]})
    result = subprocess.run(
        [sys.executable, "-c", script, recipe], capture_output=True, text=True, cwd=ROOT
    )
    assert result.stdout.split() == ["trackio"], result.stderr


def test_one_that_fails_is_tried_again_later_and_later(monkeypatch):
    """A tracker that takes long to fail must not hold up every step."""
    clock, tried = [0.0], []

    class Dead:
        def log(self, values, step):
            tried.append(clock[0])
            raise OSError("gone")

    monkeypatch.setattr("plugsft.plugins.tracker.senders.time.monotonic", lambda: clock[0])
    sender = Sender("tensorboard", Dead())
    for second in range(100):
        clock[0] = float(second)
        sender.send(second, {"loss": 1.0})
    assert tried == [0, 5, 15, 35, 75]
    assert sender.describe() == (
        "tensorboard: 0 of 100 entries, OSError: gone; metrics.jsonl has all"
    )


def test_an_error_is_described_in_one_line():
    assert describe_error(ValueError("one.\ntwo")) == "ValueError: one"
    assert describe_error(KeyError()) == "KeyError: no reason given"


def test_it_changes_nothing_that_is_learned():
    testing.keeps_gradients("tracker", {"to": ["tensorboard"]})
