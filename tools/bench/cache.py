"""Data that is prepared already: from a cache hit to the first batch, beside preparing it.

    .venv/bin/python tools/bench/cache.py [--rows 10000,1000000] [--rounds 5] [--json FILE]

Each measurement is a process of its own whose imports are done before the clock starts; it reads
the recipe, finds the tokens by their key, plans the first epoch and collates the first batch.
Prints medians with their spread; cold is the same with the entry missing.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = ["the", "owl", "hoots", "at", "night", "and", "learns", "from", "every", "step"]


def main() -> None:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="10000,1000000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(first_batch(options.one)))
        return
    report = []
    with tempfile.TemporaryDirectory() as temporary:
        for rows in map(int, options.rows.split(",")):
            one = measure(Path(temporary), rows, options.rounds)
            report.append(one)
            warm, cold = statistics.median(one["warm"]), one["cold"]
            print(
                f"{rows:>10,} rows: hit to first batch {warm:.3f} s "
                f"({min(one['warm']):.3f} to {max(one['warm']):.3f}), "
                f"cold {cold:.1f} s: {cold / warm:,.0f} x"
            )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(folder: Path, rows: int, rounds: int) -> dict:
    """Prepare once, then find what was prepared."""
    source, recipe = folder / f"{rows}.jsonl", folder / f"{rows}.toml"
    with source.open("w") as file:
        for number in range(rows):
            words = WORDS[number % 7 : 4 + number % 13]
            file.write(json.dumps({"text": f"{' '.join(words)} {number}"}) + "\n")
    recipe.write_text(
        f"""
        output = "{folder / "run"}"
        [model]
        tokenizer = "{tokenizer(folder)}"
        [model.scratch]
        [data]
        source = "{source}"
        max_length = 512
        [train]
        batch_size = 64
        learning_rate = 1e-5
        [plugins.arrow_cache]
        [plugins.multiprocess_tokenize]
        [plugins.fast_tokenizer]
        """
    )
    shutil.rmtree(folder / "cache", ignore_errors=True)
    # The source must have settled: a file that has just been written is read again.
    time.sleep(2.5)
    cold, *warm = [child(recipe, folder) for _ in range(rounds + 1)]
    return {"rows": rows, "cold": cold, "warm": warm}


def child(recipe: Path, folder: Path) -> float:
    """Measure in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", recipe],
        env=os.environ | {"PLUGSFT_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.splitlines()[-1])


def first_batch(path: Path) -> float:
    """Go from a recipe to its first batch."""
    import torch

    from plugsft.answers import DataAnswers
    from plugsft.answers_model import ModelAnswers
    from plugsft.plan import Plan
    from plugsft.prepare import prepare
    from plugsft.registry import load

    torch.set_num_threads(1)
    # Plugins are imported with the recipe that names them: these are imports too.
    load(path)
    started = time.perf_counter()
    recipe, active = load(path)
    hook = active.answer(DataAnswers(recipe.folder), ModelAnswers()).hook
    tokens = prepare(recipe, active).tokens
    window = Plan(tokens, recipe, 1, hook).window(1)
    hook.collate(tokens=tokens, examples=window.layout[0][0], pad=0)
    return time.perf_counter() - started


def tokenizer(folder: Path) -> Path:
    """Train a tokenizer, once."""
    place = folder / "tokenizer"
    if not place.is_dir():
        source, recipe = folder / "words.jsonl", folder / "words.toml"
        lines = (json.dumps({"text": " ".join(WORDS) + f" {number}"}) for number in range(500))
        source.write_text("\n".join(lines))
        recipe.write_text(
            f"""
            output = "{folder / "made"}"
            [model.scratch]
            [data]
            source = "{source}"
            max_length = 512
            [train]
            batch_size = 64
            learning_rate = 1e-5
            """
        )
        words = [sys.executable, "-m", "plugsft", "prepare", recipe]
        subprocess.run(words, check=True, capture_output=True)
        next((folder / "made/scratch").glob("tokenizer-*")).rename(place)
    return place


if __name__ == "__main__":
    main()
