"""Training on one GPU: the machine and its kernels, then plugsft against TRL.

    .venv/bin/python tools/bench/gpu.py --out FOLDER [--phases probe,0.6b-lora] [--seconds 480]
    .venv/bin/python tools/bench/gpu.py --out FOLDER --dry-run      (tiny shapes, on a CPU)

Each phase writes FOLDER/PHASE.json after every result. What is in the folder is not measured again,
so an interrupted call is simply repeated. A failure is a result, with its reason; remove it from
the file to try again. The phases, in their order:

- probe: versions, ceilings, microseconds of a launch, each kernel against float32;
- sync: 20 steps of a small run, with every wait for the device, and recompilations;
- 0.6b-lora, 1b-full, 8b-lora, 8b-full: tokens per second of the contenders in gpu_cases.py;
- times: attention and loss kernels, forward and backward;
- 0.6b-dpo, 8b-dpo: dpo.py, with LoRA.

The cases have the shapes of Qwen3 0.6B, Llama 3.2 1B and 3.1 8B in bfloat16, with random weights;
chats have lognormal lengths. Each run is a process of its own. All contenders run once, then the
fastest of TRL and of plugsft again. The speed counts tokens without padding, after the first steps.
MFU is relative to the GPU's 989 TFLOP/s: see flops_per_token in gpu_cases.py.
"""

import argparse
import fcntl
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import shared
from gpu_cases import CASES, Case, make_model, parse_case, shrink
from gpu_process import Failed, Results, TimeUp, explain_failure, follow, run_to_end, started
from gpu_train import Bench, compare_first_steps, measure, measure_case, median_speeds

from plugsft.plugins.profiler.flops import PEAKS

ITEM_LIMIT = 150.0
"""Most seconds of an item of probe, sync or times."""
PREFERENCES = {"0.6b-dpo": "0.6b", "8b-dpo": "8b"}
"""Phase -> the shape of dpo.py that it runs."""
PAIRS = ["shared+cached", "trl", "shared+reference", "trl precomputed", "packed"]
"""Contenders of dpo.py, most important first."""
DRY_PAIRS = ["trl", "shared+reference"]
ITEMS = ("probe", "sync", "times")
PHASES = (
    "probe",
    "sync",
    "0.6b-lora",
    "1b-full",
    "times",
    "8b-lora",
    "0.6b-dpo",
    "8b-full",
    "8b-dpo",
)
DRY = ("probe", "sync", "0.6b-lora", "1b-full", "times", "0.6b-dpo")


def main() -> None:
    """Run the phases, then print what the folder holds."""
    if sys.argv[1:2] == ["--model"]:
        return make_model(json.loads(sys.argv[2]))
    if sys.argv[1:2] == ["--items"]:
        return run_items(json.loads(sys.argv[2]))
    options = read_options()
    # On SIGTERM, end the child processes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options.out.mkdir(parents=True, exist_ok=True)
    machine = {"gpu": gpu_name(options.dry_run), "cores": len(os.sched_getaffinity(0))}
    machine |= {"dry_run": options.dry_run}
    options.end = time.monotonic() + options.seconds
    for phase in options.phases:
        results = Results(options.out / f"{phase}.json", machine)
        print(f"\n== {phase}", flush=True)
        try:
            run_phase(phase, options, results)
        except TimeUp:
            print("time is up: repeat the command for the rest")
            break
        except Failed as failure:
            print(f"{phase} was not prepared: {failure}")
    for phase in options.phases:
        summarize(phase, Results(options.out / f"{phase}.json", machine))


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--phases", help=f"default: all, which are {','.join(PHASES)}")
    parser.add_argument("--only", help="contenders, such as trl@4k,plugsft+compile@16k")
    parser.add_argument("--seconds", type=float, default=480.0, help="time limit of this call")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of the two fastest")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on a CPU")
    work = Path(tempfile.gettempdir(), "plugsft-gpu")
    parser.add_argument("--work", type=Path, default=work, help=f"models and data; default {work}")
    options = parser.parse_args()
    options.phases = (options.phases or ",".join(DRY if options.dry_run else PHASES)).split(",")
    if unknown := {*options.phases} - {*PHASES}:
        parser.error(f"no phase is named {', '.join(sorted(unknown))}: {', '.join(PHASES)}")
    options.work = options.work.resolve() / ("dry" if options.dry_run else "real")
    options.work.mkdir(parents=True, exist_ok=True)
    options.lock = (options.work / "lock").open("w")  # until this process ends
    try:
        fcntl.flock(options.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        parser.error(f"another run uses {options.work}: wait for it, or set --work")
    if options.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return options


def gpu_name(dry_run: bool) -> str:
    """Return the GPU's name; stop without one."""
    if dry_run:
        return "none"
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        process = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"no GPU: {error}; --dry-run takes tiny shapes on a CPU") from error
    return process.stdout.splitlines()[0].strip()


