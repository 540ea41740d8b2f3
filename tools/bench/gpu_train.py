"""The training runs of gpu.py: a model, prepared tokens, and the contenders that train on them."""

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import shared
import tomli_w
from gpu_cases import OVERHEAD, RATE, WARM, Case, Contender, count_words, flops_per_token
from gpu_process import Failed, Results, TimeUp, explain_failure, follow, run_to_end, started

from plugsft.tokens.store import Tokens

LIMIT = 240.0
"""Most seconds of a contender."""
FIRST = 45.0
"""Seconds that a contender is expected to need before any was measured."""

FALLBACKS = (("flash_attention", "attention ", "sdpa"), ("fused_loss", "loss ", "torch"))
"""A plugin, the start of its checks' names, and the kernel to take if one of them failed."""

NEEDED = {"fused_loss": "loss torch", "flash_attention": "attention sdpa"}
NEEDED |= {"lora": "lora", "liger": "liger"}
"""A plugin, and the check without which it cannot be measured."""


class Bench:
    """A folder with a model and prepared tokens, and runs on them."""

    def __init__(
        self, folder: Path, case: Case, options: argparse.Namespace, failed: Sequence[str]
    ) -> None:
        self.folder, self.case, self.failed = folder, case, failed
        self.cpu, self.end, self.out = options.dry_run, options.end, options.out
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # half-made
            folder.mkdir(parents=True)
            arguments = json.dumps({"case": asdict(case), "folder": str(folder)})
            self.run_to_end(
                sys.executable, Path(__file__).with_name("gpu.py"), "--model", arguments
            )
            self.write_chats()
            source = {"source": str(folder / "chats.jsonl")}
            recipe = self.recipe("prepared", Contender.parse("plain"), source)
            self.run_to_end(sys.executable, "-m", "plugsft", "prepare", recipe)
            (folder / "done").touch()
        (self.tokens,) = (folder / "prepared/tokens").iterdir()

    def run_to_end(self, *words: object) -> None:
        """Run a command that prepares the folder."""
        run_to_end(*words, log=self.folder / "log", end=self.end)

    def write_chats(self) -> None:
        """Write chats of random words."""
        case = self.case
        count = case.chats(1 << 20) * (WARM + case.steps + 4)
        lengths = shared.draw_lengths(count, np.log(case.median), 1.0, 12, case.longest)
        dice = np.random.default_rng(0)
        with (self.folder / "chats.jsonl").open("w") as file:
            for length in (lengths - OVERHEAD).tolist():
                words = [
                    f"w{number}" for number in dice.integers(0, count_words(case.shape), length)
                ]
                parts = {"user": words[: length // 3], "assistant": words[length // 3 :]}
                turns = [{"role": role, "content": " ".join(part)} for role, part in parts.items()]
                file.write(json.dumps({"messages": turns}) + "\n")

    def flops(self) -> dict[str, float]:
        """Return the FLOP per token: all of the head, and the head of trained tokens only."""
        tokens = Tokens(self.tokens)
        share = float(tokens.targets.sum() / tokens.lengths.sum())
        shape, lora = self.case.shape, self.case.lora
        return {
            "flops_per_token": flops_per_token(shape, tokens.lengths, lora),
            "flops_per_token_trained_head": flops_per_token(shape, tokens.lengths, lora, share),
        }

    def recipe(self, name: str, contender: Contender, data: dict[str, Any]) -> Path:
        """Write a contender's recipe."""
        case, plugins = self.case, {plugin: dict[str, Any]() for plugin in contender.plugins}
        train: dict[str, Any] = {"batch_size": case.chats(contender.rows), "learning_rate": RATE}
        if "bfd_packing" in plugins:
            plugins["bfd_packing"] = {"capacity": contender.rows}
            if "dataset" in contender.features:
                plugins["bfd_packing"]["scope"] = "dataset"
                train["batch_size"] = rows_per_step(case, contender.rows, self.mean_length())
        else:
            train["micro_batch"] = case.micro
        for plugin, part, kernel in FALLBACKS:
            if plugin in plugins and any(name.startswith(part) for name in self.failed):
                plugins[plugin] = {"kernel": kernel}
        if "low_memory_adam" in plugins:
            plugins["low_memory_adam"] = {"kind": "corrected"}
        if "profiler" in plugins:
            plugins["profiler"] = {"trace": [self.steps - 1, self.steps]}
        if case.lora:
            plugins["lora"] = {}
        # TRL stores and updates weights in this type; adapters are float32 in both.
        narrow = not case.lora and "float32" not in contender.features
        tables = {
            "output": str(self.folder / name),
            "device": "cpu" if self.cpu else "auto",
            "model": {"path": str(self.folder / "model"), "dtype": case.dtype}
            | ({"weights": case.dtype} if narrow else {}),
            "data": data | {"max_length": case.longest},
            # Without adapters, the process is killed long before: a model takes long to save.
            "train": train | {"steps": self.steps + 1 if case.lora else 1_000_000, "log_every": 1},
            "checkpoint": {"every": 0},
            "plugins": plugins,
        }
        path = self.folder / f"{name}.toml"
        path.write_text(tomli_w.dumps(tables))
        return path

    @property
    def steps(self) -> int:
        """The steps of a run."""
        return WARM + self.case.steps

    def mean_length(self) -> float:
        """Return the mean length of the chats."""
        return float(Tokens(self.tokens).lengths.mean())

    def run(self, contender: Contender, end: float) -> dict[str, Any]:
        """Train; return the figures."""
        if contender.trainer.startswith("trl"):
            return self.run_trl(contender, end)
        self.ensure_checked(contender)
        return self.run_plugsft(contender, end)

    def ensure_checked(self, contender: Contender) -> None:
        """Refuse a plugin whose kernels failed against float32; others do without the kernel."""
        for plugin in (*contender.plugins, *(["lora"] if self.case.lora else [])):
            if NEEDED.get(plugin) in self.failed:
                raise Failed(f"the check of {NEEDED[plugin]} failed")

    def run_plugsft(self, contender: Contender, end: float) -> dict[str, Any]:
        """Train with plugsft until enough steps are measured."""
        recipe = self.recipe("run", contender, {"tokens": str(self.tokens)})
        run, log = self.folder / "run", self.folder / "log"
        shutil.rmtree(run, ignore_errors=True)
        with started(sys.executable, "-m", "plugsft", recipe, log=log) as process:
            stream = follow(process, run / "metrics.jsonl", lambda: end)
            lines = list(islice(stream, self.steps))
            if len(lines) < self.steps:
                raise Failed(explain_failure(log, process.wait()))
            if self.case.lora:
                with suppress(TimeUp):  # the figures are there; only words are missing
                    list(stream)
        facts = json.loads((run / "run.json").read_text())
        summaries = {plugin["name"]: plugin["summary"] for plugin in facts["plugins"]}
        measured = lines[WARM:]
        return {
            "loss": lines[0]["loss"],
            "grad_norm": lines[0]["grad_norm"],
            "seconds": [line["step_seconds"] for line in lines],
            "speed": tokens_per_second(measured),
            "median_step_speed": statistics.median(tokens_per_second([line]) for line in measured),
            "peak_gib": lines[-1]["memory_gib"],
            "notes": summaries | {"precision": facts["precision"]},
        } | self.keep_traces(run)

    def keep_traces(self, run: Path) -> dict[str, Any]:
        """Copy the profiler's files into the folder of the results; return their names."""
        names = list[str]()
        for path in sorted((run / "profile").glob("*")):
            names.append(f"trace-{path.name}")
            shutil.copyfile(path, self.out / names[-1])
        return {"traces": names} if names else {}

    def run_trl(self, contender: Contender, end: float) -> dict[str, Any]:
        """Train with TRL, in a process of its own."""
        arguments = {
            "case": asdict(self.case),
            "contender": contender.name,
            "folder": str(self.folder),
            "tokens": str(self.tokens),
            "cpu": self.cpu,
            "lines": str(self.folder / "trl.jsonl"),
        }
        lines, log = self.folder / "trl.jsonl", self.folder / "log"
        lines.unlink(missing_ok=True)
        script = Path(__file__).with_name("gpu_trl.py")
        with started(sys.executable, script, json.dumps(arguments), log=log) as process:
            for result in follow(process, lines, lambda: end):
                return result
            raise Failed(explain_failure(log, process.wait()))


def rows_per_step(case: Case, rows: int, mean: float) -> int:
    """Return the full rows that hold a step's chats."""
    return max(1, round(case.chats(rows) * mean / rows))


def tokens_per_second(lines: list[dict[str, Any]]) -> float:
    """Return the tokens per second of these steps."""
    tokens = float(sum(line["tokens"] for line in lines))
    return tokens / float(sum(line["step_seconds"] for line in lines))


def measure_case(bench: Bench, names: list[str], rounds: int, results: Results) -> None:
    """Run the contenders once, and the best of both sides again; raise TimeUp at the end."""
    results.report |= {"settings": asdict(bench.case), **bench.flops()}

    def run(name: str, end: float) -> dict[str, Any]:
        return bench.run(Contender.parse(name), end)

    for name in names:
        if results.missing(name):
            measure(partial(run, name), name, bench.end, results)
    for number in range(2, rounds + 1):
        for name in finalists(results):
            if results.missing(name, number):
                measure(partial(run, name), name, bench.end, results)


def measure(
    run: Callable[[float], dict[str, Any]], name: str, end: float, results: Results
) -> None:
    """Run a contender, unless the time left is too short; add its figures, or the reason."""
    walls = [result["wall_seconds"] for rounds in results.all.values() for result in rounds]
    began, dry = time.monotonic(), results.report["machine"]["dry_run"]
    if began + (statistics.median(walls) if walls else FIRST) > end and not dry:
        raise TimeUp
    print(f"{name}: ...", flush=True)
    limit = LIMIT * (4 if dry else 1)
    try:
        result = run(min(end, began + limit))
    except Failed as failure:
        result = {"reason": str(failure)}
    except TimeUp:
        if time.monotonic() > end:
            raise
        result = {"reason": f"took more than {limit:.0f} s"}
    except Exception as error:  # one failure must not end the others
        result = {"reason": f"{type(error).__name__}: {error}"}
    wall = round(time.monotonic() - began, 1)
    results.add(name, result | {"wall_seconds": wall, "began": time.time()})
    print(f"{name}: {describe(result)}, {wall:.0f} s", flush=True)


def describe(result: dict[str, Any]) -> str:
    """Describe a result in a line."""
    if "reason" in result:
        return str(result["reason"]).partition("\n")[0]
    if "speed" not in result:
        return f"{1e3 * result['step']:,.0f} ms a step"
    return (
        f"{result['speed']:,.0f} tokens/s, {result['peak_gib']:.1f} GiB, loss {result['loss']:.5f}"
    )


def finalists(results: Results) -> list[str]:
    """Return TRL's fastest contender and plugsft's, of those that have figures."""
    speeds = dict(median_speeds(results))
    sides = [[name for name in speeds if name.startswith("trl") == trl] for trl in (True, False)]
    return [max(side, key=lambda name: speeds[name]) for side in sides if side]


def median_speeds(results: Results) -> Iterator[tuple[str, float]]:
    """Yield the contenders that have figures, and their tokens per second."""
    for name, rounds in results.all.items():
        speeds = [result["speed"] for result in rounds if "speed" in result]
        if speeds:
            yield name, statistics.median(speeds)


def compare_first_steps(case: Case, results: Results) -> list[str]:
    """Compare the first step's loss and gradient norm, on the same chats."""
    exact = case.dtype == "float32"
    fields = {"loss": 1e-5 if exact else 1e-2} | (
        {} if case.lora else {"grad_norm": 1e-4 if exact else 5e-2}  # adapters start at random
    )
    problems = []
    for field, tolerance in fields.items():
        reference: dict[int, tuple[str, float]] = {}
        for name, rounds in results.all.items():
            contender = Contender.parse(name)
            value = rounds[0].get(field)
            if value is None or "dataset" in contender.features:
                continue
            # Contenders with rows of other lengths have other chats in a step.
            chats = case.chats(contender.rows)
            first, expected = reference.setdefault(chats, (name, value))
            if not abs(value / expected - 1) <= tolerance:
                problems.append(f"{name}: {field} {value:.7g}, and {expected:.7g} of {first}")
    return problems
