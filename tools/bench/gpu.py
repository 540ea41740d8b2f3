"""Training on one GPU: kernels checked against float32, then plugin by plugin against TRL.

    .venv/bin/python tools/bench/gpu.py --case 0.6b-lora [--rounds 3] [--seconds 540] [--steps 6]
        [--capacity 4096] [--only NAME,...] [--work FOLDER] [--json FILE]
    .venv/bin/python tools/bench/gpu.py [--times]     (the checks alone; or times of kernels, too)
    .venv/bin/python tools/bench/gpu.py --case 0.6b-lora --shapes cpu       (tiny, to see it start)

Cases are 0.6b-lora, 1b-full, 8b-lora and 8b-full: the shapes of Qwen3 0.6B, Llama 3.2 1B and 3.1 8B
in bfloat16, with random weights; chats have lognormal lengths. Each run is a separate process. A
plugsft run is killed once enough steps are measured. The contenders take turns in each round:
trl-default has TRL's own settings except for length, batch and dtype; trl-best has packing, flash
attention and (for full fine-tuning) Liger's layers, where they are installed; plain has no plugin
except lora; each name that begins with "+" adds one plugin to the contender before it.

The speed counts tokens without padding, after the first steps. The median step's speed is printed
too, because a late compilation shows in a single step. MFU is relative to the GPU's 989 TFLOP/s:
see flops_per_token. After the first round, the losses of the first steps are compared. With --work,
the model and its tokens stay in that folder for the next call.

0.6b-dpo and 8b-dpo learn preferences with LoRA: the measurement of dpo.py, with those shapes.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import shared
from gpu_cases import (
    CASES,
    OVERHEAD,
    RATE,
    WARM,
    Case,
    count_words,
    flops_per_token,
    make_model,
    shrink,
)

PEAK = 989e12
"""FLOP/s of an H100 or H200 (SXM) in bfloat16, without sparsity."""
LADDER = (
    "bfd_packing",
    "async_collate",
    "flash_attention",
    "fused_loss",
    "liger",
    "compile",
    "gradient_checkpointing",
)
PREFERENCES = {"0.6b-dpo": "0.6b", "8b-dpo": "8b"}
"""Case -> the shape of dpo.py that it runs."""
PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "liger-kernel", "flash-attn")
PACKAGES += ("flash-attn-3", "cut-cross-entropy", "triton")


def main() -> None:
    """Run the checks, then the measurements."""
    parser = shared.command_line(__doc__)
    parser.add_argument("--case", choices=[*CASES, *PREFERENCES])
    parser.add_argument("--shapes", choices=("real", "cpu"), default="real")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=540.0, help="time limit of all rounds")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a run")
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--only", help="contenders: plain,+bfd_packing,...,trl-best")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--times", action="store_true", help="time each kernel")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, _, arguments = options.child.partition(":")
        print(json.dumps(CHILDREN[name](json.loads(arguments))))
        return
    # On SIGTERM, end the child processes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    end = time.monotonic() + options.seconds
    report: dict[str, Any] = {"machine": run_child("machine"), "case": options.case}
    report |= {"shapes": options.shapes, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items() if value))
    if not options.skip_checks:
        report["checks"] = run_child("checks")
        for check in report["checks"]:
            print(check["text"])
    failed = [check["text"] for check in report.get("checks", []) if check["failed"]]
    if options.times and not failed:
        report["times"] = run_child("times")
        print_times(report["times"])
    if options.case in PREFERENCES and not failed:
        report["rounds"] = measure_preferences(options)
    elif options.case and not failed:
        with ExitStack() as stack:
            folder = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            measure(Bench(folder, options, end), options, report)
            failed = report["failed"]
    shared.write_report(report, options.json)
    if failed:
        raise SystemExit("\n".join(["", "FAILED:", *failed]))


def measure_preferences(options: argparse.Namespace) -> list[dict]:
    """Run dpo.py; return the figures of each round."""
    shape = "small" if options.shapes == "cpu" else PREFERENCES[options.case]
    words = [Path(__file__).with_name("dpo.py"), "--lora", "--shape", shape]
    words += ["--rounds", options.rounds, "--pairs", 16 * options.steps]
    words += ["--only", options.only] if options.only else []
    with tempfile.TemporaryDirectory() as folder:
        report_path = Path(folder, "rounds.json")
        print(shared.run(sys.executable, *words, "--json", report_path, **QUIET))
        rounds: list[dict] = json.loads(report_path.read_text())["rounds"]
    return rounds


def run_child(name: str, arguments: object = None) -> Any:
    """Run a part in a fresh process, which frees its GPU memory when it ends."""
    return shared.run_python(__file__, "--child", f"{name}:{json.dumps(arguments or {})}", **QUIET)


QUIET = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}


def describe_machine(_: dict) -> dict[str, Any]:
    """Return the GPU, the host and the versions of packages."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "gpu": gpu,
        "gpu_gib": round(torch.cuda.mem_get_info()[1] / 2**30) if gpu else None,
        "host": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **versions,
    }


