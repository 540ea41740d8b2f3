"""A plugin stops a run in good order; the best checkpoint becomes the model; state is resumed."""

import json
import math
import re
import shutil

import pytest
import torch
from conftest import (
    chats,
    must_succeed,
    only_full,
    read_record,
    run_plugsft,
    start_plugsft,
    start_ranks,
    write_jsonl,
)
from plugin_packages import activate, install
from safetensors.torch import load_file

STOPS = """
    @plugin()
    class Stops:
        at: int
        rank: int = 0
        reason: str = "enough was learned"
        steps: int = state(0)

        @hookimpl
        def stepped(self, run):
            self.steps += 1
            if run.step == self.at and run.ranks.rank == self.rank:
                run.stop(self.reason)

        @hookimpl
        def state_dict(self):
            return {"steps": self.steps}

        @hookimpl
        def load_state_dict(self, state):
            self.steps = state["steps"]

        @hookimpl
        def summary(self):
            return f"{self.steps} steps seen"
"""
TRAIN = {"steps": 6, "batch_size": 8, "learning_rate": 3e-3}


@pytest.fixture
def stops(tmp_path, monkeypatch):
    activate(install(tmp_path / "site", stops=STOPS), monkeypatch)


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 1)])
def test_a_plugin_on_any_rank_stops_the_run_in_good_order(tiny, tmp_path, stops, ranks, rank):
    recipe = tiny(
        rows=chats(24),
        train=TRAIN,
        checkpoint={"every": 3},
        plugins={"stops": {"at": 4, "rank": rank}},
    )
    ended = [process.wait() for process in start_ranks(ranks, recipe)]
    assert [process.returncode for process in ended] == [0] * ranks, ended[0].stderr
    run = tmp_path / "run"
    record = read_record(run)
    assert (record["status"], record["reason"]) == ("completed", "enough was learned")
    assert record["steps"]["done"] == 4 and (run / "model").is_dir()
    assert [path.name for path in sorted((run / "checkpoints").glob("step-*"))] == [
        "step-000003",
        "step-000004",
    ]
    assert "enough was learned" in (run / "report.html").read_text()
    assert "enough was learned" in ended[0].stdout
    # It goes on where it stopped, with the plugin's state, and ends like any other run.
    result = must_succeed(recipe, "--resume", "plugins.stops.at=0")
    assert "6 steps seen" in result.stdout
    assert read_record(run)["steps"]["done"] == 6 and read_record(run)["reason"] is None


@pytest.mark.parametrize(
    ("reason", "recorded"),
    [("!SIGTERM", "!SIGTERM"), ("", "a plugin stopped the run"), ("one\ntwo", "one two")],
)
def test_any_reason_stops_in_good_order(tiny, tmp_path, stops, reason, recorded):
    recipe = tiny(train=TRAIN, plugins={"stops": {"at": 2, "reason": reason}})
    must_succeed(recipe)
    record = read_record(tmp_path / "run")
    assert (record["status"], record["reason"]) == ("completed", recorded)
    assert record["steps"]["done"] == 2
    assert (tmp_path / "run/model").is_dir()


ASKS = """
    import torch

    @plugin()
    class Asks:
        stop: object = state()
        seen: int = state(0)

        @hookimpl
        def ready(self, run):
            self.stop = run.stop if run.ranks.rank == run.ranks.size - 1 else str

        @hookimpl(wrapper=True)
        def step(self):
            if not torch.is_grad_enabled():
                self.seen += 1
                self.stop("seen enough")
            return (yield)

        @hookimpl
        def summary(self):
            return f"{self.seen} seen"
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plugin_that_stops_inside_an_evaluation_ends_the_run_after_all_of_it(
    tiny, tmp_path, monkeypatch, ranks
):
    activate(install(tmp_path / "site", asks=ASKS), monkeypatch)
    evaluation = {"split": "train[:12]", "every": 2}
    train = TRAIN | {"micro_batch": 1}
    recipe = tiny(rows=chats(24), train=train, eval=evaluation, plugins={"asks": {}})
    for ended in [process.wait() for process in start_ranks(ranks, recipe)]:
        assert ended.returncode == 0, ended.stderr
    record = read_record(run := tmp_path / "run")
    assert (record["status"], record["reason"]) == ("completed", "seen enough")
    assert record["steps"]["done"] == 2 and (run / "model").is_dir()
    assert (run / "checkpoints/step-000002").is_dir()
    assert record["plugins"][0]["summary"] == f"{12 // ranks} seen"
    assert (run / "metrics.jsonl").read_text().count('"eval_loss"') == 1


BEST = """
    @plugin(metrics=["told"])
    class Told:
        values: list[float]
        calls: int = state(0)

        @hookimpl
        def add_metrics(self):
            import torch
            if torch.is_grad_enabled():
                return {"told": torch.tensor(0.0)}
            self.calls += 1
            return {"told": torch.tensor(self.values[self.calls - 1])}

        @hookimpl
        def state_dict(self):
            return {"calls": self.calls}

        @hookimpl
        def load_state_dict(self, state):
            self.calls = state["calls"]

        @hookimpl
        def saved(self, kind, step):
            print(f"saved: {kind} of step {step}")

        @hookimpl
        def logged(self, run, metrics):
            if "eval_loss" in metrics:
                print(f"evaluated after step {run.step}")
