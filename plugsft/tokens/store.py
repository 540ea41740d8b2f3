"""Tokens on disk: an Arrow folder that `datasets.load_from_disk` opens, as flat numpy views.

Opening maps the index and hashes it: 20 ms for ten million examples. Each rank does so by itself.
A shard is mapped when one of its examples is asked for. An example is compared with its checksum
each time that it is read, so that no rank reads bytes it does not train on, and a flipped bit ends
the run before it is trained on.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ValidationError
from xxhash import xxh3_128_hexdigest

from ..base.errors import DataError
from ..base.types import Ints
from .shards import INDEX, SCHEMA, checksum_of, numpy_of, offsets_of, read_facts, sums_of

Chunk = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8]]
"""Columns of a record batch: ids, offsets, and the mask as bits."""
Chunks = list[Chunk]

NO_IDS, NO_BITS = np.zeros(0, np.int32), np.zeros(0, np.uint8)
DAMAGE = (
    OSError,
    ArithmeticError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    pa.ArrowException,
)
"""Errors of reading a damaged file."""


class Tokens:
    """Prepared examples, mapped from disk."""

    def __init__(self, folder: Path, in_memory: bool = False) -> None:
        self.folder = folder
        self._stretches: tuple[Ints, Ints] | None = None
        self._shares = False
        self.columns: dict[str, NDArray[Any]] = {}
        """Columns that plugins computed before step 1."""
        self._in_memory = in_memory
        with self._reading(folder / "facts.json") as path:
            self.facts = read_facts(path.read_text(encoding="utf8"))
            shards = self.facts["shards"]
            self._files = [str(folder / shard["file"]) for shard in shards]
            self._sizes = [shard["size"] for shard in shards]
            self._starts = offsets_of([shard["examples"] for shard in shards])
            self._opened: list[Chunks] = [[] for _ in shards]
            counted = sum(one["examples"] for one in self.facts.get("sources", shards))
        with self._reading(folder / "index.arrow") as path:
            buffer = self._buffer(path)
            if xxh3_128_hexdigest(buffer) != self.facts["index"]:
                raise ValueError("its checksum is wrong")
            self._size = buffer.size
            index = _checked(pa.ipc.open_file(buffer).get_batch(0), INDEX)
            columns = [numpy_of(one) for one in index.columns]
            self.lengths, self._firsts, self._alike, self.trained, self.rows, sums = columns
            self._checksums = sums.view(np.uint64)
            if len({counted, int(self._starts[-1]), *map(len, columns)}) > 1:
                raise ValueError("it has not as many examples as facts.json says")
        self._whole = self.lengths
        """Lengths of the examples on disk, which may be longer."""
        self.units = self.trained
        """Each example's part of the number that divides a window's loss: its targets."""
        if in_memory:
            for shard in range(len(self._files)):
                self._open(shard)

    def __len__(self) -> int:
        return len(self.lengths)

    def example(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the tokens of one example and their mask."""
        return self.gather(np.array([number]))

    def gather(self, examples: Ints) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the joined tokens of examples, and their loss mask."""
        numbers, skips, lengths = self._parts(examples)
        shards = np.searchsorted(self._starts, numbers, "right") - 1
        for shard in set(shards.tolist()):
            self._ensure_size(self._files[shard], self._sizes[shard])
        columns = (shards, numbers - self._starts[shards], skips, lengths, self._checksums[numbers])
        # Arrow stores eight booleans in a byte: gather all bytes, then unpack them at once.
        ids_of, bits_of, spans, place = [NO_IDS], [NO_BITS], [], 0
        for shard, number, skip, length, checksum in zip(
            *(some.tolist() for some in columns), strict=True
        ):
            chunks = self._opened[shard] or self._open(shard)
            (flat, offsets, bits), inside = chunks[0], number
            if len(chunks) > 1:
                (flat, offsets, bits), inside = _chunk_with(chunks, number)
            whole, end = offsets.item(inside), offsets.item(inside + 1)
            if checksum_of(flat, bits, whole, end) != checksum:
                raise self._damaged(
                    self._files[shard], f"its example {number} is not what was written"
                )
            start = whole + skip
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
        """Return the lengths of all sequences, and of their shared prompts.

        A shared prompt is the beginning of the sequence before, which a pair's second answer sees.
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
        """Return tokens of pairs that store their common beginning once, in the first sequence.

        Its last token is stored twice: the first target of each answer is predicted from it.
        """
        part = copy.copy(self)
        part._shares = True
        part.lengths = self.lengths - self._trunks(np.arange(len(self)))
        return part

    def _trunks(self, examples: Ints) -> Ints:
        trunks: Ints = np.maximum(self._alike[examples] - 1, 0)
        return trunks

    def _parts(self, examples: Ints) -> tuple[Ints, Ints, Ints]:
        """Return each part of some examples: example on disk, tokens to skip, length."""
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

    def stretches(
        self, numbers: Ints, skips: Ints, lengths: Ints, trained: "Ints | None" = None
    ) -> "Tokens":
        """Return tokens whose examples are cut from these: number, tokens to skip, length.

        `trained` has their numbers of targets; without it, they are counted.
        """
        assert self._stretches is None, "these are cut already"
        assert not self.facts["pairs"], "pairs cannot be cut"
        part = copy.copy(self)
        part._stretches = (numbers, skips)
        part.lengths, part.rows = lengths, self.rows[numbers]
        part.trained = self.trained[numbers].copy() if trained is None else trained
        cut = lengths < self.lengths[numbers]
        for place in np.flatnonzero(cut).tolist() if trained is None else []:
            _, mask = part.example(place)
            # Nothing predicts the first token of a cut example.
            part.trained[place] = np.count_nonzero(mask[1:])
        part.units, part._firsts = part.trained, lengths
        part.columns = {name: values[numbers] for name, values in self.columns.items()}
        firsts = offsets_of([one["examples"] for one in self.facts["sources"]])
        counts = np.diff(np.searchsorted(numbers, firsts))
        sources = [
            {**one, "examples": int(count)}
            for one, count in zip(self.facts["sources"], counts, strict=True)
        ]
        part.facts = {**self.facts, "examples": len(numbers), "sources": sources}
        return part

    def ensure_unchanged(self) -> None:
        """Refuse an index that was truncated in use: the map would read zeros."""
        self._ensure_size(str(self.folder / "index.arrow"), self._size)

    def _ensure_size(self, path: str, size: int) -> None:
        # Only mapped files can change; a check takes about a microsecond.
        try:
            if self._in_memory or os.stat(path).st_size == size:
                return
        except OSError as error:
            raise self._damaged(path, str(error)) from error
        raise self._damaged(path, "it was cut short, or written again, while it was in use")

    def _open(self, shard: int) -> Chunks:
        with self._reading(self._files[shard]) as path:
            buffer = self._buffer(path)
            if buffer.size != self._sizes[shard]:
                raise ValueError("its size is not the one that was written")
            chunks = [_chunk(batch) for batch in pa.ipc.open_stream(buffer)]
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
    def _reading(self, path: Path | str) -> Iterator[Path]:
        """Turn errors of Arrow and JSON on damaged files into one line with the cure."""
        try:
            yield Path(path)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            place = ".".join(map(str, wrong["loc"]))
            raise self._damaged(path, f"{place}: {wrong['msg']}") from error
        except DAMAGE as error:
            raise self._damaged(path, str(error)) from error

    def _damaged(self, path: Path | str, reason: str) -> DataError:
        return DataError(
            f"{path}: damaged: {' '.join(reason.split())}. Remove the folder {self.folder}, and "
            "the data is prepared again"
        )

    def source_of(self, number: int) -> tuple[int, int]:
        """Return the source and the row in it that an example was made from."""
        firsts = offsets_of([source["examples"] for source in self.facts["sources"]])
        return int(np.searchsorted(firsts, number, "right")) - 1, int(self.rows[number])


def _chunk_with(chunks: Chunks, number: int) -> tuple[Chunk, int]:
    """Find an example in the record batches of a shard, as one of more than 2^30 tokens has."""
    for chunk in chunks:
        count = len(chunk[1]) - 1
        if number < count:
            return chunk, number
        number -= count
    raise IndexError(number)


def _chunk(batch: pa.RecordBatch) -> Chunk:
    _checked(batch, SCHEMA)
    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    bits = np.frombuffer(mask.values.buffers()[1] or b"", np.uint8)
    flat, offsets = numpy_of(ids.values), numpy_of(ids.offsets)
    if not 0 <= offsets[0] <= offsets[-1] <= min(len(flat), 8 * len(bits)):
        raise ValueError("its offsets point outside of its tokens")
    return flat, offsets, bits


def _checked(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Make sure that a batch is what it should be."""
    if batch.schema != schema:
        raise ValueError("it has other columns")
    return batch
