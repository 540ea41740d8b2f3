"""Tensors of a model, converted from the tensors in its files.

transformers renames tensors on loading a model, and fuses those of experts. This module applies
the same conversion to one tensor at a time. So a rank reads only its own numbers, and a saved model
can be compared with its files.
"""

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import torch
import xxhash
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
from transformers.integrations import deepspeed
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from ..base.checksums import digest
from .tensor_shards import TensorShard

SAMPLE = 64
"""Numbers in each of the three compared samples of a tensor."""

FILE_SAMPLES, SAMPLE_BYTES = 32, 4096
"""Samples of each file that a checksum of weights covers, and the bytes of each."""

Read = Callable[[str], Tensor]
"""Name of a tensor in the files -> its values."""


@dataclass
class TensorGroup:
    """Tensors in the files that are converted to one or more tensors of the model."""

    target: str
    """The first of these tensors of the model."""
    converter: WeightConverter | None = None
    """transformers' conversion; None if a tensor is only renamed."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(matching pattern of the converter, name in the files) per tensor."""

    @property
    def by_rows(self) -> bool:
        """Whether row n is made from only the n-th source of each pattern."""
        if self.converter is None:
            return False
        first, *others = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and len(self.converter.target_patterns) == 1
            and all(
                (isinstance(operation, Concatenate) and operation.dim > 0)
                or (isinstance(operation, Transpose) and min(operation.dim0, operation.dim1) > 0)
                for operation in others
            )
        )

    def rows(self, start: int, stop: int) -> "TensorGroup":
        """Leave out the sources of other rows."""
        lists: dict[str, list[tuple[str, str]]] = {}
        for pattern, name in self.sources:
            lists.setdefault(pattern, []).append((pattern, name))
        selected = [source for sources in lists.values() for source in sources[start:stop]]
        return TensorGroup(self.target, self.converter, selected)

    def convert(self, model: Any, read: Read) -> dict[str, Tensor]:
        """Make the model's tensors, by name, from those in the files."""
        if self.converter is None:
            return {self.target: read(self.sources[0][1])}
        converter: Any = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, read(name))
        tensors = converter.convert(self.target, model=model, config=model.config)
        return {name: it[0] if isinstance(it, list) else it for name, it in tensors.items()}


def group_tensors(model: Any, names: Iterable[str]) -> list[TensorGroup]:
    """Group the tensors of files by the tensors of the model that they become.

    Without a model, they keep their names.
    """
    if model is None:
        return [TensorGroup(name, None, [(name, name)]) for name in names]
    transforms = get_model_conversion_mapping(model)
    renamings = [rule for rule in transforms if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in transforms if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, TensorGroup] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target in state:
            converter = by_pattern[pattern] if pattern is not None else None
            group = groups.setdefault(target, TensorGroup(target, converter))
            group.sources.append((pattern or name, name))
    # As in transformers: saving reverses the conversions of loading.
    model._weight_conversions = [rule for rule in transforms if rule.was_used()]
    return [*groups.values()]


def converted_shapes(
    model: Any, shapes: Mapping[str, Iterable[int]]
) -> dict[str, tuple[tuple[int, ...], TensorGroup]]:
    """Convert shapes alone: each tensor of the model gets its shape and its group."""

    def read(name: str) -> Tensor:
        return torch.empty(tuple(shapes[name]), device="meta")

    return {
        name: (tuple(tensor.shape), group)
        for group in group_tensors(model, shapes)
        for name, tensor in group.convert(model, read).items()
    }


def meta_copy(model: Any, model_class: Any = None) -> PreTrainedModel:
    """Build the model again without weights and undivided, or one of another class."""
    if model_class is None:
        # FSDP2 replaces the class by a subclass.
        classes = type(model).__mro__
        model_class = next(one for one in classes if not issubclass(one, FSDPModule))
    config = copy.deepcopy(model.config)
    # Saving replaces dtypes in configurations by their names, but some layers need the dtypes.
    nested = [getattr(config, name, None) for name in config.sub_configs]
    for each in filter(None, [config, *nested]):
        each.dtype = getattr(torch, each.dtype) if isinstance(each.dtype, str) else each.dtype
    # Under ZeRO-3, transformers would shard and initialize the models inside a model.
    zero3_config = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]  # untyped upstream
    try:
        with torch.device("meta"):
            copied = model_class(config)
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = zero3_config
    copied._weight_conversions = getattr(model, "_weight_conversions", None)
    return copied  # type: ignore[no-any-return]


