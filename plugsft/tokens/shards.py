"""Write shards of tokens and their index; schema.py describes the columns of both."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from ..base.atomic import replace_file, stamp
from ..base.checksums import add_checksum, file_digest, parse_checksummed
from ..base.types import Ints, Shard
from .schema import FORMAT, ColumnType, common_columns, shard_schema


@dataclass
class Examples:
    """Examples to write, as flat arrays."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    counts: NDArray[np.int64]
    """Number of tokens of each sequence."""
    num_sequences: NDArray[np.int64]
    """Number of sequences of each example."""
    rows: NDArray[np.int64]
    """Row of each example in the source."""
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    """The columns of `render`."""

    @property
    def types(self) -> dict[str, Any]:
        """The types of the columns of `render`."""
        return {name: str(values.dtype) for name, values in self.columns.items()}


def write_shard(path: Path, examples: Examples) -> int:
    """Write one Arrow file, whole or not at all; return its number of targets."""
    first_sequence = offsets_of(examples.num_sequences)
    offsets = offsets_of(examples.counts)[first_sequence]
    trained = count_true(examples.mask, np.diff(offsets))
    columns = [
        _lists(offsets, examples.ids),
        _lists(offsets, examples.mask),
        _lists(first_sequence, examples.counts.astype(np.int32)),
        _arrow(_shared_prefixes(examples, offsets, first_sequence)),
        _arrow(trained.astype(np.int32)),
        _arrow(examples.rows.astype(np.int64)),
        _arrow(_checksums(examples, offsets, first_sequence)),
        *(_arrow(examples.columns[name]) for name in sorted(examples.columns)),
    ]
    _write_batch(path, pa.record_batch(columns, schema=shard_schema(examples.types)))
    return int(trained.sum())


