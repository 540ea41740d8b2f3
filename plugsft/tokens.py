"""Tokens on disk: an Arrow folder that `datasets.load_from_disk` opens, as flat numpy views.

input_ids  list<int32>   the tokens of an example
loss_mask  list<bool>    which of them are trained targets
lengths    list<int32>   the sequences inside it: one for SFT, chosen and rejected for DPO
trained    int32         how many targets it has, so that a window's total needs no tokens
row        int64         the row of its source
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from datasets import Features
from numpy.typing import NDArray

FORMAT = 1
SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "lengths": pa.list_(pa.int32()),
        "trained": pa.int32(),
        "row": pa.int64(),
    }
)


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


def write_shard(path: Path, batches: Sequence[Examples]) -> int:
    """Write one Arrow file; return its number of trained targets."""
    trained = 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        for examples in batches:
            # A batch of its own for each: offsets are of 32 bits, and start anew.
            batch = _record_batch(examples)
            writer.write_batch(batch)
            trained += int(batch.column("trained").to_numpy().sum())
    return trained


def _record_batch(examples: Examples) -> pa.RecordBatch:
    first = _offsets(examples.pieces)
    ends = _offsets(examples.counts)[first]
    trained = np.diff(_offsets(examples.mask)[ends])
    return pa.record_batch(
        [
            _lists(ends, examples.ids),
            _lists(ends, examples.mask),
            _lists(first, examples.counts.astype(np.int32)),
            pa.array(trained, pa.int32()),
            pa.array(examples.rows, pa.int64()),
        ],
        schema=SCHEMA,
    )


def write_index(folder: Path, shards: list[str], facts: dict[str, Any]) -> None:
    """Write what makes a folder of shards a dataset, and the facts about it."""
    state = {
        "_data_files": [{"filename": name} for name in shards],
        "_fingerprint": facts["key"],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=1))
    features = Features.from_arrow_schema(SCHEMA).to_dict()
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}, indent=1))
    (folder / "facts.json").write_text(json.dumps(facts, indent=1))


def digest(key: dict[str, Any]) -> str:
    """Return a short name for a key: equal keys, equal names, in every process."""
    return xxhash.xxh3_128(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


class Tokens:
    """Prepared examples, mapped from disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
        state = json.loads((folder / "state.json").read_text())
        self._chunks: list[tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.uint8]]] = []
        trained, rows = [], []
        for file in state["_data_files"]:
            for batch in pa.ipc.open_stream(pa.memory_map(str(folder / file["filename"]))):
                ids, mask = batch.column("input_ids"), batch.column("loss_mask")
                offsets = ids.offsets.to_numpy()
                bits = np.frombuffer(mask.values.buffers()[1] or b"", np.uint8)
                self._chunks.append((ids.values.to_numpy(), offsets, bits))
                trained.append(batch.column("trained").to_numpy())
                rows.append(batch.column("row").to_numpy())
        self.lengths = _joined([np.diff(offsets) for _, offsets, _ in self._chunks])
        self.trained, self.rows = _joined(trained), _joined(rows)
        self._starts = _offsets([len(offsets) - 1 for _, offsets, _ in self._chunks])

    def __len__(self) -> int:
        return len(self.lengths)

    def example(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the tokens of one example (a view of the disk) and its mask."""
        chunk = int(np.searchsorted(self._starts, number, "right")) - 1
        ids, offsets, bits = self._chunks[chunk]
        inside = number - self._starts[chunk]
        start, stop = int(offsets[inside]), int(offsets[inside + 1])
        # Arrow holds eight booleans to a byte.
        first, last = start // 8, -(-stop // 8)
        mask = np.unpackbits(bits[first:last], bitorder="little").view(np.bool_)
        return ids[start:stop], mask[start - first * 8 : stop - first * 8]

    def source_of(self, number: int) -> tuple[int, int]:
        """Return the source and the row in it that an example was made from."""
        firsts = _offsets([source["examples"] for source in self.facts["sources"]])
        return int(np.searchsorted(firsts, number, "right")) - 1, int(self.rows[number])


def _lists(offsets: NDArray[np.int64], values: NDArray[Any]) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def _offsets(counts: Any) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _joined(parts: list[Any]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *parts])
