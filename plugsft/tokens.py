"""Tokens on disk: an Arrow folder that `datasets.load_from_disk` opens, as flat numpy views.

input_ids  list<int32>   the tokens of an example
loss_mask  list<bool>    which of them are trained targets
lengths    list<int32>   the sequences inside it: one for SFT, chosen and rejected for DPO
shared     int32         how many tokens its two sequences begin with alike, none of them trained
trained    int32         how many targets it has, so that a window's total needs no tokens
row        int64         the row of its source

Beside the shards stands index.arrow, with flat columns of all examples: length, that of the first
sequence, shared, trained and row.
Opening maps it, and a shard is opened when one of its examples is asked for, so that it costs the
same at ten thousand rows and at ten million.
"""

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .errors import DataError
from .types import Ints, Shard

Chunk = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8]]
"""Of a record batch: ids, offsets, and the mask as bits."""
Chunks = list[Chunk]

FORMAT = 3
SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "lengths": pa.list_(pa.int32()),
        "shared": pa.int32(),
        "trained": pa.int32(),
        "row": pa.int64(),
    }
)


COLUMNS = ("length", "first", "shared", "trained", "row")
INDEX = pa.schema({name: pa.int64() for name in COLUMNS})
NO_IDS, NO_BITS = np.zeros(0, np.int32), np.zeros(0, np.uint8)
MOST = 2**30
"""Tokens of a record batch: its offsets are of 32 bits."""
DAMAGE = (OSError, ArithmeticError, LookupError, TypeError, ValueError, pa.ArrowException)
"""What reading a damaged file raises."""


def _feature(kind: str, listed: bool) -> dict[str, Any]:
    value = {"dtype": kind, "_type": "Value"}
    return {"feature": value, "_type": "List"} if listed else value


# What `datasets` would write; importing it to do so takes a second.
FEATURES = {
    field.name: _feature(
        str(getattr(field.type, "value_type", field.type)), field.type.num_fields > 0
    )
    for field in SCHEMA
}


