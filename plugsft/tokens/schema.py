"""The columns of tokens on disk.

input_ids  list<int32>   token ids of an example
loss_mask  list<bool>    whether each token is a trained target
lengths    list<int32>   lengths of its sequences: one for SFT, chosen and rejected for DPO
shared     int32         length of the untrained prefix that both sequences share
trained    int32         number of targets, so that planning a step reads no tokens
row        int64         row in the source
content    uint64        checksum of its ids, mask and lengths

Then come the columns of `render`, sorted by name: bool, int64 or float64.

index.arrow has flat columns of all examples: length, length of the first sequence, shared, trained,
row, content and the columns of `render`, with integers for booleans. So its checksum tells data
apart, however they were cut into shards. facts.json has the types of these, the
checksums of the index and of each shard, and its own.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa

from ..base.errors import DataError
from ..base.types import Shard

FORMAT = 9
SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "lengths": pa.list_(pa.int32()),
        "shared": pa.int32(),
        "trained": pa.int32(),
        "row": pa.int64(),
        "content": pa.uint64(),
    }
)

WEIGHT = "weight"
"""The column of `render` that multiplies an example's loss; 1 in shards without it."""
MIN_WEIGHT, MAX_WEIGHT = 1e-30, 1e30
"""The smallest weight above 0, and the largest: losses are float32."""
WEIGHT_RANGE = f"0, or a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"


def is_weight(value: float) -> bool:
    """Return whether an example may have this weight."""
    return value == 0 or MIN_WEIGHT <= value <= MAX_WEIGHT


ColumnType = Literal["bool", "int64", "float64"]
"""Type of a column of `render`: a name of numpy."""
COLUMN_TYPES: dict[str, ColumnType] = {"b": "bool", "i": "int64", "f": "float64"}
"""numpy's kinds of the values of a column -> its type."""


def shard_schema(types: Mapping[str, ColumnType]) -> pa.Schema:
    """Return the columns of a shard."""
    return pa.schema(
        [*SCHEMA, *((name, pa.from_numpy_dtype(types[name])) for name in sorted(types))]
    )


def common_columns(shards: Sequence[Shard], sources: Sequence[str]) -> dict[str, ColumnType]:
    """Return the columns of all shards and their types; refuse a source that lacks one.

    Only the weight has a default. Beside numbers, booleans are 0 and 1.

    `sources` are the names of the sources.
    """
    columns: dict[str, ColumnType] = {}
    shards = [shard for shard in shards if shard.examples]
    for name in {name: None for shard in shards for name in shard.columns}:
        # Type -> a source that has it.
        found = {shard.columns.get(name): sources[shard.source] for shard in reversed(shards)}
        lacking = found.pop(None, None)
        if lacking and name != WEIGHT:
            raise DataError(
                f"{lacking}: its rows have no column '{name}', but those of "
                f"{[*found.values()][-1]} have; add it to all rows, or let the plugin that renders "
                "them give a default"
            )
        columns[name] = COLUMN_TYPES[np.result_type(*found).kind]
    return columns