def check_kernels(_: dict) -> list[dict]:
    """Check all kernels."""
    from gpu_checks import run_checks

    return [asdict(check) | {"text": str(check), "failed": check.failed} for check in run_checks()]


def time_kernels(_: dict) -> list[dict]:
    """Time all kernels."""
    from gpu_times import time_all

    return [*time_all()]


def print_times(timings: list[dict]) -> None:
    """Print how long each kernel took."""
    for timing in timings:
        text = f"NOT MEASURED: {timing.get('reason')}"
        if "seconds" in timing:
            memory = timing["peak_gib"]
            text = f"{shared.spread([1e3 * seconds for seconds in timing['seconds']], '.2f')} ms, "
            text += "memory n/a" if memory is None else f"{memory:.2f} GiB"
        print(f"{timing['name']}, {timing['kernel']}: {text}")


class Bench:
    """A folder with a model and prepared tokens, and runs on them."""

    def __init__(self, folder: Path, options: argparse.Namespace, end: float) -> None:
        case = CASES[options.case]
        case = shrink(case) if options.shapes == "cpu" else case
        self.case = replace(case, capacity=options.capacity or case.capacity)
        if self.case.capacity < case.longest:
            raise SystemExit(f"--capacity: chats have up to {case.longest:,} tokens")
        self.cpu = options.shapes == "cpu"
        self.steps, self.end = WARM + options.steps, end
        self.folder = folder / f"{options.case}-{options.shapes}"
        self.refused: dict[str, str] = {}
        if not (self.folder / "done").exists():
            self.folder.mkdir(parents=True)
            run_child("model", {"case": asdict(self.case), "folder": str(self.folder)})
            self.prepare()
            (self.folder / "done").touch()
        (self.tokens,) = (self.folder / "prepared/tokens").iterdir()
        self.lengths = shared.Tokens(self.tokens).lengths

    def prepare(self) -> None:
        """Write chats, and prepare their tokens."""
        case = self.case
        count = case.batch * (self.steps + 4)
        lengths = shared.draw_lengths(count, np.log(case.median), 1.0, 12, case.longest)
        dice = np.random.default_rng(0)
        with (self.folder / "chats.jsonl").open("w") as file:
            for length in (lengths - OVERHEAD).tolist():
                words = [
                    f"w{number}" for number in dice.integers(0, count_words(case.shape), length)
                ]
                question, answer = words[: length // 3], words[length // 3 :]
                parts = {"user": question, "assistant": answer}
                turns = [
                    {"role": role, "content": " ".join(words)} for role, words in parts.items()
                ]
                file.write(json.dumps({"messages": turns}) + "\n")
        source = {"source": str(self.folder / "chats.jsonl")}
        shared.run(sys.executable, "-m", "plugsft", "prepare", self.recipe("prepared", {}, source))

    def recipe(self, name: str, plugins: dict, data: dict) -> Path:
        """Write a recipe."""
        case, train = self.case, {"batch_size": self.case.batch, "learning_rate": RATE}
        if "bfd_packing" not in plugins:
            train["micro_batch"] = case.micro
        tables = {
            "output": str(self.folder / name),
            "device": "cpu" if self.cpu else "auto",
            "model": {"path": str(self.folder / "model"), "dtype": case.dtype}
            # TRL stores and updates weights in this dtype; adapters are float32 in both.
            | ({} if case.lora else {"weights": case.dtype}),
            "data": data | {"max_length": case.longest},
            # The process is killed long before.
            "train": train | {"steps": 1_000_000, "log_every": 1},
            "checkpoint": {"every": 0},
            "plugins": plugins,
        }
        path = self.folder / f"{name}.toml"
        path.write_text(shared.tomli_w.dumps(tables))
        return path

    def run_plugsft(self, plugins: tuple[str, ...]) -> dict[str, Any]:
        """Train with these plugins until enough steps are measured; return the result."""
        tables: dict[str, dict] = {name: {} for name in plugins}
        if "bfd_packing" in tables:
            tables["bfd_packing"] = {"capacity": self.case.capacity}
        recipe = self.recipe("run", tables, {"tokens": str(self.tokens)})
        run, log = self.folder / "run", self.folder / "log"
        shutil.rmtree(run, ignore_errors=True)
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "plugsft", str(recipe)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | QUIET,
            )
        try:
            lines: list[dict] = []
            while len(lines) < self.steps and process.poll() is None:
                if time.monotonic() > self.end:
                    return {"reason": "time is up"}
                time.sleep(0.1)
                lines = read_lines(run / "metrics.jsonl")
            lines = read_lines(run / "metrics.jsonl")
        finally:
            process.kill()
            process.wait()
        if len(lines) < self.steps:
            return explain_failure(log.read_text(), refused=process.returncode == 2)
        facts = json.loads((run / "run.json").read_text())
        summaries = {plugin["name"]: plugin["summary"] for plugin in facts["plugins"]}
        measured = lines[WARM : self.steps]
        return {
            "loss": lines[0]["loss"],
            "seconds": [line["step_seconds"] for line in lines[: self.steps]],
            "speed": tokens_per_second(measured),
            "median_step_speed": statistics.median(tokens_per_second([line]) for line in measured),
            "peak_gib": lines[self.steps - 1]["memory_gib"],
            "notes": summaries | {"precision": facts["precision"]},
        }

    def run_with_plugins(self, name: str) -> dict[str, Any]:
        """Train with the plugins up to `name`, except those that this machine cannot run."""
        steps = ladder_plugins(self.case)
        plugins = steps[: steps.index(name[1:]) + 1] if name.startswith("+") else []
        while name[1:] not in self.refused:
            runnable = [plugin for plugin in plugins if plugin not in self.refused]
            result = self.run_plugsft((*(["lora"] if self.case.lora else []), *runnable))
            if not result.get("refused"):
                return result
            # The refusal names the plugin, which need not be the last.
            refused_plugins = [
                plugin for plugin in runnable if f"plugins.{plugin}" in result["reason"]
            ]
            if not refused_plugins:
                raise SystemExit(f"{name} was refused: {result['reason']}")
            self.refused[refused_plugins[0]] = result["reason"]
        return {"reason": self.refused[name[1:]]}

    def run_trl(self, best: bool) -> dict[str, Any]:
        """Train with TRL."""
        arguments = {
            "case": asdict(self.case),
            "folder": str(self.folder),
            "tokens": str(self.tokens),
            "steps": self.steps,
            "cpu": self.cpu,
            "best": best,
        }
        words = [sys.executable, __file__, "--child", f"trl:{json.dumps(arguments)}"]
        seconds_left = max(1.0, self.end - time.monotonic())
        try:
            process = subprocess.run(
                words, env=os.environ | QUIET, capture_output=True, text=True, timeout=seconds_left
            )
        except subprocess.TimeoutExpired:
            return {"reason": "time is up"}
        if process.returncode:
            return explain_failure(process.stderr)
        result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        return result


