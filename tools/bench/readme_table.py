"""Write the README's figures from the results: python tools/bench/readme_table.py

From the H100 the rows in which each side ran its fastest settings: TRL with Liger, plugsft with
`compile`. The others are in docs/benchmarks.md.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results")
START, END = "<!-- tools/bench/readme_table.py writes this -->", "<!-- to here -->"


def read(name: str) -> Any:
    """Return a file of results."""
    return json.loads((RESULTS / name).read_text("utf8"))


def speed(case: str, contender: str) -> float:
    """Return the median tokens per second of a contender on the H100."""
    return float(median(run["speed"] for run in read(f"h100/{case}.json")["results"][contender]))


def seconds(name: str, *keys: str) -> float:
    """Return the median seconds in a file of results."""
    figures = read(name)
    for key in keys:
        figures = figures[key]
    return float(median(figures))


def dpo_step(name: str) -> float:
    """Return the median seconds of a DPO step."""
    return float(median(figures[name]["step"] for figures in read("dpo.json")["rounds"]))


def on_the_gpu() -> Iterator[tuple[str, float, float]]:
    """Yield (task, tokens per second of TRL, of plugsft)."""
    for task, case, length in (
        ("LoRA on Qwen3 0.6B's shape, rows of 32,768 tokens", "0.6b-lora", "32k"),
        ("all weights of Llama 3.2 1B's shape, rows of 16,384", "1b-full", "16k"),
    ):
        yield (
            task,
            speed(case, f"trl+liger@{length}"),
            speed(case, f"plugsft+compile@{length}"),
        )


def on_the_cpu() -> Iterator[tuple[str, float, float]]:
    """Yield (task, seconds of TRL, of plugsft)."""
    prepared, packed, built = "prepare-200k.json", "packing.json", "collate.json"
    yield (
        "prepare 200,000 chats, with `fast_tokenizer`",
        seconds(prepared, "seconds", "trl"),
        seconds(prepared, "seconds", "plugsft-auto"),
    )
    yield (
        "pack 100,000 documents into full rows",
        seconds(packed, "trl", "seconds", "trl"),
        seconds(packed, "trl", "seconds", "gathered"),
    )
    yield (
        "build batches of 12.8 million packed tokens",
        seconds(built, "seconds", "joined"),
        seconds(built, "seconds", "plugsft"),
    )
    yield (
        "a DPO step of a small model, with the reference precomputed",
        dpo_step("trl precomputed"),
        dpo_step("shared+cached"),
    )


def tables() -> str:
    """Return both tables as Markdown."""
    lines = ["| one H100, tokens per second | TRL, Liger | plugsft, `compile` | ratio |"]
    lines += ["|---|---|---|---|"]
    for task, trl, ours in on_the_gpu():
        lines.append(f"| {task} | {trl:,.0f} | {ours:,.0f} | {ours / trl:.2f} |")
    lines += ["", "| two CPU cores, seconds | TRL | plugsft | ratio |", "|---|---|---|---|"]
    for task, trl, ours in on_the_cpu():
        lines.append(f"| {task} | {trl:.3g} s | {ours:.3g} s | {trl / ours:.1f} |")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """Return the README with the tables of today's results."""
    found = re.compile(f"{re.escape(START)}.*?{re.escape(END)}", re.S)
    return found.sub(lambda _: f"{START}\n{tables()}\n{END}", page)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text("utf8")), "utf8")