class WeightFiles:
    """Reads a model's tensors from its files, as ranges of flat numbers."""

    def __init__(self, model: Any = None, files: Mapping[str, str] = {}) -> None:
        """`files`: tensor -> its file. Without a model, tensors keep their names."""
        self._model = model
        self._files = files
        self._stack = ExitStack()
        self._opened: dict[str, Any] = {}
        self._last: dict[str, Tensor] = {}
        """The tensors of the group that was converted last."""
        with self:
            shapes = {name: self._slice(name).get_shape() for name in files}
        converted = converted_shapes(model, shapes)
        self._groups = {name: group for name, (_, group) in converted.items()}
        self.shapes = {name: shape for name, (shape, _) in converted.items()}
        """Tensor of the model -> its shape after conversion."""

    def __enter__(self) -> Self:
        for path in sorted({*self._files.values()}):
            self._opened[path] = self._stack.enter_context(safe_open(path, "pt"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._opened, self._last = {}, {}

    def fill(self, name: str, shard: TensorShard) -> None:
        """Read the numbers of a shard."""
        if size := shard.values.numel():
            shard.values.copy_(self.numbers(name, shard.start, shard.start + size))

    def numbers(self, name: str, start: int, stop: int) -> Tensor:
        """Read a range of a flattened tensor, from the rows that hold it."""
        group, shape = self._groups[name], self.shapes[name]
        row = max(1, math.prod(shape[1:]))
        first, last = start // row, -(-stop // row)
        if group.converter is None and shape:
            rows: Tensor = self._slice(group.sources[0][1])[first:last]
        elif group.by_rows:
            rows = group.rows(first, last).convert(self._model, self._stored)[name]
        else:
            if name not in self._last:
                self._last = group.convert(self._model, self._stored)
            rows = self._last[name].reshape(-1)[first * row : last * row]
        return rows.reshape(-1)[start - first * row : stop - first * row]

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
            size = shard.values.numel()
            last = max(0, size - SAMPLE)
            for offset in {0, crc32(name.encode()) % (last + 1), last} if size else ():
                ours = shard.values[offset : offset + SAMPLE].to("cpu")
                start = shard.start + offset
                stored = self.numbers(name, start, start + len(ours))
                # Trained weights may be more precise than what is saved of them.
                common = dtype if dtype and stored.is_floating_point() else ours.dtype
                pair = ours.to(common), stored.to(common)
                if not torch.allclose(*pair, rtol=0, atol=0, equal_nan=True):
                    return f"{name} has other values than its file"
        return ""

    def _slice(self, name: str) -> Any:
        return self._opened[self._files[name]].get_slice(name)

    def _stored(self, name: str) -> Tensor:
        tensor: Tensor = self._opened[self._files[name]].get_tensor(name)
        return tensor


def find_weight_files(path: str, revision: str | None) -> dict[str, str]:
    """Map each tensor of a pretrained model to its safetensors file."""
    find: Any = partial(
        cached_file, path, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    if index := find(SAFE_WEIGHTS_INDEX_NAME):
        names: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        paths = {name: str(find(name)) for name in {*names.values()}}
        return {name: paths[file] for name, file in names.items()}
    return tensors_in(filter(None, [find(SAFE_WEIGHTS_NAME)]))


def tensors_in(files: Iterable[str | Path]) -> dict[str, str]:
    """Map each tensor of some files to its file."""
    found: dict[str, str] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), str(path))
    return found


def sampled_digest(path: str, revision: str | None) -> str:
    """Tell models apart by samples of their files: reading all of these would take minutes."""
    files = sorted({*find_weight_files(path, revision).values()})
    return digest({Path(file).name: _sampled(Path(file)) for file in files})[:8]


def _sampled(file: Path) -> str:
    """Return a file's size and a checksum of samples from all of it."""
    size, checksum = file.stat().st_size, xxhash.xxh3_64()
    with file.open("rb") as opened:
        for sample in range(FILE_SAMPLES):
            opened.seek(size * sample // FILE_SAMPLES)
            checksum.update(opened.read(SAMPLE_BYTES))
    return f"{size} {checksum.hexdigest()}"
