"""DPO: time of a step, work per epoch, and the reference pass, against TRL's trainer.

    .venv/bin/python tools/bench/dpo.py [--pairs 64] [--rounds 3] [--lora] [--threads 2]
        [--shape small] [--capacity 2048] [--only shared+kept,trl,...] [--json FILE]

A decoder learns one epoch of preferences: prompts and answers of lognormal lengths, a prompt about
as long as an answer, so that it is half of a sequence. It is a small one of the Llama kind, for a
CPU; on a GPU, --shape 0.6b or 8b have the shapes of gpu.py, in bfloat16. Weights are random. Every
run is a process of its own, contenders take turns in each round, all read the same model and the
same rows. The work is counted in places that go through a model, padding included: those of the
policy, those of the reference in each step, and those of a reference pass before the first.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import shared
from gpu_cases import LARGE, SMALL, Case, Shape, make_model, words_of

BATCH, MICRO = 8, 4
"""Pairs of a step, and of a padded micro-batch."""
RATE, BETA = 5e-5, 0.1
SHAPES = {
    "small": Shape("llama", 192, 768, 3, 3, 3, 64, 4096, True),
    "0.6b": SMALL,
    "8b": LARGE,
}
LORA = {"r": 16, "alpha": 32}


def main() -> None:
    """Make rows and a model, then let all contenders learn them."""
    parser = shared.command_line(__doc__ or "")
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--capacity", type=int, default=2048)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_trl(json.loads(options.one))))
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    with tempfile.TemporaryDirectory() as folder:
        work = Work(Path(folder), options)
        only = [name for name in options.only.split(",") if name]
        chosen = {name: run for name, run in work.contenders().items() if name in (only or [name])}
        found = shared.collect_rounds(options.rounds, chosen)
        rounds = [dict(zip(found, one, strict=True)) for one in zip(*found.values(), strict=True)]
    shared.write_report(
        {"lora": options.lora, "pairs": options.pairs, "rounds": rounds}, options.json
    )
    report(rounds)


def report(rounds: list[dict[str, Any]]) -> None:
    """Print a line for each contender, against TRL's best."""

    def middle(name: str, what: str) -> float:
        return statistics.median(one[name][what] for one in rounds)

    theirs = [name for name in rounds[0] if name.startswith("trl")]
    best = min(theirs, key=lambda name: middle(name, "step"), default="")
    most = max((middle(name, "places") for name in theirs), default=float("nan"))
    for name in rounds[0]:
        steps = [one[name]["step"] * 1e3 for one in rounds]
        relative = shared.compare_speed(steps, [one[best or name]["step"] * 1e3 for one in rounds])
        passes = [one[name]["pass"] for one in rounds]
        print(
            f"{name:>14}: {shared.spread(steps, ',.0f')} ms a step, "
            f"against TRL's best {relative}; "
            f"{middle(name, 'places'):,.0f} places, 1/{most / middle(name, 'places'):.2f} of TRL's"
            + (f"; pass {shared.spread(passes, '.2f')} s" if passes[0] else "")
            + f"; {shared.spread([one[name]['whole'] for one in rounds], '.1f')} s in all"
        )