@dataclass
class Examples:
    """A batch of examples in memory, flat, on its way to disk."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    counts: NDArray[np.int64]
    """Tokens of each sequence."""
    pieces: NDArray[np.int64]
    """Sequences of each example."""
    rows: NDArray[np.int64]


def write_shard(path: Path, examples: Examples) -> int:
    """Write one Arrow file, at once or not at all; return its number of trained targets."""
    trained = 0
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with pa.OSFile(str(half), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        for some in _parts(examples):
            writer.write_batch(_record_batch(some))
            trained += int(np.count_nonzero(some.mask))
    half.replace(path)
    return trained


def _parts(examples: Examples) -> Iterator[Examples]:
    if len(examples.ids) <= MOST:
        yield examples
        return
    first = _offsets(examples.pieces)
    ends = _offsets(examples.counts)[first]
    cuts = np.searchsorted(ends, np.arange(0, len(examples.ids), MOST))
    for a, b in zip(cuts, [*cuts[1:], len(examples.rows)], strict=True):
        yield Examples(
            examples.ids[ends[a] : ends[b]],
            examples.mask[ends[a] : ends[b]],
            examples.counts[first[a] : first[b]],
            examples.pieces[a:b],
            examples.rows[a:b],
        )


def _record_batch(examples: Examples) -> pa.RecordBatch:
    first = _offsets(examples.pieces)
    ends = _offsets(examples.counts)[first]
    trained = sums_of(examples.mask, np.diff(ends))
    return pa.record_batch(
        [
            _lists(ends, examples.ids),
            _lists(ends, examples.mask),
            _lists(first, examples.counts.astype(np.int32)),
            _arrow(_alike(examples, ends, first)),
            _arrow(trained.astype(np.int32)),
            _arrow(examples.rows.astype(np.int64)),
        ],
        schema=SCHEMA,
    )


def _alike(examples: Examples, ends: Ints, first: Ints) -> NDArray[np.int32]:
    """Count the tokens that both sequences of an example begin with, before any that is trained."""
    shared = np.zeros(len(examples.pieces), np.int32)
    for number in np.flatnonzero(examples.pieces == 2).tolist():
        a, stop = int(ends[number]), int(ends[number + 1])
        b = a + int(examples.counts[first[number]])
        most = min(b - a, stop - b)
        pair = (slice(a, a + most), slice(b, b + most))
        ids, mask = ([column[part] for part in pair] for column in (examples.ids, examples.mask))
        differs = (ids[0] != ids[1]) | mask[0] | mask[1]
        shared[number] = differs.argmax() if differs.any() else most
    return shared


def write_index(folder: Path, shards: list[Shard], facts: dict[str, Any]) -> None:
    """Write what makes a folder of shards a dataset, and the facts about it."""
    state = {
        "_data_files": [{"filename": shard.file} for shard in shards],
        "_fingerprint": facts["key"],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=1))
    (folder / "dataset_info.json").write_text(json.dumps({"features": FEATURES}, indent=1))
    columns = [_columns(folder / shard.file) for shard in shards]
    joined = [
        np.concatenate([np.zeros(0, np.int64), *parts]) for parts in zip(*columns, strict=True)
    ]
    pairs = int(np.count_nonzero(joined[1] < joined[0]))
    with pa.OSFile(str(folder / "index.arrow"), "wb") as sink, pa.ipc.new_file(sink, INDEX) as file:
        file.write_batch(pa.record_batch([_arrow(one) for one in joined], schema=INDEX))
    listed = [{"file": shard.file, "examples": shard.examples} for shard in shards]
    (folder / "facts.json").write_text(
        json.dumps(facts | {"pairs": pairs, "shards": listed}, indent=1)
    )


class Tokens:
    """Prepared examples, mapped from disk."""

    def __init__(self, folder: Path, in_memory: bool = False) -> None:
        self.folder = folder
        self._stretches: tuple[Ints, Ints] | None = None
        self._shares = False
        self.columns: dict[str, NDArray[Any]] = {}
        """What plugins have computed of each example before step 1."""
        self._in_memory = in_memory
        with self._reading(folder / "facts.json") as path:
            self.facts: dict[str, Any] = json.loads(path.read_text())
            shards = self.facts["shards"]
            self._files = [folder / shard["file"] for shard in shards]
            self._starts = _offsets([shard["examples"] for shard in shards])
            self._opened: list[Chunks] = [[] for _ in shards]
            counted = sum(one["examples"] for one in self.facts.get("sources", shards))
        with self._reading(folder / "index.arrow") as path:
            index = _checked(pa.ipc.open_file(self._buffer(path)).get_batch(0), INDEX)
            columns = [_numpy(one) for one in index.columns]
            self.lengths, self._firsts, self._alike, self.trained, self.rows = columns
            if len({counted, int(self._starts[-1]), *map(len, columns)}) > 1:
                raise ValueError("it has not as many examples as facts.json says")
        self._whole = self.lengths
        """What lies on disk, where the examples are stretches of it."""
        self.units = self.trained
        """What each adds to the number by which the loss of a window is divided: its targets."""
        if in_memory:
            for shard in range(len(self._files)):
                self._open(shard)

    def __len__(self) -> int:
        return len(self.lengths)

    def example(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the tokens of one example and their mask."""
        return self.gather(np.array([number]))

    def gather(self, examples: Ints) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the tokens of examples, end to end, and which of them are trained."""
        numbers, skips, lengths = self._parts(examples)
        shards = np.searchsorted(self._starts, numbers, "right") - 1
        columns = (shards, numbers - self._starts[shards], skips, lengths)
        # Arrow holds eight booleans to a byte: the bytes of all are gathered, and parted at once.
        ids_of, bits_of, spans, place = [NO_IDS], [NO_BITS], [], 0
        for shard, number, skip, length in zip(*(some.tolist() for some in columns), strict=True):
            chunks = self._opened[shard] or self._open(shard)
            flat, offsets, bits = chunks[0]
            if len(chunks) > 1:
                (flat, offsets, bits), number = _chunk_with(chunks, number)
            start = offsets.item(number) + skip
            first, stop = start >> 3, (start + length + 7) >> 3
            ids_of.append(flat[start : start + length])
            bits_of.append(bits[first:stop])
            begin = 8 * place + (start & 7)
            spans.append(slice(begin, begin + length))
            place += stop - first
        parted = np.unpackbits(np.concatenate(bits_of), bitorder="little").view(np.bool_)
        masks = [NO_BITS.view(np.bool_), *map(parted.__getitem__, spans)]
        return np.concatenate(ids_of), np.concatenate(masks)

    def sequences(self, examples: Ints) -> tuple[Ints, Ints]:
        """Return the lengths of the sequences in examples, and what each sees of the one before.

        That is so many tokens of its beginning, where a pair's second answer shares the prompt.
        """
        lengths = self.lengths[examples]
        if not self.facts["pairs"]:
            return lengths, np.zeros_like(lengths)
        firsts = self._firsts[examples]
        seen = self._trunks(examples) if self._shares else np.zeros_like(firsts)
        paired = np.stack([np.ones_like(firsts), firsts < lengths], 1).astype(np.bool_)
        counts = np.stack([firsts, lengths - firsts], 1)[paired]
        return counts, np.stack([np.zeros_like(seen), seen], 1)[paired]

    def targets(self, examples: Ints) -> Ints:
        """Return how many targets each sequence of examples has."""
        return sums_of(self.gather(examples)[1], self.sequences(examples)[0])

    def shared(self) -> "Tokens":
        """Return tokens of pairs whose common beginning stands once, in the first sequence.

        But for its last token: from that the second answer begins, as from it the first does.
        """
        part = copy.copy(self)
        part._shares = True
        part.lengths = self.lengths - self._trunks(np.arange(len(self)))
        return part

    def _trunks(self, examples: Ints) -> Ints:
        trunks: Ints = np.maximum(self._alike[examples] - 1, 0)
        return trunks

    def _parts(self, examples: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the stretches that examples are made of: of which, from where, how long."""
        lengths = self.lengths[examples]
        if self._stretches is not None:
            numbers, skips = (some[examples] for some in self._stretches)
            return numbers, skips, lengths
        if not self._shares:
            return examples, np.zeros_like(lengths), lengths
        firsts, trunks = self._firsts[examples], self._trunks(examples)
        skips = np.stack([np.zeros_like(firsts), firsts + trunks], 1)
        return (
            np.repeat(examples, 2),
            skips.ravel(),
            np.stack([firsts, lengths - firsts], 1).ravel(),
        )

    def stretches(self, numbers: Ints, skips: Ints, lengths: Ints) -> "Tokens":
        """Return tokens whose examples are stretches of these: of which, from where, how long."""
        assert self._stretches is None, "stretches of stretches were never needed"
        assert not self.facts["pairs"], "a pair is whole"
        part = copy.copy(self)
        part._stretches = (numbers, skips)
        part.lengths, part.rows = lengths, self.rows[numbers]
        part.trained = self.trained[numbers].copy()
        for place in np.flatnonzero(lengths < self.lengths[numbers]).tolist():
            _, mask = part.example(place)
            # The first token has nothing before it any more from which to be learned.
            part.trained[place] = np.count_nonzero(mask[1:])
        part.units, part._firsts = part.trained, lengths
        part.columns = {name: values[numbers] for name, values in self.columns.items()}
        firsts = _offsets([one["examples"] for one in self.facts["sources"]])
        counts = np.diff(np.searchsorted(numbers, firsts))
        sources = [
            {**one, "examples": int(count)}
            for one, count in zip(self.facts["sources"], counts, strict=True)
        ]
        part.facts = {**self.facts, "examples": len(numbers), "sources": sources}
        return part

    def _open(self, shard: int) -> Chunks:
        with self._reading(self._files[shard]) as path:
            chunks = [_chunk(batch) for batch in pa.ipc.open_stream(self._buffer(path))]
            lengths = [np.diff(offsets) for _, offsets, _ in chunks]
            known = self._whole[self._starts[shard] : self._starts[shard + 1]]
            if not np.array_equal(np.concatenate([known[:0], *lengths]), known):
                raise ValueError("its examples have other lengths than in the index")
        self._opened[shard] = chunks
        return chunks

    def _buffer(self, path: Path) -> pa.Buffer:
        """Map a file, or read it at once where mapping is slow."""
        with (pa.OSFile if self._in_memory else pa.memory_map)(str(path)) as file:
            return file.read_buffer()

    @contextmanager
    def _reading(self, path: Path) -> Iterator[Path]:
        """Turn whatever Arrow or JSON make of a damaged file into one line with the cure."""
        try:
            yield path
        except DAMAGE as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"{path}: damaged: {reason}. Remove the folder {self.folder}: it is prepared again"
            ) from error

    def source_of(self, number: int) -> tuple[int, int]:
        """Return the source and the row in it that an example was made from."""
        firsts = _offsets([source["examples"] for source in self.facts["sources"]])
        return int(np.searchsorted(firsts, number, "right")) - 1, int(self.rows[number])


