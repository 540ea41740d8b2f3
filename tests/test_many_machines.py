"""Two machines, as two of torchrun's agents with two ranks each: one is lost, the run goes on."""

import time

import pytest
from agents import start_nodes, wait_for
from conftest import chats, only_full, read_metrics

TRAIN = {"batch_size": 8, "micro_batch": 2, "steps": 30, "learning_rate": 1e-3}
SECONDS = 15
"""Time in which the other machines end, as docs/many-machines.md promises."""


def curve(run):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_metrics(run)]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=only_full)])
def test_a_lost_machine_ends_the_others_and_the_rerun_is_exact(tiny, tmp_path, lost):
    recipe = tiny(rows=chats(45), train=TRAIN, checkpoint={"every": 5})
    whole, run = tmp_path / "whole", tmp_path / "run"
    for node in start_nodes(recipe, f"output={whole}"):
        code, output = node.wait(60)
        assert code == 0, output
    words = (recipe, f"output={run}", "--resume", "auto")
    nodes = start_nodes(*words)
    wait_for(lambda: [*(run / "checkpoints").glob("step-*")], nodes)
    nodes[lost].kill()
    killed = time.monotonic()
    code, output = nodes[1 - lost].wait(60)
    assert code == 1 and time.monotonic() - killed < SECONDS, output
    assert "error: another rank has ended [127.0.0.1]; see" in output
    assert f"Resume with --resume ({run})" in output
    outputs = []
    for node in start_nodes(*words):
        code, output = node.wait(60)
        assert code == 0, output
        outputs.append(output)
    assert "going on after step" in outputs[0] and "DDP of 4" in outputs[0]
    assert curve(run) == curve(whole) and len(curve(run)) == TRAIN["steps"]
    weights = [folder / "model/model.safetensors" for folder in (run, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
