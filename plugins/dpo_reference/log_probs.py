"""Stored log-probabilities: an Arrow file per block of pairs, and facts.json."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from plugsft import DataError, Ints, reason_of

SCHEMA = pa.schema(
    {"example": pa.int64(), "id": pa.uint64(), "chosen": pa.float32(), "rejected": pa.float32()}
)

Values = NDArray[np.float32]
Ids = NDArray[np.uint64]


class LogProbs:
    """Two log-probabilities for each pair of a data set, read from a folder."""

    def __init__(self, folder: Path, _in_memory: bool = False) -> None:
        self.folder = folder
        try:
            self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
            blocks = [read_block(path) for path in block_files(folder)]
            examples = np.concatenate([block["example"] for block in blocks])
            count = self.facts["rows"]
            self.ids = np.zeros(count, np.uint64)
            self.values = np.zeros((count, 2), np.float32)
            self.ids[examples] = np.concatenate([block["id"] for block in blocks])
            for column, side in enumerate(("chosen", "rejected")):
                self.values[examples, column] = np.concatenate([block[side] for block in blocks])
            if len(np.unique(examples)) < count:
                raise ValueError("some pairs are missing")
        except (OSError, LookupError, TypeError, ValueError, pa.ArrowException) as error:
            raise DataError(
                f"{folder}: damaged: {reason_of(error)}. Remove the folder; the next run "
                "computes it again"
            ) from error


def load_known(folder: Path, key: dict[str, Any], ids: Ids, values: Values, known: Values) -> None:
    """Fill in pairs that a killed run has stored here, or that other data sets have too.

    `known` is 1 where `values` is filled in.
    """
    blocks = [read_block(path) for path in block_files(folder)]
    for block in blocks:
        values[block["example"]] = np.stack([block["chosen"], block["rejected"]], 1)
        known[block["example"]] = 1
    before = known.copy()
    for facts_file in sorted(folder.parent.glob("[0-9a-f]*/facts.json")):
        with suppress(OSError, ValueError, LookupError, DataError):
            if json.loads(facts_file.read_text())["key_parts"]["reference"] == key["reference"]:
                other = LogProbs(facts_file.parent)
                order = np.argsort(other.ids)
                places = order[np.searchsorted(other.ids, ids, sorter=order) % len(order)]
                shared = (other.ids[places] == ids) & (known == 0)
                values[shared], known[shared] = other.values[places[shared]], 1
    copied = np.flatnonzero(known > before)
    if len(copied):
        write_block(block_file(folder, len(blocks)), copied, ids[copied], values[copied])


def block_file(folder: Path, number: int) -> Path:
    """Return the file of a block."""
    return folder / f"data-{number:06d}.arrow"


def block_files(folder: Path) -> list[Path]:
    """Return all files of blocks, in order."""
    return sorted(folder.glob("data-*.arrow"))


def write_block(path: Path, examples: Ints, ids: Ids, values: Values) -> None:
    """Write the log-probabilities of pairs, whole or not at all."""
    unfinished = path.with_name(f".{path.name}.tmp")
    columns = [examples, ids, *np.ascontiguousarray(values.T)]
    batch = pa.record_batch([pa.array(column) for column in columns], schema=SCHEMA)
    with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as file:
        file.write_batch(batch)
    unfinished.replace(path)


def read_block(path: Path) -> dict[str, Any]:
    """Read the columns of a block."""
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    return {name: table[name].to_numpy() for name in SCHEMA.names}