"""


EACH_STEP = {"rows": chats(24), "train": TRAIN, "eval": {"split": "train[:4]", "every": 1}}
"""Evaluates after each step."""


def test_a_resume_does_not_repeat_an_evaluation(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", told=BEST), monkeypatch)
    recipe = tiny(
        **EACH_STEP,
        checkpoint={"every": 2, "keep": 9},
        plugins={"told": {"values": [0.0] * 6}},
    )
    must_succeed(recipe)
    again = must_succeed(recipe, "--resume-from", tmp_path / "run/checkpoints/step-000002")
    assert re.findall(r"evaluated after step (\d)", again.stdout) == ["3", "4", "5", "6"]


def test_evaluations_and_checkpoints_after_each_epoch(tiny, tmp_path):
    recipe = tiny(
        rows=chats(20),
        train={"epochs": 3, "batch_size": 4},
        eval={"split": "train[:12]", "every": "epoch"},
        data={"split": "train[12:]"},
        checkpoint={"every": "epoch"},
    )
    checked = must_succeed("check", recipe).stdout
    done = must_succeed(recipe).stdout
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 6]
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*"))
    assert saved == ["step-000002", "step-000004", "step-000006"]
    assert "every 2 steps, the last 3 kept" in checked and "every 2 steps, the last 3" in done


def test_the_best_checkpoint_is_kept_and_becomes_the_model(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", told=BEST), monkeypatch)
    recipe = tiny(
        **EACH_STEP,
        checkpoint={"every": 1, "keep": 1, "keep_best": "eval_told", "best": "highest"},
        # Of the two highest, the first one is kept.
        plugins={"told": {"values": [9.0, 1.0, 3.0, 2.0, 3.0, 0.0, 0.5]}},
    )
    run = tmp_path / "run"
    done = must_succeed(recipe, "eval.at_start=true")  # the untrained model is never the best
    assert "best: eval_told " in done.stdout and " at step 2; model/ has its weights" in done.stdout
    assert "saved: model of step 2" in done.stdout
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == [
        "step-000002",
        "step-000006",
    ]
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    evaluations = [line for line in lines if "eval_told" in line]
    assert evaluations[0]["step"] == 0
    best = max(evaluations[1:], key=lambda line: line["eval_told"])
    assert best["step"] == 2
    record = read_record(run)
    assert record["best"] == {"step": 2, "eval_told": best["eval_told"]}
    exported = tmp_path / "exported"
    must_succeed("export", run / "checkpoints/step-000002", "--to", exported)
    model, expected = (load_file(path / "model.safetensors") for path in (run / "model", exported))
    assert all(torch.equal(model[name], expected[name]) for name in expected)
    exported_last = tmp_path / "last"
    run_plugsft("export", run / "checkpoints/step-000006", "--to", exported_last)
    last = load_file(exported_last / "model.safetensors")
    assert any(not torch.equal(model[name], last[name]) for name in expected)


CUTS = """
    import os, signal, time
    import torch

    LAUNCHED = "TORCHELASTIC_RUN_ID" in os.environ

    @plugin()
    class Cuts:
        at: int
        rank: int = state(0)
        seen: int = state(0)

        @hookimpl
        def ready(self, run):
            self.rank = run.ranks.rank

        @hookimpl(wrapper=True)
        def step(self):
            self.seen += not torch.is_grad_enabled()
            if self.seen == self.at and self.rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
                os.kill(os.getppid() if LAUNCHED else os.getpid(), signal.SIGTERM)
                time.sleep(2 * LAUNCHED)  # until the launcher has passed it on
            return (yield)

        @hookimpl
        def summary(self):
            return f"{self.seen} seen"
