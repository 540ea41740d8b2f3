"""Training on a CPU: packing against padding and TRL's packing, and batches collated ahead.

    .venv/bin/python tools/bench/feeding.py [--only packing,async] [--rows 2000] [--rounds 3]
        [--threads 2] [--capacity 2048] [--busy] [--json FILE]

A small Llama decoder trains one epoch on chats with lognormal lengths (median about 120 tokens, 8
to 1,024). Each run is a separate process, contenders take turns in each round, and all read the
same model and tokens. The speed is that of the training loop alone: the epoch's tokens without
padding, divided by its seconds.

For async, a plugin slows collation down to a share of a step's computation. It sleeps, or with
--busy keeps a core busy, so training has one core less. Both runs have the same steps, which are
compared one to one.
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
    """Seconds per token."""
    busy: bool
    """Compute instead of sleeping, and leave training one thread less."""

    @hookimpl(wrapper=True)
    def add_columns(self):
        torch.set_num_threads(max(1, torch.get_num_threads() - self.busy))
        return (yield)

    @hookimpl(wrapper=True)
    def collate(self, tokens, examples):
        batch = yield
        end = time.perf_counter() + self.seconds * int(tokens.lengths[examples].sum())
        while (left := end - time.perf_counter()) > 0:
            # Both release the interpreter's lock.
            hashlib.sha256(BLOCK) if self.busy else time.sleep(left)
        return batch
'''


def main() -> None:
    """Prepare once, then run the benchmarks of --only."""
    parser = shared.command_line(__doc__)
    parser.add_argument("--only", default="packing,async")
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--capacity", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.6, help="collation's share of a step")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_trl(json.loads(options.child))))
        return
    # The child processes inherit this.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        workspace = Work(Path(folder), options)
        print(
            f"{options.rows:,} chats, {workspace.lengths.sum():,} tokens, "
            f"median {np.median(workspace.lengths):.0f}, longest {workspace.lengths.max():,}"
        )
        for name in options.only.split(","):
            report[name] = {"packing": compare_packing, "async": compare_loading_ahead}[name](
                workspace, options
            )
    shared.write_report(report, options.json)


class Work:
    """A folder with a model and prepared tokens, for plugsft's runs and TRL's."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        self.environment = {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": path}
        install_slow_plugin(folder)
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
        """Train one epoch; return run.json and the metrics of all steps."""
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
        arguments = {"folder": str(self.folder), "tokens": str(self.tokens), "settings": settings}
        quiet = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
        return shared.run_python(
            __file__, "--child", json.dumps(arguments), **self.environment | quiet
        )


def install_slow_plugin(folder: Path) -> None:
    """Write the plugin that collates slowly, as a package on the path."""
    (folder / "bench_slow.py").write_text(SLOW)
    info = folder / "bench_slow-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bench_slow\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[plugsft]\nslow = bench_slow\n")


def write_chats(path: Path, rows: int) -> Path:
    """Write chats of a question and an answer about twice as long."""
    dice = np.random.default_rng(0)
    words = sorted({"".join(dice.choice(SYLLABLES, 1 + n % 3)) for n in range(7_000)})
    dice.shuffle(words)
    common = 1 / np.arange(10, 10 + len(words))
    lengths = shared.draw_lengths(rows, np.log(120), 0.9, 8, 1024)
    with path.open("w") as file:
        for length in np.maximum(lengths - OVERHEAD, 3).tolist():
            chat_words = dice.choice(words, length, p=common / common.sum())
            parts = {"user": chat_words[: length // 3], "assistant": chat_words[length // 3 :]}
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


def compare_packing(work: Work, options: argparse.Namespace) -> dict:
    """Train with padding and with packing, in plugsft and in TRL."""
    per_step = BATCH * work.lengths.mean()

    def trl_packed(capacity: int) -> dict:
        # About the same number of tokens per step.
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
        "padded": lambda: run_plugsft(work, train={"micro_batch": MICRO}),
        "packed": lambda: run_plugsft(work, bfd_packing={"capacity": options.capacity}),
        "trl packed": lambda: work.trl(trl_packed(options.capacity)),
        "trl packed 1024": lambda: work.trl(trl_packed(1024)),
        "trl padding free": lambda: work.trl(trl_free),
        "trl padded": lambda: work.trl(trl_padded),
    }
    runs_by_name = shared.collect_rounds(options.rounds, contenders)
    for name, runs in runs_by_name.items():
        assert all(run["tokens"] == work.lengths.sum() for run in runs), f"{name}: other tokens"
    speeds = {name: [run["speed"] for run in runs] for name, runs in runs_by_name.items()}
    costs = {name: [1 / speed for speed in rates] for name, rates in speeds.items()}
    notes = {name: runs[0]["notes"] for name, runs in runs_by_name.items()}
    best = min(
        (name for name in runs_by_name if name.startswith("trl p")), key=lambda n: sum(costs[n])
    )
    for name, speed in speeds.items():
        print(
            f"{name:>17}: {shared.spread(speed, ',.0f')} tokens/s, against TRL's fastest "
            f"{shared.compare_speed(costs[name], costs[best])}; {notes[name]}"
        )
    print(f"packed against padded: {shared.compare_speed(costs['packed'], costs['padded'])}")
    return {"speeds": speeds, "notes": notes}


def run_plugsft(work: Work, **changes: dict) -> dict:
    """Train one epoch; return its speed."""
    run = work.train(**changes)
    return {
        "speed": run["throughput"]["tokens_per_second"],
        "tokens": sum(line["tokens"] for line in run["lines"]),
        "notes": f"{len(run['lines'])} steps, padding {run['batches']['padding']:.1%}",
    }


def run_trl(arguments: dict) -> dict:
    """Train with TRL's trainer: no logging, no saving, no gradient checkpointing."""
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
        output_dir=f"{arguments['folder']}/trl",
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
        **arguments["settings"],
    )
    trainer = SFTTrainer(
        f"{arguments['folder']}/model",
        settings,
        train_dataset=Dataset(shared.trl_table(shared.Tokens(Path(arguments["tokens"])))),
        callbacks=[clock],
    )
    trainer.train()
    tokens = sum(map(len, trainer.train_dataset["input_ids"]))
    notes = f"{trainer.state.global_step} steps"
    if trainer.padding_free:
        notes += (
            f"; neighbours' logits move by {measure_leak(trainer):.0e} of a changed document's own"
        )
    return {"speed": tokens / clock.seconds, "tokens": tokens, "notes": notes}