def run_phase(phase: str, options: argparse.Namespace, results: Results) -> None:
    """Run what is missing of a phase; raise TimeUp if time is left for no more."""
    only = options.only.split(",") if options.only else None
    if phase in ITEMS:
        return run_all_items(phase, options, results)
    if phase in PREFERENCES:
        return measure_preferences(
            phase, only or (DRY_PAIRS if options.dry_run else PAIRS), options, results
        )
    case: Case = shrink(CASES[phase]) if options.dry_run else CASES[phase]
    folder = options.work / phase.partition("-")[0]  # both 8b cases share a model
    if any(results.missing(name) for name in only or case.contenders) or options.rounds > 1:
        bench = Bench(folder, case, options, failed_kernels(options.out))
        measure_case(bench, only or list(case.contenders), options.rounds, results)


def run_all_items(phase: str, options: argparse.Namespace, results: Results) -> None:
    """Run a phase's items in a process, and in another one after each that ends it."""
    lines, log = options.work / f"{phase}.jsonl", options.work / f"{phase}.log"
    finished = False
    while not finished:
        current, limit = "", [options.end]
        lines.unlink(missing_ok=True)
        arguments = json.dumps({"phase": phase, "done": [*results.all], "lines": str(lines)})
        with started(sys.executable, __file__, "--items", arguments, log=log) as process:
            try:
                for line in follow(process, lines, partial(limit.__getitem__, 0)):
                    finished = line.get("finished", False)
                    current = line.get("name", current)
                    limit[0] = min(options.end, time.monotonic() + ITEM_LIMIT)
                    if "result" in line:
                        add_item(results, current, line["result"])
            except TimeUp:
                if time.monotonic() > options.end:
                    raise
                add_item(results, current, {"reason": f"took more than {ITEM_LIMIT:.0f} s"})
                code = 0
            else:
                code = process.wait()
        if code and not current:
            raise Failed(explain_failure(log, code))
        if code and results.missing(current):
            add_item(results, current, {"reason": explain_failure(log, code)})


def add_item(results: Results, name: str, result: dict[str, Any]) -> None:
    """Add an item's result, and print it."""
    results.add(name, result | {"began": time.time()})
    value = result.get("reason") or result["value"]
    if not isinstance(value, list):
        print(f"{name}: {value}", flush=True)
        return
    for part in value:
        print(f"{name}: {part.get('text') or describe_times(part)}", flush=True)


def describe_times(timing: dict[str, Any]) -> str:
    """Describe how long a kernel took."""
    if "seconds" not in timing:
        return f"{timing['kernel']} NOT MEASURED: {timing['reason']}"
    milliseconds = [1e3 * seconds for seconds in timing["seconds"]]
    memory = timing["peak_gib"]
    peak = "memory n/a" if memory is None else f"{memory:.2f} GiB"
    return f"{timing['kernel']} {shared.spread(milliseconds, '.2f')} ms, {peak}"


def run_items(arguments: dict[str, Any]) -> None:
    """Run items, and write a line before and after each; end if one has broken the device."""
    import torch

    items = importlib.import_module("gpu_probe").PHASES[arguments["phase"]]
    missing = [name for name in items if name not in arguments["done"]]
    # Each run of sync needs a process of its own.
    todo = missing[:1] if arguments["phase"] == "sync" else missing
    with Path(arguments["lines"]).open("a", buffering=1) as file:
        for name in todo:
            file.write(json.dumps({"name": name}) + "\n")
            try:
                result = {"value": items[name]()}
            except Exception as error:  # one failure must not hide the other items
                result = {"reason": f"{type(error).__name__}: {error}"[:2000]}
            file.write(json.dumps({"name": name, "result": result}, default=str) + "\n")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.synchronize()  # raises if the context is broken
        file.write(json.dumps({"finished": todo == missing}) + "\n")


