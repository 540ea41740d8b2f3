"""A model's tensors, made from the tensors in its files.

transformers renames tensors while it loads a model, and joins those of experts. This module asks
for the same renaming and joining, one tensor at a time. So a rank reads only its own rows, and a
loaded or written model can be compared with the files.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
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

from .tensor_shards import Part

SAMPLE = 64
"""Numbers of each compared sample of a tensor."""
WIDE = 2**20
"""Row size, in numbers, above which one sample of a tensor is compared instead of three."""
BUDGET = 2**28
"""Most bytes to compare of tensors that cannot be made by rows."""

Read = Callable[[str], Tensor]
"""The name of a tensor in the files -> its values."""


@dataclass
class Group:
    """Tensors in the files that make one or more tensors of the model."""

    target: str
    """The first tensor of the model that it makes."""
    converter: WeightConverter | None = None
    """How transformers makes it; None for a tensor that is not converted."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """The converter's pattern that matched, and the tensor's name in the files."""

    @property
    def by_rows(self) -> bool:
        """Whether row n of the tensor is made from the n-th source of each pattern alone."""
        if self.converter is None:
            return False
        first, *others = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and len(self.converter.target_patterns) == 1
            and all(
                (isinstance(one, Concatenate) and one.dim > 0)
                or (isinstance(one, Transpose) and min(one.dim0, one.dim1) > 0)
                for one in others
            )
        )

    def rows(self, start: int, stop: int) -> "Group":
        """Return the group of these rows only."""
        lists: dict[str, list[tuple[str, str]]] = {}
        for pattern, name in self.sources:
            lists.setdefault(pattern, []).append((pattern, name))
        some = [one for sources in lists.values() for one in sources[start:stop]]
        return Group(self.target, self.converter, some)

    def make(self, model: PreTrainedModel, read: Read) -> dict[str, Tensor]:
        """Make its tensors."""
        if self.converter is None:
            return {self.target: read(self.sources[0][1])}
        converter: Any = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, read(name))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def group(model: Any, names: Iterable[str]) -> list[Group]:
    """Sort tensors of files into the groups that make the tensors of a model."""
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, Group] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target in state:
            converter = by_pattern[pattern] if pattern is not None else None
            one = groups.setdefault(target, Group(target, converter))
            one.sources.append((pattern or name, name))
    # As transformers does: the model is saved as it was loaded.
    model._weight_conversions = [one for one in transforms if one.was_used()]
    return [*groups.values()]


def shapes_made(
    model: PreTrainedModel, shapes: Mapping[str, Iterable[int]]
) -> dict[str, tuple[list[int], Group]]:
    """Return the shape and group of each model tensor, from the shapes in the files."""

    def read(name: str) -> Tensor:
        return torch.empty(tuple(shapes[name]), device="meta")

    made = {}
    for one in group(model, shapes):
        for name, tensor in one.make(model, read).items():
            made[name] = (list(tensor.shape), one)
    return made


def skeleton(model: Any) -> PreTrainedModel:
    """Return an unsharded copy of the model on the meta device."""
    made: Any = next(one for one in type(model).__mro__ if not issubclass(one, FSDPModule))
    config = copy.deepcopy(model.config)
    # Saving replaces types in configurations by their names, and some layers need the types.
    inner = [getattr(config, name, None) for name in config.sub_configs]
    for one in filter(None, [config, *inner]):
        one.dtype = getattr(torch, one.dtype) if isinstance(one.dtype, str) else one.dtype
    with torch.device("meta"):
        twin = made(config)
    twin._weight_conversions = getattr(model, "_weight_conversions", None)
    return twin  # type: ignore[no-any-return]


class Weights:
    """The tensors of a model, read from its files by rows."""

    def __init__(self, model: PreTrainedModel, files: Mapping[str, str]) -> None:
        self._model, self._files = model, files
        self._stack = ExitStack()
        self._opened: dict[str, Any] = {}
        self._made: dict[str, Tensor] = {}
        with self:
            shapes = {name: self._slice(name).get_shape() for name in files}
        made = shapes_made(model, shapes)
        self._groups = {name: one for name, (_, one) in made.items()}
        self.shapes = {name: shape for name, (shape, _) in made.items()}
        """Tensor of the model -> its shape, as made from the files."""

    def __enter__(self) -> "Weights":
        for path in sorted({*self._files.values()}):
            self._opened[path] = self._stack.enter_context(safe_open(path, "pt"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._opened, self._made = {}, {}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of a tensor; a scalar whole."""
        one = self._groups[name]
        if not self.shapes[name]:
            return one.make(self._model, self._whole)[name]
        if one.converter is None:
            rows: Tensor = self._slice(one.sources[0][1])[start:stop]
            return rows
        if one.by_rows and stop > start:
            return one.rows(start, stop).make(self._model, self._whole)[name]
        if name not in self._made:
            self._made = one.make(self._model, self._whole)
        return self._made[name][start:stop]

    def differing(
        self, parts: Mapping[str, Part], dtype: torch.dtype | None = None, rank: int = 0
    ) -> str:
        """Compare samples of each part with the files; describe the first difference.

        `dtype` is the type in which the model was loaded, or saved.
        """
        left = BUDGET
        names = sorted(parts)
        # Ranks begin at different tensors, so together they compare more than one budget.
        turn = rank * 7919 % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            part = parts[name]
            if name not in self.shapes:
                continue
            if self.shapes[name] != list(part.shape):
                return f"{name} has the shape {list(part.shape)}; its file {self.shapes[name]}"
            one = self._groups[name]
            if one.converter is not None and not one.by_rows and name not in self._made:
                left -= 4 * torch.Size(part.shape).numel()
                if left < 0:
                    continue
            for start, stop in sampled(part, crc32(name.encode())):
                if not self._same(name, part, start, stop, dtype):
                    return f"{name} has other values than its file"
        return ""

    def _same(
        self, name: str, part: Part, start: int, stop: int, dtype: torch.dtype | None
    ) -> bool:
        row = max(1, torch.Size(part.shape[1:]).numel())
        first = start // row
        stored = self.rows(name, first, -(-stop // row)).reshape(-1)
        stored = stored[start - first * row : stop - first * row]
        ours = part.values[start - part.start : stop - part.start].to("cpu")
        # Compared in the type of loading or saving: trained weights may have more digits.
        kind = dtype if dtype is not None and stored.is_floating_point() else ours.dtype
        ours, stored = ours.to(kind), stored.to(kind)
        # NaN equals NaN here: it was loaded as it is in the file.
        return bool(((ours == stored) | ((ours != ours) & (stored != stored))).all())

    def _slice(self, name: str) -> Any:
        return self._opened[self._files[name]].get_slice(name)

    def _whole(self, name: str) -> Tensor:
        tensor: Tensor = self._opened[self._files[name]].get_tensor(name)
        return tensor


def sampled(part: Part, turn: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of a part to compare, as positions in the flat tensor."""
    size = part.values.numel()
    if size <= 3 * SAMPLE:
        yield from [(part.start, part.start + size)] if size else []
        return
    row = torch.Size(part.shape[1:]).numel()
    last = size - SAMPLE
    for offset in [turn % last] if row > WIDE else [0, turn % last, last]:
        yield part.start + offset, part.start + offset + SAMPLE


def files_of(path: str, revision: str | None) -> dict[str, str]:
    """Map the tensors of a pretrained model to their safetensors files."""
    have = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    if index := cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **have):
        names: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        paths = {name: str(cached_file(path, name, **have)) for name in {*names.values()}}
        return {name: paths[file] for name, file in names.items()}
    if single := cached_file(path, SAFE_WEIGHTS_NAME, **have):
        with safe_open(single, "pt") as file:
            return {name: str(single) for name in file.keys()}  # noqa: SIM118  # no dict
    return {}
