"""Write the figures of README.md and docs/speed.md: python tools/bench/readme_table.py

The README has the rows of the H100 in which each side ran its fastest settings: TRL with Liger,
plugsft with `compile`; docs/speed.md what each plugin changed there. docs/benchmarks.md has all.
`plugsft plugins NAME` prints what each changed on either machine, from measured.json.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results")
MEASURED = ROOT / "plugsft/commands/measured.json"
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


def trained(case: str, contender: str) -> str:
    """Return a contender's speed and memory on the H100."""
    [run] = read(f"h100/{case}.json")["results"][contender]
    return f"{run['speed']:,.0f} tokens/s, {run['peak_gib']:.1f} GiB"


def kernel(case: str, name: str) -> str:
    """Return a kernel's time on the H100."""
    return f"{1000 * median(measured(case, name)['seconds']):.3g} ms"


def loss(head: str, name: str) -> str:
    """Return a kernel's time and memory for the loss, with its head trained or frozen."""
    case = f"loss {head}"
    return f"{kernel(case, name)}, {measured(case, name)['peak_gib']:.1f} GiB"


def measured(case: str, name: str) -> Any:
    """Return what was measured of a kernel on the H100."""
    [results] = read("h100/times.json")["results"][case]
    [kernel] = [one for one in results["value"] if one["kernel"] == name]
    return kernel


LORA, FULL = "0.6b-lora", "1b-full"
"""Cases of the H100."""


def changes() -> list[tuple[str, str, str, str]]:
    """Return what each plugin changed on the H100: its name, the case, without it and with it."""
    qlora = read("h100/t4-qlora.json")["peak_gib"]
    long = trained(LORA, "plugsft+compile@32k")
    return [
        (
            "bfd_packing",
            "both packed, LoRA, 0.6B weights, with `compile`: `capacity` 4,096; 32,768",
            trained(LORA, "plugsft+compile@4k"),
            long,
        ),
        ("compile", "LoRA, 0.6B weights, rows of 32,768", trained(LORA, "plugsft@32k"), long),
        (
            "flash_attention",
            "attention, documents of 500 tokens; of 16,384",
            f"{kernel('attention short', 'sdpa')}; {kernel('attention long', 'sdpa')}",
            f"{kernel('attention short', 'torch')}; {kernel('attention long', 'torch')}",
        ),
        (
            "fused_loss",
            "loss of 16,384 positions, 248,320 words, all weights; with LoRA",
            f"{loss('trained', 'plain')}; {loss('frozen', 'plain')}",
            f"{loss('trained', 'torch')}; {loss('frozen', 'torch')}",
        ),
        (
            "liger",
            "all weights, 1B, rows of 16,384, in place of `compile`",
            trained(FULL, "plugsft+compile@16k"),
            trained(FULL, "plugsft+liger@16k"),
        ),
        (
            "low_memory_adam",
            "the same with `compile`; without the plugin, AdamW's states in bfloat16",
            trained(FULL, "plugsft+compile@16k"),
            trained(FULL, "plugsft+compile+low_memory_adam@16k"),
        ),
        (
            "quantize",
            "[t4_qlora.toml](../recipes/t4_qlora.toml), 8B weights",
            "",
            f"{qlora:.1f} GiB",
        ),
    ]


def plugins() -> str:
    """Return what each plugin changed on the H100, as Markdown."""
    lines = ["| plugin | on one H100 | without | with |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| `{name}` | {' | '.join(row)} |" for name, *row in changes()])


def by_plugin() -> str:
    """Return what each plugin changed, for people at a terminal."""
    said: dict[str, list[str]] = {}
    for name, case, without, with_it in changes():
        case = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", case).replace("`", "")
        case = case.replace("the same", "all weights, 1B, rows of 16,384,")
        before = f"{without} without, " if without else ""
        said.setdefault(name, []).append(f"one H100, {case}: {before}{with_it} with it")
    table = (ROOT / "docs/benchmarks.md").read_text("utf8")
    for name, alone, memory in re.findall(
        r"^\| (\w+) \| ([\d.]+ x .*?) \|.*?\| (-\d+ MiB) \|", table, re.M
    ):
        text = f"2 CPU cores, 10 million weights: {alone} as fast, {memory} of memory"
        said.setdefault(name, []).append(text)
    return json.dumps(dict(sorted(said.items())), indent=1) + "\n"


def with_tables(page: str, text: str) -> str:
    """Return a page with a text between its marks."""
    found = re.compile(f"{re.escape(START)}.*?{re.escape(END)}", re.S)
    return found.sub(lambda _: f"{START}\n{text}\n{END}", page)


def pages() -> dict[str, str]:
    """Return page -> its tables, of today's results."""
    return {"README.md": tables(), "docs/speed.md": plugins()}


if __name__ == "__main__":
    for name, text in pages().items():
        page = ROOT / name
        page.write_text(with_tables(page.read_text("utf8"), text), "utf8")
    MEASURED.write_text(by_plugin(), "utf8")