def read_lines(path: Path) -> list[dict]:
    """Read the metrics of the finished steps; the last line may be incomplete."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def explain_failure(output: str, refused: bool = False) -> dict[str, Any]:
    """Return why a run has no figures; exit if the failure is unexpected."""
    lines = [line for line in output.splitlines() if line.strip()]
    if refused:
        return {"reason": " ".join(line.strip() for line in lines[-6:]), "refused": True}
    if "out of memory" in output.lower():
        return {"reason": "out of memory"}
    raise SystemExit(f"a run failed:\n{output[-4000:]}")


def tokens_per_second(lines: list[dict]) -> float:
    """Return the tokens per second of these steps."""
    return sum(line["tokens"] for line in lines) / sum(line["step_seconds"] for line in lines)


def measure(bench: Bench, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Run the contenders one after the other; print the results."""
    case, names = bench.case, contender_names(bench.case)
    names = [name for name in names if not options.only or name in options.only.split(",")]
    if unknown := {*(options.only or "").split(",")} - {*names, ""}:
        raise SystemExit(f"no contender is named {', '.join(sorted(unknown))}: {', '.join(names)}")
    lengths, flops = bench.lengths, flops_per_token(case.shape, bench.lengths, case.lora)
    print(
        f"\n{options.case}: {case.shape.multiplied / 1e9:.3f} billion weights multiplied, "
        f"{flops / 1e9:.3f} GFLOP a token; {len(lengths):,} chats of {np.median(lengths):.0f} "
        f"tokens (median), {lengths.max():,} at most; {case.batch} chats a step, packed into "
        f"rows of {case.capacity:,}; {bench.steps - WARM} steps measured, after {WARM}"
    )
    runs: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names:
            result = run_contender(bench, name, runs[name])
            runs[name].append(result)
            if number == 0 or "reason" in result:
                outcome = (
                    result.get("reason")
                    or f"loss {result['loss']:.6f}, {result['speed']:,.0f} tokens/s"
                )
                print(f"{name:>24}, round {number + 1}: {outcome}", flush=True)
        if number == 0:
            report["failed"] = compare_losses(runs, case.dtype)
            if report["failed"]:
                break
    report |= {"settings": asdict(case), "flops_per_token": flops, "runs": runs}
    report["summary"] = summarize(bench, runs, flops, report["machine"]["gpu"])


