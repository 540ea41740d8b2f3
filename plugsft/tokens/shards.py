"""Shards of tokens on disk: their columns, and the writing of shards and index.

input_ids  list<int32>   the tokens of an example
loss_mask  list<bool>    which of them are trained targets
lengths    list<int32>   its sequences: one for SFT, chosen and rejected for DPO
shared     int32         tokens of the untrained prefix that its two sequences share
trained    int32         its number of targets, so that a window's total needs no tokens
row        int64         its row in the source
checksum   int64         checksum of its tokens and mask in the file

index.arrow has flat columns of all examples: length, length of the first sequence, shared, trained,
row and checksum. facts.json has the checksum of the index, and its own.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from ..base.checksums import add_checksum, parse_checksummed
from ..base.types import Ints, Shard

FORMAT = 4
SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "lengths": pa.list_(pa.int32()),
        "shared": pa.int32(),
        "trained": pa.int32(),
        "row": pa.int64(),
        "checksum": pa.int64(),
    }
)


COLUMNS = ("length", "first", "shared", "trained", "row", "checksum")
INDEX = pa.schema({name: pa.int64() for name in COLUMNS})
MOST = 2**30
"""Most tokens in a record batch: its offsets have 32 bits."""


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


Number = Annotated[int, Field(ge=0, lt=2**63)]


class _Listed(BaseModel):
    """A shard in facts.json."""

    file: str = Field(pattern=r"^data-[\w-]+\.arrow$")
    examples: Number
    size: Number


class _Source(BaseModel):
    examples: Number


class _Facts(BaseModel):
    """The fields of facts.json that opening needs."""

    model_config = ConfigDict(strict=True)

    format: Literal[4]
    index: str
    pairs: Number
    shards: list[_Listed]
    sources: list[_Source] | None = None


@dataclass
class Examples:
    """A batch of examples in memory, flat, to be written."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    counts: NDArray[np.int64]
    """Tokens of each sequence."""
    pieces: NDArray[np.int64]
    """Sequences of each example."""
    rows: NDArray[np.int64]


def write_shard(path: Path, examples: Examples) -> int:
    """Write one Arrow file, whole or not at all; return its number of targets."""
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
    first = offsets_of(examples.pieces)
    ends = offsets_of(examples.counts)[first]
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
    first = offsets_of(examples.pieces)
    ends = offsets_of(examples.counts)[first]
    trained = sums_of(examples.mask, np.diff(ends))
    return pa.record_batch(
        [
            _lists(ends, examples.ids),
            _lists(ends, examples.mask),
            _lists(first, examples.counts.astype(np.int32)),
            _arrow(_alike(examples, ends, first)),
            _arrow(trained.astype(np.int32)),
            _arrow(examples.rows.astype(np.int64)),
            _arrow(_checksums(examples, ends)),
        ],
        schema=SCHEMA,
    )


def _checksums(examples: Examples, ends: Ints) -> Ints:
    bits = np.packbits(examples.mask, bitorder="little")
    spans = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    checksums = [checksum_of(examples.ids, bits, start, stop) for start, stop in spans]
    return np.array(checksums, np.uint64).view(np.int64)


def checksum_of(ids: NDArray[np.int32], bits: NDArray[np.uint8], start: int, stop: int) -> int:
    """Return the checksum of an example: of its ids, and of the bytes with its mask."""
    seed = xxh3_64_intdigest(ids[start:stop].data)
    return xxh3_64_intdigest(bits[start >> 3 : (stop + 7) >> 3].data, seed)


def _alike(examples: Examples, ends: Ints, first: Ints) -> NDArray[np.int32]:
    """Count the tokens of the untrained prefix that both sequences of an example share."""
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
    """Write the index, the facts, and the files that make a folder of shards a dataset."""
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
    index = folder / "index.arrow"
    with pa.OSFile(str(index), "wb") as sink, pa.ipc.new_file(sink, INDEX) as file:
        file.write_batch(pa.record_batch([_arrow(one) for one in joined], schema=INDEX))
    with pa.memory_map(str(index)) as mapped:
        checksum = xxh3_128_hexdigest(mapped.read_buffer())
    listed = [
        {
            "file": shard.file,
            "examples": shard.examples,
            "size": (folder / shard.file).stat().st_size,
        }
        for shard in shards
    ]
    made = {"format": FORMAT, "index": checksum, "pairs": pairs, "shards": listed}
    (folder / "facts.json").write_text(json.dumps(add_checksum(facts | made), indent=1))


def read_facts(text: str) -> dict[str, Any]:
    """Parse facts.json; raise ValueError if it is damaged."""
    facts = json.loads(text)
    if isinstance(facts, dict) and facts.get("format") != FORMAT:
        raise ValueError("it was written by another version of plugsft")
    facts = parse_checksummed(text)
    _Facts.model_validate(facts)
    return facts


def sums_of(values: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count True values in each run of `counts` values."""
    summed = np.zeros(len(counts), np.int64)
    # For an empty run numpy would return the next value.
    filled = counts > 0
    starts = (np.cumsum(counts) - counts)[filled]
    summed[filled] = np.add.reduceat(values.view(np.uint8), starts, dtype=np.int64)
    return summed


def _lists(offsets: NDArray[np.int64], values: NDArray[Any]) -> pa.ListArray:
    return pa.ListArray.from_arrays(_arrow(offsets.astype(np.int32)), _arrow(values))


def _arrow(values: NDArray[Any]) -> pa.Array:
    """Return values as an Arrow array; pa.array() would import pandas, half a second long."""
    if values.dtype == np.bool_:
        kind, data = pa.bool_(), np.packbits(values, bitorder="little")
    else:
        kind, data = pa.from_numpy_dtype(values.dtype), np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(data)])


def numpy_of(array: pa.Array) -> NDArray[Any]:
    """Return a view of an Arrow array of numbers; of a damaged one, a shorter view."""
    values = np.frombuffer(array.buffers()[1] or b"", array.type.to_pandas_dtype())
    return values[array.offset : array.offset + len(array)]


def offsets_of(counts: Any) -> NDArray[np.int64]:
    """Return where lists of these lengths begin, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _columns(path: Path) -> tuple[NDArray[np.int64], ...]:
    """Read a shard's columns of the index."""
    with pa.memory_map(str(path)) as mapped:
        batches = [*pa.ipc.open_stream(mapped)]
    columns = (
        [np.diff(numpy_of(batch["input_ids"].offsets)) for batch in batches],
        [_firsts(batch["lengths"]) for batch in batches],
        *([numpy_of(batch[name]) for batch in batches] for name in COLUMNS[2:]),
    )
    return tuple(np.concatenate([np.zeros(0, np.int64), *column]) for column in columns)


def _firsts(lengths: pa.ListArray) -> NDArray[np.int32]:
    """Return the first of each list."""
    offsets = numpy_of(lengths.offsets)[:-1]
    values: NDArray[np.int32] = numpy_of(lengths.values)[offsets]
    return values
