"""Tensors of a model's files that are not trained, and stay as they are in the saved model.

Each name in the files is the model's, kept, or refused: decided once, when the model is loaded.
They are copied as bytes, so each keeps its type.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from transformers.utils import (
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    VIDEO_PROCESSOR_NAME,
)

from ..base.console import format_count
from ..base.errors import CheckpointError, RecipeError, reason_of
from .published import meta_copy, taken_out
from .weight_files import Renamed, WeightFiles, find_file, find_weight_files, renamed

PROCESSOR_FILES = (IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME)
CHUNK = 2**24
"""Bytes that are copied at a time."""


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    file: str
    start: int
    size: int
    header: dict[str, Any]
    """Its type and shape, as the file's header has them."""


def stored_tensors(path: str) -> Iterator[tuple[str, StoredTensor]]:
    """Read the header of a safetensors file, which was opened by safetensors before."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry.pop("data_offsets")
            yield name, StoredTensor(path, 8 + size + start, end - start, entry)


@dataclass
class KeptTensors:
    """Tensors in a base's files that are not trained: a saved model gets them as they are."""

    base: str = ""
    published: str = ""
    """The class that the base was published as."""
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    """Parts that the published class itself leaves out, as heads for the token after the next."""
    others: list[str] = field(default_factory=list)
    """Files of the processor."""

    def open(self) -> None:
        """Open the files; from now on they may be moved."""
        paths = {tensor.file for tensor in self.tensors.values()}
        self._files = {path: os.open(path, os.O_RDONLY) for path in paths}
        self._stamps = {path: _stamp(file) for path, file in self._files.items()}
        self._texts = {Path(path).name: Path(path).read_bytes() for path in self.others}

    def counts(self) -> dict[str, int]:
        """Return how many weights each part has that is kept: visual, mtp."""
        counts = Counter[str]()
        for name, tensor in self.tensors.items():
            counts[part_of(name)] += prod(tensor.header["shape"])
        return dict(counts)

    def add_to(self, folder: Path, cure: str) -> None:
        """Copy the tensors into the folder of a saved model, and name all in one index."""
        for name, text in self._texts.items():
            (folder / name).write_bytes(text)
        if not self.tensors:
            return
        written = [*sorted(folder.glob("*.safetensors")), folder / "kept"]
        self._write(written[-1], cure)
        places, size = dict[str, str](), 0
        for number, file in enumerate(written, start=1):
            name = f"model-{number:05d}-of-{len(written):05d}.safetensors"
            for tensor, stored in stored_tensors(str(file)):
                places[tensor] = name
                size += stored.size
            file.rename(folder / name)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def _write(self, path: Path, cure: str) -> None:
        """Write a safetensors file of the tensors."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in self.tensors.items():
            header[name] = tensor.header | {"data_offsets": [end, end + tensor.size]}
            end += tensor.size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as target:
            target.write(len(text).to_bytes(8, "little") + text)
            for tensor in self.tensors.values():
                for start in range(0, tensor.size, CHUNK):
                    size = min(CHUNK, tensor.size - start)
                    target.write(self._read(tensor.file, tensor.start + start, size, cure))

    def _read(self, path: str, start: int, size: int, cure: str) -> bytes:
        """Read bytes of a file that must be as it was when it was opened."""
        why = "it has changed since the model was loaded"
        try:
            values = os.pread(self._files[path], size, start)
            if len(values) == size and _stamp(self._files[path]) == self._stamps[path]:
                return values
        except OSError as error:  # its disk or server may be gone
            why = reason_of(error)
        raise CheckpointError(
            f"{path}: {why}, and model/ needs {len(self.tensors):,} tensors of {self.base} that "
            f"are not trained; {cure}"
        )


def part_of(name: str) -> str:
    """Return the part of a model that a tensor belongs to: visual, mtp, or one of its layers."""
    first, second, *_ = [*name.removeprefix("model.").split("."), ""]
    return f"{first}.{second}" if first == "layers" else first


def _stamp(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns


def kept_tensors(
    model: Any, base: str, revision: str | None, known: Renamed | None = None
) -> KeptTensors:
    """Find what in a base's files is not the model's, and is kept; refuse what nothing knows.

    A name is the model's if its `state_dict` has it, also as a tied one. `known` says how names
    are renamed, if that is known: of thousands it takes seconds.
    """
    kept = KeptTensors(base, type(model).__name__)
    if taken_out(model):
        kept.others = [*filter(None, (find_file(base, name, revision) for name in PROCESSOR_FILES))]
    files = find_weight_files(base, revision)
    tensors = {name: tensor for file in files for name, tensor in stored_tensors(file)}
    own = model.state_dict()
    names = known or renamed(model, tensors)
    rest = [name for name, (target, _) in names.items() if target not in own]
    if not rest:
        return kept
    published = meta_copy(model, type(model))
    names, whole = renamed(published, rest), published.state_dict()
    unused = {name: target for name, (target, _) in names.items() if target not in whole}
    unexpected = without_ignored(published, unexpected={*unused.values()}).unexpected_keys
    unknown = [name for name, target in unused.items() if target in unexpected]
    if unknown:
        raise RecipeError(
            f"model.path: {type(model).__name__} has no place for "
            f"{format_count(len(unknown), 'tensor')} in the files of '{base}', first "
            f"{min(unknown)}; the trained model would lack them. Its config.json may be of another "
            "model, or ask for fewer layers: download the model again, or remove them from its "
            "files (docs/troubleshooting.md)"
        )
    kept.tensors = {name: tensors[name] for name in rest}
    modules = {name.removeprefix("model.") for name, _ in published.named_modules()}
    kept.unused = sorted({*map(part_of, unused)} - modules)
    return kept


def without_ignored(
    model: Any, missing: Iterable[str] = (), unexpected: Iterable[str] = ()
) -> SimpleNamespace:
    """Leave out the names that a class ignores, by transformers' own rule."""
    info = SimpleNamespace(missing_keys={*missing}, unexpected_keys={*unexpected})
    model._adjust_missing_and_unexpected_keys(info)
    return info


def ensure_complete(model: Any, files: WeightFiles, path: str) -> None:
    """Refuse files that lack a tensor of a model, or hold one with another shape.

    `model` is built without weights, and its tied tensors are one.
    """
    own = model.state_dict(keep_vars=True)
    for name, shape in files.shapes.items():
        if tuple(own[name].shape) != shape:
            raise RecipeError(
                f"model.path: the files of '{path}' hold {name} with the shape {[*shape]}, and its "
                f"config.json asks for {[*own[name].shape]}; download the model again"
            )
    stored = {own[name] for name in files.shapes}
    missing = (name for name, tensor in own.items() if tensor not in stored)
    refuse_missing(without_ignored(model, missing).missing_keys, path)


def refuse_missing(names: Iterable[str], path: str) -> None:
    """Refuse a model with tensors that its files lack."""
    if missing := sorted(names):
        raise RecipeError(
            f"model.path: the files of '{path}' lack {len(missing):,} of the model's "
            f"tensors ({missing[0]} first), which would be random; download the model again"
        )
