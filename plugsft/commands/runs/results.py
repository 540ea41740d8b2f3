"""Print the results of a run in a few lines."""

import shlex
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.text import Text

from ...base.console import out
from ...base.errors import RecipeError
from ...output.folder import is_locked, newest_checkpoint
from ...output.report import read_metrics, read_record


def show_run(folder: Path) -> None:
    """Print the results of a run."""
    for name, text in summarize(folder):
        out.print(Text.assemble((f"{name:<9}", "bold"), str(text)))


def summarize(folder: Path) -> list[tuple[str, str]]:
    """Return the results of a run: names and texts."""
    try:
        return [*_summary(read_record(folder), folder)]
    except OSError as error:
        raise RecipeError(f"{folder}: is no run's output: it has no readable run.json") from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise RecipeError(f"{folder / 'run.json'}: was not written by plugsft") from error


def _summary(run: dict[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    steps, final, speed = (run.get(part) or {} for part in ("steps", "final", "throughput"))
    status, reason = run["status"], run.get("reason")
    if status == "running":
        # The record is written at the start and the end; between them, the metrics are newer.
        lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
        steps, final = (steps and steps | {"done": len(lines)}), lines[-1] if lines else final
        if not is_locked(folder):
            option = "--resume" if newest_checkpoint(folder / "checkpoints") else "--overwrite"
            recipe = shlex.quote(str(folder / "recipe.toml"))
            status, reason = "killed", f"continue with plugsft {recipe} {option}"
    yield "status", status + (f": {reason}" if reason else "")
    yield "started", run["started"]
    if steps:
        yield "steps", f"{steps['done']:,} of {steps['total']:,}, {steps['per_epoch']:,} an epoch"
    if (loss := final.get("loss")) is not None:
        yield "loss", f"{loss:.4f}"
    if (loss := final.get("eval_loss")) is not None:
        yield "eval", f"{loss:.4f}"
    if "seconds" in run:
        yield "time", str(timedelta(seconds=round(run["seconds"])))
    if speed:
        yield "speed", f"{speed['tokens_per_second']:,.0f} tokens/s"
    if "memory" in run:
        yield "memory", f"{run['memory']['peak_gib']:.1f} GiB peak"
    machine = run["machine"]
    yield (
        "machine",
        ", ".join(str(machine[key]) for key in ("host", "device", "launcher") if key in machine),
    )
    if model := run.get("model"):
        count = f"{model['parameters']:,} parameters, {model['dtype']}"
        yield "model", f"{model['type']} ({model['source']}), {count}"
    for name in ("data", "eval"):
        if facts := run.get(name):
            yield name, _data(facts)
            if mask := facts.get("mask"):
                yield "mask", mask
    for plugin in run.get("plugins", ()):
        yield "plugin", f"{plugin['name']}: {plugin['summary']}"
    for warning in run.get("warnings", ()):
        yield "warning", warning
    if (folder / "report.html").is_file():
        yield "report", str(folder / "report.html")
    if (folder / "model").is_dir():
        yield "talk", f"plugsft chat {shlex.quote(str(folder))}"


def _data(facts: dict[str, Any]) -> str:
    names = ", ".join(source["name"] for source in facts["sources"])
    share = facts["trained_tokens"] / facts["tokens"]
    bad = sum(entry["count"] for entry in facts["bad_rows"].values())
    return (
        f"{names}: {facts['examples']:,} examples, {facts['tokens']:,} tokens, {share:.0%} "
        f"trained, {bad:,} bad rows, {facts['truncated']['count']:,} truncated"
    )
