"""What `plugsft.api.prepare`, `inspect` and `load_run` return."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import PlugsftError
from .messages import errors

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..audit.inspect_data import InspectedRow
    from ..audit.rows import Audit
    from ..output.run_record import RunRecord


@dataclass(frozen=True)
class PreparedData:
    """Tokens on disk, ready for training."""

    folder: Path
    """The folder of the training tokens; `data.tokens` of a recipe takes it."""
    rows: int
    examples: int
    tokens: int
    trained_tokens: int
    bad_rows: dict[str, int]
    """Reason -> number of rows that cannot be used."""
    truncated: int
    """Examples that were cut to data.max_length."""


@dataclass(frozen=True)
class InspectedSource:
    """Counts and findings of a source, from all rows or a sample."""

    name: str
    rows: int
    """Rows of the whole source."""
    sampled: int
    """Rows that were read."""
    examples: int
    tokens: int
    trained_tokens: int
    lengths: list[int]
    """Tokens of each example, before long ones are cut or dropped."""
    bad_rows: dict[str, list[int]]
    """Reason -> rows that cannot be used."""
    facts: list[tuple[str, str]]
    """Labels and texts, as `plugsft inspect` prints them."""
    warnings: list[str]
    errors: list[str]
    """Problems that would stop the run or make training wrong."""

    def _repr_html_(self) -> str:
        lines = [*self.facts, *(("warning", text) for text in self.warnings)]
        lines += [("error", text) for text in self.errors]
        title = f"{self.sampled:,} of {self.rows:,} rows"
        return table_html([(self.name, title), *lines])


@dataclass(frozen=True)
class Inspection:
    """Rows token by token, and findings about each source."""

    rows: list[InspectedRow]
    sources: list[InspectedSource]

    @property
    def errors(self) -> list[str]:
        """Problems of all sources: they would stop or spoil a run."""
        return [f"{source.name}: {error}" for source in self.sources for error in source.errors]

    @property
    def warnings(self) -> list[str]:
        """Warnings of all sources."""
        return [f"{source.name}: {text}" for source in self.sources for text in source.warnings]

    def _repr_html_(self) -> str:
        rows = [row._repr_html_() for row in self.rows]
        return "".join([*rows, *(source._repr_html_() for source in self.sources)])


def inspected_source(audit: Audit) -> InspectedSource:
    """Return the counts and findings of an audited source."""
    sample = audit.sample
    return InspectedSource(
        audit.name,
        len(audit.rows),
        len(sample.rows),
        sample.shard.examples,
        sample.shard.tokens,
        sample.shard.trained,
        audit.lengths.tolist(),
        sample.shard.bad,
        audit.facts,
        audit.warnings,
        audit.errors,
    )


def table_html(lines: Sequence[tuple[str, str]]) -> str:
    """Return names and texts as a table for notebooks."""
    left = "style='text-align:left'"
    rows = "".join(
        f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(text)}</td></tr>"
        for name, text in lines
    )
    return f"<table>{rows}</table>"


Turns = list[dict[str, str]]


class FinishedRun:
    """A run's output folder: status, figures, metrics, and the model.

    run = plugsft.api.load_run("runs/my-model")
    print(run.status, run.metrics["loss"].iloc[-1])
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def record(self) -> dict[str, Any]:
        """The content of run.json, as it is now."""
        return self._run.facts

    @property
    def status(self) -> str:
        """completed, stopped, failed, running, or killed."""
        return self._run.status

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe's tables, with all defaults."""
        from ..output.folder import read_recipe

        return read_recipe(self.folder)

    @property
    def report(self) -> Path:
        """The page with curves and settings."""
        return self.folder / "report.html"

    @property
    def metrics(self) -> DataFrame:
        """The metrics, with a row for each step.

        run.metrics[["step", "loss", "learning_rate"]]
        """
        return self._table("loss")

    @property
    def evaluations(self) -> DataFrame:
        """The metrics of each evaluation; no rows without [eval]."""
        return self._table("eval_loss")

    def model(self) -> PreTrainedModel:
        """Return the model as transformers loads it, with its adapters.

        It is loaded once, onto a GPU if available, and shared with `generate`.
        """
        with errors():
            return self._loaded[0]

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""
        with errors():
            return self._loaded[1]

    def unload(self) -> None:
        """Free the memory of the loaded model."""
        from .isolation import free_memory

        vars(self).pop("_loaded", None)
        free_memory()

    def generate(
        self,
        prompts: str | Sequence[str | Turns],
        *,
        system: str = "",
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
    ) -> list[str]:
        """Return the model's answers to questions or chats; see `plugsft.api.generate`.

        run.generate(["What is a checkpoint?"], max_tokens=64)
        """
        from ..export.answers import Answers

        options = Answers(
            max_tokens=max_tokens,
            temperature=temperature,
            system=system,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
        prompts = [prompts] if isinstance(prompts, str) else prompts
        _ensure_prompts(prompts)
        with errors():
            model, tokenizer = self._loaded
            from ..export.chat import make_speaker
            from .isolation import isolated

            with isolated():
                speaker = make_speaker(model, tokenizer, options)
                return speaker.answer_all(prompts)

    @cached_property
    def _loaded(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        from ..export.answers import Answers
        from ..export.folder import model_folder

        folder = model_folder(self.folder)
        from ..export.chat import open_speaker
        from .isolation import isolated

        with isolated():
            speaker = open_speaker(folder, Answers())
            return speaker.model, speaker.tokenizer

    @property
    def _run(self) -> RunRecord:
        from ..output.folder import read_run

        return read_run(self.folder)

    def _figures(self) -> list[tuple[str, str]]:
        from ..output.results import summarize

        return [pair for pair in summarize(self.folder) if pair[0] not in ("machine", "talk")]

    def _table(self, name: str) -> DataFrame:
        import pandas

        rows = [line for line in self._run.metrics if name in line]
        return pandas.DataFrame(rows, columns=None if rows else ["step", name])

    def __repr__(self) -> str:
        try:
            figures = dict(self._figures())
        except PlugsftError:  # no run yet, or a damaged one
            return f"<run {self.folder}>"
        names = [name for name in ("steps", "loss", "eval loss", "time") if name in figures]
        rest = "".join(f", {name} {figures[name]}" for name in names)
        return f"<run {self.folder}: {figures['status']}{rest}>"

    def _repr_html_(self) -> str:
        return table_html([("run", str(self.folder)), *self._figures()])


def _ensure_prompts(prompts: object) -> None:
    """Refuse anything but a list of questions and chats."""
    for prompt in prompts if isinstance(prompts, list | tuple) else [None]:
        turns = prompt if isinstance(prompt, list) else [] if isinstance(prompt, str) else [None]
        for turn in turns:
            if not (isinstance(turn, dict) and {"role", "content"} <= turn.keys()):
                raise PlugsftError(
                    f"prompts={prompts!r}: give a text, or a list of texts and chats; a chat is a "
                    'list: [[{"role": "user", "content": "..."}]]'
                )
