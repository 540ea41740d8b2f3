"""Training on a CPU: packed against padded and against TRL's packing, and batches built ahead.

    .venv/bin/python tools/bench/feeding.py [--only packing,async] [--rows 2000] [--rounds 3]
        [--threads 2] [--capacity 2048] [--busy] [--json FILE]

A small decoder of the Llama kind learns one epoch of chats of lognormal lengths (median about
120 tokens, 8 to 1,024). Every run is a process of its own, contenders take turns in each round, and
all read the same model and the same tokens. What is compared is the training loop alone: tokens
of the epoch, none of them padding, over its seconds.

For async, a plugin slows collating down, to a part of what a step computes: it sleeps, or with
--busy keeps a core busy, so training has one less. Steps of both runs have the same
global batches, and are compared each with its like.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import shared

SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
OVERHEAD = 14
"""Tokens that the template adds to a chat."""
BATCH, MICRO = 32, 8
MODEL = {"hidden": 256, "layers": 4, "heads": 4, "vocab": 8192, "context": 1024}
SLOW = '''
"""Collate slowly."""

import hashlib
import time

import torch

from plugsft import hookimpl, plugin

BLOCK = bytes(1 << 17)


@plugin()
class Slow:
    """Collate slowly."""

    seconds: float
    """Of each token."""
    busy: bool
    """Whether another process keeps a core busy, so training has one less."""

    @hookimpl(wrapper=True)
    def annotate(self):
        torch.set_num_threads(max(1, torch.get_num_threads() - self.busy))
        return (yield)

    @hookimpl(wrapper=True)
    def collate(self, tokens, examples):
        batch = yield
        end = time.perf_counter() + self.seconds * int(tokens.lengths[examples].sum())
        while (left := end - time.perf_counter()) > 0:
            # Neither of them keeps the interpreter from others.
            hashlib.sha256(BLOCK) if self.busy else time.sleep(left)
        return batch
'''


def main() -> None:
    """Prepare once, then measure what is asked for."""
    parser = shared.command_line(__doc__)
    parser.add_argument("--only", default="packing,async")
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--capacity", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.6, help="of a step, to collate")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_trl(json.loads(options.one))))
        return
    # All processes take it over, and have as many threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Work(Path(folder), options)
        print(
            f"{options.rows:,} chats, {work.lengths.sum():,} tokens, "
            f"{np.median(work.lengths):.0f} in the middle, {work.lengths.max():,} at most"
        )
        for name in options.only.split(","):
            report[name] = {"packing": packing, "async": ahead}[name](work, options)
    shared.write_report(report, options.json)


class Work:
    """A folder with a model and prepared tokens, for runs of both kinds."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        self.environment = {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": path}
        install(folder)
        source = write_chats(folder / "chats.jsonl", options.rows)
        shared.train_tokenizer(folder, source, MODEL["vocab"])
        save_model(folder)
        recipe = self.recipe("prepared", data={"source": str(source), "max_length": 1024})
        shared.run(sys.executable, "-m", "plugsft", "prepare", recipe)
        (self.tokens,) = (folder / "prepared/tokens").iterdir()
        self.lengths = shared.Tokens(self.tokens).lengths

    def recipe(self, name: str, **changes: dict) -> Path:
        """Write a recipe."""
        model = {"path": str(self.folder / "model")}
        train = {"batch_size": BATCH, "learning_rate": 1e-4, "log_every": 1_000_000}
        tables = {
            "output": str(self.folder / name),
            "model": model,
            "train": train | changes.pop("train", {}),
            "checkpoint": {"every": 0},
        }
        path = self.folder / f"{name}.toml"
        path.write_text(shared.tomli_w.dumps(tables | changes))
        return path

    def train(self, train: dict | None = None, **plugins: dict) -> dict:
        """Run an epoch; return run.json, with all steps."""
        recipe = self.recipe(
            "run",
            data={"tokens": str(self.tokens), "max_length": 1024},
            train=train or {},
            plugins=plugins,
        )
        shared.run(sys.executable, "-m", "plugsft", recipe, **self.environment)
        run = json.loads((self.folder / "run/run.json").read_text())
        lines = (self.folder / "run/metrics.jsonl").read_text().splitlines()
        shutil.rmtree(self.folder / "run")
        return run | {"lines": [json.loads(line) for line in lines]}

    def trl(self, settings: dict) -> dict:
        """Train an epoch with TRL."""
        given = {"folder": str(self.folder), "tokens": str(self.tokens), "settings": settings}
        quiet = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
        return shared.run_python(__file__, "--one", json.dumps(given), **self.environment | quiet)