def failed_kernels(out: Path) -> list[str]:
    """Return the kernels whose check in the probe failed: "attention torch", "liger"."""
    path = out / "probe.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    checks = {
        name.removeprefix("check "): rounds[0].get("value") or []
        for name, rounds in results.items()
        if name.startswith("check ")
    }
    return [name for name, parts in checks.items() if any(part["failed"] for part in parts)]


def measure_preferences(
    phase: str, names: list[str], options: argparse.Namespace, results: Results
) -> None:
    """Run dpo.py for each contender."""
    for name in names:
        if results.missing(name):
            measure(partial(run_preferences, phase, name, options), name, options.end, results)


def run_preferences(
    phase: str, name: str, options: argparse.Namespace, end: float
) -> dict[str, Any]:
    """Run a contender of dpo.py; return its figures."""
    report, log = options.work / "dpo.json", options.work / "dpo.log"
    words = ["--shape", "tiny" if options.dry_run else PREFERENCES[phase], "--lora"]
    words += ["--only", name, "--rounds", "1", "--json", str(report)]
    words += ["--work", str(options.work / phase)]
    words += ["--pairs", "16"] if options.dry_run else []
    run_to_end(sys.executable, Path(__file__).with_name("dpo.py"), *words, log=log, end=end)
    figures: dict[str, Any] = json.loads(report.read_text())["rounds"][0][name]
    return figures


def peak_flops(gpu: str) -> float | None:
    """Return a GPU's peak FLOP/s, if known; the PCIe and NVL builds are slower."""
    if "PCIe" in gpu or "NVL" in gpu:
        return None
    return next((1e12 * rate for known, rate in PEAKS.items() if known in gpu), None)


def summarize(phase: str, results: Results) -> None:
    """Print a phase's results, and add a summary to its file."""
    failed = {
        name: rounds[0]["reason"] for name, rounds in results.all.items() if "reason" in rounds[0]
    }
    print(f"\n{phase}: {len(results.all) - len(failed)} results")
    if phase in CASES and "settings" in results.report:
        results.report["summary"] = summarize_case(results)
    for name, reason in failed.items():
        print(f"{name:>34} NOT MEASURED: {reason.splitlines()[0]}")
    if results.all:
        results.write()


def summarize_case(results: Results) -> dict[str, Any]:
    """Print a line for each contender, with ratios to TRL's best; return the figures."""
    report = results.report
    peak = peak_flops(report["machine"]["gpu"])
    speeds = dict(median_speeds(results))
    trl = {name: speed for name, speed in speeds.items() if name.startswith("trl")}
    figures: dict[str, Any] = {}
    for name in sorted(speeds, key=lambda name: -speeds[name]):
        rounds = results.all[name]
        row = name.partition("@")[2]
        same_row = [speed for other, speed in trl.items() if other.partition("@")[2] == row]
        line = {
            "tokens_per_second": speeds[name],
            "median_step_speed": statistics.median(part["median_step_speed"] for part in rounds),
            "rounds": len(rounds),
            "peak_gib": max(part["peak_gib"] for part in rounds),
            "mfu": peak and speeds[name] * report["flops_per_token"] / peak,
            "mfu_trained_head": peak
            and speeds[name] * report["flops_per_token_trained_head"] / peak,
            "against_trl_best": trl and speeds[name] / max(trl.values()),
            "against_trl_same_row": same_row and speeds[name] / max(same_row),
        }
        figures[name] = {key: value or None for key, value in line.items()}
        print(f"{name:>34} {describe_line(figures[name])}")
    problems = compare_first_steps(parse_case(report["settings"]), results)
    for problem in problems:
        print(f"FIRST STEP DIFFERS: {problem}")
    return {"contenders": figures, "first_step_differs": problems}


def describe_line(line: dict[str, Any]) -> str:
    """Describe a contender's figures."""
    mfu = "n/a" if line["mfu"] is None else f"{line['mfu']:.1%}, {line['mfu_trained_head']:.1%}"
    ratios = [
        f"{line[key]:.2f} x {words}"
        for key, words in {
            "against_trl_best": "TRL",
            "against_trl_same_row": "TRL's same row",
        }.items()
        if line[key]
    ]
    return (
        f"{line['tokens_per_second']:,.0f} tokens/s ({line['median_step_speed']:,.0f} in the "
        f"median step, {line['rounds']} rounds), MFU {mfu}, {line['peak_gib']:.1f} GiB; "
        + ", ".join(ratios)
    )


if __name__ == "__main__":
    main()
