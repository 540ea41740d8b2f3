"""Training on one GPU: kernels checked against float32, then plugin by plugin against TRL.

    .venv/bin/python tools/bench/gpu.py --case 0.6b-lora [--rounds 3] [--seconds 540] [--steps 6]
        [--capacity 4096] [--only NAME,...] [--work FOLDER] [--json FILE]
    .venv/bin/python tools/bench/gpu.py [--times]     (the checks alone; or times of kernels, too)
    .venv/bin/python tools/bench/gpu.py --case 0.6b-lora --shapes cpu       (tiny, to see it start)

Cases are 0.6b-lora, 1b-full, 8b-lora and 8b-full: the shapes of Qwen3 0.6B, Llama 3.2 1B and 3.1 8B
in bfloat16, their weights random; chats have lognormal lengths. Every run is a process of its own.
plugsft's are whole runs of a recipe, killed once enough steps are measured: what follows would be a
checkpoint. In each round all contenders take their turn: trl-default, with TRL's own settings but
for length, batch and type; trl-best, with packing, flash attention and (for whole weights) Liger's
layers where they are installed; plain, with no plugin but lora; and those that begin with "+", each
with one plugin more than the one before it.

Speed is that of real tokens, after the first steps; the median step's is printed too, since
a late compilation shows in a single step. MFU is what the model needs of the 989
TFLOP/s of the GPU: see flops_per_token. After the first round, losses of first steps are compared.
With --work, the model and its tokens stay in that folder for the next call.

0.6b-dpo and 8b-dpo learn preferences with LoRA instead: what dpo.py measures, with those shapes.
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
from gpu_cases import CASES, OVERHEAD, RATE, WARM, Case, flops_per_token, make_model, tiny, words_of

PEAK = 989e12
"""What an H100 or H200 (SXM) multiplies a second in bfloat16, both numbers of a sum counted."""
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
"""Cases of dpo.py, and the shapes that it calls so."""
PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "liger-kernel", "flash-attn")
PACKAGES += ("flash-attn-3", "cut-cross-entropy", "triton")


def main() -> None:
    """Check, then measure."""
    parser = shared.command_line(__doc__)
    parser.add_argument("--case", choices=[*CASES, *PREFERENCES])
    parser.add_argument("--shapes", choices=("real", "cpu"), default="real")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it, at most")
    parser.add_argument("--steps", type=int, default=6, help="of a run, that are measured")
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--only", help="contenders, by name: plain,+bfd_packing,...,trl-best")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--times", action="store_true", help="of kernels, one by one")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, _, given = options.child.partition(":")
        print(json.dumps(CHILDREN[name](json.loads(given))))
        return
    # On SIGTERM, end the child processes, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    end = time.monotonic() + options.seconds
    report: dict[str, Any] = {"machine": child("machine"), "case": options.case}
    report |= {"shapes": options.shapes, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items() if value))
    if not options.skip_checks:
        report["checks"] = child("checks")
        for one in report["checks"]:
            print(one["said"])
    failed = [one["said"] for one in report.get("checks", []) if one["failed"]]
    if options.times and not failed:
        report["times"] = child("times")
        tell_times(report["times"])
    if options.case in PREFERENCES and not failed:
        report["rounds"] = prefer(options)
    elif options.case and not failed:
        with ExitStack() as stack:
            folder = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            measure(Bench(folder, options, end), options, report)
            failed = report["failed"]
    shared.write_report(report, options.json)
    if failed:
        raise SystemExit("\n".join(["", "FAILED:", *failed]))


def prefer(options: argparse.Namespace) -> list[dict]:
    """Train on preferences; return the figures."""
    shape = "small" if options.shapes == "cpu" else PREFERENCES[options.case]
    words = [Path(__file__).with_name("dpo.py"), "--lora", "--shape", shape]
    words += ["--rounds", options.rounds, "--pairs", 16 * options.steps]
    words += ["--only", options.only] if options.only else []
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "rounds.json")
        print(shared.run(sys.executable, *words, "--json", kept, **QUIET))
        rounds: list[dict] = json.loads(kept.read_text())["rounds"]
    return rounds


def child(name: str, given: object = None) -> Any:
    """Run a part in a fresh process, which frees its GPU memory when it ends."""
    return shared.run_python(__file__, "--child", f"{name}:{json.dumps(given or {})}", **QUIET)


QUIET = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}


def tell_machine(_: dict) -> dict[str, Any]:
    """Name the machine and all that runs on it."""
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


def run_checks(_: dict) -> list[dict]:
    """Run all checks of kernels."""
    from gpu_checks import checks

    return [asdict(one) | {"said": str(one), "failed": one.failed} for one in checks()]


def run_times(_: dict) -> list[dict]:
    """Time all kernels."""
    from gpu_times import times

    return [*times()]


def tell_times(made: list[dict]) -> None:
    """Print how long each kernel took."""
    for one in made:
        said = f"NOT MEASURED: {one.get('reason')}"
        if "seconds" in one:
            memory = one["peak_gib"]
            said = f"{shared.spread([1e3 * took for took in one['seconds']], '.2f')} ms, "
            said += "memory n/a" if memory is None else f"{memory:.2f} GiB"
        print(f"{one['of']}, {one['kernel']}: {said}")


class Bench:
    """A folder with a model and prepared tokens, and runs on them."""

    def __init__(self, folder: Path, options: argparse.Namespace, end: float) -> None:
        case = CASES[options.case]
        case = tiny(case) if options.shapes == "cpu" else case
        self.case = replace(case, capacity=options.capacity or case.capacity)
        if self.case.capacity < case.longest:
            raise SystemExit(f"--capacity: chats have up to {case.longest:,} tokens")
        self.cpu = options.shapes == "cpu"
        self.steps, self.end = WARM + options.steps, end
        self.folder = folder / f"{options.case}-{options.shapes}"
        self.refused: dict[str, str] = {}
        if not (self.folder / "done").exists():
            self.folder.mkdir(parents=True)
            child("model", {"case": asdict(self.case), "folder": str(self.folder)})
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
                words = [f"w{number}" for number in dice.integers(0, words_of(case.shape), length)]
                asked, said = words[: length // 3], words[length // 3 :]
                parts = {"user": asked, "assistant": said}
                turns = [{"role": role, "content": " ".join(one)} for role, one in parts.items()]
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
            # TRL stores and updates all of its weights in this type; adapters are float32 in both.
            | ({} if case.lora else {"weights": case.dtype}),
            "data": data | {"max_length": case.longest},
            # It is killed long before.
            "train": train | {"steps": 1_000_000, "log_every": 1},
            "checkpoint": {"every": 0},
            "plugins": plugins,
        }
        path = self.folder / f"{name}.toml"
        path.write_text(shared.tomli_w.dumps(tables))
        return path

    def ours(self, plugins: tuple[str, ...]) -> dict[str, Any]:
        """Train with these plugins until enough steps are measured; return what came of it."""
        given: dict[str, dict] = {name: {} for name in plugins}
        if "bfd_packing" in given:
            given["bfd_packing"] = {"capacity": self.case.capacity}
        recipe = self.recipe("run", given, {"tokens": str(self.tokens)})
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
        verdicts = {one["name"]: one["verdict"] for one in facts["plugins"]}
        measured = lines[WARM : self.steps]
        return {
            "loss": lines[0]["loss"],
            "seconds": [line["step_seconds"] for line in lines[: self.steps]],
            "speed": speed_of(measured),
            "middle": statistics.median(speed_of([line]) for line in measured),
            "peak_gib": lines[self.steps - 1]["memory_gib"],
            "notes": verdicts | {"precision": facts["precision"]},
        }

    def climbed(self, name: str) -> dict[str, Any]:
        """Train with the plugins up to this one, but for those that this machine cannot run."""
        steps = ladder(self.case)
        wanted = steps[: steps.index(name[1:]) + 1] if name.startswith("+") else []
        while name[1:] not in self.refused:
            kept = [one for one in wanted if one not in self.refused]
            made = self.ours((*(["lora"] if self.case.lora else []), *kept))
            if not made.get("refused"):
                return made
            # The refusal names who cannot run, which need not be the last.
            named = [one for one in kept if f"plugins.{one}" in made["reason"]]
            if not named:
                raise SystemExit(f"{name} was refused: {made['reason']}")
            self.refused[named[0]] = made["reason"]
        return {"reason": self.refused[name[1:]]}

    def trl(self, best: bool) -> dict[str, Any]:
        """Train with TRL."""
        given = {
            "case": asdict(self.case),
            "folder": str(self.folder),
            "tokens": str(self.tokens),
            "steps": self.steps,
            "cpu": self.cpu,
            "best": best,
        }
        words = [sys.executable, __file__, "--child", f"trl:{json.dumps(given)}"]
        left = max(1.0, self.end - time.monotonic())
        try:
            done = subprocess.run(
                words, env=os.environ | QUIET, capture_output=True, text=True, timeout=left
            )
        except subprocess.TimeoutExpired:
            return {"reason": "time is up"}
        if done.returncode:
            return explain_failure(done.stderr)
        made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return made


def read_lines(path: Path) -> list[dict]:
    """Read the metrics of the steps that are done; a line may be half written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def explain_failure(said: str, refused: bool = False) -> dict[str, Any]:
    """Say why there is nothing to measure; end where nobody expected that."""
    lines = [line for line in said.splitlines() if line.strip()]
    if refused:
        return {"reason": " ".join(line.strip() for line in lines[-6:]), "refused": True}
    if "out of memory" in said.lower():
        return {"reason": "out of memory"}
    raise SystemExit(f"a run failed:\n{said[-4000:]}")


