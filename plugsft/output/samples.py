"""The answers of a run's samples.jsonl, as a section of its report."""

import html
from collections.abc import Sequence
from typing import Any

SAMPLES = "samples.jsonl"
"""File in the output: step, prompt and answer in each line."""
MAX_PROMPTS, MAX_STEPS, MAX_TEXT = 10, 12, 400


def samples_section(lines: Sequence[dict[str, Any]]) -> str:
    """Return the answers to each prompt over the steps; texts are escaped and cut."""
    answers: dict[str, dict[int, str]] = {}
    for line in lines:
        step, prompt, answer = (line.get(key) for key in ("step", "prompt", "answer"))
        if isinstance(step, int) and isinstance(prompt, str) and isinstance(answer, str):
            answers.setdefault(prompt, {})[step] = answer
    if not answers:
        return ""
    shown = list(answers.items())[:MAX_PROMPTS]
    parts = "".join(f"<h3>{_text(prompt)}</h3>\n{_table(steps)}" for prompt, steps in shown)
    more = len(answers) > MAX_PROMPTS or any(len(steps) > MAX_STEPS for _, steps in shown)
    note = '<p class="small">samples.jsonl has more prompts or steps.</p>\n' if more else ""
    return f'<h2>Samples</h2>\n<div class="samples">\n{parts}</div>\n{note}'


def _table(answers: dict[int, str]) -> str:
    """Return a prompt's answers by step: the first, the last, and some between."""
    steps, last = sorted(answers), len(answers) - 1
    if len(steps) > MAX_STEPS:
        steps = [steps[last * number // (MAX_STEPS - 1)] for number in range(MAX_STEPS)]
    rows = "".join(
        f"<div><dt>step {step:,}</dt><dd>{_text(answers[step]) or '(empty)'}</dd></div>\n"
        for step in steps
    )
    return f"<dl>\n{rows}</dl>\n"


def _text(text: str) -> str:
    return html.escape(text[:MAX_TEXT] + "…" * (len(text) > MAX_TEXT))
