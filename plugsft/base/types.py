"""Types of the values that hooks pass on. numpy and torch are imported for type hints only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.nn import Module

Ints: TypeAlias = "NDArray[np.int64]"
"""Whole numbers; some columns are stored in 32 bits."""

Batch: TypeAlias = dict[str, Any]
"""The arguments of a model call and the labels: tensors and plain values."""

Row: TypeAlias = dict[str, Any]
"""One row of a source: JSON values by column."""

Counted: TypeAlias = dict[str, Any]
"""Rows with the same problem: their "count", and the numbers of the first "rows"."""

Range: TypeAlias = tuple[str, int, int]
"""A range of a source's rows: split, first row, and one past the last."""

Span: TypeAlias = tuple[int, int]
"""A trained span of a text: first character, and one past the last."""

Layout: TypeAlias = list[list["Ints"]]
"""The examples of one global batch: [rank][micro-batch] -> example numbers."""


@dataclass
class Rendered:
    """Rows as text. A row may give several consecutive texts (DPO gives two)."""

    texts: list[str] = field(default_factory=list)
    spans: list[list[Span]] = field(default_factory=list)
    """The trained spans of each text."""
    rows: list[int] = field(default_factory=list)
    """For each text, the number of its row among the rendered rows."""
    turns: list[int] = field(default_factory=list)
    """For each text, which example of its row it is; none if each row is one example. A chat whose
    template rewrites earlier turns gives several chains: of one that is too long, the trained spans
    that fit stay."""
    bad: dict[int, str] = field(default_factory=dict)
    """Rows that cannot be used: number among the rendered rows -> reason."""
    columns: dict[str, Sequence[Any]] = field(default_factory=dict)
    """Columns of the examples, by name: a number or boolean for each rendered row, at its number.
    Values of rows in `bad` do not count."""
    special_tokens: bool = False
    """Whether the tokenizer adds its special tokens (a chat template writes its own)."""
    mask: str = "every token of the text"
    """Where the spans come from, in words for run.json."""
    warnings: dict[str, list[int]] = field(default_factory=dict)
    """Warning -> numbers of the rows concerned, which are still trained on."""
    read: Collection[str] | None = None
    """Columns that were read. Rows with an unread column that changes their meaning (label, weight,
    images, ...) are refused. None disables this check."""
    unread: list[str] = field(default_factory=list)
    """Unread columns; the core fills them in."""


@dataclass
class Encoded:
    """Texts as tokens, in flat arrays."""

    ids: NDArray[np.int32]
    counts: Ints
    """Number of tokens of each text."""
    ends: Ints
    """End of each token: an offset into the joined texts, in bytes of UTF-8."""
    engines: dict[str, int] = field(default_factory=dict)
    """Number of texts that each engine encoded, for run.json."""


class TokenNll(Protocol):
    """The stage `token_nll`, as `step` calls it."""

    def __call__(self, *, model: Module, batch: Batch, summed: bool) -> Tensor:
        """Return -log p of each target; or their sum, if `summed`."""


class Rows(Protocol):
    """An open source with random access to its rows; parts are pickled for workers."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> list[Row | str]:
        """Return rows; the reason in place of one that cannot be read."""

    def part(self, start: int, stop: int) -> Rows:
        """Return a range of the rows; its pickle holds only these."""

    def sizes(self) -> Ints:
        """Return the bytes of each row, approximately."""


@dataclass(frozen=True)
class Slice:
    """A range of a source's rows, and their reader: the unit of work of `tokenize`."""

    source: int
    start: int
    stop: int
    rows: Rows
    lead_row: Row = field(default_factory=dict, compare=False)
    """Of the source's first rows: all rows are read as it is."""


@dataclass
class Shard:
    """The result of one slice: a file of examples, and the rows left out."""

    file: str
    examples: int = 0
    tokens: int = 0
    trained: int = 0
    source: int = 0
    rows: int = 0
    bad: dict[str, list[int]] = field(default_factory=dict)
    """Reason -> row numbers."""
    too_long: list[int] = field(default_factory=list)
    """Rows left out because they are too long."""
    truncated: list[int] = field(default_factory=list)
    kept_rows: int = 0
    """Rows with examples: a chat may give several."""
    longest: int = 0
    """The tokens of each row's longest example, added up."""
    warnings: dict[str, Counted] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    """Columns that are not read."""
    mask: str = ""
    engines: Counter[str] = field(default_factory=Counter)
    """Number of texts that each engine encoded."""
    largest: int = 0
    """The largest token id."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The columns of `render`: name -> type."""
    stamp: list[int | str] = field(default_factory=list)
    """The file's size and checksum."""

    @property
    def elsewhere(self) -> bool:
        """Whether another process writes the file; only the rows are known here."""
        return not self.file


@dataclass(frozen=True)
class SliceResult:
    """The shard of a slice, or the error, as a worker sends it."""

    shard: Shard | None
    error: BaseException | None = None

    def get(self) -> Shard:
        """Return the shard; raise the worker's error here."""
        if self.error is not None:
            raise self.error
        assert self.shard is not None
        return self.shard


@dataclass(frozen=True)
class StepPlan:
    """The plan of one optimizer step: which rank computes which examples, in which micro-batch."""

    step: int
    epoch: int
    layout: Layout
    denominator: float
    """The divisor of the loss: targets over all ranks, or a plugin's count, times the weights of
    their examples."""
    targets: int
    """Tokens that are trained on, over all ranks."""
    tokens: int
    imbalance: float = 1.0
    """Tokens of the busiest rank, divided by the average."""

    @property
    def examples(self) -> int:
        """Number of examples."""
        return sum(map(len, chain(*self.layout)))

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches with examples, over all ranks."""
        return sum(len(micro_batch) > 0 for micro_batch in chain(*self.layout))


@dataclass(frozen=True)
class LoadedStep:
    """A planned step with this rank's micro-batches as tensors; `build(step)` returns it."""

    plan: StepPlan
    batches: list[Batch]
    copied: float = 0.0
    """Seconds in which copying to the device blocked the host."""


Build: TypeAlias = Callable[[int], LoadedStep]
LoadedSteps: TypeAlias = Iterator[LoadedStep]


class Layouts(Sequence[Layout], ABC):
    """The layouts of an epoch, computed on access: it may have millions of steps."""

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self.lay_out(number)

    @abstractmethod
    def lay_out(self, number: int) -> Layout:
        """Lay out the global batch of one step; `number` is in range."""


@dataclass
class WeightSlice:
    """This rank's part of a tensor that has the shape of a model's weight.

    The part is the same as of the weight: all of it in one process and under DDP, rows under
    FSDP2, a flat range under ZeRO-3. A checkpoint reshards it onto other ranks.
    """

    weight: str
    """The weight's name in the model."""
    values: Tensor