def _chunk_with(chunks: Chunks, number: int) -> tuple[Chunk, int]:
    """Find an example in the record batches of a shard, as one of more than 2^30 tokens has."""
    for chunk in chunks:
        count = len(chunk[1]) - 1
        if number < count:
            return chunk, number
        number -= count
    raise IndexError(number)


def sums_of(values: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the true values of each of the stretches that so many values make."""
    summed = np.zeros(len(counts), np.int64)
    # Of an empty stretch numpy would give the value that stands there.
    filled = counts > 0
    starts = (np.cumsum(counts) - counts)[filled]
    summed[filled] = np.add.reduceat(values.view(np.uint8), starts, dtype=np.int64)
    return summed


def _lists(offsets: NDArray[np.int64], values: NDArray[Any]) -> pa.ListArray:
    return pa.ListArray.from_arrays(_arrow(offsets.astype(np.int32)), _arrow(values))


def _arrow(values: NDArray[Any]) -> pa.Array:
    """Return values as an Arrow array; pa.array() would import pandas, half a second long."""
    if values.dtype == np.bool_:
        kind, held = pa.bool_(), np.packbits(values, bitorder="little")
    else:
        kind, held = pa.from_numpy_dtype(values.dtype), np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(held)])


def _numpy(array: pa.Array) -> NDArray[Any]:
    """Return a view of an Arrow array of numbers: shorter where a damaged one ends early."""
    values = np.frombuffer(array.buffers()[1] or b"", array.type.to_pandas_dtype())
    return values[array.offset : array.offset + len(array)]


def _offsets(counts: Any) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _chunk(batch: pa.RecordBatch) -> Chunk:
    _checked(batch, SCHEMA)
    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    bits = np.frombuffer(mask.values.buffers()[1] or b"", np.uint8)
    flat, offsets = _numpy(ids.values), _numpy(ids.offsets)
    if not 0 <= offsets[0] <= offsets[-1] <= min(len(flat), 8 * len(bits)):
        raise ValueError("its offsets point outside of its tokens")
    return flat, offsets, bits


def _checked(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Make sure that a batch is what it should be."""
    if batch.schema != schema:
        raise ValueError("it has other columns")
    return batch


def _columns(path: Path) -> tuple[NDArray[np.int64], ...]:
    """Read what the index holds of a shard."""
    with pa.memory_map(str(path)) as mapped:
        batches = [*pa.ipc.open_stream(mapped)]
    columns = (
        [np.diff(_numpy(batch["input_ids"].offsets)) for batch in batches],
        [_firsts(batch["lengths"]) for batch in batches],
        *([_numpy(batch[name]) for batch in batches] for name in COLUMNS[2:]),
    )
    return tuple(np.concatenate([np.zeros(0, np.int64), *column]) for column in columns)


def _firsts(lengths: pa.ListArray) -> NDArray[np.int32]:
    """Return the first of each list."""
    offsets = _numpy(lengths.offsets)[:-1]
    values: NDArray[np.int32] = _numpy(lengths.values)[offsets]
    return values
