"""DPO against TRL's trainer: time per step, computed positions, and the reference pass.

    .venv/bin/python tools/bench/dpo.py [--pairs 64] [--rounds 3] [--lora] [--threads N]
        [--shape small] [--capacity 2048] [--only shared+reference,trl,...] [--seconds 3600]
        [--work FOLDER] [--json FILE]

A decoder trains one epoch on preferences: prompts and answers have lognormal lengths, so a prompt
is about half of a sequence. The default is a small Llama model, for a CPU; --shape 0.6b and 8b are
the shapes of gpu.py, in bfloat16, for a GPU. Weights are random. Each run is a separate process,
contenders take turns in each round, and all read the same model and rows. The work is the number
of positions that a model computes, padding included: the policy's, the reference's in each step,
and those of a reference pass before the first step. --json is written after each round, and
--seconds ends a run that takes longer. With --work, model and rows stay for the next call.
"""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import shared
import tomli_w
from gpu_cases import LARGE, SMALL, Case, Shape, count_words

from plugsft.lab import timing

BATCH, MICRO = 8, 4
"""Pairs per step, and per padded micro-batch."""
RATE, BETA = 5e-5, 0.1
SHAPES = {
    "tiny": Shape("llama", 32, 64, 2, 2, 2, 16, 1000, True),
    "small": Shape("llama", 192, 768, 3, 3, 3, 64, 4096, True),
    "0.6b": SMALL,
    "8b": LARGE,
}
BATCHES = {"0.6b": (32, 8), "8b": (16, 4)}
"""The same, of the shapes for a GPU."""
LORA = {"r": 16, "alpha": 32}


def main() -> None:
    """Write rows and a model, then run the contenders."""
    parser = shared.command_line(__doc__ or "")
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit of all rounds")
    parser.add_argument("--work", type=Path, help="folder for model and rows")
    parser.add_argument("--capacity", type=int, default=2048)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_trl(json.loads(options.child))))
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("time is up"))
    signal.alarm(math.ceil(options.seconds))
    rounds: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contenders = Work(folder, options).contenders()
        names = options.only.split(",") if options.only else [*contenders]
        chosen = {name: contenders[name] for name in names}
        for figures in timing.in_rounds(options.rounds, chosen):
            rounds.append(figures)
            facts = {"lora": options.lora, "pairs": options.pairs}
            shared.write_report(facts | {"rounds": rounds}, options.json)
    report(rounds)


def report(rounds: list[dict[str, Any]]) -> None:
    """Print one line for each contender, compared with TRL's best."""

    def median(name: str, field: str) -> float:
        return float(statistics.median(figures[name][field] for figures in rounds))

    trl_names = [name for name in rounds[0] if name.startswith("trl")]
    best = min(trl_names, key=lambda name: median(name, "step"), default="")
    trl_positions = max((median(name, "positions") for name in trl_names), default=float("nan"))
    for name in rounds[0]:
        steps = [figures[name]["step"] * 1e3 for figures in rounds]
        relative = shared.compare_speed(
            steps, [figures[best or name]["step"] * 1e3 for figures in rounds]
        )
        passes = [figures[name]["pass"] for figures in rounds]
        print(
            f"{name:>16}: {shared.spread(steps, ',.0f')} ms a step, "
            f"against TRL's best {relative}; "
            f"{median(name, 'positions'):,.0f} positions, "
            f"1/{trl_positions / median(name, 'positions'):.2f} of TRL's"
            + (f"; pass {shared.spread(passes, '.2f')} s" if passes[0] else "")
            + f"; {shared.spread([figures[name]['whole'] for figures in rounds], '.1f')} s in all"
        )


