"""What a run's folder records: run.json and metrics.jsonl, with the fields that readers use.

`plugsft show`, `diff`, the report and the model card only format a RunRecord.
"""

from collections.abc import Iterator
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..base.limits import TABLES, check_depth, read_json_object
from .metrics import read_metrics

FIGURES = {
    "loss": ("loss of the last step", "final", "loss", "{:.4f}"),
    "eval": ("evaluation loss", "final", "eval_loss", "{:.4f}"),
    "speed": ("speed", "throughput", "tokens_per_second", "{:,.0f} tokens/s"),
    "memory": ("memory of a process", "memory", "peak_gib", "{:.1f} GiB peak"),
}
"""Short name -> name, place in run.json, and format with the unit."""
NOT_CURVES = {"step", "epoch", "eval_tokens"}

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Numbers = dict[str, Number | None]
Points = list[tuple[float, float | None]]


class Table(BaseModel):
    """A table of run.json; null is the default, and other keys stay."""

    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        return {key: value for key, value in table.items() if value is not None}


class Steps(Table):
    """Steps that are done, of the whole run, and of an epoch."""

    done: Count = 0
    total: Count = 0
    per_epoch: Count = 0


class Machine(Table):
    """Where a run trained."""

    host: str = ""
    device: str = ""
    launcher: str = ""
    gpus: list[str] = []
    cores: Count = 0
    ranks: Count = 1


class Model(Table):
    """What a run trained."""

    source: str = ""
    type: str = ""
    dtype: str = ""
    parameters: Count = 0
    trained_parameters: Count = 0


class RowCount(Table):
    """How many rows have something in common."""

    count: Count = 0


class Source(Table):
    """A source of the data."""

    name: str
    weight: Number = 1.0
    examples: Count = 0


class Lengths(Table):
    """Tokens of an example."""

    edges: list[Number] = []
    counts: list[Number] = []
    median: Number | None = None
    p95: Number | None = None
    max: Count | None = None


class Data(Table):
    """The rows of a run, or of its evaluation."""

    rows: Count = 0
    examples: Count = 0
    tokens: Count = 0
    trained_tokens: Count = 0
    pairs: Count | None = None
    bad_rows: dict[str, RowCount] = {}
    truncated: RowCount = RowCount()
    sources: list[Source] = []
    engines: dict[str, Count] = {}
    lengths: Lengths = Lengths()
    mask: str | None = None
    key: str = ""
    key_parts: dict[str, Any] = {}


class Plugin(Table):
    """A plugin of a run."""

    name: str
    origin: str = ""
    options: dict[str, Any] = {}
    summary: str | None = None


class Profile(Table):
    """What a profiler found."""

    shares: dict[str, Number] = {}
    findings: list[str] = []


class RunRecord(Table):
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
    warnings: list[str] = []
    versions: dict[str, str] = {}
    steps: Steps = Steps()
    machine: Machine = Machine()
    model: Model = Model()
    data: Data | None = None
    eval: Data | None = None
    plugins: list[Plugin] = []
    final: Numbers = {}
    throughput: Numbers = {}
    batches: Numbers = {}
    memory: Numbers = {}
    profile: Profile = Profile()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a run's record; raise ValueError if plugsft did not write it."""
        facts = check_depth(read_json_object(folder / "run.json"), TABLES)
        try:
            return cls.model_validate({**facts, "facts": facts, "folder": folder})
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            place = ".".join(map(str, wrong["loc"]))
            raise ValueError(f"was not written by this plugsft: {place}: {wrong['msg']}") from error

    @property
    def figures(self) -> Iterator[tuple[str, str, str]]:
        """Results and costs as far as they are known: a short name, the name, and the text."""
        for short, (name, table, key, form) in FIGURES.items():
            value = getattr(self, table).get(key)
            if value is not None:
                yield short, name, form.format(value)
        if self.seconds is not None:
            yield "time", "time", str(timedelta(seconds=round(self.seconds)))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that have a step."""
        return read_metrics(self.folder / "metrics.jsonl")

    @cached_property
    def series(self) -> dict[str, Points]:
        """The points of each metric, the losses first."""
        series: dict[str, Points] = {}
        for line in self.metrics:
            step = line["step"]
            for key, value in line.items():
                points = series.setdefault(key, [])
                # A resumed run repeats steps after its checkpoint: the later values count.
                while points and points[-1][0] >= step:
                    points.pop()
                points.append((step, number(value)))
        known = (key for key in series if key not in NOT_CURVES and finite(series[key]))
        # Of too many curves, the last ones are left out: never a loss.
        return {key: series[key] for key in sorted(known, key=lambda key: not key.endswith("loss"))}


def number(value: object) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # False for NaN and the infinities, and exact for integers of any size.
    return value if abs(value) < 1e300 else None


def finite(points: Points) -> list[tuple[float, float]]:
    """Return the points that have a value."""
    return [(step, value) for step, value in points if value is not None]
