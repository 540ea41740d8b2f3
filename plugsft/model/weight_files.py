"""Tensors of a model, converted from the tensors in its files.

transformers renames tensors on loading a model, and fuses those of experts. This module applies
the same conversion to one tensor at a time. So a rank reads only its own numbers, and a saved model
can be compared with its files.
"""

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from .tensor_shards import TensorShard

SAMPLE = 64
"""Numbers in each of the three compared samples of a tensor."""

Renamed = dict[str, tuple[str, str | None]]
"""Name of a tensor in the files -> in the model, and the converter's pattern."""
Read = Callable[[str], Tensor]
"""Name of a tensor in the files -> its values."""


@dataclass
class TensorGroup:
    """Tensors in the files that are converted to one or more tensors of the model."""

    target: str
    """The first of these tensors of the model."""
    converter: WeightConverter | None = None
    """transformers' conversion; None if a tensor is only renamed."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Pattern of the converter -> the names in the files that match it."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Tensor of the model -> its shape."""

    @property
    def by_rows(self) -> bool:
        """Whether row n is made from only the n-th source of each pattern."""
        if self.converter is None or len(self.converter.target_patterns) > 1:
            return False
        first, *others = self.converter.operations
        return (isinstance(first, MergeModulelist) and first.dim == 0) and all(
            (isinstance(operation, Concatenate) and operation.dim > 0)
            or (isinstance(operation, Transpose) and min(operation.dim0, operation.dim1) > 0)
            for operation in others
        )

    def of_rows(self, start: int, stop: int) -> "TensorGroup":
        """Leave out the sources of other rows."""
        sources = {pattern: names[start:stop] for pattern, names in self.sources.items()}
        return TensorGroup(self.target, self.converter, sources)

    def convert(self, model: Any, read: Read) -> dict[str, Tensor]:
        """Make the model's tensors, by name, from those in the files."""
        converter: Any = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                if converter is None:
                    return {self.target: read(name)}
                converter.add_tensor(self.target, name, pattern, read(name))
        tensors = converter.convert(self.target, model=model, config=model.config)
        return {name: it[0] if isinstance(it, list) else it for name, it in tensors.items()}


def group_tensors(
    model: Any, shapes: Mapping[str, Iterable[int]]
) -> tuple[dict[str, TensorGroup], Renamed, list[Any]]:
    """Group tensors in files by those of the model that they become; without a model, each alone.

    Also gives how they are renamed, and the rules of transformers by which they are. Nothing is
    read.
    """
    groups: dict[str, TensorGroup] = {}
    if model is None:
        for name, shape in shapes.items():
            groups[name] = TensorGroup(name, None, {name: [name]}, {name: tuple(shape)})
        return groups, {}, []
    rules, state = conversions_of(model), model.state_dict()
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    names = renamed(model, shapes, rules)
    for name, (target, pattern) in names.items():
        if target in state:
            converter = by_pattern[pattern] if pattern is not None else None
            group = groups.setdefault(target, TensorGroup(target, converter))
            group.sources.setdefault(pattern or name, []).append(name)
    for group in [*groups.values()]:
        empty = group.convert(model, lambda name: torch.empty(tuple(shapes[name]), device="meta"))
        group.shapes = {name: tuple(tensor.shape) for name, tensor in empty.items()}
        groups |= dict.fromkeys(group.shapes, group)
    return groups, names, [rule for rule in rules if rule.was_used()]


def conversions_of(model: Any) -> list[Any]:
    """Return transformers' rules by which tensors in files become those of a model."""
    quantizer = getattr(model, "hf_quantizer", None)
    return [*get_model_conversion_mapping(model, hf_quantizer=quantizer)]


def renamed(model: Any, names: Iterable[str], rules: Sequence[Any] | None = None) -> Renamed:
    """Return the names in a model's files -> those in the model, and the converters' patterns."""
    rules = conversions_of(model) if rules is None else rules
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    targets = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        targets[name] = target, pattern
    return targets