"""


def test_a_resume_that_evaluates_other_rows_says_so(tiny, tmp_path):
    eval_rows = {"source": str(write_jsonl(tmp_path / "held.jsonl", chats(8, 1))), "every": 2}
    recipe = tiny(eval=eval_rows, checkpoint={"every": 2, "keep": 3})
    whole = run_plugsft(recipe)
    assert whole.returncode == 0 and "warning" not in whole.stdout, whole
    words = ("--resume-from", tmp_path / "run/checkpoints/step-000002")
    for split, count in (("train", 0), ("train[:3]", 1)):
        result = must_succeed(recipe, *words, f"eval.split={split}")
        assert result.stdout.count("warning: [eval] has other rows than before") == count


SPEED = {"tokens_per_second", "step_seconds", "memory_gib", "data_wait_seconds"}


@pytest.mark.parametrize(
    ("ranks", "launched"), [(1, False), (2, False), pytest.param(2, True, marks=only_full)]
)
def test_a_signal_cuts_an_evaluation_short_and_a_resume_begins_with_it(
    tiny, tmp_path, monkeypatch, ranks, launched
):
    """Metrics, samples, the best model and an early stop are those of a run without a stop."""
    activate(install(tmp_path / "site", told=BEST, cuts=CUTS), monkeypatch)
    of_told = {"metric": "eval_told", "best": "highest", "patience": 2}
    recipe = tiny(
        rows=chats(24),
        train=TRAIN | {"batch_size": 4, "micro_batch": 1},
        eval={"split": "train[:12]", "every": 1, "at_start": True},
        checkpoint={"keep_best": "eval_told", "best": "highest"},
        plugins={
            "told": {"values": [0.5, 1.0, 3.0, 2.0, 2.5, 0.0, 0.5]},
            "early_stopping": of_told,
            "samples": {"prompts": ["Who?"], "every": 2, "max_tokens": 4},
            "cuts": {"at": -1},
        },
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def ended(run, *words):
        words, env = (recipe, f"output={run}", *words), {"PLUGSFT_PROGRESS_SECONDS": "0"}
        if launched:
            return [start_plugsft("launch", *words, f"--ranks={ranks}", env=env).wait()]
        return [process.wait() for process in start_ranks(ranks, *words, env=env)]

    def left_by(run):
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        metrics = [{key: line[key] for key in line if key not in SPEED} for line in lines]
        samples = (run / "samples.jsonl").read_text()
        return (
            metrics,
            samples,
            read_record(run)["best"],
            load_file(run / "model/model.safetensors"),
        )

    done = ended(whole)[0]
    assert done.returncode == 0 and done.stdout.count("4 of 12 examples, after step 1, about") == 1
    assert [line["step"] for line in left_by(whole)[0]] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    at = 24 // ranks + 2
    for stopped in ended(parts, f"plugins.cuts.at={at}"):
        assert stopped.returncode == 143, stopped.stderr
        said = "stopping after this micro-batch of the evaluation; then" in stopped.stderr
        assert said == (ranks == 1 or launched), "the main process says it"
    assert {"cuts": f"{at} seen"}.items() <= {
        one["name"]: one["summary"] for one in read_record(parts)["plugins"]
    }.items()
    assert [path.name for path in (parts / "checkpoints").glob("*2")] == ["step-000002"]
    for _ in range(2):  # the second time as if killed after that evaluation
        for resumed in ended(parts, "--resume"):
            assert resumed.returncode == 0, resumed.stderr
        assert str(left_by(parts)) == str(left_by(whole))
        for name in ("model", "checkpoints/step-000003", "checkpoints/step-000004"):
            shutil.rmtree(parts / name)


TWICE = """
    import os, signal, time

    @plugin()
    class Twice:
        last: int = state(0)

        @hookimpl
        def saved(self, step):
            self.last = step

        @hookimpl
        def stepped(self):
            for _ in range(2 if self.last else 0):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(2.1)
