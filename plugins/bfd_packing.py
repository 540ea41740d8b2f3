"""Pack examples into full micro-batches, best fit first, without attention across examples."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Generator
from threading import Lock
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from plugsft import (
    Batch,
    DataError,
    Ints,
    Layout,
    Layouts,
    ModelLoad,
    OnDemand,
    Prelude,
    Recipe,
    RecipeError,
    Train,
    hookimpl,
    plugin,
    state,
)
from plugsft.kit.tokens import Tokens

Costs = Callable[[Ints], Any]
"""Lengths of documents -> their cost in a step."""
TYPICAL = 50_000
"""Length at which attention costs as much as the rest of a model of some billion weights."""
COUNTING = Lock()
"""Training and evaluation batches may be made in different threads."""


@plugin(learns=["scope", "overlong"])
class BfdPacking:
    """Pack examples into full micro-batches, best fit first, without attention across examples.

    scope = "step" leaves every step's examples as they are, and does not affect results; "dataset"
    does: it fills rows from the whole epoch, and a step is then `batch_size` packed rows.
    """

    capacity: Annotated[int, Field(ge=2)] | None = None
    """Most tokens in a micro-batch. Default: data.max_length, and twice that for pairs."""
    scope: Literal["step", "dataset"] = "step"
    """What is packed together: the examples of one step, or of the whole epoch."""
    overlong: Literal["error", "truncate", "split"] = "error"
    """What happens to examples with more tokens than `capacity`. "split" makes each part an example
    of its own, so steps hold other examples. Parts without a trained token are left out."""

    room: int = state(0)
    longest: int = state(0)
    """Most tokens in a document."""
    long: int = state(0)
    """Examples of more tokens than fit."""
    parts: int = state(0)
    """Additional examples made by splitting."""
    untrained: int = state(0)
    """Cut examples and parts that were left out because they have no target."""
    even: float = state(float(TYPICAL))
    """Length at which attention costs as much as everything else."""
    apart: str = state("")
    """Result of the probe on the run's model."""
    twin: str = state("")
    """Result of the probe on its tiny twin."""
    rows: str = state("")
    """What the rows of a data set hold."""
    used: int = state(0)
    """Tokens in micro-batches that were made, and their number."""
    made: int = state(0)

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Set the capacity; refuse settings that packing would ignore."""
        # A pair of answers has two sequences.
        longest = recipe.data.max_length * (2 if recipe.has("dpo") else 1)
        self.room = self.capacity or longest
        self.longest = min(self.room, recipe.data.max_length)
        if recipe.train.micro_batch > 1:
            raise RecipeError(
                "capacity sets the size of a micro-batch, so train.micro_batch has no effect; "
                f"remove it; capacity = {recipe.train.micro_batch * self.room} takes about as many "
                "tokens at a time"
            )
        halves = [one.source for one in recipe.data.all_sources() if one.weight % 1]
        if self.overlong != "error" and recipe.has("dpo"):
            raise RecipeError(
                f'overlong = "{self.overlong}" would cut one answer of a pair: remove it'
            )
        if self.scope == "dataset" and halves:
            raise RecipeError(
                f'scope = "dataset" cannot draw a new part of {halves[0]} in each epoch, since '
                "epochs would have different numbers of steps; give it a whole weight, or set "
                'scope = "step"'
            )

    @hookimpl(wrapper=True)
    def optimize_model(self, load: ModelLoad) -> Generator[None, Any, Any]:
        """Let attention be computed per document, unless a kernel that can do so was chosen."""
        from plugsft.kit.model import attend_per_document, ensure_twin_apart, takes_documents

        load.kwargs.setdefault("attn_implementation", attend_per_document())
        with takes_documents():
            model = yield
        self.twin = ensure_twin_apart(model, self.longest, self.room)
        self.even = evens_out(model)
        return model

    @hookimpl(wrapper=True)
    def annotate(
        self, model: Any, tokens: Tokens, prelude: Prelude
    ) -> Generator[None, Tokens, Tokens]:
        """Prove that documents do not see each other; cut long examples."""
        from plugsft.kit.model import ensure_apart

        tokens = yield
        self.apart = self.apart or f"{ensure_apart(model, prelude.exact)}, {self.twin}"
        return self.fitting(tokens)

    @hookimpl(wrapper=True)
    def batches(
        self, order: Ints, lengths: Ints, ranks: int, train: Train
    ) -> Generator[None, Layouts, Layouts]:
        """Lay every window out again; or lay out windows of rows filled from the whole epoch."""
        layouts = yield
        if (lengths > self.room).any():
            # Of a run `annotate` has treated them; but a check may ask before.
            if self.overlong == "error":
                raise DataError(self.too_long(lengths))
            lengths = np.minimum(lengths, self.room)
        if self.scope == "step":
            return Windows(layouts, lengths, ranks, self.room, self.cost)
        rows = Rows(order, lengths, ranks, train.batch_size, self.room, self.cost)
        fill = lengths[order].sum() / (rows.total * self.room)
        # Of the training data, which comes before that of evaluation.
        self.rows = self.rows or (
            f"{len(order):,} examples in {rows.total:,} rows of {self.room:,} tokens, {fill:.2%} "
            f"full; a step is {train.batch_size} rows, {len(order) / len(rows):,.1f} examples"
        )
        return rows

    @hookimpl
    def collate(self, tokens: Tokens, examples: Ints) -> Batch:
        """Lay examples end to end; rows of a data set all have the same length."""
        from plugsft.kit.model import pack

        with COUNTING:
            self.used += int(tokens.lengths[examples].sum())
            self.made += len(examples) > 0
        return pack(tokens, examples, self.room if self.scope == "dataset" else None)

    @hookimpl
    def verdict(self) -> str:
        """Say how it packs, and what the probe found."""
        unit = "step" if self.scope == "step" else "data set"
        said = [f"each {unit} packed into micro-batches of at most {self.room:,} tokens"]
        if self.made:
            said.append(f"{self.used / self.made / self.room:.0%} full on average")
        long = f"{self.long:,} longer examples cut" if self.long else ""
        if self.long and self.overlong == "split":
            long = f"{self.long:,} longer examples split, which made {self.parts:,} more"
        if self.untrained:
            long += f"; {self.untrained:,} of them or their parts left out: no trained token"
        return "; ".join(filter(None, [*said, self.rows, long, self.apart]))

    def cost(self, lengths: Ints) -> Any:
        """Return what documents cost, in tokens: attention looks back from each of them."""
        return lengths * (1 + lengths / self.even)

    def too_long(self, lengths: Ints, rows: "Ints | None" = None) -> str:
        """Say that examples do not fit, and the cure; about, where the rows are not known yet."""
        count = int((lengths > self.room).sum())
        shown = ""
        if rows is not None:
            shown = f" (rows {', '.join(map(str, rows[:5]))}{', ...' if count > 5 else ''})"
        return (
            f"plugins.bfd_packing: {'about ' if rows is None else ''}{count:,} of "
            f"{len(lengths):,} examples have more than {self.room:,} tokens, the longest"
            f"{' that was seen' if rows is None else ''} {int(lengths.max()):,}{shown}. Raise "
            'capacity, or set overlong = "truncate" or "split"'
        )

    def fitting(self, tokens: Tokens) -> Tokens:
        """Return tokens whose examples all fit a micro-batch and have a target."""
        long = np.flatnonzero(tokens.lengths > self.room)
        self.long += len(long)
        if not len(long):
            return tokens
        if self.overlong == "error" or tokens.facts["pairs"]:
            raise DataError(self.too_long(tokens.lengths, tokens.rows[long]))
        if self.overlong == "truncate":
            numbers = np.arange(len(tokens))
            skips, kind = 0 * numbers, "the first"
        else:
            parts, kind = -(-tokens.lengths // self.room), "a part of"
            self.parts += int(parts.sum()) - len(parts)
            numbers = np.repeat(np.arange(len(tokens)), parts)
            firsts = np.repeat(np.cumsum(parts) - parts, parts)
            skips = (np.arange(len(numbers)) - firsts) * self.room
        lengths = np.minimum(tokens.lengths[numbers] - skips, self.room)
        cut = tokens.cut(numbers, skips, lengths)
        reason = f"no trained token in {kind} {self.room:,} tokens of an example"
        return self.with_targets(tokens, cut, (numbers, skips, lengths), reason)

    def with_targets(self, tokens: Tokens, cut: Tokens, stretches: Any, reason: str) -> Tokens:
        """Leave out cut examples without a target; name their rows in the facts."""
        trained = cut.trained > 0
        if trained.all():
            return cut
        if not trained.any():
            raise DataError(f"plugins.bfd_packing: {reason}, for every example; raise capacity")
        chosen: Any = [column[trained] for column in (*stretches, cut.trained)]
        result, rows = tokens.cut(*chosen), cut.rows[~trained]
        self.untrained += len(rows)
        count = {"count": len(rows), "rows": np.unique(rows)[:10].tolist()}
        result.facts["bad_rows"] = {**tokens.facts.get("bad_rows", {}), reason: count}
        return result


class Windows(OnDemand):
    """Windows that are packed when they are asked for."""

    def __init__(
        self, layouts: Layouts, lengths: Ints, ranks: int, capacity: int, cost: Costs
    ) -> None:
        self._layouts, self._lengths, self._ranks = layouts, lengths, ranks
        self._capacity, self._cost = capacity, cost

    def __len__(self) -> int:
        return len(self._layouts)

    def lay_out(self, number: int) -> Layout:
        """Lay out one window."""
        examples = np.concatenate([part for rank in self._layouts[number] for part in rank])
        lengths = self._lengths[examples]
        dealt = deal(lengths, self._cost(lengths), self._ranks, self._capacity)
        return [[examples[part] for part in rank] for rank in dealt]


class Rows(OnDemand):
    """Rows filled from the whole epoch, `batch_size` of them in a window."""

    def __init__(
        self, order: Ints, lengths: Ints, ranks: int, size: int, capacity: int, cost: Costs
    ) -> None:
        mine = lengths[order]
        items, bins, self.total = best_fit(mine, capacity)
        # A row takes the place of its longest example in the epoch's order: at random.
        first = np.full(self.total, len(order))
        first[bins[::-1]] = items[::-1]
        rank_of = np.empty(self.total, np.int64)
        rank_of[np.argsort(first)] = np.arange(self.total)
        rows = rank_of[bins]
        self._examples = order[items[np.argsort(rows, kind="stable")]]
        self._stops = np.cumsum(np.bincount(rows, minlength=self.total))
        costs = np.bincount(rows, weights=cost(mine[items]), minlength=self.total)
        self._costs, self._ranks, self._size = costs, ranks, size

    def __len__(self) -> int:
        return -(-self.total // self._size)

    def lay_out(self, number: int) -> Layout:
        """Lay out one window."""
        rows = np.arange(number * self._size, min((number + 1) * self._size, self.total))
        # Who works side by side has about equal work.
        rows = rows[np.argsort(-self._costs[rows], kind="stable")]
        starts = np.append(0, self._stops)[rows]
        parts = [
            self._examples[start:stop]
            for start, stop in zip(starts, self._stops[rows], strict=True)
        ]
        parts += [self._examples[:0]] * (-len(parts) % self._ranks)
        return [parts[rank :: self._ranks] for rank in range(self._ranks)]


def evens_out(model: Any) -> float:
    """Return the length at which attention costs a model as much as all its weights.

    A weight takes one multiplication for each token; attention two per layer and unit of width,
    for each of the tokens before it, on average half of the document.
    """
    config = model.config.get_text_config()
    # Under ZeRO-3 `numel` counts this rank's shard; `ds_numel` has the whole size.
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return float(TYPICAL)  # no attention: the probe decides
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    weights = sum(getattr(one, "ds_numel", one.numel()) for one in model.parameters())
    if head is not None and head.weight is not table:
        weights -= getattr(table, "ds_numel", table.numel())  # looked up, not multiplied
    # A configuration whose layers differ raises where the attribute itself is read.
    width = config.to_dict().get("head_dim") or config.hidden_size // heads
    return float(weights / (config.num_hidden_layers * heads * width))


def best_fit(lengths: Ints, capacity: int) -> tuple[Ints, Ints, int]:
    """Pack exactly as best-fit-decreasing would; return the items, their bins, and how many bins.

    The longest come first, and each goes where the least is left. Equal lengths are alike: whole
    groups of bins with as much left take them at once, so that time goes with the number of
    distinct lengths, not of items.
    """
    # A narrow type is sorted by its digits, in one pass.
    narrow = lengths.astype(np.uint16) if capacity < 2**16 else lengths
    items = np.argsort(capacity - narrow, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    left: dict[int, list[tuple[int, int]]] = {}
    spaces: list[int] = []
    segments: list[tuple[int, int, int]] = []
    bins = 0

    def put(first: int, count: int, each: int, space: int) -> None:
        """Note that so many bins take so many items each, with that much left in them."""
        segments.append((first, count, each))
        if space:
            if space not in left:
                left[space] = []
                insort(spaces, space)
            left[space].append((first, count))

    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            place = bisect_left(spaces, size)
            if place == len(spaces):
                each = capacity // size
                full, rest = divmod(count, each)
                for some, items_each in ((full, each), (min(rest, 1), rest)):
                    if some:
                        put(bins, some, items_each, capacity - items_each * size)
                        bins += some
                break
            space = spaces[place]
            first, there = left[space].pop()
            if not left[space]:
                del left[space]
                spaces.pop(place)
            each = space // size
            taken = min(there, count // each)
            if taken:
                put(first, taken, each, space - each * size)
                count -= taken * each
                first, there = first + taken, there - taken
            if there and 0 < count < each:
                put(first, 1, count, space - count * size)
                first, there, count = first + 1, there - 1, 0
            if there:
                if space not in left:
                    left[space] = []
                    insort(spaces, space)
                left[space].append((first, there))
    firsts, many, each_of = np.array(segments, np.int64).reshape(-1, 3).T
    total = many * each_of
    inside = np.arange(len(items)) - np.repeat(np.cumsum(total) - total, total)
    return items, np.repeat(firsts, total) + inside // np.repeat(each_of, total), bins


def deal(lengths: Ints, costs: Any, ranks: int, capacity: int) -> list[list[Ints]]:
    """Deal examples to ranks: in as few micro-steps as can hold them, each of even work.

    All micro-steps but the last are full everywhere. Best fit leaves the shortest for the last,
    and of these each rank gets as much as evens out the whole.
    """
    items, bins, count = best_fit(lengths, capacity)
    ends = np.cumsum(np.bincount(bins, minlength=count))
    packed = np.split(items[np.argsort(bins, kind="stable")], ends[:-1])
    full = (count - 1) // ranks * ranks
    packed[:full] = sorted(packed[:full], key=lambda part: -costs[part].sum())
    dealt: list[list[Ints]] = [[] for _ in range(ranks)]
    work = np.zeros(ranks)
    for first in range(0, full, ranks):
        for rank, part in zip(np.argsort(work), packed[first : first + ranks], strict=True):
            dealt[rank].append(part)
            work[rank] += costs[part].sum()
    rest = np.concatenate(packed[full:])
    shares = evenly(costs[rest], lengths[rest], work, capacity)
    last = packed[full:] + [items[:0]] * (ranks - count + full)
    for rank in range(ranks):
        dealt[rank].append(last[rank] if shares is None else rest[shares[rank]])
    return dealt


def evenly(costs: Any, lengths: Ints, work: Any, capacity: int) -> list[list[int]] | None:
    """Give each example, the dearest first, to the rank that has least, if all find room."""
    shares: list[list[int]] = [[] for _ in work]
    heap = [(load, rank, 0) for rank, load in enumerate(work.tolist())]
    heapq.heapify(heap)
    for item in np.argsort(-costs, kind="stable").tolist():
        crowded = []
        while heap and heap[0][2] + lengths[item] > capacity:
            crowded.append(heapq.heappop(heap))
        if not heap:
            return None
        load, rank, used = heap[0]
        shares[rank].append(item)
        heapq.heapreplace(heap, (load + costs[item], rank, used + int(lengths[item])))
        for one in crowded:
            heapq.heappush(heap, one)
    return shares
