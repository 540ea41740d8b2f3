"""From mapped Arrow to the tensors of packed rows, on one core: plugsft against datasets and TRL.

    .venv/bin/python tools/bench/collate.py [--documents 20000] [--shards 50] [--capacity 16384]
        [--rounds 5] [--json FILE]

Both read the same documents, in the same random rows, from files in the page cache, into int64
ids, labels and positions; those of every tenth row are compared before the rounds. TRL's collator
gets its documents from datasets in three ways: one by one; a list of numbers at once, as its data
loader asks for them; or, as after its own packing, each row joined on disk beforehand.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import shared
import torch
from datasets import Dataset, disable_progress_bars, load_from_disk
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from plugsft import Batch, Ints
from plugsft.kit.model import pack
from plugsft.kit.tokens import Tokens
from plugsft.plugins.bfd_packing.best_fit import best_fit

Made = Callable[[int], Batch]
"""Row number -> its tensors."""


def main() -> None:
    """Compare, measure and print."""
    parser = shared.command_line(__doc__)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--shards", type=int, default=50)
    parser.add_argument("--capacity", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), options)
    tokens, seconds = report["tokens"], report["seconds"]
    print(
        f"{options.documents:,} documents, {tokens:,} tokens, {options.shards} shards, "
        f"{report['rows']:,} rows of at most {options.capacity:,}, one core: tensors are equal"
    )
    theirs = [took for name, took in seconds.items() if name != "plugsft"]
    best = min(theirs, key=statistics.median)
    for name, took in seconds.items():
        speed = tokens / statistics.median(took) / 1e6
        print(
            f"{name:>8} {shared.spread(took)} s {speed:8.1f} million tokens/s; "
            f"against TRL's fastest {shared.compare_speed(took, best)}"
        )
    shared.write_report(report, options.json)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write the documents in both forms, and read them in rounds."""
    lengths = shared.draw_lengths(options.documents, 6.0, 1.0, 1, shared.MAX_LENGTH)
    tokens = shared.write_tokens(folder / "tokens", lengths, options.shards)
    rows = random_rows(lengths, options.capacity)
    makers = {"plugsft": lambda row: pack(tokens, rows[row]), **by_trl(folder, tokens, rows)}
    for row in range(0, len(rows), 10):
        ensure_equal({name: make(row) for name, make in makers.items()})
    seconds = shared.in_rounds(
        options.rounds, **{name: epoch(make, len(rows)) for name, make in makers.items()}
    )
    return {
        "capacity": options.capacity,
        "rows": len(rows),
        "tokens": int(lengths.sum()),
        "seconds": seconds,
    }


def ensure_equal(made: dict[str, Batch]) -> None:
    """Assert that all contenders make the same tensors."""
    for name, batch in made.items():
        for key in ("input_ids", "labels", "position_ids", "cu_seq_lens_q"):
            assert torch.equal(batch[key], made["plugsft"][key]), f"{name}: other {key}"


def random_rows(lengths: Ints, capacity: int) -> list[Ints]:
    """Fill rows by best fit; return them in random order, of examples in random order."""
    order = np.random.default_rng(0).permutation(len(lengths))
    items, bins, count = best_fit(lengths[order], capacity)
    examples = order[items[np.argsort(bins, kind="stable")]]
    rows = np.split(examples, np.cumsum(np.bincount(bins, minlength=count))[:-1])
    return [rows[number] for number in np.random.default_rng(1).permutation(count)]


def by_trl(folder: Path, tokens: Tokens, rows: list[Ints]) -> dict[str, Made]:
    """Return the ways in which TRL's collator can get a row's documents."""
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    table = shared.trl_table(tokens)
    order, sizes = np.concatenate(rows), [len(row) for row in rows]
    joined = {name: regrouped(table[name].chunk(0), order, sizes) for name in table.column_names}
    counts = pa.array(tokens.lengths[order], pa.int32())
    joined["seq_lengths"] = pa.ListArray.from_arrays(offsets_of(sizes), counts)
    documents, packed = (
        mapped(folder / name, made.combine_chunks())
        for name, made in (("documents", table), ("packed", pa.table(joined)))
    )
    asked = [row.tolist() for row in rows]
    return {
        "one": lambda row: collator([documents[number] for number in asked[row]]),
        "list": lambda row: collator(documents.__getitems__(asked[row])),
        "joined": lambda row: collator([packed[row]]),
    }


def mapped(folder: Path, table: pa.Table) -> Dataset:
    """Save a table as datasets does, and open it."""
    Dataset(table).save_to_disk(folder)
    return load_from_disk(folder)


def regrouped(column: pa.ListArray, order: Ints, sizes: list[int]) -> pa.ListArray:
    """Join the lists of each row."""
    taken = column.take(pa.array(order))
    ends = taken.offsets.to_numpy()[np.append(0, np.cumsum(sizes))]
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), taken.values)


def offsets_of(sizes: list[int]) -> pa.Array:
    """Return the offsets of lists of these sizes."""
    return pa.array(np.append(0, np.cumsum(sizes)), pa.int32())


def epoch(make: Made, rows: int) -> Callable[[], None]:
    """Return what makes all rows, one after the other."""

    def run() -> None:
        for row in range(rows):
            make(row)

    return run


if __name__ == "__main__":
    main()
