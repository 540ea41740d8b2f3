"""Best-fit-decreasing bin packing, as fast for millions of items as for thousands."""

from bisect import bisect_left, insort

import numpy as np

from plugsft import Ints


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
                each = capacity // size
                full, rest = divmod(count, each)
                for new_bins, items_each in ((full, each), (min(rest, 1), rest)):
                    if new_bins:
                        put(bins, new_bins, items_each, capacity - items_each * size)
                        bins += new_bins
                break
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
    inside = np.arange(len(items)) - np.repeat(np.cumsum(num_items) - num_items, num_items)
    return items, np.repeat(firsts, num_items) + inside // np.repeat(each_of, num_items), bins
