"""A run's output folder, read: figures, metrics as tables, and the model."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import PlugsftError
from .data import table_html
from .messages import errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pandas import DataFrame
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Turns = list[dict[str, str]]


class FinishedRun:
    """A run's output folder: status, figures, metrics, and the model.

    run = plugsft.load_run("runs/my-model")
    print(run.status, run.metrics["loss"].iloc[-1])
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def record(self) -> dict[str, Any]:
        """The content of run.json, as it is now."""
        from ..output.folder import read_run

        return read_run(self.folder).facts

    @property
    def status(self) -> str:
        """completed, stopped, failed, running, or killed."""
        return str(self.record["status"])

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe's tables, with all defaults."""
        from ..recipe.read import read

        return read(self.folder / "recipe.toml")

    @property
    def report(self) -> Path:
        """The page with curves and settings."""
        return self.folder / "report.html"

    @property
    def metrics(self) -> "DataFrame":
        """The metrics, with a row for each step.

        run.metrics[["step", "loss", "learning_rate"]]
        """
        return self._table("loss")

    @property
    def evaluations(self) -> "DataFrame":
        """The metrics of each evaluation; no rows without [eval]."""
        return self._table("eval_loss")

    def model(self) -> "PreTrainedModel":
        """Return the model as transformers loads it, with its adapters.

        It is loaded once, onto a GPU if available, and shared with `generate`.
        """
        with errors():
            return self._loaded[0]

    def tokenizer(self) -> "PreTrainedTokenizerBase":
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
        prompts: "str | Sequence[str | Turns]",
        *,
        system: str = "",
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
    ) -> list[str]:
        """Return the model's answers to questions or chats; see `plugsft.generate`.

        run.generate(["What is a checkpoint?"], max_tokens=64)
        """
        from ..export.answers import Answers

        options = Answers(max_tokens, temperature, system, top_p, top_k, repetition_penalty, seed)
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
    def _loaded(self) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        from ..export.answers import Answers
        from ..export.folder import model_folder

        folder = model_folder(self.folder)
        from ..export.chat import open_speaker
        from .isolation import isolated

        with isolated():
            speaker = open_speaker(folder, Answers())
            return speaker.model, speaker.tokenizer

    def _figures(self) -> list[tuple[str, str]]:
        from ..output.results import summarize

        return [pair for pair in summarize(self.folder) if pair[0] not in ("machine", "talk")]

    def _table(self, name: str) -> "DataFrame":
        import pandas

        from ..output.folder import read_run

        rows = [line for line in read_run(self.folder).metrics if name in line]
        return pandas.DataFrame(rows, columns=None if rows else ["step", name])

    def __repr__(self) -> str:
        try:
            figures = dict(self._figures())
        except PlugsftError:  # no run yet, or a damaged one
            return f"<run {self.folder}>"
        names = [name for name in ("steps", "loss", "eval", "time") if name in figures]
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
