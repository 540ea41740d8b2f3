"""The loop: laws of what is learned, resuming, stopping, evaluation, broken numbers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    ROOT,
    chats,
    only_full,
    read_metrics,
    run_plugsft,
    run_ranks,
    start_plugsft,
    start_ranks,
)
from safetensors.torch import load_file

from plugsft.ranks.connect import seed_step
from plugsft.ranks.stopping import Stopping

# 43 examples in global batches of 8: five whole ones and one of three, in every epoch.
LONG = {"epochs": 4, "batch_size": 8, "steps": 20, "learning_rate": 1e-3, "max_grad_norm": 0.5}


def curve(run: Path) -> list[float]:
    """Return losses and grad norms: clipping and AdamW hide a wrong scale, norms do not."""
    metrics = read_metrics(run)
    return [line[name] for name in ("loss", "grad_norm") for line in metrics]


def weights(run: Path) -> bytes:
    return (run / "model/model.safetensors").read_bytes()


def layout(recipe: Path, folder: Path, ranks: int, micro: int, env=None) -> list[float]:
    words = (recipe, f"output={folder}", f"train.micro_batch={micro}")
    done = run_ranks(ranks, *words, env=env) if ranks > 1 else run_plugsft(*words, env=env)
    assert done.returncode == 0, done.stderr
    return curve(folder)


def test_every_layout_of_a_global_batch_learns_the_same(tiny, tmp_path):
    recipe = tiny(rows=chats(43), train=LONG)
    reference = layout(recipe, tmp_path / "1x8", 1, 8)
    assert len(reference) == 40
    for ranks, micro in ((1, 4), (2, 4), (2, 2)):
        found = layout(recipe, tmp_path / f"{ranks}x{micro}", ranks, micro)
        assert found == pytest.approx(reference, rel=1e-5), (ranks, micro)


@only_full
def test_without_the_scaling_by_ranks_the_law_above_fails(tiny, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(ROOT / "plugsft", broken / "plugsft")
    shutil.copytree(ROOT / "plugins", broken / "plugsft/plugins")
    loop = broken / "plugsft/loop.py"
    whole = loop.read_text()
    assert "= run.accelerator.num_processes, run.loss_scale" in whole
    loop.write_text(whole.replace("= run.accelerator.num_processes, run", "= 1, run"))
    recipe = tiny(rows=chats(43), train=LONG | {"steps": 2})
    reference = layout(recipe, tmp_path / "1x8", 1, 8)
    env = {**os.environ, "PYTHONPATH": str(broken), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": "29731", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "plugsft", recipe, f"output={tmp_path / '2x4'}"]
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd="/")
        for rank in (0, 1)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert curve(tmp_path / "2x4") != pytest.approx(reference, rel=1e-2)


def test_each_rank_draws_other_random_numbers_at_each_step():
    def drawn(step, rank):
        seed_step(0, step, rank)
        return torch.rand(1).item()

    numbers = [drawn(step, rank) for step in range(1, 5) for rank in range(4)]
    assert len({*numbers}) == len(numbers)
    assert drawn(2, 1) == numbers[5], "whatever was drawn before"


def test_resumed_is_uninterrupted_bit_for_bit(tiny, tmp_path):
    recipe = tiny(rows=chats(43), train=LONG | {"steps": 9}, checkpoint={"every": 4})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_plugsft(recipe, f"output={whole}").returncode == 0
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints/step-000009")
    shutil.rmtree(parts / "model")
    result = run_plugsft(recipe, f"output={parts}", "--resume")
    assert result.returncode == 0, result.stderr
    assert "going on after step 8" in result.stdout
    assert weights(parts) == weights(whole)
    assert curve(parts) == curve(whole)
    means = [json.loads((run / "run.json").read_text())["batches"] for run in (whole, parts)]
    for name in ("padding", "examples_per_micro_batch", "imbalance"):
        assert means[0][name] == means[1][name], "the means are of all steps, not of the last"
    # Another number of ranks goes on from the same place.
    for name in ("checkpoints/step-000009", "checkpoints/step-000008", "model"):
        shutil.rmtree(parts / name)
    result = run_ranks(2, recipe, f"output={parts}", "--resume")
    assert result.returncode == 0, result.stderr
    assert "going on after step 4" in result.stdout
    assert curve(parts) == pytest.approx(curve(whole), rel=1e-5)


def test_the_time_left_after_a_resume_is_that_of_steps_since_it(tiny, tmp_path):
    recipe, run = tiny(train={"steps": 4}, checkpoint={"every": 2}), tmp_path / "run"
    assert run_plugsft(recipe).returncode == 0
    for name in ("checkpoints/step-000004", "model"):
        shutil.rmtree(run / name)
    lines = [line | {"step_seconds": 3600.0} for line in read_metrics(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    resumed = run_plugsft(recipe, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert re.search(r"step 3/4 .* left 0:00:\d\d$", resumed.stdout, re.MULTILINE), resumed.stdout


def test_the_resolved_recipe_runs_again_and_gives_the_same(tiny, tmp_path):
    recipe = tiny(train={"steps": 3})
    assert run_plugsft(recipe, "train.weight_decay=0.1").returncode == 0
    again = tmp_path / "again"
    result = run_plugsft(tmp_path / "run/recipe.toml", f"output={again}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert weights(again) == weights(tmp_path / "run")
    assert curve(again) == curve(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_rerun_ends_the_same(tiny, tmp_path, number):
    recipe = tiny(rows=chats(43), train=LONG | {"steps": 200, "log_every": 100})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_plugsft(recipe, f"output={whole}").returncode == 0
    running = start_plugsft(recipe, f"output={parts}")
    wait_for_lines(parts / "metrics.jsonl", 5)
    os.kill(running.pid, number)
    ended = running.wait()
    assert ended.returncode == 128 + number, ended.stderr
    assert f"stopped by {number.name}" in ended.stderr and "--resume" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert json.loads((parts / "run.json").read_text())["status"] == "stopped"
    result = run_plugsft(recipe, f"output={parts}", "--resume")
    assert result.returncode == 0, result.stderr
    assert weights(parts) == weights(whole) and curve(parts) == curve(whole)


def test_a_signal_that_comes_twice_at_once_is_one(tiny, tmp_path):
    """Ctrl-C reaches every process of a terminal, and the launcher passes it on as well."""
    running = start_plugsft(tiny(rows=chats(43), train=LONG | {"steps": 2000, "log_every": 1000}))
    wait_for_lines(tmp_path / "run/metrics.jsonl", 3)
    for _ in range(4):
        os.kill(running.pid, signal.SIGINT)
        time.sleep(0.005)
    ended = running.wait()
    assert ended.returncode == 130 and "saved" in ended.stderr, ended.stderr
    assert len(list((tmp_path / "run/checkpoints").glob("step-*"))) == 1


def test_a_signal_that_comes_again_as_the_run_ends_is_the_same_one():
    """Else the message that the run was saved could be lost."""
    before = {number: signal.getsignal(number) for number in Stopping.SIGNALS}
    try:
        with Stopping(str):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # would raise KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt), Stopping(str) as stopping:
            os.kill(os.getpid(), signal.SIGINT)
            stopping._caught_at -= Stopping.REPEATED
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_second_run_into_the_same_output_is_refused_while_the_first_runs(tiny, tmp_path):
    recipe = tiny(rows=chats(43), train=LONG | {"steps": 2000, "log_every": 1000})
    running = start_plugsft(recipe)
    wait_for_lines(tmp_path / "run/metrics.jsonl", 3)
    for words in ((), ("--overwrite",)):
        second = run_plugsft(recipe, *words)
        assert second.returncode == 2
        assert "another run is writing into" in second.stderr
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert run_plugsft(recipe, "train.steps=2", "--overwrite").returncode == 0


def test_a_signal_to_one_rank_stops_all_of_them(tiny, tmp_path):
    recipe = tiny(rows=chats(43), train=LONG | {"steps": 2000, "log_every": 1000})
    ranks = start_ranks(2, recipe)
    wait_for_lines(tmp_path / "run/metrics.jsonl", 5)
    os.kill(ranks[1].pid, signal.SIGHUP)
    ended = [rank.wait() for rank in ranks]
    assert [one.returncode for one in ended] == [129, 129], ended[0].stderr
    # One of them says so.
    assert "saved; resume with --resume" in ended[0].stderr and not ended[1].stderr
    assert list((tmp_path / "run/checkpoints").glob("step-*"))


def test_resume_says_what_is_wrong(tiny, tmp_path):
    recipe = tiny(train={"steps": 3})
    nothing = run_plugsft(recipe, "--resume")
    assert nothing.returncode == 2 and "there is no checkpoint" in nothing.stderr
    assert run_plugsft(recipe).returncode == 0
    again = run_plugsft(recipe)
    assert again.returncode == 2 and "--overwrite" in again.stderr
    other = run_plugsft(recipe, "train.learning_rate=0.5", "train.seed=7", "--resume")
    assert other.returncode == 2
    assert "train.learning_rate was 0.003 and is 0.5; train.seed was 0 and is 7" in other.stderr
    plugin = run_plugsft(recipe, "plugins.async_collate.depth=1", "--resume")
    assert plugin.returncode == 2, plugin.stdout
    assert "another recipe's finished run: plugins.async_collate.depth" in plugin.stderr
    state = tmp_path / "run/checkpoints/step-000003/rank-00000-000.safetensors"
    state.write_bytes(state.read_bytes()[:-7])
    given = run_plugsft(recipe, "--resume-from", state.parent)
    assert given.returncode == 2 and "rank-00000-000.safetensors" in given.stderr
    data = Path(tmp_path / "data.jsonl")
    data.write_text(data.read_text().replace("fox", "cat"))
    assert run_plugsft(recipe, "--overwrite").returncode == 0


def test_old_checkpoints_are_pruned_and_half_written_ones_swept(tiny, tmp_path):
    folder = tmp_path / "run/checkpoints"
    recipe = tiny(train={"steps": 6}, checkpoint={"every": 1, "keep": 2})
    assert run_plugsft(recipe).returncode == 0
    assert sorted(os.listdir(folder)) == ["step-000005", "step-000006"]
    names = sorted(os.listdir(folder / "step-000006"))
    assert names == ["manifest.json", "rank-00000-000.safetensors", "state.json"]


def test_broken_numbers_stop_the_run_before_they_reach_the_weights(tiny, tmp_path):
    recipe = tiny(
        rows=chats(43),
        train={"learning_rate": 1e9, "steps": 50, "max_grad_norm": 0.0},
        checkpoint={"every": 1},
    )
    result = run_plugsft(recipe)
    assert result.returncode == 1, result.stdout
    assert "gradient norm" in result.stderr and "data.jsonl rows " in result.stderr
    assert "Traceback" not in result.stderr
    step = int(result.stderr.split("error: step ")[1].split(":")[0])
    kept = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    assert kept[-1].name == f"step-{step - 1:06d}"
    assert all(
        t.isfinite().all() for t in load_file(kept[-1] / "rank-00000-000.safetensors").values()
    )
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "failed"


def test_evaluation_is_weighted_by_tokens_whatever_the_layout(tiny, tmp_path):
    recipe = tiny(rows=chats(43), train={"steps": 2}, eval={"every": 1, "split": "train[:11]"})
    found = []
    for ranks, micro in ((1, 11), (1, 2), (2, 3)):
        folder = tmp_path / f"{ranks}x{micro}"
        layout(recipe, folder, ranks, micro)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found.append([line["eval_loss"] for line in lines if "eval_loss" in line])
        assert len(found[-1]) == 2
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


def wait_for_lines(path: Path, count: int) -> None:
    """Wait until a run has written so many metrics."""
    for _ in range(4800):
        if path.is_file() and path.read_text().count("\n") >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} never had {count} lines")