def install(folder: Path) -> None:
    """Write the plugin that collates slowly, as a distribution on the path."""
    (folder / "bench_slow.py").write_text(SLOW)
    info = folder / "bench_slow-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bench_slow\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[plugsft]\nslow = bench_slow\n")


def write_chats(path: Path, rows: int) -> Path:
    """Write chats of one question and an answer that is about twice as long."""
    dice = np.random.default_rng(0)
    words = sorted({"".join(dice.choice(SYLLABLES, 1 + n % 3)) for n in range(7_000)})
    dice.shuffle(words)
    common = 1 / np.arange(10, 10 + len(words))
    lengths = shared.draw_lengths(rows, np.log(120), 0.9, 8, 1024)
    with path.open("w") as file:
        for length in np.maximum(lengths - OVERHEAD, 3).tolist():
            said = dice.choice(words, length, p=common / common.sum())
            parts = {"user": said[: length // 3], "assistant": said[length // 3 :]}
            turns = [{"role": role, "content": " ".join(part)} for role, part in parts.items()]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def save_model(folder: Path) -> None:
    """Save the model that all runs start from, with its tokenizer."""
    from transformers import AutoTokenizer

    from plugsft.model.load import make_scratch_model
    from plugsft.ranks.launch import silence_libraries
    from plugsft.recipe.tables import Scratch

    silence_libraries()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.save_pretrained(folder / "model")
    make_scratch_model(Scratch(**MODEL), tokenizer, seed=0).save_pretrained(folder / "model")


def packing(work: Work, options: argparse.Namespace) -> dict:
    """Train padded and packed, with plugsft and with TRL."""
    per_step = BATCH * work.lengths.mean()

    def trl_packed(capacity: int) -> dict:
        # About as many tokens to a step.
        steps = max(1, round(per_step / capacity))
        return {
            "packing": True,
            "max_length": capacity,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": steps,
        }

    trl_padded = {
        "max_length": 1024,
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": BATCH // MICRO,
    }
    trl_free = trl_padded | {"padding_free": True, "max_length": None}
    contenders = {
        "padded": lambda: ours(work, train={"micro_batch": MICRO}),
        "packed": lambda: ours(work, bfd_packing={"capacity": options.capacity}),
        "trl packed": lambda: work.trl(trl_packed(options.capacity)),
        "trl packed 1024": lambda: work.trl(trl_packed(1024)),
        "trl padding free": lambda: work.trl(trl_free),
        "trl padded": lambda: work.trl(trl_padded),
    }
    made = shared.collect_rounds(options.rounds, contenders)
    for name, runs in made.items():
        assert all(run["tokens"] == work.lengths.sum() for run in runs), f"{name}: other tokens"
    speeds = {name: [run["speed"] for run in runs] for name, runs in made.items()}
    costs = {name: [1 / speed for speed in some] for name, some in speeds.items()}
    notes = {name: runs[0]["notes"] for name, runs in made.items()}
    best = min((name for name in made if name.startswith("trl p")), key=lambda n: sum(costs[n]))
    for name, speed in speeds.items():
        print(
            f"{name:>17}: {shared.spread(speed, ',.0f')} tokens/s, against TRL's fastest "
            f"{shared.compare_speed(costs[name], costs[best])}; {notes[name]}"
        )
    print(f"packed against padded: {shared.compare_speed(costs['packed'], costs['padded'])}")
    return {"speeds": speeds, "notes": notes}


def ours(work: Work, **changes: dict) -> dict:
    """Train an epoch, and return what is compared."""
    run = work.train(**changes)
    return {
        "speed": run["throughput"]["tokens_per_second"],
        "tokens": sum(line["tokens"] for line in run["lines"]),
        "notes": f"{len(run['lines'])} steps, {run['feeding']['fill']:.1%} full",
    }


def run_trl(given: dict) -> dict:
    """Train with TRL's trainer, as it likes best: nothing is logged, saved or computed twice."""
    from datasets import Dataset, disable_progress_bars
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Clock(TrainerCallback):
        """Times the loop."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.seconds = -time.perf_counter()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.seconds += time.perf_counter()

    disable_progress_bars()
    clock = Clock()
    settings = SFTConfig(
        output_dir=f"{given['folder']}/trl",
        model_init_kwargs={"attn_implementation": "sdpa", "dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        num_train_epochs=1,
        learning_rate=1e-4,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **given["settings"],
    )
    trainer = SFTTrainer(
        f"{given['folder']}/model",
        settings,
        train_dataset=Dataset(shared.trl_table(shared.Tokens(Path(given["tokens"])))),
        callbacks=[clock],
    )
    trainer.train()
    tokens = sum(map(len, trainer.train_dataset["input_ids"]))
    notes = f"{trainer.state.global_step} steps"
    if trainer.padding_free:
        notes += f"; neighbours' logits move by {leak(trainer):.0e} of a changed document's own"
    return {"speed": tokens / clock.seconds, "tokens": tokens, "notes": notes}


def leak(trainer: Any) -> float:
    """Change the first document of a row as TRL collates it, and see what moves in others."""
    import torch

    rows = trainer.train_dataset
    count = 1 if "seq_lengths" in rows.column_names else 4
    packed = (rows[n] for n in range(len(rows)) if len(rows[n].get("seq_lengths", "..")) > 1)
    batch = trainer.data_collator([next(packed) for _ in range(count)])
    del batch["labels"]
    first, size = int(batch["cu_seq_lens_q"][1]), trainer.model.config.vocab_size
    # As its own compute_loss calls the model.
    with torch.no_grad():
        before = trainer.model(**batch, use_cache=False).logits[0]
        batch["input_ids"][0, :first] = (batch["input_ids"][0, :first] + 1) % size
        moved = (trainer.model(**batch, use_cache=False).logits[0] - before).abs()
    return float(moved[first:].max() / moved[:first].max())


def ahead(work: Work, options: argparse.Namespace) -> dict:
    """Train with batches built serially and ahead, with slow and with fast collating."""
    # Every run has the plugin, which may take a core; fast collating adds no time.
    cheap = {
        "bfd_packing": {"capacity": options.capacity},
        "slow": {"seconds": 0.0, "busy": options.busy},
    }
    steps = work.train(**cheap)["lines"][1:]
    computed = sum(step["step_seconds"] - step["wait_seconds"] for step in steps)
    a_token = options.share * computed / sum(step["tokens"] for step in steps)
    dear = cheap | {"slow": {"seconds": a_token, "busy": options.busy}}
    kinds = {
        "dear": dear,
        "dear ahead": dear | {"async_collate": {}},
        "cheap": cheap,
        "cheap ahead": cheap | {"async_collate": {}},
    }

    def lines(plugins: dict[str, dict]) -> list[dict]:
        return work.train(**plugins)["lines"]

    runs = shared.collect_rounds(
        options.rounds, {name: partial(lines, one) for name, one in kinds.items()}
    )
    whole = {name: [*map(seconds, some)] for name, some in runs.items()}
    # Before the first step there is nothing to build behind.
    waits = [share_waited(lines[1:]) for lines in runs["dear ahead"]]
    faster = shared.times_as_fast(whole["dear ahead"], whole["dear"])
    print(
        f"collating takes {share_waited(by_step(runs['dear'])):.1%} of the time serially; ahead, "
        f"{shared.spread(waits, '.2%')} after the first step, and the run is "
        f"{faster.phrase}"
    )
    extra = shared.times_as_fast(whole["cheap ahead"], whole["cheap"])
    middle = seconds(by_step(runs["cheap ahead"])) / seconds(by_step(runs["cheap"])) - 1
    print(
        f"where it takes {share_waited(by_step(runs['cheap'])):.2%} of the time, a thread next to "
        f"costs {middle:.2%} (each step's median of {options.rounds} rounds; round by round "
        f"{extra.phrase})"
    )
    words = {"faster": faster.rounds, "extra": extra.rounds}
    return {**words, "waits": waits, "middle": middle, "runs": runs}


def seconds(lines: list[dict]) -> float:
    """Return how long all steps took."""
    return sum(line["step_seconds"] for line in lines)


def share_waited(lines: list[dict]) -> float:
    """Return which share of the seconds the loop waited for its batches."""
    return sum(line["wait_seconds"] for line in lines) / seconds(lines)


def by_step(runs: list[list[dict]]) -> list[dict]:
    """Return each step's medians over the runs."""
    names = ("step_seconds", "wait_seconds")
    return [
        {name: statistics.median(line[name] for line in lines) for name in names}
        for lines in zip(*runs, strict=True)
    ]


if __name__ == "__main__":
    main()
