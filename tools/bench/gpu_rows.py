"""Check packed rows against their examples, and rows that are collated and copied ahead."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import shared
import torch
from accelerate import Accelerator
from torch import Tensor

from plugsft import hookimpl
from plugsft.base.types import StepPlan
from plugsft.data_kit import Tokens
from plugsft.plugins.async_collate import AsyncCollate
from plugsft.plugins.bfd_packing.documents import pack
from plugsft.ranks.agree import agreed
from plugsft.ranks.load_batches import BatchLoader
from plugsft.registry.active import Active

IGNORED = -100
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SIZE = 4096 if GPU else 64


@dataclass(frozen=True)
class Check:
    """The result of a check: its error, or why it was not run."""

    name: str
    error: float | None = None
    tolerance: float = 0.0
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether the error exceeds the tolerance; NaN does."""
        return self.error is not None and not self.error <= self.tolerance

    def __str__(self) -> str:
        if self.error is None:
            return f"NOT RUN  {self.name}: {self.reason}"
        summary = "FAILED " if self.failed else "ok     "
        return f"{summary}  {self.name}: off by {self.error:.1e}, of {self.tolerance:.0e} allowed"


def check_rows() -> Iterator[Check]:
    """Check packed rows against their examples, and rows collated and copied ahead."""
    steps, size = 20, 40
    with tempfile.TemporaryDirectory() as folder:
        lengths = shared.draw_lengths(steps * size, 4.0, 1.0, 1, 512)
        tokens = shared.write_tokens(Path(folder, "tokens"), lengths, 3)
        rows = np.random.default_rng(0).permutation(len(tokens)).reshape(steps, size)
        batches = [pack(tokens, row) for row in rows]
        mismatches = sum(
            int((collate_in_python(tokens, row)[name] != batch[name][0]).sum())
            for row, batch in zip(rows, batches, strict=True)
            for name in ("input_ids", "labels", "position_ids")
        )
        yield Check("rows collated, numbers that differ", mismatches, 0)
        yield check_loading_ahead(tokens, rows, batches)
    if GPU:
        unpinned = sum(not batch["input_ids"].is_pinned() for batch in batches)
        yield Check("rows not in pinned memory", unpinned, 0)
    else:
        yield Check("rows in pinned memory, copied during training", reason="no GPU")


def collate_in_python(tokens: Tokens, examples: Any) -> dict[str, Tensor]:
    """Collate examples into a packed row, token by token."""
    ids, labels, positions = list[int](), list[int](), list[int]()
    for number in examples:
        example_ids, mask = tokens.example(int(number))
        for position, (token, trained) in enumerate(zip(example_ids, mask, strict=True)):
            ids.append(int(token))
            labels.append(int(token) if trained and position else IGNORED)
            positions.append(position)
    columns = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: torch.tensor(values) for name, values in columns.items()}


class Packer:
    """Collates packed rows, as the core would call bfd_packing."""

    @hookimpl
    def collate(self, tokens: Tokens, examples: Any) -> dict[str, Any]:
        """Pack the examples."""
        batch: dict[str, Any] = pack(tokens, examples)
        return batch


def check_loading_ahead(tokens: Tokens, rows: Any, batches: list[dict[str, Any]]) -> Check:
    """Collate rows with async_collate while the device computes; compare with serial collation."""
    hooks = Active({"async_collate": AsyncCollate(depth=2)}, {}).attach(Packer()).hooks
    loader = BatchLoader(hooks, Accelerator(cpu=not GPU), 0, packed=True)

    def plan_step(step: int) -> StepPlan:
        return StepPlan(step, 0, [[rows[step - 1]]], 1, 1, 1)

    loaded_steps = loader.load(plan_step, tokens, range(1, len(rows) + 1), agreed)
    mismatches, busy = 0, torch.randn(SIZE, SIZE, device=DEVICE)
    for loaded_step, batch in zip(loaded_steps, batches, strict=True):
        busy @ busy  # the next row is copied meanwhile
        [loaded] = loaded_step.micro_batches
        mismatches += sum(
            int((loaded[name].cpu() != batch[name]).sum())
            for name in batch
            if isinstance(batch[name], Tensor)
        )
    where = "copied to the GPU during training" if GPU else "built in a thread"
    return Check(f"rows {where}, numbers that differ", mismatches, 0)