"""


def test_each_ctrl_c_says_what_it_does_and_what_is_lost(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", twice=TWICE), monkeypatch)
    recipe = tiny(train=TRAIN | {"steps": 40}, checkpoint={"every": 2}, plugins={"twice": {}})
    ended = run_plugsft(recipe)
    assert ended.returncode == 130 and "Traceback" not in ended.stderr, ended.stderr
    loss = r"(\d+ steps? since the checkpoint of step \d+, from which --resume goes on)"
    first = re.search(
        rf"^stopping after this step \(about \d+\.\d s\); .* ends it at once, and loses {loss}$",
        ended.stderr,
        re.M,
    )
    assert f"\nended at once: lost {first[1]}\n" in ended.stderr
    record = read_record(tmp_path / "run")
    assert (record["status"], record["reason"]) == ("stopped", f"ended at once: lost {first[1]}")
    must_succeed(recipe, "--resume", "--without", "twice")


WORST = """
    from typing import Any
    import torch

    @plugin()
    class Worst:
        losses: list = state([])
        steps: Any = state()
        status: str = state("")

        @hookimpl
        def ready(self):
            if self.steps is None:
                self.steps = torch.zeros(())

        @hookimpl
        def logged(self, step, metrics):
            if "loss" in metrics:
                self.steps += 1
                self.losses.append([metrics["loss"], step])

        @hookimpl
        def state_dict(self):
            return {"losses": self.losses, "steps": self.steps}

        @hookimpl
        def load_state_dict(self, state):
            self.losses[:] = state["losses"]
            if self.steps is None:
                self.steps = torch.zeros(())
            self.steps.copy_(state["steps"])

        @hookimpl
        def finished(self, run, status):
            seen = [step for _, step in self.losses]
            (run.output / f"seen-{run.ranks.rank}").write_text(f"{seen} of {self.steps:.0f}")

        @hookimpl
        def summary(self):
            return f"{len(self.losses)} losses"
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_best_model_leaves_plugins_the_state_of_the_last_step(
    tiny, tmp_path, monkeypatch, ranks
):
    activate(install(tmp_path / "site", told=BEST, worst=WORST), monkeypatch)
    recipe = tiny(
        rows=chats(24),
        train=TRAIN,
        eval={"split": "train[:4]", "every": 2},
        checkpoint={"every": 2, "keep_best": "eval_told", "best": "highest"},
        plugins={"told": {"values": [3.0, 2.0, 1.0]}, "worst": {}},
    )
    ended = [process.wait() for process in start_ranks(ranks, recipe)]
    assert [process.returncode for process in ended] == [0] * ranks, ended[0].stderr
    run = tmp_path / "run"
    assert read_record(run)["best"]["step"] == 2
    seen = {(run / f"seen-{rank}").read_text() for rank in range(ranks)}
    assert seen == {"[1, 2, 3, 4, 5, 6] of 6"}
    assert "worst: 6 losses" in ended[0].stdout


