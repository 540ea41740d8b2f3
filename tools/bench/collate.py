"""Collating packed rows from mapped Arrow files, on one core: plugsft against datasets and TRL.

    .venv/bin/python tools/bench/collate.py [--documents 20000] [--shards 50] [--capacity 16384]
        [--rounds 5] [--json FILE]

Both read the same documents, in the same random rows, from files in the page cache, into int64
ids, labels and positions. Every tenth row is compared before the rounds. TRL's collator gets its
documents from datasets in three ways: each document alone ("single"); all documents of a row at
once ("list"), as its data loader does; or a row that is already packed on disk ("joined").
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
from plugsft.data_kit import Tokens
from plugsft.plugins.bfd_packing.documents import pack
from plugsft.plugins.bfd_packing.layouts import best_fit

Collate = Callable[[int], Batch]
"""Row number -> the row's tensors."""


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
    trl_seconds = [times for name, times in seconds.items() if name != "plugsft"]
    best = min(trl_seconds, key=statistics.median)
    for name, times in seconds.items():
        speed = tokens / statistics.median(times) / 1e6
        print(
            f"{name:>8} {shared.spread(times)} s {speed:8.1f} million tokens/s; "
            f"against TRL's fastest {shared.compare_speed(times, best)}"
        )
    shared.write_report(report, options.json)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write the documents for both, then time both in rounds."""
    lengths = shared.draw_lengths(options.documents, 6.0, 1.0, 1, shared.MAX_LENGTH)
    tokens = shared.write_tokens(folder / "tokens", lengths, options.shards)
    rows = random_rows(lengths, options.capacity)
    collators = {
        "plugsft": lambda row: pack(tokens, rows[row]),
        **trl_collators(folder, tokens, rows),
    }
    for row in range(0, len(rows), 10):
        assert_equal_batches({name: collate(row) for name, collate in collators.items()})
    seconds = shared.in_rounds(
        options.rounds,
        **{name: epoch_runner(collate, len(rows)) for name, collate in collators.items()},
    )
    return {
        "capacity": options.capacity,
        "rows": len(rows),
        "tokens": int(lengths.sum()),
        "seconds": seconds,
    }


def assert_equal_batches(batches: dict[str, Batch]) -> None:
    """Assert that all contenders make the same tensors."""
    for name, batch in batches.items():
        for key in ("input_ids", "labels", "position_ids", "cu_seq_lens_q"):
            assert torch.equal(batch[key], batches["plugsft"][key]), f"{name}: other {key}"


def random_rows(lengths: Ints, capacity: int) -> list[Ints]:
    """Fill rows by best fit; return them in random order, of examples in random order."""
    order = np.random.default_rng(0).permutation(len(lengths))
    items, bins, count = best_fit(lengths[order], capacity)
    examples = order[items[np.argsort(bins, kind="stable")]]
    rows = np.split(examples, np.cumsum(np.bincount(bins, minlength=count))[:-1])
    return [rows[number] for number in np.random.default_rng(1).permutation(count)]


def trl_collators(folder: Path, tokens: Tokens, rows: list[Ints]) -> dict[str, Collate]:
    """Return the three ways to collate a row with TRL's collator."""
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    table = shared.trl_table(tokens)
    order, sizes = np.concatenate(rows), [len(row) for row in rows]
    joined = {name: join_lists(table[name].chunk(0), order, sizes) for name in table.column_names}
    counts = pa.array(tokens.lengths[order], pa.int32())
    joined["seq_lengths"] = pa.ListArray.from_arrays(make_offsets(sizes), counts)
    documents, packed = (
        save_and_map(folder / name, table.combine_chunks())
        for name, table in (("documents", table), ("packed", pa.table(joined)))
    )
    row_documents = [row.tolist() for row in rows]
    return {
        "single": lambda row: collator([documents[number] for number in row_documents[row]]),
        "list": lambda row: collator(documents.__getitems__(row_documents[row])),
        "joined": lambda row: collator([packed[row]]),
    }


def save_and_map(folder: Path, table: pa.Table) -> Dataset:
    """Save a table as datasets does, and open it."""
    Dataset(table).save_to_disk(folder)
    return load_from_disk(folder)


def join_lists(column: pa.ListArray, order: Ints, sizes: list[int]) -> pa.ListArray:
    """Join the lists of each row."""
    documents = column.take(pa.array(order))
    ends = documents.offsets.to_numpy()[np.append(0, np.cumsum(sizes))]
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), documents.values)


def make_offsets(sizes: list[int]) -> pa.Array:
    """Return the offsets of lists of these sizes."""
    return pa.array(np.append(0, np.cumsum(sizes)), pa.int32())


def epoch_runner(collate: Collate, rows: int) -> Callable[[], None]:
    """Return a function that collates all rows in turn."""

    def run() -> None:
        for row in range(rows):
            collate(row)

    return run


if __name__ == "__main__":
    main()
