"""Planning packed rows from lengths: best fit against TRL's packing, and the balance over ranks.

    .venv/bin/python tools/bench/packing.py [--sizes 100000,1000000,10000000] [--documents 100000]
        [--steps 100] [--ranks 64] [--rounds 5] [--json FILE]

Lengths are lognormal(6, 1), from 1 to 4,096. TRL's pack_dataset packs 1,000 documents at a time
and copies their tokens. A plan has row numbers only; tokens are gathered when a batch is read. So
two times are measured: the plan alone, and the plan with all tokens and masks gathered into rows.
Before the rounds, each packing is checked: complete, and at most as many rows as TRL's.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import shared
from datasets import Dataset, disable_progress_bars, load_from_disk
from trl.data_utils import pack_dataset

from plugsft import Ints
from plugsft.plugins.bfd_packing.attention_cost import TYPICAL
from plugsft.plugins.bfd_packing.layouts import best_fit, deal

CAPACITY = 4096
LONG = 32_768
"""With this capacity, 1,000 documents fill few rows, and the last row is mostly padding."""
GROUP = 1_000
"""Documents that TRL packs at a time."""
BATCH = 512


def main() -> None:
    """Run all measurements."""
    parser = shared.command_line(__doc__)
    parser.add_argument("--sizes", default="100000,1000000,10000000")
    parser.add_argument(
        "--documents", type=int, default=100_000, help="documents for the comparison with TRL"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    report = {
        "plan": time_planning([int(size) for size in options.sizes.split(",")], options.rounds),
        "trl": compare_with_trl(options.documents, options.rounds),
        "groups": compare_with_groups(options.documents),
        "balance": [balance(options, capacity) for capacity in (CAPACITY, 2 * CAPACITY)],
    }
    shared.write_report(report, options.json)


def draw(count: int) -> Ints:
    """Draw document lengths."""
    return shared.draw_lengths(count, 6.0, 1.0, 1, CAPACITY)


def count_rows(lengths: Ints, capacity: int) -> int:
    """Pack the documents, check the packing, and return its number of rows."""
    items, bins, count = best_fit(lengths, capacity)
    assert np.array_equal(np.sort(items), np.arange(len(lengths))), (
        "not every example is packed once"
    )
    assert bins.min() == 0 and bins.max() == count - 1, "the row numbers do not match the count"
    assert np.bincount(bins, lengths[items]).max() <= capacity, "a row is too long"
    return int(count)


def time_planning(sizes: list[int], rounds: int) -> dict[str, Any]:
    """Time the plan for each number of documents."""
    lengths_by_size = {str(size): draw(size) for size in sizes}
    bins = {size: count_rows(lengths, CAPACITY) for size, lengths in lengths_by_size.items()}
    seconds = shared.in_rounds(
        rounds,
        **{
            size: lambda lengths=lengths: best_fit(lengths, CAPACITY)
            for size, lengths in lengths_by_size.items()
        },
    )
    for size, times in seconds.items():
        fill = lengths_by_size[size].sum() / (bins[size] * CAPACITY)
        print(f"{int(size):>12,} documents planned in {shared.spread(times)} s, {fill:.3%} full")
    return {"seconds": seconds, "bins": bins}


def compare_with_trl(documents: int, rounds: int) -> dict[str, Any]:
    """Pack the same tokens with both, and time them."""
    disable_progress_bars()
    lengths = draw(documents)
    with tempfile.TemporaryDirectory() as folder:
        tokens = shared.write_tokens(Path(folder, "tokens"), lengths, 1 + documents // 1_000)
        Dataset(shared.trl_table(tokens).select(["input_ids"])).save_to_disk(f"{folder}/trl")
        dataset = load_from_disk(f"{folder}/trl")

        def trl() -> Dataset:
            return pack_dataset(dataset, CAPACITY, "bfd", {"load_from_cache_file": False})

        def gather_rows() -> None:
            order, bins, _ = best_fit(lengths, CAPACITY)
            tokens.gather(order[np.argsort(bins, kind="stable")])

        trl_rows, plugsft_rows = len(trl()), count_rows(lengths, CAPACITY)
        fewest = -(-int(lengths.sum()) // CAPACITY)
        assert plugsft_rows <= trl_rows, f"{plugsft_rows} rows, and TRL's are {trl_rows}"
        assert plugsft_rows <= max(fewest + 1, 1.002 * fewest), (
            f"{plugsft_rows} rows, and {fewest} would hold all tokens"
        )
        gather_rows()
        seconds = shared.in_rounds(
            rounds, trl=trl, plan=lambda: best_fit(lengths, CAPACITY), gathered=gather_rows
        )
    print(
        f"{documents:,} documents, {lengths.sum():,} tokens: {plugsft_rows:,} rows, TRL "
        f"{trl_rows:,}, lower bound {fewest:,}"
    )
    for name, times in seconds.items():
        relative = shared.compare_speed(times, seconds["trl"])
        print(f"{name:>12} {shared.spread(times)} s; against TRL {relative}")
    return {"rows": {"plugsft": plugsft_rows, "trl": trl_rows, "least": fewest}, "seconds": seconds}


def compare_with_groups(documents: int) -> dict[str, Any]:
    """Pack long rows, from all documents and from groups of them."""
    lengths = draw(documents)
    groups = np.split(lengths, range(GROUP, documents, GROUP))
    grouped_rows = sum(count_rows(group, LONG) for group in groups)
    rows = count_rows(lengths, LONG)
    print(
        f"rows of {LONG:,}: {rows:,} from all documents, {grouped_rows:,} from groups of "
        f"{GROUP:,}: {1 - rows / grouped_rows:.2%} fewer"
    )
    return {"whole": rows, "groups": grouped_rows}


def balance(options: argparse.Namespace, capacity: int) -> dict[str, Any]:
    """Deal global batches to ranks; compare the slowest rank's cost with the mean."""
    batches = draw(options.steps * BATCH).reshape(options.steps, BATCH)
    slowest, lockstep, in_turn, seconds = [], [], [], []
    for lengths in batches:
        costs = lengths * (1 + lengths / TYPICAL)
        started = time.perf_counter()
        dealt = deal(lengths, costs, options.ranks, capacity)
        seconds.append(time.perf_counter() - started)
        work = np.array([[costs[part].sum() for part in rank] for rank in dealt])
        mean = costs.sum() / options.ranks
        slowest.append(work.sum(1).max() / mean)
        # If parameters are gathered in each micro-batch, ranks wait for each other there too.
        lockstep.append(work.max(0).sum() / mean)
        items, bins, _ = best_fit(lengths, capacity)
        turns = np.bincount(bins % options.ranks, costs[items], options.ranks)
        in_turn.append(turns.max() / mean)
    print(
        f"{options.ranks} ranks, {BATCH} examples, capacity {capacity:,}: the slowest rank has "
        f"{np.mean(slowest):.3f} times the mean work ({np.mean(lockstep):.3f} if ranks wait after "
        f"each micro-batch; {np.mean(in_turn):.2f} where packed rows are dealt in turn), "
        f"{1e3 * statistics.median(seconds):.1f} ms a step"
    )
    return {
        "capacity": capacity,
        "slowest": slowest,
        "lockstep": lockstep,
        "in_turn": in_turn,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