def test_a_best_checkpoint_that_is_missing_is_named(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", told=BEST), monkeypatch)
    recipe = tiny(
        rows=chats(24),
        train=TRAIN | {"steps": 3},
        eval={"split": "train[:4]", "every": 1},
        checkpoint={"every": 1, "keep_best": "eval_told", "best": "lowest"},
        plugins={"told": {"values": [math.nan] * 3}},
    )
    last = "warning: no evaluation had a finite eval_told; model/ has the weights of"
    done = run_plugsft(recipe)
    assert done.returncode == 0 and last in done.stdout, done.stderr
    done = run_plugsft(recipe, "plugins.told.values=[1.0,2.0,3.0]", "--overwrite")
    assert "at step 1; model/ has its weights" in done.stdout
    second = ("--resume-from", tmp_path / "run/checkpoints/step-000002")
    # 3.0 at step 3 is the best of the other rows, and no loss is as low as 1.0.
    for other in ("eval.split=train[:3]", "checkpoint.keep_best=eval_loss"):
        done = must_succeed(recipe, "plugins.told.values=[1.0,2.0,3.0]", other, *second)
        assert "at step 3; model/ has its weights" in done.stdout
    assert "step-000001, is missing, or was chosen by another checkpoint.keep_best" in done.stdout
    shutil.rmtree(tmp_path / "run/checkpoints/step-000003")
    # The lowest value so far, 1.0, is not the highest, though higher than that of step 3.
    turned = ("plugins.told.values=[1.0,2.0,0.5]", "checkpoint.best=highest")
    done = must_succeed(recipe, *turned, *second)
    assert "at step 3; model/ has its weights" in done.stdout
    shutil.rmtree(tmp_path / "run/checkpoints/step-000003")
    words = ("plugins.told.values=[1.0,2.0,3.0]", "--resume")
    shutil.rmtree(tmp_path / "run/checkpoints/step-000001")
    done = must_succeed(recipe, *words)
    assert "warning: the best checkpoint so far," in done.stdout
    assert "step-000001, is missing, or was chosen by another " in done.stdout
    assert "at step 3; model/ has its weights" in done.stdout


def test_a_metric_that_evaluations_lack_is_named_before_anything_is_written(tiny, tmp_path):
    held_out = {"every": 2, "split": "train[:8]"}
    recipe = tiny(train=TRAIN, eval=held_out, checkpoint={"keep_best": "eval_los"})
    says = "evaluations have no metric 'eval_los'; did you mean 'eval_loss'?"
    for command in ("train", "check"):
        result = run_plugsft(command, recipe)
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert says in result.stderr
    assert not (tmp_path / "run").exists()
    result = run_plugsft(tiny(checkpoint={"keep_best": "eval_loss"}))
    assert result.returncode == 2 and "add [eval]" in result.stderr


def test_a_declared_metric_that_an_evaluation_does_not_give_is_named(tiny, tmp_path, monkeypatch):
    silent = BEST.replace("self.calls += 1", "return {}")
    activate(install(tmp_path / "site", told=silent), monkeypatch)
    recipe = tiny(
        train=TRAIN,
        eval={"split": "train[:4]", "every": 1},
        checkpoint={"keep_best": "eval_told", "best": "lowest"},
        plugins={"told": {"values": []}},
    )
    result = run_plugsft(recipe)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert (
        "checkpoint.keep_best: this evaluation has no metric 'eval_told', though a plugin declares "
        "it; it has: eval_loss, eval_tokens"
    ) in result.stderr


LOSES = """
    @plugin()
    class Loses:
        @hookimpl
        def stepped(self, run):
            if run.step == 4 and run.ranks.rank == 1:
                raise ValueError("half of the state is updated")

        @hookimpl
        def state_dict(self):
            return {}

        @hookimpl
        def load_state_dict(self, state):
            pass

        @hookimpl
        def finished(self, run, status):
            (run.output / f"finished-{run.ranks.rank}").write_text(status)
"""


def test_no_checkpoint_holds_the_state_of_a_plugin_that_failed(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", loses=LOSES), monkeypatch)
    recipe = tiny(rows=chats(24), train=TRAIN, checkpoint={"every": 1}, plugins={"loses": {}})
    ended = [process.wait() for process in start_ranks(2, recipe)]
    assert [process.returncode for process in ended] == [1, 1]
    run = tmp_path / "run"
    assert "rank 1 failed" in ended[0].stderr and "plugin 'loses'" in ended[0].stderr
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*"))[-1] == "step-000003"
    record = read_record(run)
    assert record["status"] == "failed" and "half of the state is updated" in record["reason"]
    assert [(run / f"finished-{rank}").read_text() for rank in range(2)] == ["failed", "failed"]
    assert not (run / "model").exists()


BROKEN = """
    import resource

    @plugin()
    class Broken:
        @hookimpl
        def stepped(self):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            raise ValueError("the tracker is gone")
"""


def test_a_checkpoint_that_cannot_be_written_hides_no_failure(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", broken=BROKEN), monkeypatch)
    result = run_plugsft(tiny(rows=chats(24), train=TRAIN, plugins={"broken": {}}))
    assert result.returncode == 1, result.stderr
    assert "the tracker is gone" in result.stderr and "file too large" in result.stderr
