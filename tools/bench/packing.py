"""Planning packed rows from lengths: best fit against TRL's, and work balanced over ranks.

    .venv/bin/python tools/bench/packing.py [--sizes 100000,1000000,10000000] [--documents 100000]
        [--steps 100] [--ranks 64] [--rounds 5] [--json FILE]

Lengths are lognormal(6, 1), from 1 to 4,096. TRL's pack_dataset packs 1,000 documents at a time
and copies their tokens; a plan holds numbers only, tokens are gathered when a batch is read. So
both are timed: the plan alone, and the plan with all tokens gathered into rows, with their masks.
Before the rounds each packing is proved whole, and no worse than TRL's.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import shared
from datasets import Dataset, disable_progress_bars, load_from_disk
from trl.data_utils import pack_dataset

from plugsft import Ints
from plugsft.plugins.bfd_packing.attention_cost import TYPICAL
from plugsft.plugins.bfd_packing.best_fit import best_fit
from plugsft.plugins.bfd_packing.layouts import deal

CAPACITY = 4096
LONG = 32_768
"""A capacity at which a group of 1,000 documents fills few rows, and its last one badly."""
GROUP = 1_000
"""Documents that TRL packs at a time."""
BATCH = 512


def main() -> None:
    """Measure, and print one line for each question."""
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
        "plan": planning([int(size) for size in options.sizes.split(",")], options.rounds),
        "trl": compare_with_trl(options.documents, options.rounds),
        "groups": against_groups(options.documents),
        "balance": [balance(options, capacity) for capacity in (CAPACITY, 2 * CAPACITY)],
    }
    shared.write_report(report, options.json)


def draw(count: int) -> Ints:
    """Draw the lengths that are packed."""
    return shared.draw_lengths(count, 6.0, 1.0, 1, CAPACITY)


def proved(lengths: Ints, capacity: int) -> int:
    """Pack, make sure that the packing is one, and return how many rows it has."""
    items, bins, count = best_fit(lengths, capacity)
    assert np.array_equal(np.sort(items), np.arange(len(lengths))), "an example is not there once"
    assert bins.min() == 0 and bins.max() == count - 1, "other rows than it says"
    assert np.bincount(bins, lengths[items]).max() <= capacity, "a row is too long"
    return count


def planning(sizes: list[int], rounds: int) -> dict:
    """Plan each number of documents."""
    drawn = {str(size): draw(size) for size in sizes}
    bins = {size: proved(lengths, CAPACITY) for size, lengths in drawn.items()}
    seconds = shared.in_rounds(
        rounds,
        **{size: lambda some=some: best_fit(some, CAPACITY) for size, some in drawn.items()},
    )
    for size, took in seconds.items():
        fill = drawn[size].sum() / (bins[size] * CAPACITY)
        print(f"{int(size):>12,} documents planned in {shared.spread(took)} s, {fill:.3%} full")
    return {"seconds": seconds, "bins": bins}


def compare_with_trl(documents: int, rounds: int) -> dict:
    """Pack real tokens with both."""
    disable_progress_bars()
    lengths = draw(documents)
    with tempfile.TemporaryDirectory() as folder:
        tokens = shared.write_tokens(Path(folder, "tokens"), lengths, 1 + documents // 1_000)
        Dataset(shared.trl_table(tokens).select(["input_ids"])).save_to_disk(f"{folder}/trl")
        dataset = load_from_disk(f"{folder}/trl")

        def trl() -> Dataset:
            return pack_dataset(dataset, CAPACITY, "bfd", {"load_from_cache_file": False})

        def gathered() -> None:
            items, bins, _ = best_fit(lengths, CAPACITY)
            tokens.gather(items[np.argsort(bins, kind="stable")])

        theirs, ours = len(trl()), proved(lengths, CAPACITY)
        least = -(-int(lengths.sum()) // CAPACITY)
        assert ours <= theirs, f"{ours} rows, and TRL's are {theirs}"
        assert ours <= max(least + 1, 1.002 * least), (
            f"{ours} rows, and {least} would hold all tokens"
        )
        gathered()
        seconds = shared.in_rounds(
            rounds, trl=trl, plan=lambda: best_fit(lengths, CAPACITY), gathered=gathered
        )
    print(
        f"{documents:,} documents, {lengths.sum():,} tokens: {ours:,} rows, TRL's {theirs:,}, "
        f"no packing can have fewer than {least:,}"
    )
    for name, took in seconds.items():
        relative = shared.compare_speed(took, seconds["trl"])
        print(f"{name:>12} {shared.spread(took)} s; against TRL {relative}")
    return {"rows": {"plugsft": ours, "trl": theirs, "least": least}, "seconds": seconds}


def against_groups(documents: int) -> dict:
    """Pack rows of a long context, from all documents and from groups of them."""
    lengths = draw(documents)
    groups = np.split(lengths, range(GROUP, documents, GROUP))
    parted = sum(proved(group, LONG) for group in groups)
    whole = proved(lengths, LONG)
    print(
        f"rows of {LONG:,}: {whole:,} from all documents, {parted:,} from {GROUP:,} at a time: "
        f"{1 - whole / parted:.2%} fewer"
    )
    return {"whole": whole, "groups": parted}


def balance(options: argparse.Namespace, capacity: int) -> dict:
    """Deal global batches to ranks; compare the slowest rank's cost with the mean."""
    drawn = draw(options.steps * BATCH).reshape(options.steps, BATCH)
    slowest, lockstep, in_turn, seconds = [], [], [], []
    for lengths in drawn:
        costs = lengths * (1 + lengths / TYPICAL)
        started = time.perf_counter()
        dealt = deal(lengths, costs, options.ranks, capacity)
        seconds.append(time.perf_counter() - started)
        work = np.array([[costs[part].sum() for part in rank] for rank in dealt])
        mean = costs.sum() / options.ranks
        slowest.append(work.sum(1).max() / mean)
        # Where parameters are exchanged in each micro-batch, ranks wait for each other there.
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
