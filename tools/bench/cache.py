"""Prepared data: from a cache hit to the first batch, compared with preparing it.

    .venv/bin/python tools/bench/cache.py [--rows 10000,1000000] [--rounds 5] [--json FILE]

Each measurement is a fresh process; imports happen before the clock starts. It reads the recipe,
finds the tokens by their key, plans the first epoch and collates the first batch. Prints medians
with their spread; cold is the same with the entry missing.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import shared

WORDS = ["the", "owl", "hoots", "at", "night", "and", "learns", "from", "every", "step"]


def main() -> None:
    """Measure every size."""
    parser = shared.command_line(__doc__)
    parser.add_argument("--rows", default="10000,1000000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(first_batch(options.one)))
        return
    sizes = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shared.train_tokenizer(folder, write_rows(folder / "words.jsonl", 500), 2048)
        for rows in map(int, options.rows.split(",")):
            figures = measure(folder, rows, options.rounds)
            sizes.append(figures)
            warm, cold = statistics.median(figures["warm"]), figures["cold"]
            print(
                f"{rows:>10,} rows: hit to first batch {shared.spread(figures['warm'])} s, "
                f"cold {cold:.1f} s: {cold / warm:,.0f} x"
            )
    shared.write_report({"sizes": sizes}, options.json)


def measure(folder: Path, rows: int, rounds: int) -> dict:
    """Prepare once, then measure hits."""
    recipe = shared.write_recipe(
        folder / f"{rows}.toml",
        folder / "run",
        write_rows(folder / f"{rows}.jsonl", rows),
        model={"tokenizer": str(folder / "tokenizer")},
        data={"max_length": 512},
        train={"batch_size": 64},
        plugins={"arrow_cache": {}, "multiprocess_tokenize": {}, "fast_tokenizer": {}},
    )
    cache = str(folder / "cache")
    shutil.rmtree(cache, ignore_errors=True)
    # The source must have settled: a file that has just been written is read again.
    time.sleep(2.5)
    words = (__file__, "--one", recipe)
    once = partial(shared.run_python, *words, PLUGSFT_CACHE=cache)
    return {"rows": rows, "cold": once(), **shared.collect_rounds(rounds, {"warm": once})}


def write_rows(path: Path, rows: int) -> Path:
    """Write short texts of various lengths."""
    with path.open("w") as file:
        for number in range(rows):
            words = WORDS[number % 7 : 4 + number % 13]
            file.write(json.dumps({"text": f"{' '.join(words)} {number}"}) + "\n")
    return path


def first_batch(path: Path) -> float:
    """Go from a recipe to its first batch."""
    import torch

    from plugsft.batches.defaults import BatchDefaults
    from plugsft.batches.plan import Plan
    from plugsft.data.defaults import DataDefaults
    from plugsft.data.prepare import prepare
    from plugsft.model.defaults import ModelDefaults
    from plugsft.registry.active import load

    torch.set_num_threads(1)
    # Plugins are imported with the recipe that names them: these are imports too.
    load(path)
    started = time.perf_counter()
    recipe, active = load(path)
    hook = active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults()).hooks
    tokens = prepare(recipe, active).tokens
    plan = Plan(tokens, recipe, 1, hook).plan_step(1)
    hook.collate(tokens=tokens, examples=plan.layout[0][0], pad=0)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