def measure_leak(trainer: Any) -> float:
    """Change a row's first document; return how far the other documents' logits move."""
    import torch

    rows = trainer.train_dataset
    count = 1 if "seq_lengths" in rows.column_names else 4
    packed = (rows[n] for n in range(len(rows)) if len(rows[n].get("seq_lengths", "..")) > 1)
    batch = trainer.data_collator([next(packed) for _ in range(count)])
    del batch["labels"]
    first, size = int(batch["cu_seq_lens_q"][1]), trainer.model.config.vocab_size
    # TRL's compute_loss calls the model with these arguments.
    with torch.no_grad():
        before = trainer.model(**batch, use_cache=False).logits[0]
        batch["input_ids"][0, :first] = (batch["input_ids"][0, :first] + 1) % size
        change = (trainer.model(**batch, use_cache=False).logits[0] - before).abs()
    return float(change[first:].max() / change[:first].max())


def compare_loading_ahead(work: Work, options: argparse.Namespace) -> dict:
    """Train with serial and with asynchronous collation, each slow and fast."""
    # All runs have the slow plugin, which may take a core; with 0 seconds it adds no time.
    fast = {
        "bfd_packing": {"capacity": options.capacity},
        "slow": {"seconds": 0.0, "busy": options.busy},
    }
    steps = work.train(**fast)["lines"][1:]
    computed = sum(step["step_seconds"] - step["data_wait_seconds"] for step in steps)
    seconds_per_token = options.share * computed / sum(step["tokens"] for step in steps)
    slow = fast | {"slow": {"seconds": seconds_per_token, "busy": options.busy}}
    contenders = {
        "slow": slow,
        "slow ahead": slow | {"async_collate": {}},
        "fast": fast,
        "fast ahead": fast | {"async_collate": {}},
    }

    def lines(plugins: dict[str, dict]) -> list[dict]:
        return work.train(**plugins)["lines"]

    runs = shared.collect_rounds(
        options.rounds, {name: partial(lines, plugins) for name, plugins in contenders.items()}
    )
    run_seconds = {name: [*map(total_seconds, run)] for name, run in runs.items()}
    # The first batch cannot be collated during a step.
    waits = [share_waited(lines[1:]) for lines in runs["slow ahead"]]
    faster = shared.times_as_fast(run_seconds["slow ahead"], run_seconds["slow"])
    print(
        f"slow collation: {share_waited(median_steps(runs['slow'])):.1%} of the time serially; "
        f"ahead, {shared.spread(waits, '.2%')} after the first step, and the run is "
        f"{faster} as fast, {faster.word}"
    )
    overhead = shared.times_as_fast(run_seconds["fast ahead"], run_seconds["fast"])
    extra_share = (
        total_seconds(median_steps(runs["fast ahead"])) / total_seconds(median_steps(runs["fast"]))
        - 1
    )
    print(
        f"fast collation: {share_waited(median_steps(runs['fast'])):.2%} of the time; the thread "
        f"costs {extra_share:.2%} (each step's median of {options.rounds} rounds; round by round "
        f"{overhead} as fast, {overhead.word})"
    )
    words = {"faster": faster.rounds, "extra": overhead.rounds}
    return {**words, "waits": waits, "middle": extra_share, "runs": runs}


def total_seconds(lines: list[dict]) -> float:
    """Return the seconds of all steps."""
    return sum(line["step_seconds"] for line in lines)


def share_waited(lines: list[dict]) -> float:
    """Return the share of the time that the loop waited for batches."""
    return sum(line["data_wait_seconds"] for line in lines) / total_seconds(lines)


def median_steps(runs: list[list[dict]]) -> list[dict]:
    """Return the median of each step over the runs."""
    names = ("step_seconds", "data_wait_seconds")
    return [
        {name: statistics.median(line[name] for line in lines) for name in names}
        for lines in zip(*runs, strict=True)
    ]


if __name__ == "__main__":
    main()
