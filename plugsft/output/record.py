"""Writes a run's recipe.toml, run.json and metrics.jsonl; start/ makes the report of them."""

import importlib.metadata
import json
import platform
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from ..base.atomic import discard, is_published, list_checkpoints, write_text, writing
from ..base.console import say
from ..base.machine import Machine, peak_memory
from ..hooks import hookimpl
from ..recipe.parse import resolved
from ..recipe.tables import Recipe
from ..registry.active import Active, options_of
from ..tokens.store import Tokens
from .metrics import SAMPLES, read_metrics

AVERAGED = (
    "step_seconds",
    "data_wait_seconds",
    "tokens",
    "trained_tokens",
    "padding",
    "examples_per_micro_batch",
    "imbalance",
)
"""Metrics of each step that the record averages."""
SHOWN = 2
"""Most metrics of a plugin that the console shows: the first that it declares."""
PACKAGES = ("plugsft", "torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy")


class Record:
    """The record of a run; the main process writes it during the run."""

    def __init__(self, recipe: Recipe, machine: Machine, active: Active) -> None:
        self.recipe, self.machine, self.active = recipe, machine, active
        self.folder = recipe.folder
        self._metrics: TextIO | None = None
        self._started = time.perf_counter()
        self._rows: list[list[float]] = []
        self._earlier = 0
        """Steps before a resume, perhaps at another speed."""
        self.writes = machine.is_main
        self.run: dict[str, Any] = {
            "format": 1,
            "status": "running",
            "reason": None,
            "name": recipe.folder.name,
            "output": recipe.output,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "machine": {
                "host": machine.host,
                "system": machine.system,
                "cores": machine.cores,
                "memory_gib": round(machine.memory / 2**30, 1),
            },
        }

    def open(self, done: int, evaluates: bool) -> None:
        """Begin in place of an earlier run's results, or resume after step `done`.

        Lines of steps after `done` are removed, and those of its evaluation if the run begins with
        it. Prepared data stays.
        """
        if not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write()  # marks the other files as a run's
        if not done:
            clear(self.folder)
        (self.folder / "report.html").unlink(missing_ok=True)
        write_text(self.folder / "recipe.toml", resolved(self.recipe))
        path, samples = self.folder / "metrics.jsonl", self.folder / SAMPLES
        lines = keep_lines(path, done, evaluates)
        if not keep_lines(samples, done, evaluates):
            samples.unlink()
        # The means at the end count the steps before a resume, too.
        known = [line for line in lines if all(line.get(name) is not None for name in AVERAGED)]
        self._rows = [[line[name] for name in AVERAGED] for line in known]
        self._earlier = len(self._rows)
        self._evaluated = {line["eval_tokens"] for line in lines if "eval_tokens" in line}
        self._metrics = path.open("a", encoding="utf8")

    @hookimpl
    def logged(self, step: int, metrics: dict[str, Any]) -> None:
        """Write a line to metrics.jsonl, and every `log_every` steps to the console."""
        if self._metrics is None:
            return
        # JSON has no NaN: null instead.
        line = {
            name: None if isinstance(value, float) and not np.isfinite(value) else value
            for name, value in metrics.items()
        }
        with writing(self.folder / "metrics.jsonl"):
            self._metrics.write(json.dumps({"step": step, **line}) + "\n")
            self._metrics.flush()
        final = self.run.setdefault("final", {})
        if "eval_loss" in metrics:
            final["eval_loss"] = line["eval_loss"]
            if self._evaluated - {line["eval_tokens"]}:
                say("warning: [eval] has other rows than before this resume: losses differ by them")
                self._evaluated.clear()
            say(f"step {step}  eval loss {metrics['eval_loss']:.4f}{self._show(metrics, 'eval_')}")
            return
        self.run["steps"]["done"] = step
        final["loss"] = line["loss"]
        self._rows.append([metrics[name] for name in AVERAGED])
        total = self.run["steps"]["total"]
        if step % self.recipe.train.log_every == 0 or step in (1, total):
            say(
                f"step {step}/{total}  epoch {metrics['epoch']:.2f}  loss {metrics['loss']:.4f}"
                f"{self._show(metrics)}  "
                f"grad norm {metrics['grad_norm']:.3f}  lr {metrics['learning_rate']:.2e}  "
                f"{metrics['tokens_per_second']:,.0f} tokens/s  {metrics['memory_gib']:.1f} GiB  "
                f"left {timedelta(seconds=round((total - step) * self.step_seconds()))}"
            )

    def end(self, status: str, reason: str | None) -> None:
        """Write how the run ended and its means, before the plugins hear of it."""
        self.run.update(status=status, reason=reason)
        if self._metrics is None:
            return
        self._metrics.close()
        self.run["seconds"] = round(time.perf_counter() - self._started, 2)
        if self._rows:
            self.run |= _means(self._rows)
            self.run["memory"] = {"peak_gib": round(memory_gib(), 3)}
        self.write()

    @property
    def begun(self) -> bool:
        """Whether this process has begun to write the record of this run."""
        return self._metrics is not None

    def close(self) -> None:
        """Add the plugins' summaries; print what is new."""
        # After the notice `finished`, in which a plugin may still compute its summary.
        before, now = self.run.get("plugins", []), self.plugins()
        for plugin in now:
            if plugin not in before:
                say(f"plugin {plugin['name']}: {plugin['summary']}")
        self.run["plugins"] = now
        if self.run["status"] == "completed" and self.run["reason"]:
            say(f"stopped after step {self.run['steps']['done']}: {self.run['reason']}")
        if self._rows:
            say(
                "batches: padding {padding:.0%}, {examples_per_micro_batch:.1f} examples per "
                "micro-batch, waited for data {data_wait_share:.1%} of the time; busiest rank "
                "{imbalance:.2f}x the average".format(**self.run["batches"])
            )

    def write(self) -> None:
        """Write run.json with its current content; facts of plugins that JSON lacks, as text."""
        if self.writes:
            text = json.dumps(self.run, indent=1, default=str) + "\n"
            write_text(self.folder / "run.json", text)

    def plugins(self) -> list[dict[str, Any]]:
        """Return the active plugins with their options and summaries."""
        summaries = self.active.summaries()
        return [
            {
                "name": name,
                "origin": self.active.found[name].origin,
                "options": options_of(plugin),
                "summary": summaries[name],
            }
            for name, plugin in self.active.plugins.items()
        ]

    def _show(self, metrics: dict[str, Any], prefix: str = "") -> str:
        """Format the plugins' metrics that the console shows."""
        text = ""
        for names in self.active.declared_metrics.values():
            for name in names[:SHOWN]:
                if prefix + name in metrics:
                    text += f"  {name} {metrics[prefix + name]:.3f}"
        return text

    def step_seconds(self) -> float:
        """Return the mean time of the last 50 steps; 0 before the first one since the start."""
        own = [seconds for seconds, *_ in self._rows[self._earlier :]]
        recent = (own[1:] or own)[-50:]  # the first step is slower
        return sum(recent) / max(1, len(recent))