def _write_batch(path: Path, batch: pa.RecordBatch) -> None:
    with (
        replace_file(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_stream(sink, batch.schema) as writer,
    ):
        writer.write_batch(batch)


def _read_batch(path: Path) -> pa.RecordBatch:
    with pa.memory_map(str(path)) as mapped:
        return pa.ipc.open_stream(mapped).read_next_batch()


def _shared_prefixes(examples: Examples, offsets: Ints, first_sequence: Ints) -> NDArray[np.int32]:
    """Measure the untrained prefix that both sequences of each example share."""
    lengths = np.zeros(len(examples.num_sequences), np.int32)
    for number in np.flatnonzero(examples.num_sequences == 2).tolist():
        start, stop = int(offsets[number]), int(offsets[number + 1])
        middle = start + int(examples.counts[first_sequence[number]])
        lengths[number] = shared_prefix(examples.ids, examples.mask, start, middle, stop)
    return lengths


def _checksums(examples: Examples, offsets: Ints, first_sequence: Ints) -> NDArray[np.uint64]:
    """Make a checksum of each example: of its ids, its mask, and the lengths of its sequences."""
    counts = examples.counts.astype(np.int32)
    checksums = np.zeros(len(offsets) - 1, np.uint64)
    spans = zip(pairwise(offsets.tolist()), pairwise(first_sequence.tolist()), strict=True)
    for number, ((start, stop), (first, last)) in enumerate(spans):
        checksum = xxhash.xxh3_64(examples.ids[start:stop].data)
        checksum.update(examples.mask[start:stop].data)
        checksum.update(counts[first:last].data)
        checksums[number] = checksum.intdigest()
    return checksums


def shared_prefix(
    ids: NDArray[np.int32], mask: NDArray[np.bool_], start: int, middle: int, stop: int
) -> int:
    """Measure the untrained prefix that two adjacent sequences share."""
    longest = min(middle - start, stop - middle)
    first, second = slice(start, start + longest), slice(middle, middle + longest)
    differs = (ids[first] != ids[second]) | mask[first] | mask[second]
    return int(differs.argmax()) if differs.any() else longest


def write_index(folder: Path, shards: list[Shard], facts: dict[str, Any]) -> None:
    """Write the index, the facts, and the files that `datasets` needs to open a folder."""
    sources = facts.get("sources", [])
    names = [source.get("name", "data") for source in sources] or ["data"] * len(shards)
    types = common_columns(shards, names)
    for shard in shards:
        if shard.columns != types:
            _unify(folder / shard.file, types)
            shard.stamp = []
        shard.stamp = shard.stamp or [*stamp(folder / shard.file)]
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
    (folder / "dataset_info.json").write_text("{}")
    parts = [_index_columns(folder / shard.file, types) for shard in shards]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    pairs = int(np.count_nonzero(columns["first"] < columns["length"]))
    index = folder / "index.arrow"
    arrays = {name: _arrow(values) for name, values in columns.items()}
    _write_batch(index, pa.RecordBatch.from_pydict(arrays))
    facts = facts | {
        "format": FORMAT,
        "index": file_digest(index),
        "pairs": pairs,
        "columns": types,
        "shards": [
            {"file": shard.file, "examples": shard.examples, "checksum": shard.stamp[1]}
            for shard in shards
        ],
    }
    (folder / "facts.json").write_text(json.dumps(add_checksum(facts), indent=1))


def _unify(path: Path, types: Mapping[str, ColumnType]) -> None:
    """Give a shard the columns of all shards: floats for integers, and the weight 1."""
    schema, batch = shard_schema(types), _read_batch(path)
    # Only the weight may be missing in a shard with examples.
    columns = dict.fromkeys(types, _arrow(np.ones(len(batch))))
    columns |= {name: batch[name] for name in batch.schema.names}
    casts = [columns[field.name].cast(field.type) for field in schema]
    _write_batch(path, pa.record_batch(casts, schema=schema))


def read_facts(text: str) -> dict[str, Any]:
    """Parse facts.json; raise ValueError if it is damaged."""
    facts = parse_checksummed(text)
    if facts.get("format") != FORMAT:
        raise ValueError("it was written by another version of plugsft")
    return facts


def count_true(values: NDArray[np.bool_], counts: Ints) -> Ints:
    """Count the True values of each list; `counts` are the lengths of the lists."""
    sums = np.zeros(len(counts), np.int64)
    # For an empty list reduceat would return the next value.
    filled = counts > 0
    starts = offsets_of(counts)[:-1][filled]
    sums[filled] = np.add.reduceat(values.view(np.uint8), starts, dtype=np.int64)
    return sums


def _lists(offsets: NDArray[np.int64], values: NDArray[Any]) -> pa.ListArray:
    # The cast refuses more than 2^31 tokens.
    return pa.ListArray.from_arrays(_arrow(offsets).cast(pa.int32()), _arrow(values))


def _arrow(values: NDArray[Any]) -> pa.Array:
    """Wrap values for Arrow; pa.array() would import pandas, which takes 0.5 s."""
    if values.dtype == np.bool_:
        dtype, data = pa.bool_(), np.packbits(values, bitorder="little")
    else:
        dtype, data = pa.from_numpy_dtype(values.dtype), np.ascontiguousarray(values)
    return pa.Array.from_buffers(dtype, len(values), [None, pa.py_buffer(data)])


def numpy_of(array: pa.Array) -> NDArray[Any]:
    """View an Arrow array of numbers; the view of a damaged array is shorter."""
    values = np.frombuffer(array.buffers()[1] or b"", array.type.to_pandas_dtype())
    return values[array.offset : array.offset + len(array)]


def offsets_of(counts: Any) -> Ints:
    """Find the offset at which each list begins, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def places_of(counts: Ints) -> Ints:
    """Count the values before each value in its list."""
    return np.arange(counts.sum()) - np.repeat(offsets_of(counts)[:-1], counts)


def _index_columns(path: Path, types: Mapping[str, ColumnType]) -> dict[str, NDArray[Any]]:
    """Read from a shard what the index repeats, so that planning opens no shard."""
    batch = _read_batch(path)
    ends = numpy_of(batch["input_ids"].offsets)
    lengths = batch["lengths"]
    firsts = numpy_of(lengths.values)[numpy_of(lengths.offsets)[:-1]]
    columns = {"length": np.diff(ends), "first": firsts}
    columns |= {name: numpy_of(batch[name]) for name in ("shared", "trained", "row")}
    columns = {name: values.astype(np.int64) for name, values in columns.items()}
    columns["content"] = numpy_of(batch["content"])
    for name in sorted(types):
        kind = pa.int64() if types[name] == "bool" else batch[name].type
        columns[f"column {name}"] = numpy_of(batch[name].cast(kind))
    return columns