class Work:
    """A folder with a model and rows, for runs of both kinds."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.environment = {"OMP_NUM_THREADS": str(options.threads)}
        self.environment["PLUGSFT_CACHE"] = str(folder / "cache")
        shape = SHAPES[options.shape]
        self.dtype = "float32" if options.shape == "small" else "bfloat16"
        case = Case(shape, options.lora, BATCH, MICRO, options.capacity, dtype=self.dtype)
        make_model({"case": asdict(case), "folder": str(folder)})
        self.source = write_pairs(folder / "pairs.jsonl", options.pairs, words_of(shape))

    def contenders(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return what is compared: ours with one plugin more each time, and TRL's."""
        packing = {"bfd_packing": {"capacity": self.options.capacity}, "fused_loss": {}}
        shared_prompt = {**packing, "dpo": {"share_prompt": True}}
        kept = {"dpo_reference": {}}
        return {
            "padded": lambda: self.ours(),
            "packed": lambda: self.ours(**packing),
            "shared": lambda: self.ours(**shared_prompt),
            "shared+kept": lambda: self.ours(**shared_prompt, **kept),
            # The second run of the same rows and weights.
            "found": lambda: self.ours(again=True, **shared_prompt, **kept),
            "trl": lambda: self.trl({}),
            "trl kept": lambda: self.trl({"precompute_ref_log_probs": True}),
        }

    def ours(self, again: bool = False, **plugins: dict) -> dict[str, Any]:
        """Train an epoch; return what is compared."""
        packed = "bfd_packing" in plugins
        if self.options.lora:
            plugins["lora"] = LORA
        if again:
            plugins["arrow_cache"] = {}
            shared.run(sys.executable, "-m", "plugsft", self.recipe(packed, plugins))
        recipe = self.recipe(packed, plugins)
        began = time.perf_counter()
        shared.run(sys.executable, "-m", "plugsft", recipe, **self.environment)
        whole = time.perf_counter() - began
        lines = [json.loads(one) for one in (self.folder / "run/metrics.jsonl").open()]
        facts = [json.loads(path.read_text()) for path in self.folder.rglob("tokens/*/facts.json")]
        seconds = [one["step_seconds"] for one in lines]
        places = sum(one["tokens"] / one["fill"] for one in lines)
        found = [one for one in facts if one.get("kind") == "reference"]
        tokens = sum(one["tokens"] for one in lines)
        shutil.rmtree(self.folder / "run")
        if not again:
            shutil.rmtree(self.folder / "cache", ignore_errors=True)
        computed = bool(found) and not again
        return {
            "step": statistics.median(seconds),
            "places": places + (tokens if computed else 0 if again else places),
            "pass": found[0]["seconds_per_pair"] * self.options.pairs if computed else 0.0,
            "whole": whole,
        }

    def recipe(self, packed: bool, plugins: dict[str, dict]) -> Path:
        """Write a recipe."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        train = {"batch_size": BATCH, "learning_rate": RATE, "log_every": 1_000_000}
        tables = {
            "output": str(self.folder / "run"),
            "model": {"path": str(self.folder / "model"), "dtype": self.dtype},
            "data": {"source": str(self.source), "max_length": 1024},
            "train": train | ({} if packed else {"micro_batch": MICRO}),
            "checkpoint": {"every": 0},
            "plugins": {"dpo": {"beta": BETA}} | plugins,
        }
        path = self.folder / "recipe.toml"
        path.write_text(shared.tomli_w.dumps(tables))
        return path

    def trl(self, settings: dict) -> dict[str, Any]:
        """Train an epoch with TRL."""
        given = {
            "folder": str(self.folder),
            "source": str(self.source),
            "settings": settings,
            "dtype": self.dtype,
            "lora": LORA if self.options.lora else None,
        }
        quiet = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
        began = time.perf_counter()
        made = shared.run_python(__file__, "--one", json.dumps(given), **self.environment | quiet)
        return made | {"whole": time.perf_counter() - began}


def write_pairs(path: Path, count: int, words: int) -> Path:
    """Write prompts with two answers each, all of about the same lengths."""
    dice = np.random.default_rng(0)
    with path.open("w") as file:
        for lengths in shared.draw_lengths(3 * count, np.log(110), 0.7, 8, 450).reshape(-1, 3):
            prompt, chosen, rejected = (
                [
                    {
                        "role": role,
                        "content": " ".join(f"w{one}" for one in dice.integers(0, words, n)),
                    }
                ]
                for role, n in zip(("user", "assistant", "assistant"), lengths, strict=True)
            )
            row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            file.write(json.dumps(row) + "\n")
    return path


def run_trl(given: dict) -> dict[str, Any]:
    """Train with TRL's trainer, as it likes best: nothing is logged or saved."""
    from datasets import disable_progress_bars, load_dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    disable_progress_bars()
    places, passes, seconds = [0], [0.0], list[float]()

    def count(_module: Any, _inputs: Any, kwargs: dict) -> None:
        places[0] += kwargs["input_ids"].numel()

    class Clock(TrainerCallback):
        """Times steps, and counts what goes through the models from the first on."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seconds.append(-time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds[-1] += time.perf_counter()

    compute = DPOTrainer.compute_ref_log_probs

    def counted(self: Any, model: Any, inputs: dict) -> Any:
        began = time.perf_counter()
        found = compute(self, model, inputs)
        passes[0] += time.perf_counter() - began
        places[0] += inputs["input_ids"].numel()
        return found

    DPOTrainer.compute_ref_log_probs = counted
    settings = DPOConfig(
        output_dir=f"{given['folder']}/trl",
        model_init_kwargs={"attn_implementation": "sdpa", "dtype": given["dtype"]},
        use_cpu=given["dtype"] == "float32",
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=BATCH // MICRO,
        num_train_epochs=1,
        learning_rate=RATE,
        beta=BETA,
        max_length=1024,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **given["settings"],
    )
    lora = given["lora"] and LoraConfig(
        task_type="CAUSAL_LM",
        r=given["lora"]["r"],
        lora_alpha=given["lora"]["alpha"],
        target_modules="all-linear",
    )
    rows = load_dataset("json", data_files=given["source"], split="train")
    trainer = DPOTrainer(
        f"{given['folder']}/model",
        args=settings,
        train_dataset=rows,
        peft_config=lora,
        callbacks=[Clock()],
    )
    for model in {id(one): one for one in (trainer.model, trainer.ref_model) if one}.values():
        model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.train()
    return {
        "step": statistics.median(seconds),
        "places": places[0],
        "pass": passes[0],
    }


if __name__ == "__main__":
    main()
