"""SIGKILL at any moment: the rerun ends with the weights of an undisturbed run."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import chats, run_plugsft, start_plugsft

KILLS = 30 if os.environ.get("PLUGSFT_FULL") else 3
TRAIN = {"batch_size": 8, "micro_batch": 4, "steps": 30, "learning_rate": 1e-3, "log_every": 30}


def preparing(run: Path) -> bool:
    """Tell whether somebody builds tokens, a tokenizer or a model right now."""
    return any(run.glob("tokens/.*.claim-*")) or any(run.glob("scratch/.*.claim-*"))


def saving(run: Path) -> bool:
    return any(run.glob("checkpoints/.step-*.tmp")) or any(run.glob(".model.*.tmp"))


def training(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


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
        while not moment(run) and running.process.is_alive():
            time.sleep(0.0005)
        time.sleep(rng.uniform(0.002, moments[moment]))
        hits[moment] += running.process.is_alive()
        with suppress(ProcessLookupError):  # it has ended
            os.kill(running.pid, signal.SIGKILL)
        running.wait()
        go_on = ["--resume" if list(run.glob("checkpoints/step-*")) else "--overwrite"]
        result = run_plugsft(recipe, f"output={run}", *go_on)
        assert result.returncode == 0, (kill, result.stderr)
        assert (run / "model/model.safetensors").read_bytes() == expected, (kill, moment.__name__)
        left = [path.name for path in run.rglob(".*") if path.name.endswith((".tmp", "claim"))]
        assert not left, (kill, left)
    # A run may have ended just before its kill; not at every moment, though.
    assert sum(map(bool, hits.values())) >= min(3, KILLS // 3 + 1), hits
    print(f"{KILLS} kills, all reruns bit-equal: { ({m.__name__: n for m, n in hits.items()}) }")
