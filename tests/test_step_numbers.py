"""A step's numbers are read while the next step runs, and the host waits for nothing else."""

import importlib
import json
import random

import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import ROOT, chats, read_metrics, run_plugsft, write_jsonl
from plugin_packages import activate, install

from plugsft.kit import target_places
from plugsft.ranks.load_batches import to_device
from plugsft.testing import tiny_runs

STEPS = 4
PACKED = {"bfd_packing": {"capacity": 300}}
PLUGINS = {
    "padded": {},
    "packed": PACKED,
    "float16": PACKED,
    "fused_loss": {**PACKED, "fused_loss": {}},
    "lora": {**PACKED, "fused_loss": {}, "lora": {"r": 4}},
    "dpo": {**PACKED, "dpo": {"loss": "simpo"}},
}


def pairs(count):
    """Return preference pairs."""
    rng = random.Random(0)
    sides = ("prompt", "chosen", "rejected")
    return [
        {side: " ".join(rng.choices(["owl", "fox", "red", "blue"], k=9)) for side in sides}
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", PLUGINS)
def test_the_host_waits_once_a_step_and_never_in_a_micro_step(tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(str(ROOT / "tools/bench"))
    rows = pairs(24) if name == "dpo" else chats(24)
    tables = tiny_runs.merged(
        tiny_runs.TINY,
        {
            "output": str(tmp_path / "run"),
            "data": {"source": str(write_jsonl(tmp_path / "data.jsonl", rows))},
            "train": {"steps": STEPS},
            "checkpoint": {"every": 0},
            "model": tiny_runs.TINY["model"] | ({"dtype": name} if name == "float16" else {}),
            "plugins": PLUGINS[name],
        },
    )
    AcceleratorState._reset_state(reset_partial_state=True)  # it knows one type
    with importlib.import_module("launches").counting() as steps:
        tiny_runs.train(tables)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert steps.parts["step"] == STEPS - 1 and steps.launches["micro-step"] > 100
    waits = dict(steps.waits)
    if name == "padded":  # transformers reads the mask of padding, once or twice a forward
        masks = [place for place in waits if "transformers/masking_utils.py" in place]
        assert masks and all(place.startswith("micro-step") for place in masks)
        waits = {place: waits[place] for place in waits if place not in masks}
    # After step 1, a checkpoint is described once, to see that it could be stored.
    described = (
        "step: _local_scalar_dense in ranks/loss_scale.py, ",
        "step: tolist in checkpoint/",
    )
    waits = {place: count for place, count in waits.items() if not place.startswith(described)}
    assert waits == {"step: read in ranks/step_numbers.py, read": STEPS}


def test_batches_are_copied_from_pinned_memory(monkeypatch):
    calls = []

    def pin_memory(tensor):
        calls.append("pinned")
        return tensor

    def to(tensor, device, non_blocking=False):
        calls.append((str(device), non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    to_device(torch.ones(2), torch.device("cuda"))
    assert calls == ["pinned", ("cuda", True)]
    to_device(torch.ones(2), torch.device("cpu"))
    assert calls[2:] == [("cpu", True)]


def test_rows_of_labels_that_a_plugin_has_replaced_are_found_anew():
    labels = torch.tensor([[-100, 5, 6, -100], [7, 8, -100, -100]])
    rows = target_places({"labels": labels})
    assert rows.tolist() == [0, 1, 4]
    batch = {"labels": labels, "_places": rows, "_places_of": labels}
    assert target_places(batch) is rows
    changed = batch | {"labels": labels.masked_fill(labels == 6, -100)}
    assert target_places(changed).tolist() == [0, 4]


LATE = """
    import json
    import torch

    @plugin()
    class Late:
        broken: int = 0
        fails: int = 0
        forward_fails: int = 0
        run: object = state()
        forwards: int = state(0)

        def write(self, *facts):
            shards = self.run.model.shards().values()
            weights = float(sum(shard.double().sum() for shard in shards))
            with open(self.run.output / "heard.jsonl", "a") as file:
                file.write(json.dumps([*facts, self.run.step, weights]) + "\\n")

        @hookimpl
        def ready(self, run):
            self.run = run

        @hookimpl(wrapper=True)
        def step(self, model):
            next_step = self.run.step + 1
            if model.training and self.forwards < next_step:
                self.forwards = next_step
                self.write("forward", next_step)
                if next_step == self.forward_fails:
                    raise RuntimeError("no forward")
            loss = yield
            return loss * torch.nan if model.training and next_step == self.broken else loss

        @hookimpl
        def stepped(self, run):
            self.write("stepped", run.step)
            if run.step == self.fails:
                raise ValueError("no notice")

        @hookimpl
        def logged(self, step, metrics):
            self.write("logged" if "loss" in metrics else "evaluated", step)

        @hookimpl
        def finished(self, status):
            self.write("finished", status)
"""
IN_TIME = LATE.replace("@plugin()", '@plugin(provides={"early_stop": None})')
SPEED = ("step_seconds", "tokens_per_second", "memory_gib", "data_wait_seconds")


@pytest.fixture
def trains(tiny, tmp_path, monkeypatch):
    """Return a function that trains with a plugin that writes what it hears."""
    in_time = IN_TIME.replace("class Late", "class Intime")
    activate(install(tmp_path / "site", late=LATE, intime=in_time), monkeypatch)

    def train(name="late", tables=None, **options):
        tables = {"train": {"steps": 5, "batch_size": 8}, "checkpoint": {"every": 0}} | (
            tables or {}
        )
        recipe = tiny(rows=chats(43), plugins={name: options}, **tables)
        run = tmp_path / name
        done = run_plugsft(recipe, f"output={run}")
        heard = list(map(json.loads, (run / "heard.jsonl").read_text().splitlines()))
        return done, heard, run

    return train


def test_metrics_come_one_step_late_with_the_weights_of_their_step(trains):
    tables = {"eval": {"every": 3, "split": "train[:4]"}}
    done, heard, run = trains(tables=tables)
    assert done.returncode == 0, done.stderr
    assert [facts[:-1] for facts in heard] == [
        *(["forward", 1, 0], ["stepped", 1, 1]),
        *(["forward", 2, 1], ["logged", 1, 1], ["stepped", 2, 2]),
        *(["forward", 3, 2], ["logged", 2, 2], ["stepped", 3, 3]),
        *(["logged", 3, 3], ["evaluated", 3, 3]),
        *(["forward", 4, 3], ["stepped", 4, 4]),
        *(["forward", 5, 4], ["logged", 4, 4], ["stepped", 5, 5]),
        *(["logged", 5, 5], ["evaluated", 5, 5], ["finished", "completed", 5]),
    ]
    weights = {facts[1]: facts[-1] for facts in heard if facts[0] == "stepped"}
    assert len({*weights.values()}) == 5
    assert all(facts[-1] == weights[facts[1]] for facts in heard if facts[0] == "logged")
    # A plugin that stops runs early hears of each step at once; the metrics are the same.
    done, heard, other = trains("intime", tables)
    assert done.returncode == 0, done.stderr
    order = [facts[:2] for facts in heard]
    assert order.index(["logged", 1]) < order.index(["forward", 2])
    lines = [
        [{name: line[name] for name in line if name not in SPEED} for line in read_metrics(folder)]
        for folder in (run, other)
    ]
    assert lines[0] == lines[1] and [line["step"] for line in lines[0]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["late", "intime"])
def test_a_broken_step_moves_no_weight_and_is_named(trains, name):
    done, heard, run = trains(name, broken=3)
    assert done.returncode == 1 and "step 3: loss nan" in done.stderr, done.stderr
    assert "data.jsonl rows " in done.stderr and "Traceback" not in done.stderr
    assert heard[-1][:3] == ["finished", "failed", 2]
    weights = {facts[1]: facts[-1] for facts in heard if facts[0] == "stepped"}
    assert heard[-1][-1] == weights[2]
    assert [line["step"] for line in read_metrics(run)] == [1, 2]
    assert json.loads((run / "run.json").read_text())["steps"]["done"] == 2
    assert not list((run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("fails, every, says", [(3, 0, "no notice"), (0, 3, "step 3: loss nan")])
def test_no_checkpoint_is_of_a_broken_step(trains, fails, every, says):
    """A notice that fails after it would have it saved, and so would the recipe."""
    done, _, run = trains(broken=3, fails=fails, tables={"checkpoint": {"every": every}})
    assert done.returncode == 1 and says in done.stderr
    assert not list((run / "checkpoints").glob("step-*"))
    assert [line["step"] for line in read_metrics(run)] == [1, 2]


def test_the_last_step_before_a_failure_is_logged(trains):
    done, _, run = trains(forward_fails=4)
    assert done.returncode == 1 and "no forward" in done.stderr
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3]
    assert not list((run / "checkpoints").glob("step-*"))


def test_a_failed_notice_leaves_its_step_saved_and_logged(trains):
    done, heard, run = trains(fails=3)
    assert done.returncode == 1 and "no notice" in done.stderr
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-000003"]
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3]
    assert ["logged", 3, 3] in [facts[:-1] for facts in heard]
