"""Time from a cache hit to the first batch, compared with preparing the data.

    .venv/bin/python tools/bench/cache.py [--rows 10000,1000000] [--rounds 5] [--json FILE]

Each measurement is a fresh process, which imports before the clock starts. It reads the recipe,
finds the tokens by their key, plans the first epoch and collates the first batch. The script prints
medians with their spread; "cold" is the same without a cache entry.
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
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(time_first_batch(options.child)))
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
    """Prepare once, then time cache hits."""
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
    # The cache does not trust the timestamps of a file that was written just now.
    time.sleep(2.5)
    words = (__file__, "--child", recipe)
    run_child = partial(shared.run_python, *words, PLUGSFT_CACHE=cache)
    return {"rows": rows, "cold": run_child(), **shared.collect_rounds(rounds, {"warm": run_child})}


def write_rows(path: Path, rows: int) -> Path:
    """Write short texts of several lengths."""
    with path.open("w") as file:
        for number in range(rows):
            words = WORDS[number % 7 : 4 + number % 13]
            file.write(json.dumps({"text": f"{' '.join(words)} {number}"}) + "\n")
    return path


def time_first_batch(path: Path) -> float:
    """Return the seconds from a recipe to its first batch."""
    import torch

    from plugsft.batches.defaults import BatchDefaults
    from plugsft.batches.plan import Plan
    from plugsft.data.defaults import DataDefaults
    from plugsft.data.prepare import prepare
    from plugsft.model.defaults import ModelDefaults
    from plugsft.registry.load import load

    torch.set_num_threads(1)
    # Loading the recipe imports its plugins; import them before the clock starts.
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