class Work:
    """A folder with a model and rows, for plugsft's runs and TRL's."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.batch, self.micro = BATCHES.get(options.shape, (BATCH, MICRO))
        self.environment = {"OMP_NUM_THREADS": str(options.threads)}
        self.environment["PLUGSFT_CACHE"] = str(folder / "cache")
        shape = SHAPES[options.shape]
        self.dtype = "float32" if options.shape in ("tiny", "small") else "bfloat16"
        self.source = folder / f"pairs-{options.pairs}.jsonl"
        case = Case(shape, options.lora, self.batch, self.micro, steps=0, dtype=self.dtype)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # half-made
            arguments = json.dumps({"case": asdict(case), "folder": str(folder)})
            # In its own process, which frees the memory of the GPU.
            shared.run(sys.executable, Path(__file__).with_name("gpu.py"), "--model", arguments)
            (folder / "done").touch()
        if not self.source.exists():
            write_pairs(self.source, options.pairs, count_words(shape))

    def contenders(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return the contenders: plugsft with more and more plugins, and TRL."""
        packing: dict[str, Any] = {
            "bfd_packing": {"capacity": self.options.capacity},
            "fused_loss": {},
        }
        shared_prompt: dict[str, Any] = {**packing, "dpo": {"share_prompt": True}}
        reference: dict[str, Any] = {"dpo_reference": {}}
        return {
            "padded": lambda: self.run_plugsft(),
            "packed": lambda: self.run_plugsft(**packing),
            "shared": lambda: self.run_plugsft(**shared_prompt),
            "shared+reference": lambda: self.run_plugsft(**shared_prompt, **reference),
            # A second run with the same rows and weights, which finds the reference in the cache.
            "shared+cached": lambda: self.run_plugsft(
                second_run=True, **shared_prompt, **reference
            ),
            "trl": lambda: self.run_trl({}),
            "trl precomputed": lambda: self.run_trl({"precompute_ref_log_probs": True}),
        }

    def run_plugsft(self, second_run: bool = False, **plugins: dict[str, Any]) -> dict[str, Any]:
        """Train one epoch; return its figures."""
        packed = "bfd_packing" in plugins
        if self.options.lora:
            plugins["lora"] = LORA
        if second_run:
            plugins["arrow_cache"] = {}
            shared.run(sys.executable, "-m", "plugsft", self.recipe(packed, plugins))
        recipe = self.recipe(packed, plugins)
        start = time.perf_counter()
        shared.run(sys.executable, "-m", "plugsft", recipe, **self.environment)
        run_seconds = time.perf_counter() - start
        lines = [json.loads(line) for line in (self.folder / "run/metrics.jsonl").open()]
        facts = [json.loads(path.read_text()) for path in self.folder.rglob("tokens/*/facts.json")]
        seconds = [line["step_seconds"] for line in lines]
        positions = sum(line["tokens"] / (1 - line["padding"]) for line in lines)
        references = [entry for entry in facts if entry.get("kind") == "reference"]
        tokens = sum(line["tokens"] for line in lines)
        shutil.rmtree(self.folder / "run")
        if not second_run:
            shutil.rmtree(self.folder / "cache", ignore_errors=True)
        computed = bool(references) and not second_run
        return {
            "step": statistics.median(seconds),
            "positions": positions + (tokens if computed else 0 if second_run else positions),
            "pass": references[0]["seconds_per_pair"] * self.options.pairs if computed else 0.0,
            "whole": run_seconds,
        }

    def recipe(self, packed: bool, plugins: dict[str, dict[str, Any]]) -> Path:
        """Write a recipe."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        train = {"batch_size": self.batch, "learning_rate": RATE, "log_every": 1_000_000}
        tables = {
            "output": str(self.folder / "run"),
            "model": {"path": str(self.folder / "model"), "dtype": self.dtype},
            "data": {"source": str(self.source), "max_length": 1024},
            "train": train | ({} if packed else {"micro_batch": self.micro}),
            "checkpoint": {"every": 0},
            "plugins": {"dpo": {"beta": BETA}} | plugins,
        }
        path = self.folder / "recipe.toml"
        path.write_text(tomli_w.dumps(tables))
        return path

    def run_trl(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Train an epoch with TRL."""
        arguments = {
            "folder": str(self.folder),
            "source": str(self.source),
            "settings": settings,
            "dtype": self.dtype,
            "lora": LORA if self.options.lora else None,
            "batch": (self.batch, self.micro),
        }
        quiet = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
        start = time.perf_counter()
        result: dict[str, Any] = shared.run_python(
            __file__, "--child", json.dumps(arguments), **self.environment | quiet
        )
        return result | {"whole": time.perf_counter() - start}


def write_pairs(path: Path, count: int, words: int) -> Path:
    """Write prompts with two answers each; all have the same length distribution."""
    dice, temporary = np.random.default_rng(0), path.with_suffix(".tmp")
    with temporary.open("w") as file:
        for lengths in shared.draw_lengths(3 * count, np.log(110), 0.7, 8, 450).reshape(-1, 3):
            prompt, chosen, rejected = (
                [
                    {
                        "role": role,
                        "content": " ".join(f"w{number}" for number in dice.integers(0, words, n)),
                    }
                ]
                for role, n in zip(("user", "assistant", "assistant"), lengths, strict=True)
            )
            row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            file.write(json.dumps(row) + "\n")
    return temporary.replace(path)


def run_trl(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train with TRL's trainer, without logging or saving."""
    import torch
    from datasets import disable_progress_bars, load_dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    disable_progress_bars()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan for each new length
    batch, micro = arguments["batch"]
    positions, passes, seconds = [0], [0.0], list[float]()

    def count_inputs(_module: Any, _inputs: Any, kwargs: dict[str, Any]) -> None:
        positions[0] += kwargs["input_ids"].numel()

    class Clock(TrainerCallback):
        """Times the steps."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seconds.append(-time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds[-1] += time.perf_counter()

    compute = DPOTrainer.compute_ref_log_probs

    def count_reference(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        start = time.perf_counter()
        log_probs = compute(self, model, inputs)  # type: ignore[no-untyped-call]  # untyped upstream
        passes[0] += time.perf_counter() - start
        positions[0] += inputs["input_ids"].numel()
        return log_probs

    DPOTrainer.compute_ref_log_probs = count_reference  # type: ignore[method-assign]
    settings = DPOConfig(
        output_dir=f"{arguments['folder']}/trl",
        model_init_kwargs={"attn_implementation": "sdpa", "dtype": arguments["dtype"]},
        use_cpu=arguments["dtype"] == "float32",
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        num_train_epochs=1,
        learning_rate=RATE,
        beta=BETA,
        max_length=1024,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **arguments["settings"],
    )
    lora = arguments["lora"] and LoraConfig(
        task_type="CAUSAL_LM",
        r=arguments["lora"]["r"],
        lora_alpha=arguments["lora"]["alpha"],
        target_modules="all-linear",
    )
    rows = load_dataset("json", data_files=arguments["source"], split="train")
    trainer = DPOTrainer(
        f"{arguments['folder']}/model",
        args=settings,
        train_dataset=rows,
        peft_config=lora,
        callbacks=[Clock()],
    )
    for model in {
        id(model): model for model in (trainer.model, trainer.ref_model) if model
    }.values():
        model.register_forward_pre_hook(count_inputs, with_kwargs=True)
    trainer.train()
    return {
        "step": statistics.median(seconds),
        "positions": positions[0],
        "pass": passes[0],
    }


if __name__ == "__main__":
    main()