class WeightFiles:
    """Reads a model's tensors from its files, as ranges of flat numbers."""

    def __init__(self, model: Any = None, paths: Iterable[str | Path] = ()) -> None:
        """Without a model, tensors keep their names."""
        self._model = model
        self._files: dict[str, Any] = {}
        """Tensor in the files -> its open file."""
        self._last: dict[str, Tensor] = {}
        """The tensors of the group that was converted last."""
        for path in paths:
            file: Any = safe_open(path, "pt")
            self._files |= dict.fromkeys(file.keys(), file)
        shapes = {name: file.get_slice(name).get_shape() for name, file in self._files.items()}
        self._groups, self.names, self.conversions = group_tensors(model, shapes)
        """How tensors were renamed, and transformers' rules by which they were converted."""
        self.shapes = {name: group.shapes[name] for name, group in self._groups.items()}
        """Tensor of the model -> its shape after conversion."""

    def close(self) -> None:
        """Close the files: what was read of them takes memory until then."""
        self._files, self._last = {}, {}

    def fill(self, name: str, shard: TensorShard) -> None:
        """Read the numbers of a shard."""
        if size := shard.values.numel():
            shard.values.copy_(self.numbers(name, shard.start, shard.start + size))

    def numbers(self, name: str, start: int, stop: int) -> Tensor:
        """Read a range of a flattened tensor, from the rows that hold it."""
        group, shape = self._groups[name], self.shapes[name]
        row_size = max(1, math.prod(shape[1:]))
        first, last = start // row_size, -(-stop // row_size)
        if group.converter is None and shape:
            source = next(iter(group.sources.values()))[0]
            values: Tensor = self._files[source].get_slice(source)[first:last]
        elif group.by_rows:
            values = group.of_rows(first, last).convert(self._model, self._stored)[name]
        else:
            if name not in self._last:
                self._last = group.convert(self._model, self._stored)
            values = self._last[name].reshape(-1)[first * row_size : last * row_size]
        before = first * row_size
        return values.reshape(-1)[start - before : stop - before]

    def whole(self, name: str) -> Tensor:
        """Read a tensor."""
        shape = self.shapes[name]
        return self.numbers(name, 0, math.prod(shape)).view(shape)

    def differing(self, shards: Mapping[str, TensorShard], dtype: torch.dtype | None) -> str:
        """Compare samples of each shard with the files; describe the first difference, or "".

        `dtype` is the type of saving.
        """
        for name, shard in sorted(shards.items()):
            if name not in self.shapes:
                return f"{name} is missing"
            if self.shapes[name] != shard.shape:
                return f"{name} has the shape {[*shard.shape]}; in its file {[*self.shapes[name]]}"
            for offset in sample_offsets(name, shard.values.numel()):
                ours = shard.values[offset : offset + SAMPLE].to("cpu")
                start = shard.start + offset
                stored = self.numbers(name, start, start + len(ours))
                # Trained weights may be more precise than what is saved of them.
                common = dtype if dtype and stored.is_floating_point() else ours.dtype
                pair = ours.to(common), stored.to(common)
                if not torch.allclose(*pair, rtol=0, atol=0, equal_nan=True):
                    return f"{name} has other values than its file"
        return ""

    def _stored(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def sample_offsets(name: str, size: int) -> set[int]:
    """Choose where samples of a tensor begin: at its first number, at one of all, near the last."""
    last = max(0, size - SAMPLE)
    return {0, crc32(name.encode()) % (last + 1), last} if size else set()


def find_file(path: str, name: str, revision: str | None) -> str | None:
    """Find a file of a pretrained model, if it has that file."""
    found: str | None = cached_file(
        path, name, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    return found


def find_weight_files(path: str, revision: str | None) -> list[str]:
    """Find the safetensors files of a pretrained model: as transformers, one file before many."""
    if file := find_file(path, SAFE_WEIGHTS_NAME, revision):
        return [file]
    index = find_file(path, SAFE_WEIGHTS_INDEX_NAME, revision)
    files = json.loads(Path(index).read_text())["weight_map"].values() if index else ()
    return [str(find_file(path, file, revision)) for file in sorted({*files})]
