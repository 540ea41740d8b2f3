"""A checkpoint is written while training goes on; `saved` is heard once it is published."""

import json
import statistics
import time
from types import SimpleNamespace

import optimizers
import torch
from conftest import chats, only_full, run_ranks
from plugin_packages import activate, install
from test_resume import on_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from plugsft.base.atomic import damage
from plugsft.base.step_folders import step_folder
from plugsft.model.load import Load
from plugsft.output.checkpoint import Checkpoints
from plugsft.ranks.sharding import shard_model, train_state_of

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


def save_both_ways(name, accelerator, recipe, active):
    """Return the seconds that training stands still: for a whole save, and for one behind it."""
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=12,
        vocab_size=16000,
        tie_word_embeddings=True,
    )
    model, optimizer = shard_model(
        accelerator, Load(""), LlamaForCausalLM(config), optimizers.ALL["AdamW"]
    )
    state = train_state_of(accelerator, model, optimizer)
    tokens = SimpleNamespace(facts={"index": "tokens"})
    recipe = recipe.model_copy(
        update={"checkpoint": recipe.checkpoint.model_copy(update={"keep": 1})}
    )
    checkpoints = Checkpoints(recipe, active, tokens, accelerator, state, 100)
    ids = torch.arange(64).view(1, 64)
    waits, stalls, step = [], [], 0

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
    for _ in range(3):
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
    size = sum(weight.nbytes for weight in model.parameters())
    return size, waits, stalls


@only_full
def test_training_stands_still_for_a_tenth_of_a_save(tmp_path):
    [answers] = on_ranks(1, {}, tmp_path, [("both", save_both_ways)])
    assert isinstance(answers["both"], tuple), answers["both"]
    size, waits, stalls = answers["both"]
    assert size >= 200e6
    wait, stall = statistics.median(waits), statistics.median(stalls)
    print(f"\nweights of {size / 1e6:.0f} MB: a save that training waits for takes {wait:.2f} s")
    print(f"a save in the background stops it for {stall:.3f} s ({stall / wait:.1%})")
    assert stall <= 0.1 * wait
