"""Answer fixed prompts during the run: samples over time, in a file and in the report."""

import json
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat

from plugsft import Place, Recipe, RecipeError, Run, hookimpl, plugin, reason_of, state

FILE = "samples.jsonl"
"""File in the output that the report reads; a resumed run removes the lines of later steps."""

Prompt = str | list[dict[str, str]]
"""A question, or the messages before an answer."""


@plugin(provides={"sampled_answers": None})
class Samples:
    """Answer fixed prompts during the run: samples over time, in a file and in the report.

    Training does not change: its random numbers are restored.
    """

    prompts: list[str] = field(default_factory=list)
    """Questions that the model answers."""
    file: Place | None = None
    """File of more prompts: lines of text, or .jsonl with "prompt" or "messages" in each line."""
    every: Annotated[int, Field(ge=1)] | None = None
    """Steps between samples; the last step has some too."""
    evaluations: bool = True
    """Whether to answer after each evaluation as well; eval.at_start gives the untrained model's
    answers."""
    max_tokens: Annotated[int, Field(ge=1)] = 64
    """Tokens of the longest answer."""
    temperature: NonNegativeFloat = 0.0
    """0: always the likeliest token."""

    chats: list[Prompt] = state([])
    answered: int | None = state()
    """The last step with samples; 0 is before step 1."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Read the prompts; refuse a recipe that would answer none."""
        if self.every is None and not (self.evaluations and recipe.eval):
            raise RecipeError("the run has no evaluations to answer after; set every, in steps")
        read = read_prompts(Path(self.file)) if self.file else []
        self.chats = [*self.prompts, *read]
        if not self.chats:
            raise RecipeError('no prompts; set prompts = ["..."], or file')
        if not all(text_of(prompt).strip() for prompt in self.chats):
            raise RecipeError("prompts: an empty prompt has no answer; remove it")

    @hookimpl
    def logged(self, run: Run, metrics: dict[str, Any]) -> None:
        """Answer the prompts after an evaluation, or after every `every` steps: it is not timed."""
        is_due = self.every and (run.step % self.every == 0 or run.step == run.steps)
        if "eval_loss" in metrics:
            is_due = self.evaluations
        if is_due:
            self._answer(run)

    @hookimpl
    def summary(self) -> str | None:
        """Report how many prompts were answered, and when last."""
        if self.answered is None:
            return None
        return f"{len(self.chats)} prompts answered, the last time after step {self.answered}"

    def _answer(self, run: Run) -> None:
        """Answer the prompts, unless that is done after this step."""
        if self.answered == run.step:
            return
        answers = run.model.generate(
            [with_system(prompt, run.recipe.data.system) for prompt in self.chats],
            self.max_tokens,
            self.temperature,
        )
        lines = [
            json.dumps({"step": run.step, "prompt": text_of(prompt), "answer": answer}) + "\n"
            for prompt, answer in zip(self.chats, answers, strict=True)
        ]
        with run.ranks.agree(f"writing {FILE}"):
            if run.is_main:
                with (run.output / FILE).open("a", encoding="utf8") as file:
                    file.writelines(lines)
        self.answered = run.step


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a file, one in each line that is not blank."""
    try:
        lines = path.read_text(encoding="utf8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"file: {path} cannot be read: {reason_of(error)}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line.strip() for _, line in numbered]
    return [read_row(line, f"file: {path}, line {number}") for number, line in numbered]


def read_row(line: str, where: str) -> Prompt:
    """Return the prompt of a row; answers at the end of its messages are left out."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{where}: is no JSON: {reason_of(error)}") from error
    prompt = row.get("prompt", row.get("messages")) if isinstance(row, dict) else None
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(map(is_message, prompt)):
        raise RecipeError(
            f'{where}: needs "prompt" with a text, or "messages" with "role" and "content"'
        )
    while prompt and prompt[-1]["role"] == "assistant":
        prompt.pop()
    if not prompt:
        raise RecipeError(f"{where}: has no message before the answer")
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def is_message(message: Any) -> bool:
    """Tell whether a value is a message with a text."""
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def with_system(prompt: Prompt, system: str) -> Prompt:
    """Add the system prompt of the data to a chat that has none, as to the rows."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system and turns[0]["role"] != "system":
        return [{"role": "system", "content": system}, *turns]
    return turns


def text_of(prompt: Prompt) -> str:
    """Return a prompt as one text: that of a question alone, or all messages with their roles."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
