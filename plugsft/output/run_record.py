"""What a run's folder records: run.json and metrics.jsonl, with the fields that readers use.

`plugsft show`, `diff`, the report and the model card only format a RunRecord.
"""

from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..recipe.parse import flatten
from .metrics import read_metrics

LAST_VALUES = ("loss", "eval_loss", "eval_accuracy")
COSTS = {
    "speed": ("throughput", "tokens_per_second", "{:,.0f} tokens/s"),
    "memory": ("memory", "peak_gib", "{:.1f} GiB peak"),
}
"""Name -> place in run.json, and format with the unit."""
NOT_CURVES = {"step", "epoch", "eval_tokens"}
NOT_SHOWN = (
    "key",
    "format",
    "index",
    "shards",
    "pairs",
    "largest_id",
    "lengths.edges",
    "lengths.counts",
)
"""Beginnings of keys of the data's table that no person reads."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Numbers = dict[str, Number | None]
Points = list[tuple[float, float | None]]


class RecordedTable(BaseModel):
    """A table of run.json; null is the default, and other keys stay."""

    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        return {key: value for key, value in table.items() if value is not None}


class Steps(RecordedTable):
    """Steps that are done, of the whole run, and of an epoch."""

    done: Count = 0
    total: Count = 0
    per_epoch: Count = 0


class RecordedMachine(RecordedTable):
    """Where a run trained."""

    host: str = ""
    device: str = ""
    launcher: str = ""
    gpus: list[str] = []
    cores: Count = 0
    ranks: Count = 1


class RecordedModel(RecordedTable):
    """What a run trained."""

    source: str = ""
    type: str = ""
    dtype: str = ""
    parameters: Count = 0
    trained_parameters: Count = 0
    sees: bool = False
    kept: dict[str, Count] = {}
    unused: list[str] = []


class RowCount(RecordedTable):
    """How many rows have something in common."""

    count: Count = 0


class RecordedSource(RecordedTable):
    """A source of the data."""

    name: str
    weight: Number = 1.0
    examples: Count = 0


class RecordedData(RecordedTable):
    """The rows of a run, or of its evaluation."""

    rows: Count = 0
    examples: Count = 0
    tokens: Count = 0
    trained_tokens: Count = 0
    left_out: Count = 0
    truncated: RowCount = RowCount()
    sources: list[RecordedSource] = []
    mask: str = ""
    key_parts: dict[str, Any] = {}

    def __str__(self) -> str:
        share = self.trained_tokens / max(1, self.tokens)
        return (
            f"{self.examples:,} examples, {self.tokens:,} tokens, {share:.0%} trained, "
            f"{self.left_out:,} left out, {self.truncated.count:,} truncated"
        )


class RecordedPlugin(RecordedTable):
    """A plugin of a run."""

    name: str
    origin: str = ""
    options: dict[str, Any] = {}
    summary: str = ""


class Profile(RecordedTable):
    """What a profiler found."""

    shares: dict[str, Number] = {}
    findings: list[str] = []


class RunRecord(RecordedTable):
    """A run's record; what it does not know has a default."""

    folder: Path = Path()
    facts: dict[str, Any] = {}
    """The content of run.json."""
    format: Count = 0
    status: str
    reason: str = ""
    name: str = "run"
    started: str = "no date"
    seconds: Annotated[Number, Field(ge=0, lt=1e9)] | None = None
    precision: str = ""
    versions: dict[str, str] = {}
    steps: Steps = Steps()
    machine: RecordedMachine = RecordedMachine()
    model: RecordedModel = RecordedModel()
    data: RecordedData | None = None
    eval: RecordedData | None = None
    plugins: list[RecordedPlugin] = []
    throughput: Numbers = {}
    memory: Numbers = {}
    profile: Profile = Profile()

    @property
    def figures(self) -> dict[str, str]:
        """Results and costs with their units, as far as they are known."""
        steps = self.steps
        epochs = steps.done / max(1, steps.per_epoch)
        known = {"steps": f"{steps.done:,} of {steps.total:,}, {epochs:.2f} epochs"}
        for name in LAST_VALUES:
            points = self.series.get(name, [(0, None)])
            (first, start), (step, last) = points[0], points[-1]
            if last is not None:
                baseline = f" ({start:.4f} before step 1)" if first == 0 < step and start else ""
                known[label(name)] = f"{last:.4f}{baseline}"
        for name, (table, key, form) in COSTS.items():
            value = getattr(self, table).get(key)
            if value is not None:
                known[name] = form.format(value)
        if self.seconds is not None:
            known["time"] = str(timedelta(seconds=round(self.seconds)))
        return known

    def table(self, name: str) -> dict[str, Any]:
        """The values of a table of run.json that are not empty, by readable names."""
        value = self.facts.get(name)
        flat = flatten(value) if isinstance(value, dict) else {name: value}
        shown = {key: flat[key] for key in flat if not key.startswith(NOT_SHOWN)}
        for key, value in shown.items():
            if key.endswith(".rows") and isinstance(value, list):  # counted from 1 for people
                shown[key] = ", ".join(str(row + 1) for row in value if isinstance(row, int))
        named = shown if name == "versions" else {label(key): shown[key] for key in shown}
        return {key: value for key, value in named.items() if value not in (None, "", [], {})}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that have a step."""
        return read_metrics(self.folder / "metrics.jsonl")

    @cached_property
    def series(self) -> dict[str, Points]:
        """The points of each metric, the losses first."""
        series: dict[str, Points] = {}
        for line in self.metrics:
            for key, value in line.items():
                series.setdefault(key, []).append((line["step"], number(value)))
        known = (key for key in series if key not in NOT_CURVES and finite(series[key]))
        return {key: series[key] for key in sorted(known, key=lambda key: not key.endswith("loss"))}


def label(key: str) -> str:
    """Name a key of run.json or of a metric as people do."""
    return key.replace("_", " ").replace(" gib", ", GiB").replace(".", ", ")


def number(value: object) -> float | None:
    """A finite number, or None, which a curve shows as a gap."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # False for NaN and the infinities, and exact for integers of any size.
    return value if abs(value) < 1e300 else None


def finite(points: Points) -> list[tuple[float, float]]:
    """The points without gaps."""
    return [(step, value) for step, value in points if value is not None]


def figure(value: Any) -> str:
    """Write a value of a record or a recipe in few digits."""
    match value:
        case None:
            return "-"
        case bool():
            return str(value).lower()
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
        case list():
            return ", ".join(map(figure, value))
        case dict():
            return ", ".join(f"{name} {figure(each)}" for name, each in value.items())
    return str(value)
