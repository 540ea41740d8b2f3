"""Layouts of packed rows: the examples of each step, dealt to ranks and micro-batches.

Best-fit-decreasing bin packing, as fast for millions of items as for thousands.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

import numpy as np

from plugsft import Ints, Layouts

from .row_shape import RowShape

Costs = Callable[[Ints], Any]
"""Lengths of documents -> their cost in a step."""


class PackedSteps(Layouts):
    """Steps whose examples are packed on demand."""

    def __init__(
        self, layouts: Layouts, lengths: Ints, ranks: int, capacity: int, cost: Costs
    ) -> None:
        self._layouts, self._lengths, self._ranks = layouts, lengths, ranks
        self._capacity, self._cost = capacity, cost

    def __len__(self) -> int:
        return len(self._layouts)

    def lay_out(self, number: int) -> list[list[Ints]]:
        """Lay out one step."""
        examples = np.concatenate([batch for rank in self._layouts[number] for batch in rank])
        lengths = self._lengths[examples]
        dealt = deal(lengths, self._cost(lengths), self._ranks, self._capacity)
        return [[examples[row] for row in rank] for rank in dealt]


class PackedEpoch(Layouts):
    """Rows filled from the whole epoch, `batch_size` of them in a step."""

    def __init__(
        self, order: Ints, lengths: Ints, ranks: int, size: int, capacity: int, cost: Costs
    ) -> None:
        ordered = lengths[order]
        items, bins, self._num_rows = best_fit(ordered, capacity)
        # A row has the position of its longest example in the epoch's order, which is random.
        position = np.full(self._num_rows, len(order))
        # The longest come first: written backwards, the longest of a bin is the last, and stays.
        position[bins[::-1]] = items[::-1]
        row_of_bin = np.empty(self._num_rows, np.int64)
        row_of_bin[np.argsort(position)] = np.arange(self._num_rows)
        rows = row_of_bin[bins]
        self._examples = order[items[np.argsort(rows, kind="stable")]]
        self._stops = np.cumsum(np.bincount(rows, minlength=self._num_rows))
        self._costs = np.bincount(rows, weights=cost(ordered[items]), minlength=self._num_rows)
        self._ranks, self._size = ranks, size
        self._tokens = np.bincount(rows, weights=ordered[items], minlength=self._num_rows)
        self._longest = int(ordered.max(initial=1))
        self._capacity = capacity

    def __len__(self) -> int:
        return -(-self._num_rows // self._size)

    def describe(self) -> str:
        """Describe the rows of an epoch: number, size, fill."""
        examples = len(self._examples)
        fill = self._tokens.sum() / (self._num_rows * self._capacity)
        return (
            f"{examples:,} examples in {self._num_rows:,} rows of {self._capacity:,} tokens, "
            f"{fill:.2%} full; a step is {self._size} rows, "
            f"{examples / len(self):,.1f} examples"
        )

    def shape(self, sequences: int) -> RowShape:
        """Return the shape of all rows; `sequences` is the most that an example has."""
        documents = np.diff(self._stops, prepend=0) * sequences
        padding = -(-(self._capacity - self._tokens) // self._longest)
        empty_row = -(-self._capacity // self._longest)  # of a rank that has no examples left
        return RowShape(int((documents + padding).max(initial=empty_row)), self._longest)

    def lay_out(self, number: int) -> list[list[Ints]]:
        """Lay out one step."""
        rows = np.arange(number * self._size, min((number + 1) * self._size, self._num_rows))
        # Rows of the same micro-batch have about equal costs.
        rows = rows[np.argsort(-self._costs[rows], kind="stable")]
        starts = np.append(0, self._stops)[rows]
        spans = zip(starts, self._stops[rows], strict=True)
        packed = [self._examples[start:stop] for start, stop in spans]
        packed += [self._examples[:0]] * (-len(packed) % self._ranks)
        return [packed[rank :: self._ranks] for rank in range(self._ranks)]


def deal(lengths: Ints, costs: Any, ranks: int, capacity: int) -> list[list[Ints]]:
    """Deal examples to ranks in the fewest micro-batches, with balanced costs.

    All micro-batches but the last are full on every rank. Best fit leaves the shortest examples for
    the last, where each rank gets the examples that balance the total.
    """
    items, bins, count = best_fit(lengths, capacity)
    ends = np.cumsum(np.bincount(bins, minlength=count))
    packed = np.split(items[np.argsort(bins, kind="stable")], ends[:-1])
    full = (count - 1) // ranks * ranks
    packed[:full] = sorted(packed[:full], key=lambda row: -costs[row].sum())
    dealt: list[list[Ints]] = [[] for _ in range(ranks)]
    work = np.zeros(ranks)
    for first in range(0, full, ranks):
        for rank, row in zip(np.argsort(work), packed[first : first + ranks], strict=True):
            dealt[rank].append(row)
            work[rank] += costs[row].sum()
    rest = np.concatenate(packed[full:])
    shares = balance(costs[rest], lengths[rest], work, capacity)
    last = packed[full:] + [items[:0]] * (ranks - count + full)
    for rank in range(ranks):
        dealt[rank].append(last[rank] if shares is None else rest[shares[rank]])
    return dealt


def balance(costs: Any, lengths: Ints, work: Any, capacity: int) -> list[list[int]] | None:
    """Give each example, the most costly first, to the least busy rank; None if they do not fit."""
    shares: list[list[int]] = [[] for _ in work]
    heap = [(load, rank, 0) for rank, load in enumerate(work.tolist())]
    heapq.heapify(heap)
    for item in np.argsort(-costs, kind="stable").tolist():
        full = []
        while heap and heap[0][2] + lengths[item] > capacity:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, rank, used = heap[0]
        shares[rank].append(item)
        heapq.heapreplace(heap, (load + costs[item], rank, used + int(lengths[item])))
        for entry in full:
            heapq.heappush(heap, entry)
    return shares


def best_fit(lengths: Ints, capacity: int) -> tuple[Ints, Ints, int]:
    """Pack by best-fit-decreasing; return the items, their bins, and the number of bins.

    The longest items come first. Each goes into the bin with the least sufficient space. Groups of
    bins with equal space take items of equal length at once, so the time grows with the number of
    distinct lengths and not of items.
    """
    # numpy sorts 16-bit integers by radix sort.
    narrow = lengths.astype(np.uint16) if capacity < 2**16 else lengths
    items = np.argsort(capacity - narrow, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    groups: dict[int, list[tuple[int, int]]] = {}  # space -> (first bin, number of bins)
    spaces: list[int] = []  # keys of `groups`, sorted
    segments: list[tuple[int, int, int]] = []  # first bin, number of bins, items in each
    bins = 0

    def add_group(first: int, count: int, space: int) -> None:
        """Let `count` bins with this space take shorter items."""
        if space not in groups:
            groups[space] = []
            insort(spaces, space)
        groups[space].append((first, count))

    def put(first: int, count: int, each: int, space: int) -> None:
        """Put `each` items into each of `count` bins, which leaves `space` in them."""
        segments.append((first, count, each))
        if space:
            add_group(first, count, space)

    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            tightest = bisect_left(spaces, size)
            if tightest == len(spaces):
                # The rest of the items of this length fill new bins.
                needed = -(-count // (capacity // size))
                add_group(bins, needed, capacity)
                bins += needed
                continue
            space = spaces[tightest]
            first, available = groups[space].pop()
            if not groups[space]:
                del groups[space]
                spaces.pop(tightest)
            each = space // size
            filled = min(available, count // each)
            if filled:
                put(first, filled, each, space - each * size)
                count -= filled * each
                first, available = first + filled, available - filled
            if available and 0 < count < each:
                put(first, 1, count, space - count * size)
                first, available, count = first + 1, available - 1, 0
            if available:
                add_group(first, available, space)
    firsts, num_bins, each_of = np.array(segments, np.int64).reshape(-1, 3).T
    num_items = num_bins * each_of
    in_segment = np.arange(len(items)) - np.repeat(np.cumsum(num_items) - num_items, num_items)
    bin_in_segment = in_segment // np.repeat(each_of, num_items)
    return items, np.repeat(firsts, num_items) + bin_in_segment, bins