def speed_of(lines: list[dict]) -> float:
    """Return the tokens a second of some steps."""
    return sum(line["tokens"] for line in lines) / sum(line["step_seconds"] for line in lines)


def measure(bench: Bench, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Run the contenders one after the other; print the results."""
    case, names = bench.case, contenders(bench.case)
    names = [name for name in names if not options.only or name in options.only.split(",")]
    if unknown := {*(options.only or "").split(",")} - {*names, ""}:
        raise SystemExit(f"no contender is named {', '.join(sorted(unknown))}: {', '.join(names)}")
    lengths, flops = bench.lengths, flops_per_token(case.shape, bench.lengths, case.lora)
    print(
        f"\n{options.case}: {case.shape.multiplied / 1e9:.3f} billion weights multiplied, "
        f"{flops / 1e9:.3f} GFLOP a token; {len(lengths):,} chats of {np.median(lengths):.0f} "
        f"tokens in the middle, {lengths.max():,} at most; {case.batch} chats a step, packed into "
        f"rows of {case.capacity:,}; {bench.steps - WARM} steps measured, after {WARM}"
    )
    runs: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names:
            one = contend(bench, name, runs[name])
            runs[name].append(one)
            if number == 0 or "reason" in one:
                said = one.get("reason") or f"loss {one['loss']:.6f}, {one['speed']:,.0f} tokens/s"
                print(f"{name:>24}, round {number + 1}: {said}", flush=True)
        if number == 0:
            report["failed"] = differences(runs, case.dtype)
            if report["failed"]:
                break
    report |= {"settings": asdict(case), "flops_per_token": flops, "runs": runs}
    report["summary"] = summary(bench, runs, flops, report["machine"]["gpu"])


def contenders(case: Case) -> list[str]:
    """Return the names of all, in the order in which they run."""
    return ["trl-default", "trl-best", "plain", *(f"+{name}" for name in ladder(case))]


def ladder(case: Case) -> list[str]:
    """Return the plugins that are added, one after the other; Liger's are for whole weights."""
    return [name for name in LADDER if name != "liger" or not case.lora]


def contend(bench: Bench, name: str, before: list[dict]) -> dict[str, Any]:
    """Run one contender, if that is of use and there is time."""
    if before and before[-1].get("reason", "time is up") != "time is up":
        return {"reason": before[-1]["reason"]}
    needed = max((one.get("took", 0.0) for one in before), default=0.0)
    if time.monotonic() + needed > bench.end:
        return {"reason": "time is up"}
    started = time.monotonic()
    made = bench.trl(name == "trl-best") if name.startswith("trl") else bench.climbed(name)
    return made | {"took": round(time.monotonic() - started, 1)}


def differences(runs: dict[str, list[dict]], dtype: str) -> list[str]:
    """Compare the losses of the first step, all of the same chats; say which differ."""
    losses = {name: one[0]["loss"] for name, one in runs.items() if "loss" in one[0]}
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    first = losses.get("plain", next(iter(losses.values()), 0.0))
    return [
        f"{name}: the first step's loss is {loss:.7g}, and {first:.7g} for the plain run"
        for name, loss in losses.items()
        if not abs(loss / first - 1) <= tolerance
    ]


def peak_of(gpu: str) -> float | None:
    """Return what a GPU can do, if that is known here; other builds of the same are slower."""
    known = any(kind in gpu for kind in ("H100", "H200"))
    return PEAK if known and not any(kind in gpu for kind in ("PCIe", "NVL")) else None


def summary(
    bench: Bench, runs: dict[str, list[dict]], flops: float, gpu: str | None
) -> dict[str, dict]:
    """Print one line for each contender, and return them."""
    peak = None if bench.cpu else peak_of(gpu or "")
    speeds = {name: [one["speed"] for one in made if "speed" in one] for name, made in runs.items()}
    middle = {name: statistics.median(speed) for name, speed in speeds.items() if speed}
    found: dict[str, dict] = {}
    print()
    for name, speed in speeds.items():
        if not speed:
            print(f"{name:>24} NOT MEASURED: {runs[name][-1]['reason']}")
            continue
        memory = max(one["peak_gib"] for one in runs[name] if "peak_gib" in one)
        mfu = middle[name] * flops / peak if peak else None
        against = {other: middle[name] / middle[other] for other in middle if other[:3] == "trl"}
        found[name] = {"tokens_per_second": middle[name], "mfu": mfu, "peak_gib": memory}
        steady = statistics.median(one["middle"] for one in runs[name] if "middle" in one)
        found[name] |= {"rounds": len(speed), "against": against, "middle_step": steady}
        ratios = ", ".join(f"{ratio:.2f} x {other}" for other, ratio in against.items())
        print(
            f"{name:>24} {shared.spread(speed, ',.0f')} tokens/s in {len(speed)} rounds "
            f"({steady:,.0f} in the middle step), MFU "
            f"{'n/a' if mfu is None else f'{mfu:.1%}'}, {memory:.2f} GiB; {ratios}"
        )
    for name in ("trl-default", "trl-best"):
        for one in [one for one in runs.get(name, []) if "notes" in one][:1]:
            print(f"{name}: {one['notes']}")
    return found


def run_trl(given: dict) -> dict[str, Any]:
    """Train with TRL."""
    from gpu_trl import train

    return train(given)


CHILDREN = {
    "machine": tell_machine,
    "checks": run_checks,
    "times": run_times,
    "model": make_model,
    "trl": run_trl,
}

if __name__ == "__main__":
    main()
