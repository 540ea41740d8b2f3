"""A checkpoint is written while training goes on; `saved` is heard once it is published."""

import json
import os
import signal
import time

import optimizers
import torch
from conftest import chats, only_full, read_metrics, run_plugsft, run_ranks, start_plugsft
from launching import FSDP2
from plugin_packages import activate, install
from saved_runs import on_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from plugsft.base.atomic import damage, step_folder
from plugsft.checkpoint.contents import Contents
from plugsft.checkpoint.save import Checkpoints
from plugsft.checkpoint.state import TrainState
from plugsft.model.load import ModelLoad
from plugsft.ranks.loss_scale import LossScale
from plugsft.ranks.sharding import shard_model, weights_of

COPIES = 2.5
"""The most copies of the state that training may stand still for."""
HEARD = """
import json, threading
from plugsft import damage, hookimpl, plugin

@plugin()
class Heard:
    \"""Tell when each checkpoint is heard of, and by whom.\"""

    @hookimpl
    def saved(self, run, folder, kind, step):
        main = threading.current_thread() is threading.main_thread()
        line = [kind, step, run.step, damage(folder), main]
        with (run.output / f"heard-{run.ranks.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\\n")
"""


def test_all_ranks_hear_of_a_checkpoint_at_one_step_and_when_it_is_true(
    tiny, tmp_path, monkeypatch
):
    activate(install(tmp_path / "site", heard=HEARD), monkeypatch)
    recipe = tiny(
        rows=chats(40),
        train={"batch_size": 4, "micro_batch": 2, "steps": 9},
        checkpoint={"every": 3, "keep": 2},
        plugins={"heard": {}},
    )
    result = run_ranks(2, recipe)
    assert result.returncode == 0, result.stderr
    heard = [(tmp_path / f"run/heard-{rank}.jsonl").read_text() for rank in range(2)]
    assert heard[0] == heard[1]
    lines = [json.loads(line) for line in heard[0].splitlines()]
    assert [line[:2] for line in lines] == [
        *(["checkpoint", step] for step in (3, 6, 9)),
        ["model", 9],
    ]
    for _, step, now, wrong, main in lines:
        assert step <= now <= step + 3 and wrong is None and main
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step-000006", "step-000009"]


FULL_HOST = """
import time
from plugsft import hookimpl, plugin
from plugsft.checkpoint import save as checkpoint
from plugsft.checkpoint import files as shard_files

shard_files.available_memory = lambda: 1000
copied = []
copy = checkpoint.copy_to_host
checkpoint.copy_to_host = lambda *arguments: copied.append(1) or copy(*arguments)
# Training that went on would change the weights by then.
write = checkpoint.write_shards
checkpoint.write_shards = lambda *arguments: time.sleep(0.5) or write(*arguments)

@plugin()
class FullHost:
    \"""Rank 1's host has no memory for copies.\"""

    @hookimpl
    def ready(self, run):
        if run.ranks.rank == 0:
            shard_files.available_memory = lambda: 10**12

    @hookimpl
    def finished(self, run):
        (run.output / f"copied-{run.ranks.rank}").write_text(str(len(copied)))
"""