def contender_names(case: Case) -> list[str]:
    """Return the contenders, in the order in which they run."""
    return ["trl-default", "trl-best", "plain", *(f"+{name}" for name in ladder_plugins(case))]


def ladder_plugins(case: Case) -> list[str]:
    """Return the plugins in the order they are added; liger is for full fine-tuning."""
    return [name for name in LADDER if name != "liger" or not case.lora]


def run_contender(bench: Bench, name: str, earlier: list[dict]) -> dict[str, Any]:
    """Run a contender, unless it failed before or the time is up."""
    if earlier and earlier[-1].get("reason", "time is up") != "time is up":
        return {"reason": earlier[-1]["reason"]}
    expected_seconds = max((result.get("wall_seconds", 0.0) for result in earlier), default=0.0)
    if time.monotonic() + expected_seconds > bench.end:
        return {"reason": "time is up"}
    started = time.monotonic()
    result = (
        bench.run_trl(name == "trl-best")
        if name.startswith("trl")
        else bench.run_with_plugins(name)
    )
    return result | {"wall_seconds": round(time.monotonic() - started, 1)}


def compare_losses(runs: dict[str, list[dict]], dtype: str) -> list[str]:
    """Compare the first step's losses, on the same chats; describe those that differ."""
    losses = {name: results[0]["loss"] for name, results in runs.items() if "loss" in results[0]}
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    reference_loss = losses.get("plain", next(iter(losses.values()), 0.0))
    return [
        f"{name}: the first step's loss is {loss:.7g}, and {reference_loss:.7g} for the plain run"
        for name, loss in losses.items()
        if not abs(loss / reference_loss - 1) <= tolerance
    ]


def peak_flops(gpu: str) -> float | None:
    """Return a GPU's peak FLOP/s, if known; the PCIe and NVL builds are slower."""
    known = any(kind in gpu for kind in ("H100", "H200"))
    return PEAK if known and not any(kind in gpu for kind in ("PCIe", "NVL")) else None


def summarize(
    bench: Bench, runs: dict[str, list[dict]], flops: float, gpu: str | None
) -> dict[str, dict]:
    """Print one line for each contender; return the figures."""
    peak = None if bench.cpu else peak_flops(gpu or "")
    speeds = {
        name: [result["speed"] for result in results if "speed" in result]
        for name, results in runs.items()
    }
    medians = {name: statistics.median(speed) for name, speed in speeds.items() if speed}
    figures: dict[str, dict] = {}
    print()
    for name, speed in speeds.items():
        if not speed:
            print(f"{name:>24} NOT MEASURED: {runs[name][-1]['reason']}")
            continue
        memory = max(result["peak_gib"] for result in runs[name] if "peak_gib" in result)
        mfu = medians[name] * flops / peak if peak else None
        against = {other: medians[name] / medians[other] for other in medians if other[:3] == "trl"}
        figures[name] = {"tokens_per_second": medians[name], "mfu": mfu, "peak_gib": memory}
        steady = statistics.median(
            result["median_step_speed"] for result in runs[name] if "median_step_speed" in result
        )
        figures[name] |= {"rounds": len(speed), "against": against, "median_step_speed": steady}
        ratios = ", ".join(f"{ratio:.2f} x {other}" for other, ratio in against.items())
        print(
            f"{name:>24} {shared.spread(speed, ',.0f')} tokens/s in {len(speed)} rounds "
            f"({steady:,.0f} in the median step), MFU "
            f"{'n/a' if mfu is None else f'{mfu:.1%}'}, {memory:.2f} GiB; {ratios}"
        )
    for name in ("trl-default", "trl-best"):
        for result in [result for result in runs.get(name, []) if "notes" in result][:1]:
            print(f"{name}: {result['notes']}")
    return figures


def run_trl(arguments: dict) -> dict[str, Any]:
    """Train with TRL."""
    from gpu_trl import train

    return train(arguments)


CHILDREN = {
    "machine": describe_machine,
    "checks": check_kernels,
    "times": time_kernels,
    "model": make_model,
    "trl": run_trl,
}

if __name__ == "__main__":
    main()
