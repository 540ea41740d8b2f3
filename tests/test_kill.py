"""SIGKILL at any moment: the rerun ends with the weights of an undisturbed run.

`tools/test --full` kills 30 runs of one process, and 24 of two ranks of each strategy.
"""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import FULL, chats, run_plugsft, start_plugsft, start_ranks
from launching import FSDP2, ZERO3

KILLS, KILLS_OF_RANKS = (30, 24) if FULL else (3, 1)
TRAIN = {"batch_size": 8, "micro_batch": 4, "steps": 30, "learning_rate": 1e-3, "log_every": 30}


def preparing(run: Path) -> bool:
    """Tell whether somebody builds tokens, a tokenizer or a model right now."""
    return any(run.glob("tokens/.*.claim-*")) or any(run.glob("scratch/.*.claim-*"))


def saving(run: Path) -> bool:
    return any(run.glob("checkpoints/.step-*.tmp")) or any(run.glob(".model.*.tmp"))


def training(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def killed(processes, moment, delay):
    """Wait for a moment, and a little longer; kill; tell whether one was still running."""
    running = [one for one in processes if one.process.is_alive()]
    while not moment() and len(running) == len(processes):
        time.sleep(0.0005)
        running = [one for one in processes if one.process.is_alive()]
    time.sleep(delay)
    hit = any(one.process.is_alive() for one in processes)
    for one in processes:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(one.pid, signal.SIGKILL)
    return hit


def go_on(run):
    """How a user starts a killed run again."""
    return "--resume" if list(run.glob("checkpoints/step-*")) else "--overwrite"


def leftovers(run):
    return [path.name for path in run.rglob(".*") if path.name.endswith((".tmp", "claim"))]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_rerun_after_a_kill_ends_with_the_same_weights(tiny, tmp_path):
    # Some 700 rows: preparing them takes long enough to be hit.
    recipe = tiny(rows=chats(700), train=TRAIN, checkpoint={"every": 2, "keep": 2})
    whole = tmp_path / "whole"
    assert run_plugsft(recipe, f"output={whole}").returncode == 0
    expected = (whole / "model/model.safetensors").read_bytes()
    rng = random.Random(7)
    # Seconds up to which a kill comes later. At once, a claim has no text yet: 30 s of patience.
    moments = {preparing: 0.05, training: 0.4, saving: 0.02}
    hits = dict.fromkeys(moments, 0)
    for kill in range(KILLS):
        run, moment = tmp_path / f"run-{kill}", [*moments][kill % 3]
        running = start_plugsft(recipe, f"output={run}")
        delay = rng.uniform(0.002, moments[moment])
        hits[moment] += killed([running], lambda: moment(run), delay)  # noqa: B023  # called here
        running.wait()
        result = run_plugsft(recipe, f"output={run}", go_on(run))
        assert result.returncode == 0, (kill, result.stderr)
        assert (run / "model/model.safetensors").read_bytes() == expected, (kill, moment.__name__)
        assert not leftovers(run), kill
    # A run may have ended just before its kill; not at every moment, though.
    assert sum(map(bool, hits.values())) >= min(3, KILLS // 3 + 1), hits
    print(f"{KILLS} kills, all reruns bit-equal: { ({m.__name__: n for m, n in hits.items()}) }")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_two_ranks_go_on_after_a_kill_of_one_or_both_with_the_same_weights(
    strategy, tiny, tmp_path
):
    recipe = tiny(rows=chats(200), train=TRAIN, checkpoint={"every": 2, "keep": 2})
    env = {"OMP_NUM_THREADS": "1", **{"ddp": {}, "fsdp2": FSDP2, "zero3": ZERO3}[strategy]}

    def start(run, *words):
        return start_ranks(2, recipe, f"output={run}", *words, env=env)

    def weights(run, *words):
        results = [rank.wait() for rank in start(run, *words)]
        assert {rank.returncode for rank in results} == {0}, [rank.stderr for rank in results]
        return (run / "model/model.safetensors").read_bytes()

    expected = weights(tmp_path / "whole")
    rng = random.Random(strategy)
    moments = {training: 0.4, saving: 0.03}
    hits = 0
    for kill in range(KILLS_OF_RANKS):
        run, moment = tmp_path / f"run-{kill}", rng.choice([*moments])
        ranks = start(run)
        delay = rng.uniform(0.002, moments[moment])
        victims = rng.choice([ranks, ranks[:1], ranks[1:]])
        hits += killed(victims, lambda: moment(run), delay)  # noqa: B023  # called here
        for rank in ranks:
            rank.wait()  # the other one ends by itself
        assert weights(run, go_on(run)) == expected, (kill, moment.__name__, len(victims))
        assert not leftovers(run), kill
    assert hits >= KILLS_OF_RANKS // 2, hits
    print(f"{KILLS_OF_RANKS} kills of two ranks under {strategy}, {hits} while they ran: bit-equal")