def test_a_host_without_room_for_copies_writes_at_once_on_all_ranks(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", full_host=FULL_HOST), monkeypatch)
    tables = {
        "train": {"batch_size": 4, "micro_batch": 2, "steps": 4},
        "checkpoint": {"every": 2, "keep": 2},
    }
    files, results = [], []
    for name, plugins in [("copied", {}), ("full", {"full_host": {}})]:
        run = tmp_path / name
        recipe = tiny(rows=chats(40), output=str(run), plugins=plugins, **tables)
        results.append(run_ranks(2, recipe, env=FSDP2))
        assert results[-1].returncode == 0, results[-1].stderr
        shards = sorted((run / "checkpoints").rglob("*.safetensors"))
        files.append({path.relative_to(run): path.read_bytes() for path in shards})
    assert files[0] == files[1] and len(files[0]) == 4
    warning = "the host has too little free memory for copies of a checkpoint"
    assert [result.stdout.count(warning) for result in results] == [0, 1]
    assert [(run / f"copied-{rank}").read_text() for rank in range(2)] == ["0", "0"]


SLOW = """
@plugin()
class Slow:
    \"""Write the tensors of a checkpoint slowly.\"""
    seconds: float

    @hookimpl
    def ready(self):
        import time
        from plugsft.checkpoint import files as shard_files
        save_file = shard_files.save_file
        shard_files.save_file = lambda *words: (time.sleep(self.seconds), save_file(*words))
"""


def test_a_kill_before_the_first_checkpoint_is_published_starts_again(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", slow=SLOW), monkeypatch)
    recipe = tiny(
        train={"batch_size": 4, "micro_batch": 4, "steps": 6},
        checkpoint={"every": 3},
        plugins={"slow": {"seconds": 60}},
    )
    words, run = (recipe, "--resume-auto"), tmp_path / "run"
    running = start_plugsft(*words)
    while not (run / "metrics.jsonl").exists() or len(read_metrics(run)) < 5:
        assert running.process.is_alive()
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert not [*run.glob("checkpoints/step-*")]
    done = run_plugsft(*words, "plugins.slow.seconds=0")
    assert done.returncode == 0 and "no checkpoint yet" in done.stdout, done.stderr
    assert [line["step"] for line in read_metrics(run)] == [*range(1, 7)]
    assert not [*run.glob("checkpoints/.*")]


def save_both_ways(name, accelerator, recipe, active):
    """Return the seconds of a save, those that one in the background takes, and of a copy."""
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=12,
        vocab_size=16000,
        tie_word_embeddings=True,
    )
    model, optimizer = shard_model(
        accelerator, ModelLoad(""), LlamaForCausalLM(config), optimizers.ALL["AdamW"]
    )
    weights = weights_of(accelerator, model, optimizer)
    state = TrainState(weights, optimizer, LossScale(accelerator))
    recipe = recipe.model_copy(
        update={"checkpoint": recipe.checkpoint.model_copy(update={"keep": 1})}
    )
    contents = Contents()
    contents.read_weights({})
    checkpoints = Checkpoints(recipe, active, accelerator, state, 100, 10, contents)
    ids = torch.arange(64).view(1, 64)
    waits, stalls, copied, step = [], [], [], 0

    def train():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def published():
        began = time.perf_counter()
        step = checkpoints.publish()
        return step, time.perf_counter() - began

    train()
    checkpoints.save(step := step + 1)  # allocates the copies
    moments = [value for held in optimizer.state.values() for value in held.values()]
    held = [*model.parameters(), *moments]
    copies = [tensor.detach().clone() for tensor in held]
    for _ in range(20):
        began = time.perf_counter()
        checkpoints.save(step := step + 1)
        waits.append(time.perf_counter() - began)
        began = time.perf_counter()
        checkpoints.begin(step := step + 1)
        stall = time.perf_counter() - began
        while True:
            train()
            done, seconds = published()
            stall += seconds
            if done:
                break
        stalls.append(stall)
        assert damage(step_folder(checkpoints.folder, step)) is None
        began = time.perf_counter()
        for copy, tensor in zip(copies, held, strict=True):
            copy.copy_(tensor.detach())
        copied.append(time.perf_counter() - began)
        if min(stalls) <= COPIES * min(copied):  # other work can only add to a stall
            break
    return sum(tensor.nbytes for tensor in held), waits, stalls, copied


@only_full
def test_training_stands_still_for_a_copy_of_its_state(tmp_path):
    [answers] = on_ranks(1, {}, tmp_path, [("both", save_both_ways)])
    assert isinstance(answers["both"], tuple), answers["both"]
    size, *measured = answers["both"]
    assert size >= 600e6
    wait, stall, copy = map(min, measured)
    print(f"\n{size / 1e6:.0f} MB: a save that training waits for takes {wait:.2f} s")
    print(f"one in the background stops it for {stall:.3f} s, a copy takes {copy:.3f} s")
    assert stall <= COPIES * copy