def keep_lines(path: Path, done: int, evaluates: bool = False) -> list[dict[str, Any]]:
    """Remove the lines of steps after `done` from a file of JSON lines; return the others.

    `evaluates`: remove those of the evaluation of step `done` too, which have no loss.
    """
    known = read_metrics(path) if done else []
    if known and path.read_bytes().count(b"\n") > len(known):
        say(f"warning: {path}: lines that cannot be read are left out")
    lines = [line for line in known if line["step"] <= done]
    if evaluates:
        lines = [line for line in lines if line["step"] < done or "loss" in line]
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
    return lines


def clear(folder: Path) -> None:
    """Remove an earlier run's checkpoints and model, but no file of the user."""
    for path in (*list_checkpoints(folder / "checkpoints"), folder / "model"):
        if is_published(path):
            discard(path)


def _means(measured: list[list[float]]) -> dict[str, dict[str, float]]:
    """Return throughput and batch statistics over all steps."""
    seconds, waited, tokens, trained, padding, examples, imbalance = np.array(measured).T
    throughput = {
        "tokens_per_second": tokens.sum() / seconds.sum(),
        "trained_tokens_per_second": trained.sum() / seconds.sum(),
        "step_seconds_median": np.median(seconds),
    }
    batches = {
        "padding": 1 - tokens.sum() / (tokens / (1 - padding)).sum(),
        "examples_per_micro_batch": examples.mean(),
        "data_wait_share": waited.sum() / seconds.sum(),
        "imbalance": imbalance.mean(),
    }
    return {
        table: {name: round(float(value), 4) for name, value in means.items()}
        for table, means in (("throughput", throughput), ("batches", batches))
    }


def data_facts(tokens: Tokens) -> dict[str, Any]:
    """Return the facts of a data set for the record."""
    lengths = tokens.lengths
    width = max(1, -(-int(lengths.max() + 1 - lengths.min()) // 24))
    edges = np.arange(lengths.min(), lengths.max() + width + 1, width)
    counts, _ = np.histogram(lengths, edges)
    return {
        **tokens.facts,
        "lengths": {
            "edges": edges.tolist(),
            "counts": counts.tolist(),
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": round(float(lengths.mean()), 1),
            "p95": float(np.percentile(lengths, 95)),
            "max": int(lengths.max()),
        },
    }


def memory_gib() -> float:
    """Return the peak memory of this process, on the GPU if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return peak_memory() / 2**30


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python and of the packages that a record names."""
    names = dict.fromkeys((*PACKAGES, *more))
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }
