"""The values that travel between hooks. Importing this costs nothing: numpy and torch are hints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.nn import Module

Ints: TypeAlias = "NDArray[np.int64]"
Batch: TypeAlias = dict[str, Any]
"""What a model is called with, and its labels: tensors, and plain values about them."""

Row: TypeAlias = dict[str, Any]
"""One row of a source, as JSON would give it."""

Counted: TypeAlias = dict[str, Any]
"""Counted rows: their "count", and the first "rows"."""

Span: TypeAlias = tuple[int, int]
"""A trained stretch of a text: its first character, and the one after its last."""

Layout: TypeAlias = list[list["Ints"]]
"""The examples of one window: [rank][micro-step] -> example numbers."""


@dataclass
class Rendered:
    """Rows as text. A row may give several texts (DPO gives two): they follow each other."""

    texts: list[str] = field(default_factory=list)
    spans: list[list[Span]] = field(default_factory=list)
    """The trained spans of each text."""
    rows: list[int] = field(default_factory=list)
    """For each text, the number of its row in the batch."""
    bad: dict[int, str] = field(default_factory=dict)
    """Rows that cannot be used: number in the batch -> reason."""
    special_tokens: bool = False
    """Whether the tokenizer adds its own first and last tokens (a chat template writes them)."""
    mask: str = "every token of the text"
    """Where the spans come from, in words for the record."""
    warnings: dict[str, list[int]] = field(default_factory=dict)
    """Warning -> numbers in the batch of rows that are trained on nevertheless."""
    read: Collection[str] | None = None
    """Columns that were read. Rows with an unread column that changes their meaning (label, weight,
    images, ...) are refused; None turns this check off."""
    unread: list[str] = field(default_factory=list)
    """Unread columns; the core fills them in."""


@dataclass
class Encoded:
    """Texts as tokens, flat."""

    ids: NDArray[np.int32]
    counts: Ints
    """How many tokens each text has."""
    ends: Ints
    """For each token, where it ends: a place in all texts joined, in bytes of UTF-8."""
    engines: dict[str, int] = field(default_factory=dict)
    """How many texts each engine encoded, for the record."""


class Score(Protocol):
    """The stage `score`, as `step` calls it."""

    def __call__(self, *, model: Module, batch: Batch, summed: bool) -> Tensor:
        """Return -log p of each target, one after the other; or, all that is needed, their sum."""


class Rows(Protocol):
    """A source, opened: random access to its rows. Travels to other processes in parts."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; None stands for one that is not a JSON object."""

    def part(self, start: int, stop: int) -> Rows:
        """Return a stretch of the rows, as small to send as it is."""


@dataclass(frozen=True)
class Slice:
    """A stretch of a source's rows, and what it takes to read them: the unit of `tokenize`."""

    source: int
    start: int
    stop: int
    rows: Rows


@dataclass
class Shard:
    """What became of one slice: a file of examples, and what was left out."""

    file: str
    examples: int = 0
    tokens: int = 0
    trained: int = 0
    source: int = 0
    rows: int = 0
    bad: dict[str, list[int]] = field(default_factory=dict)
    """Reason -> row numbers."""
    too_long: list[int] = field(default_factory=list)
    """Rows left out because of their length."""
    truncated: list[int] = field(default_factory=list)
    warnings: dict[str, Counted] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    """Columns that are not read."""
    mask: str = ""
    engines: dict[str, int] = field(default_factory=dict)
    """How many texts each engine encoded."""
    largest: int = 0
    """The largest token id."""
    stamp: list[int | str] = field(default_factory=list)
    """The file's size and checksum."""


class Work(Protocol):
    """What is done to a slice. Travels to other processes, where it makes its plugins again."""

    def __call__(self, part: Slice) -> Shard:
        """Render, encode and mask a slice, and write it as one shard."""

    def where(self, part: Slice) -> str:
        """Name a slice: its source and rows."""


@dataclass(frozen=True)
class Window:
    """One optimizer step: which examples, laid out how, and what their loss is divided by."""

    step: int
    epoch: int
    layout: Layout
    total: int
    """The divisor of its loss: its targets over all ranks, or a plugin's count."""
    trained: int
    tokens: int
    imbalance: float = 1.0
    """Tokens of the busiest rank over the average."""

    @property
    def examples(self) -> int:
        """How many examples it has."""
        return sum(len(part) for rank in self.layout for part in rank)

    @property
    def parts(self) -> int:
        """How many micro-batches with examples it has, over all ranks."""
        return sum(len(part) > 0 for rank in self.layout for part in rank)


@dataclass(frozen=True)
class Fed:
    """A window with this rank's batches, ready for the device."""

    window: Window
    batches: list[Batch]
    copied: float = 0.0
    """Seconds that copying them to the device kept the host."""

    @property
    def slots(self) -> int:
        """Number of tokens that this rank computes, padding included."""
        return sum(batch["input_ids"].numel() for batch in self.batches)


Build: TypeAlias = Callable[[int], Fed]
Feed: TypeAlias = Iterator[Fed]
Layouts: TypeAlias = Sequence[Layout]


class OnDemand(Sequence[Layout], ABC):
    """Windows that are laid out when they are asked for: an epoch may have millions."""

    @overload
    def __getitem__(self, number: int) -> Layout: ...
    @overload
    def __getitem__(self, number: slice) -> Layouts: ...
    def __getitem__(self, number: int | slice) -> Layout | Layouts:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self.lay_out(number)

    @abstractmethod
    def lay_out(self, number: int) -> Layout:
        """Lay out one window, whose number is in range."""


class Kept(Protocol):
    """What a folder of the cache holds: tokens, or what a plugin keeps there."""

    facts: dict[str, Any]
    """Among them `key_parts`, the key that it was built for."""


class ModelLoad(Protocol):
    """How the model will be loaded; a wrapper of `optimize_model` edits it before its yield."""

    path: str
    kwargs: dict[str, Any]
    empty: bool
    """Whether weights stay in their files until the model is sharded, when ranks read their own; a
    wrapper that needs the weights sets it to False."""
