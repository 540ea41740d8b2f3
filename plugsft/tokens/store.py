"""Tokens on disk: an Arrow folder that `datasets.load_from_disk` opens, as flat numpy views.

Opening maps the index and checks its checksum: 20 ms for ten million examples. Each rank opens
the tokens by itself. A shard is mapped at the first access to one of its examples, and its checksum
is compared, so that a flipped bit ends the run before it is trained on.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from ..base.checksums import digest
from ..base.errors import DataError, PluginError, reason_of
from ..base.limits import path_inside
from ..base.types import Ints
from .schema import WEIGHT
from .shards import count_true, numpy_of, offsets_of, read_facts

Views = tuple[NDArray[Any], NDArray[np.int32], NDArray[np.uint8]]
"""Columns of a shard: ids, where each example's begin, and the mask as bits."""

NO_IDS, NO_BITS = np.zeros(0, np.int32), np.zeros(0, np.uint8)
READ_ERRORS = (
    *(OSError, ArithmeticError, LookupError),
    *(RecursionError, TypeError, ValueError, pa.ArrowException),
)
"""Errors that reading a damaged file may raise."""


class Tokens:
    """Prepared examples, mapped from disk.

    len(tokens) is their number. Arrays have a value for each example; change none in place.

    lengths       the tokens of each example, of all its sequences
    targets       the trained tokens of each example
    denominators  what each example adds to the divisor of the loss, before its weight
    columns       the columns of `render`, and those that plugins add: name -> values
    rows          the row of each example in its source, counted from 0
    contents      a checksum of the tokens of each example
    facts         facts about the data: sources, pairs, key and others
    folder        where they are stored
    """

    def __init__(self, folder: Path, in_memory: bool = False) -> None:
        self.folder, self._in_memory = folder, in_memory
        facts_file, index_file = folder / "facts.json", folder / "index.arrow"
        with self._explain_damage(facts_file):
            self.facts = read_facts(facts_file.read_text(encoding="utf8"))
            shards = self.facts["shards"]
            self._files = [path_inside(folder, shard["file"]) for shard in shards]
            self._shard_offsets = offsets_of([shard["examples"] for shard in shards])
            self._views: list[Views | None] = [None] * len(shards)
        with self._explain_damage(index_file):
            buffer = self._open(index_file, self.facts["index"])
            batch = pa.ipc.open_stream(buffer).read_next_batch()
            index = {name: numpy_of(batch[name]) for name in batch.schema.names}
            self.lengths, self.targets, self.rows = index["length"], index["trained"], index["row"]
            self._first_lengths, self._shared_prefixes = index["first"], index["shared"]
            self.contents: NDArray[np.uint64] = index["content"]
            self.columns: dict[str, NDArray[Any]] = {
                name: index[f"column {name}"].astype(kind, copy=False)
                for name, kind in sorted(self.facts["columns"].items())
            }
            """The columns of `render`, and those that plugins add before step 1."""
        self._shared_tokens = np.zeros_like(self.lengths)
        """The tokens of an example's prompt that its second sequence does not repeat."""
        self.denominators = self.targets
        """What each example adds to the divisor of a step's loss, times its weight: its targets
        by default."""
        if in_memory:
            for shard in range(len(self._files)):
                self._open_shard(shard)

    def __len__(self) -> int:
        return len(self.lengths)

    def example(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Read the tokens of one example and their loss mask."""
        return self.gather(np.array([number]))

    def gather(self, examples: Ints) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Read the tokens of examples, one after the other, and their loss mask."""
        return self._read(examples, np.zeros_like(examples), self.lengths[examples])

    def _read(
        self, numbers: Ints, skips: Ints, lengths: Ints
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Read spans of examples on disk: their number, tokens to skip, length."""
        shards = np.searchsorted(self._shard_offsets, numbers, "right") - 1
        inside = numbers - self._shard_offsets[shards]
        ids_parts, bits_parts, spans, num_bytes = [NO_IDS], [NO_BITS], [], 0
        for shard, number, skip, length in np.stack([shards, inside, skips, lengths], 1).tolist():
            ids, begins, bits = self._views[shard] or self._open_shard(shard)
            start = begins.item(number) + skip
            ids_parts.append(ids[start : start + length])
            # Arrow stores eight booleans in a byte: gather all bytes, then unpack them at once.
            first_byte, last_byte = start >> 3, (start + length + 7) >> 3
            bits_parts.append(bits[first_byte:last_byte])
            first_bit = 8 * num_bytes + (start & 7)
            spans.append(slice(first_bit, first_bit + length))
            num_bytes += last_byte - first_byte
        unpacked = np.unpackbits(np.concatenate(bits_parts), bitorder="little").view(np.bool_)
        masks = [NO_BITS.view(np.bool_), *map(unpacked.__getitem__, spans)]
        return np.concatenate(ids_parts), np.concatenate(masks)

    def weights(self, examples: Ints) -> NDArray[np.float32]:
        """Look up what the losses of examples are multiplied with: the column `weight`, or 1."""
        weights = self.columns.get(WEIGHT)
        if weights is None:
            return np.ones(len(examples), np.float32)
        return weights[examples].astype(np.float32)

    def divisor(self, examples: "Ints | slice" = slice(None)) -> float:
        """Add up weight x denominator of examples: the divisor of their loss."""
        denominators, weights = self.denominators[examples], self.columns.get(WEIGHT)
        if weights is None:
            return int(denominators.sum())
        # Rounded once, so that it is the same in any order of examples.
        return math.fsum((denominators * weights[examples]).tolist())

    def plan_columns(self) -> dict[str, NDArray[Any]]:
        """Collect the columns that `plan_batches` gets: these, and the shapes of examples."""
        first, second = self.lengths, np.zeros_like(self.lengths)
        if self.facts["pairs"]:
            first, second = self._first_lengths, self.lengths - self._first_lengths
        shapes = {"longest": np.maximum(first, second), "sequences": 1 + (second > 0)}
        if taken := self.columns.keys() & shapes.keys():
            raise PluginError(
                f"a plugin's column '{min(taken)}' has the name of a column of plugsft; rename it"
            )
        return {**self.columns, **shapes}

    def sequences(self, examples: Ints) -> tuple[Ints, Ints]:
        """Measure each sequence, and the shared prompt that it attends to.

        The shared prompt of a rejected answer is the beginning of the sequence before it.
        """
        lengths = self.lengths[examples]
        if not self.facts["pairs"]:
            return lengths, np.zeros_like(lengths)
        first, shared = self._first_lengths[examples], self._shared_tokens[examples]
        counts = np.stack([first, lengths - first], 1).ravel()
        shared = np.stack([np.zeros_like(shared), shared], 1).ravel()
        # An example without a second sequence has one of length 0 there.
        return counts[counts > 0], shared[counts > 0]

    def sequence_targets(self, examples: Ints) -> Ints:
        """Count the targets of each sequence."""
        return count_true(self.gather(examples)[1], self.sequences(examples)[0])

    def source_of(self, number: int) -> tuple[int, int]:
        """Find the source of an example, and its row there."""
        source = int(np.searchsorted(self._source_offsets(), number, "right")) - 1
        return source, int(self.rows[number])

    def _source_offsets(self) -> Ints:
        """Find where the examples of each source begin, and their number."""
        return offsets_of([source["examples"] for source in self.facts["sources"]])

    def _open_shard(self, shard: int) -> Views:
        with self._explain_damage(self._files[shard]):
            buffer = self._open(self._files[shard], self.facts["shards"][shard]["checksum"])
            batch = pa.ipc.open_stream(buffer).read_next_batch()
            bits = np.frombuffer(batch["loss_mask"].values.buffers()[1] or b"", np.uint8)
            ids = batch["input_ids"]
            views = self._views[shard] = numpy_of(ids.values), numpy_of(ids.offsets), bits
        return views

    def _open(self, path: Path, checksum: str) -> pa.Buffer:
        """Map a file, or read all of it where mapping is slow; compare its checksum."""
        with (pa.OSFile if self._in_memory else pa.memory_map)(str(path)) as file:
            buffer = file.read_buffer()
        if xxh3_128_hexdigest(buffer) != checksum:
            raise ValueError("its checksum is wrong")
        return buffer

    @contextmanager
    def _explain_damage(self, path: Path) -> Iterator[None]:
        """Turn errors of Arrow and JSON on damaged files into one line with the cure."""
        try:
            yield
        except READ_ERRORS as error:
            raise DataError(
                f"{path}: damaged: {reason_of(error)}. Remove the folder {self.folder} to prepare "
                "the data again"
            ) from error


@dataclass
class Prepared:
    """The prepared data of a run."""

    tokenizer: Any
    tokenizer_folder: Path
    tokens: Tokens
    evaluation: Tokens | None

    def compared(self) -> dict[str, str]:
        """Describe the data, to compare ranks."""
        named = {"the training data": self.tokens, "the evaluation data": self.evaluation}
        described = {}
        for name, data in named.items():
            if data:
                key = digest({part: data.facts[part] for part in ("key", "index")})
                size = f"{len(data):,} examples of {data.facts['tokens']:,} tokens"
                described[name] = f"{size} ({key[:8]})"
        return described
