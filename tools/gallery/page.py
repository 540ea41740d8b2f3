"""Write the figures of docs/examples.json into docs/examples.md, and its pictures."""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from plugsft.lab.timing import as_json

ROOT = Path(__file__).resolve().parents[2]
FIGURES, PAGE = ROOT / "docs/examples.json", ROOT / "docs/examples.md"
START, END = "<!-- tools/examples {} writes this -->", "<!-- to here -->"
ANSWERS = ("before", "after", "in the data")
TITLES = {
    "style": "Chats: before and after",
    "calls": "Function calls on held-out questions",
    "preferences": "Replies that ask back",
}
STYLE = """
    .page { fill: #ffffff; stroke: #d0d7de; }
    text { font: 13px system-ui, sans-serif; fill: #57606a; }
    .title { font-weight: 600; font-size: 15px; fill: #1f2328; }
    .before { fill: #8c959f; }
    .after { fill: #0f766e; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; stroke: #30363d; }
      text { fill: #9aa4ae; }
      .title { fill: #e6edf3; }
      .after { fill: #2dd4bf; }
    }
  """


def written(value: float, number: list[int]) -> str:
    """A figure: a count as "3 of 100", others with three digits."""
    return f"{value} of {number[0]}" if number else f"{value:.3g}"


def picture(name: str, figures: dict[str, list[Any]]) -> str:
    """Two bars for each of the first two figures; as wide as the screen of a phone."""
    shapes, says, y = [], [], 56
    for label, (before, after, *number) in [*figures.items()][:2]:
        shapes.append(f'<text x="16" y="{y}">{escape(label)}</text>')
        for when, value in (("before", before), ("after", after)):
            y += 22
            wide = 200 * value / (number[0] if number else max(before, after))
            said = written(value, number)
            shapes.append(f'<text x="16" y="{y}">{when}</text>')
            bar = f'class="{when}" x="66" y="{y - 12}" width="{wide + 2:.0f}" height="15" rx="2"'
            shapes += [f"<rect {bar}/>", f'<text x="{wide + 76:.0f}" y="{y}">{said}</text>']
            says.append(f"{label}, {when}: {said}")
        y += 34
    size = f'viewBox="0 0 360 {y - 14}" width="360" height="{y - 14}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title says">',
        f'<title id="title">{TITLES[name]}</title>',
        f'<desc id="says">{escape("; ".join(says))}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="359" height="{y - 15}" rx="8"/>',
        f'<text class="title" x="16" y="28">{TITLES[name]}</text>',
    ]
    return "\n  ".join([*lines, *shapes]) + "\n</svg>\n"


def section(name: str, found: dict[str, Any]) -> str:
    """The heart of the recipe, the figures and the answers of an example, as Markdown."""
    recipe = (ROOT / f"tools/gallery/{name}.toml").read_text("utf8")
    heart = "[train]" + recipe.split("[train]")[1].split("\n# The rest")[0]
    machine, seconds = found["machine"], found["seconds"]
    made = (
        f"{found['date'][:10]}, {machine['cores']} cores of {machine['cpu']}, no GPU: "
        f"{sum(seconds.values()) / 60:.0f} minutes in all. The {found['steps']} steps took "
        f"{seconds['train'] / 60:.0f}."
    )
    if found["pilot"]:
        made = f"**A pilot of {found['steps']} steps, not the whole run.** {made}"
    for key, (ours, theirs) in found.get("compared", {}).items():
        made += f" `{key}` of the run: {ours:.4f}; by plain transformers: {theirs:.4f}."
    made += f" Answers have at most {found['tokens']} tokens."
    table = ["| | before | after |", "|---|---|---|"]
    for label, (before, after, *number) in found["figures"].items():
        table.append(f"| {label} | {written(before, number)} | {written(after, number)} |")
    answers = []
    for answer in found["answers"]:
        answers += ["", f"Asked: {quoted(answer['asked'])}", ""]
        answers += [f"- {when}: {quoted(answer[when])}" for when in ANSWERS]
    shown = f"![{TITLES[name]}](examples/{name}.svg)"
    return "\n".join([f"```toml\n{heart.rstrip()}\n```\n\n{made}\n", *table, "", shown, *answers])


def quoted(text: str) -> str:
    """A text in one line as code, so that nothing in it is read as Markdown."""
    ticks = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{ticks} {' '.join(text.split())} {ticks}" if text.strip() else "(nothing)"


def filled(page: str, figures: dict[str, Any]) -> str:
    """A page with the sections of all examples that were made."""
    for name, found in figures.items():
        before, mark, rest = page.partition(START.format(name))
        page = f"{before}{mark}\n{section(name, found)}\n{END}{rest.partition(END)[2]}"
    return page


def write(name: str, found: dict[str, Any]) -> None:
    """Add the figures of an example, and write the page and the picture."""
    figures = json.loads(FIGURES.read_text("utf8")) if FIGURES.exists() else {}
    figures[name] = found
    FIGURES.write_text(as_json(figures), "utf8")
    PAGE.write_text(filled(PAGE.read_text("utf8"), figures), "utf8")
    (PAGE.parent / "examples").mkdir(exist_ok=True)
    (PAGE.parent / f"examples/{name}.svg").write_text(picture(name, found["figures"]), "utf8")
