"""A failure on one of two real ranks, at each place of a run, ends both with its reason."""

import json

import pytest
from conftest import chats, only_full, start_ranks
from plugin_packages import activate, failing, install

from plugsft.base.atomic import damage

# It fails on one rank: in a hook, or as soon as a file grows beyond what the disk would grant.
FAULT = """
    import os, resource

    @plugin(after=["dpo", "dpo_reference"])
    class Fault:
        place: str
        rank: int
        calls: int = state(0)
        steps: int = state(0)

        def fail(self, place):
            if self.place == place and os.environ["RANK"] == str(self.rank):
                raise RuntimeError(f"boom in {place}")

        @hookimpl(wrapper=True)
        def collate(self):
            self.calls += 1
            if self.calls == 4:  # two micro-batches a step: in the second step
                self.fail("collate")
            if self.calls == 7:  # three steps are made, and what is evaluated on comes next
                self.fail("collate for evaluation")
            return (yield)

        @hookimpl(wrapper=True)
        def step(self):
            if self.steps == 1:
                self.fail("step")
                if self.place == "write" and os.environ["RANK"] == str(self.rank):
                    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, resource.RLIM_INFINITY))
            return (yield)

        @hookimpl(wrapper=True)
        def token_nll(self):
            if self.steps == 1:
                self.fail("token_nll")
            return (yield)

        @hookimpl
        def add_metrics(self):
            self.steps += 1
            if self.steps == 2:
                self.fail("add_metrics")
            return {}

        @hookimpl
        def logged(self, step):
            if step == 2:
                self.fail("logged")

        @hookimpl
        def stepped(self, run):
            if run.step == 2:
                self.fail("stepped")

        @hookimpl
        def saved(self, kind, step):
            self.fail(f"saved {kind} {step}")
"""
EARLY = ("optimize_model", "optimizer", "add_columns", "plan_batches", "summary")
FAULT += failing(*EARLY, "ready", "finished")
LATE = ("collate", "step", "token_nll", "add_metrics", "collate for evaluation")
NOTICES = (
    "ready",
    "stepped",
    "logged",
    "saved checkpoint 2",
    "saved checkpoint 3",
    "saved model 3",
    "finished",
)
QUICK = {("optimize_model", 1), ("step", 0), ("write", 0)}
PLACES = [
    *((place, rank) for place in (*EARLY, *LATE, *NOTICES) for rank in (1, 0)),
    ("write", 0),  # the main rank's alone
]


@pytest.mark.parametrize(
    "place, rank",
    [
        pytest.param(place, rank, marks=[] if (place, rank) in QUICK else only_full)
        for place, rank in PLACES
    ],
)
def test_a_fault_on_one_rank_ends_both_with_its_reason(tiny, tmp_path, monkeypatch, place, rank):
    activate(install(tmp_path / "site", fault=FAULT), monkeypatch)
    recipe = tiny(
        rows=chats(29),
        train={"batch_size": 8, "micro_batch": 2, "steps": 3, "log_every": 1},
        checkpoint={"every": 1},
        eval={"split": "train[:5]", "every": 3},
        plugins={"fault": {"place": place, "rank": rank}},
    )
    ended = [process.wait() for process in start_ranks(2, recipe)]
    failed, other = ended[rank], ended[1 - rank]
    said = "file too large" if place == "write" else f"boom in {place}"
    assert failed.returncode and other.returncode, (failed.stderr, other.stderr)
    assert said in failed.stderr
    assert f"rank {rank} failed" in other.stderr and said in other.stderr, other.stderr
    assert "Traceback" not in other.stderr
    if place in (*LATE, "logged"):
        assert damage(tmp_path / "run/checkpoints/step-000001") is None
    if place in (*EARLY, "ready"):  # results of an earlier run are still in place
        assert not (tmp_path / "run/run.json").exists()
    else:
        run = json.loads((tmp_path / "run/run.json").read_text())
        assert run["status"] == "failed" and said in run["reason"], run["reason"]
