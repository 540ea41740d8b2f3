"""Write shards of tokens and their index; schema.py describes the columns of both."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from ..base.atomic import replace_file
from ..base.checksums import add_checksum, parse_checksummed
from ..base.types import Ints, Shard
from .schema import (
    FORMAT,
    INDEX_COLUMNS,
    ColumnType,
    common_columns,
    features,
    index_schema,
    shard_schema,
)

MAX_TOKENS = 2**30
"""Most tokens in a record batch: its offsets have 32 bits."""
Number = Annotated[int, Field(ge=0, lt=2**63)]


class _ShardFacts(BaseModel):
    """A shard in facts.json."""

    file: str = Field(pattern=r"^data-[\w-]+\.arrow$")
    examples: Number
    size: Number


class _SourceFacts(BaseModel):
    """A source in facts.json."""

    examples: Number


class _Facts(BaseModel):
    """The fields of facts.json that opening needs."""

    model_config = ConfigDict(strict=True)

    format: Literal[5]
    index: str
    columns: dict[str, ColumnType]
    pairs: Number
    shards: list[_ShardFacts]
    sources: list[_SourceFacts] | None = None


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
    num_targets = 0
    with (
        replace_file(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_stream(sink, shard_schema(examples.types)) as writer,
    ):
        for batch in _split(examples):
            writer.write_batch(_record_batch(batch))
            num_targets += int(np.count_nonzero(batch.mask))
    return num_targets


def _split(examples: Examples) -> Iterator[Examples]:
    """Split examples into record batches of about MAX_TOKENS tokens."""
    if len(examples.mask) <= MAX_TOKENS:
        yield examples
        return
    first_sequence = offsets_of(examples.num_sequences)
    offsets = offsets_of(examples.counts)[first_sequence]
    cuts = np.searchsorted(offsets, np.arange(0, len(examples.mask), MAX_TOKENS))
    for start, stop in zip(cuts, [*cuts[1:], len(examples.rows)], strict=True):
        yield Examples(
            examples.ids[offsets[start] : offsets[stop]],
            examples.mask[offsets[start] : offsets[stop]],
            examples.counts[first_sequence[start] : first_sequence[stop]],
            examples.num_sequences[start:stop],
            examples.rows[start:stop],
            {name: values[start:stop] for name, values in examples.columns.items()},
        )


def _record_batch(examples: Examples) -> pa.RecordBatch:
    first_sequence = offsets_of(examples.num_sequences)
    offsets = offsets_of(examples.counts)[first_sequence]
    trained = count_true(examples.mask, np.diff(offsets))
    return pa.record_batch(
        [
            _lists(offsets, examples.ids),
            _lists(offsets, examples.mask),
            _lists(first_sequence, examples.counts.astype(np.int32)),
            _arrow(_shared_prefixes(examples, offsets, first_sequence)),
            _arrow(trained.astype(np.int32)),
            _arrow(examples.rows.astype(np.int64)),
            _arrow(_checksums(examples, offsets)),
            *(_arrow(examples.columns[name]) for name in sorted(examples.columns)),
        ],
        schema=shard_schema(examples.types),
    )


def _checksums(examples: Examples, offsets: Ints) -> Ints:
    bits = np.packbits(examples.mask, bitorder="little")
    spans, ids = pairwise(offsets.tolist()), examples.ids
    checksums = [checksum_of(ids[start:stop], bits, start, stop) for start, stop in spans]
    return np.array(checksums, np.uint64).view(np.int64)


def checksum_of(ids: NDArray[Any], bits: NDArray[np.uint8], start: int, stop: int) -> int:
    """Return the checksum of an example's ids and of the bytes that hold its mask.

    The mask is the bits from `start` to `stop`.
    """
    seed = xxh3_64_intdigest(ids.data)
    return xxh3_64_intdigest(bits[start >> 3 : (stop + 7) >> 3].data, seed)


def _shared_prefixes(examples: Examples, offsets: Ints, first_sequence: Ints) -> NDArray[np.int32]:
    """Return the length of the untrained prefix that both sequences of each example share."""
    lengths = np.zeros(len(examples.num_sequences), np.int32)
    for number in np.flatnonzero(examples.num_sequences == 2).tolist():
        start, stop = int(offsets[number]), int(offsets[number + 1])
        middle = start + int(examples.counts[first_sequence[number]])
        lengths[number] = shared_prefix(examples.ids, examples.mask, start, middle, stop)
    return lengths


def shared_prefix(
    ids: NDArray[np.int32], mask: NDArray[np.bool_], start: int, middle: int, stop: int
) -> int:
    """Return the length of the untrained prefix that two adjacent sequences share."""
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
    state = {
        "_data_files": [{"filename": shard.file} for shard in shards],
        "_fingerprint": facts["key"],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"features": features(types)}
    (folder / "state.json").write_text(json.dumps(state, indent=1))
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=1))
    shard_columns = [_index_columns(folder / shard.file, types) for shard in shards]
    columns = [np.concatenate(parts) for parts in zip(*shard_columns, strict=True)]
    pairs = int(np.count_nonzero(columns[1] < columns[0]))
    index, schema = folder / "index.arrow", index_schema(types)
    with pa.OSFile(str(index), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
        file.write_batch(pa.record_batch([_arrow(column) for column in columns], schema=schema))
    with pa.memory_map(str(index)) as mapped:
        checksum = xxh3_128_hexdigest(mapped.read_buffer())
    shard_facts = [
        {
            "file": shard.file,
            "examples": shard.examples,
            "size": (folder / shard.file).stat().st_size,
        }
        for shard in shards
    ]
    facts = facts | {
        "format": FORMAT,
        "index": checksum,
        "pairs": pairs,
        "columns": types,
        "shards": shard_facts,
    }
    (folder / "facts.json").write_text(json.dumps(add_checksum(facts), indent=1))


def _unify(path: Path, types: Mapping[str, ColumnType]) -> None:
    """Give a shard the columns of all shards: floats for integers, and the weight 1."""
    schema = shard_schema(types)
    with pa.memory_map(str(path)) as mapped:
        batches = [*pa.ipc.open_stream(mapped)]
        with (
            replace_file(path) as temporary,
            pa.OSFile(str(temporary), "wb") as sink,
            pa.ipc.new_stream(sink, schema) as writer,
        ):
            for batch in batches:
                columns = [_column(batch, field) for field in schema]
                writer.write_batch(pa.record_batch(columns, schema=schema))


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    if field.name not in batch.schema.names:
        # But for the weight, only a shard without examples lacks a column.
        return _arrow(np.ones(len(batch))).cast(field.type)
    return batch[field.name].cast(field.type)


def read_facts(text: str) -> dict[str, Any]:
    """Parse facts.json; raise ValueError if it is damaged."""
    facts = json.loads(text)
    if isinstance(facts, dict) and facts.get("format") != FORMAT:
        raise ValueError("it was written by another version of plugsft")
    facts = parse_checksummed(text)
    _Facts.model_validate(facts)
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
    return pa.ListArray.from_arrays(_arrow(offsets.astype(np.int32)), _arrow(values))


def _arrow(values: NDArray[Any]) -> pa.Array:
    """Return values as an Arrow array; pa.array() would import pandas, which takes 0.5 s."""
    if values.dtype == np.bool_:
        dtype, data = pa.bool_(), np.packbits(values, bitorder="little")
    else:
        dtype, data = pa.from_numpy_dtype(values.dtype), np.ascontiguousarray(values)
    return pa.Array.from_buffers(dtype, len(values), [None, pa.py_buffer(data)])


def numpy_of(array: pa.Array) -> NDArray[Any]:
    """Return a view of an Arrow array of numbers; the view of a damaged array is shorter."""
    values = np.frombuffer(array.buffers()[1] or b"", array.type.to_pandas_dtype())
    return values[array.offset : array.offset + len(array)]


def offsets_of(counts: Any) -> Ints:
    """Return the offset at which each list begins, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def places_of(counts: Ints) -> Ints:
    """Return the place of each value in its list."""
    return np.arange(counts.sum()) - np.repeat(offsets_of(counts)[:-1], counts)


def _index_columns(path: Path, types: Mapping[str, ColumnType]) -> tuple[NDArray[Any], ...]:
    """Read the columns of the index from a shard."""
    with pa.memory_map(str(path)) as mapped:
        batches = [*pa.ipc.open_stream(mapped)]
    schema = index_schema(types)
    own_types = zip(sorted(types), schema.types[len(INDEX_COLUMNS) :], strict=True)
    columns = (
        [np.diff(numpy_of(batch["loss_mask"].offsets)) for batch in batches],
        [_first_values(batch["lengths"]) for batch in batches],
        *([numpy_of(batch[name]) for batch in batches] for name in INDEX_COLUMNS[2:]),
        *([numpy_of(batch[name].cast(kind)) for batch in batches] for name, kind in own_types),
    )
    return tuple(
        np.concatenate([np.zeros(0, kind.to_pandas_dtype()), *parts])
        for kind, parts in zip(schema.types, columns, strict=True)
    )


def _first_values(lists: pa.ListArray) -> NDArray[np.int32]:
    """Return the first value of each list."""
    values: NDArray[np.int32] = numpy_of(lists.values)[numpy_of(lists.offsets)[:-1]]
    return values
