"""Train on questions with several choices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugsft import Rendered, hookimpl, plugin

if TYPE_CHECKING:
    from plugsft.data_kit import Tokenizer

COLUMNS = {"question", "choices", "answer"}


@plugin()
class MyPlugin:
    """Train on questions with several choices."""

    letters: str = "ABCDEFGH"
    """The names of the choices."""

    @hookimpl
    def render(self, rows: list[dict[str, Any]], tokenizer: Tokenizer) -> Rendered | None:
        """Turn rows into texts whose answers are trained."""
        if not any(row.keys() >= COLUMNS for row in rows):
            return None  # another format: the core, or another plugin, renders these rows
        rendered = Rendered(read=COLUMNS, mask="the letter of the answer")
        for number, row in enumerate(rows):
            if problem := self._problem(row):
                rendered.bad[number] = problem  # data.on_bad_row says what happens then
                continue
            choices = zip(self.letters, row["choices"], strict=False)
            lines = [row["question"], *(f"{letter}. {choice}" for letter, choice in choices)]
            prompt = "\n".join([*lines, "Answer: "])
            text = prompt + self.letters[row["answer"]] + tokenizer.eos_token
            rendered.texts.append(text)
            rendered.spans.append([(len(prompt), len(text))])  # the characters that are trained
            rendered.rows.append(number)
        return rendered

    def _problem(self, row: dict[str, Any]) -> str | None:
        """Return the mistake in a row."""
        question, choices, answer = (row.get(name) for name in ("question", "choices", "answer"))
        if not isinstance(question, str) or not isinstance(choices, list):
            return "no 'question' as text, or no list of 'choices'"
        if not isinstance(answer, int) or not 0 <= answer < len(choices) <= len(self.letters):
            return f"'answer' is no number of one of at most {len(self.letters)} choices, from 0"
        return None
