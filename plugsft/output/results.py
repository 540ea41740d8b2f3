"""Print the results of a run in a few lines."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from ..base.console import out
from .folder import how_to_continue, read_run
from .run_record import Data, RunRecord


def show_run(folder: Path) -> None:
    """Print the results of a run."""
    for name, text in summarize(folder):
        out.print(Text.assemble((f"{name:<9}", "bold"), text))


def summarize(folder: Path) -> list[tuple[str, str]]:
    """Return the results of a run: names and texts."""
    return [(name, text) for name, text in _summary(read_run(folder)) if text]


def _summary(run: RunRecord) -> Iterator[tuple[str, str]]:
    folder, steps, machine, model = run.folder, run.steps, run.machine, run.model
    reason = f"continue with {how_to_continue(folder)}" if run.status == "killed" else run.reason
    yield "status", run.status + (f": {reason}" if reason else "")
    yield "started", run.started
    if steps.total:
        yield "steps", f"{steps.done:,} of {steps.total:,}, {steps.per_epoch:,} an epoch"
    for name, _, text in run.figures:
        yield name, text
    yield "machine", ", ".join(filter(None, (machine.host, machine.device, machine.launcher)))
    if model.type:
        count = f"{model.parameters:,} parameters, {model.dtype}"
        yield "model", f"{model.type} ({model.source}), {count}"
    for name, data in (("data", run.data), ("eval", run.eval)):
        if data:
            yield name, f"{', '.join(source.name for source in data.sources)}: {describe(data)}"
            yield "mask", data.mask or ""
    for plugin in run.plugins:
        yield "plugin", f"{plugin.name}: {plugin.summary}"
    for warning in run.warnings:
        yield "warning", warning
    if (folder / "report.html").is_file():
        yield "report", str(folder / "report.html")
    if (folder / "model").is_dir():
        yield "talk", f"plugsft chat {shlex.quote(str(folder))}"


def describe(data: Data) -> str:
    """Return the counts of a data set in words."""
    share = data.trained_tokens / max(1, data.tokens)
    bad = sum(rows.count for rows in data.bad_rows.values())
    return (
        f"{data.examples:,} examples, {data.tokens:,} tokens, {share:.0%} trained, {bad:,} bad "
        f"rows, {data.truncated.count:,} truncated"
    )
