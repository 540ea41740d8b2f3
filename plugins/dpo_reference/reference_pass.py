"""The pass of the reference over one data set, on all ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from plugsft import Ints, PluginError, Ranks, RunModel, digest, progress
from plugsft.data_kit import Tokens
from plugsft.kit import lay_out, shard_of

from .log_probs import LogProbs, Values, block_file, load_known, write_block

if TYPE_CHECKING:
    from . import DpoReference

BLOCK = 16
"""Micro-batches of each rank in one stored block."""
TOLERANCE = {True: (1e-4, 1e-3), False: (2e-2, 0.5)}
"""Allowed difference of a recomputed pair, relative and absolute, in float32 (True) or not."""


class ReferencePass:
    """Computes the reference's log-probabilities of one data set."""

    def __init__(self, plugin: DpoReference, model: RunModel, tokens: Tokens, ranks: Ranks) -> None:
        self.plugin, self.tokens, self.model, self.ranks = plugin, tokens, model, ranks
        module: Any = getattr(model.module, "module", model.module)
        self.initial_digest = getattr(module, "initial_digest", "")
        self.kernel = module.config.get_text_config()._attn_implementation
        self.without_adapters: Any = None
        if not plugin.reference:
            self.without_adapters = getattr(module, "disable_adapter", None)
        # Without this plugin, each rank would hold its shard of a frozen copy.
        self.saved_bytes = 0
        if not self.without_adapters:
            self.saved_bytes = sum(shard_of(each).values.nbytes for each in module.parameters())
        self.seconds, self.computed, self.difference = 0.0, 0, 0.0

    @cached_property
    def reference(self) -> Any:
        """Another model than the trained one, loaded by all ranks for this pass."""
        path = self.plugin.reference
        return self.model.load_frozen(path) if path else None

    @cached_property
    def key(self) -> dict[str, Any]:
        """Everything that the log-probabilities depend on."""
        load = self.model.load
        # Attention per document calls SDPA for each document.
        kernels = {"plugsft_documents": "sdpa"}
        reference = {
            "weights": self.model.weights_digest(self.plugin.reference),
            "dtype": str(load.kwargs.get("dtype")),
            "exact": self.model.exact,
            "kernel": kernels.get(self.kernel, self.kernel),
            "device": self.device.type,
        }
        if (quantization := load.kwargs.get("quantization_config")) is not None:
            reference["quantization"] = quantization.to_dict()
        if self.without_adapters and self.initial_digest:
            reference["adapters"] = self.initial_digest
        return {"kind": "reference", "tokens": self.tokens.facts["key"], "reference": reference}

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        device: torch.device = next(iter(self.model.module.parameters())).device
        return device

    def build(self, folder: Path | None) -> None:
        """Compute the missing pairs on all ranks; the main process has a folder, and writes."""
        started = time.perf_counter()
        count = len(self.tokens)
        values, known = np.zeros((count, 2), np.float32), np.zeros(count, np.float32)
        ids = self.tokens.contents
        with self.ranks.agree("reading known log-probabilities"):
            if folder is not None:
                load_known(folder, self.key, ids, values, known)
        known = self.ranks.reduce(torch.from_numpy(known)).cpu().numpy()
        missing = np.flatnonzero(known == 0)
        first = len([*folder.glob("data-*")]) if folder is not None else 0
        num_tokens = 0
        with progress("reference", len(missing), "pairs") as advance:
            for number, micro_batches in enumerate(self._blocks(missing), start=first):
                pairs = np.concatenate(micro_batches)
                log_probs = self.compute(micro_batches)
                with self.ranks.agree("writing log-probabilities"):
                    if folder is not None:
                        write_block(block_file(folder, number), pairs, ids[pairs], log_probs)
                num_tokens += int(self.tokens.lengths[pairs].sum())
                self.seconds = time.perf_counter() - started
                advance(len(pairs), f"{num_tokens / self.seconds:,.0f} tokens/s")
        self.computed = len(missing)
        with self.ranks.agree("writing log-probabilities"):
            if folder is not None:
                facts = {
                    "kind": "reference",
                    "key": digest(self.key),
                    "key_parts": self.key,
                    "rows": count,
                    "tokens": int(self.tokens.lengths.sum()),
                    "seconds_per_pair": self.seconds / max(1, self.computed),
                    "sources": self.tokens.facts["sources"],
                }
                (folder / "facts.json").write_text(json.dumps(facts, indent=1))

    def _blocks(self, pairs: Ints) -> Iterator[list[Ints]]:
        """Yield the micro-batches of each block, the longest pairs first."""
        sizes, padded = self.tokens.lengths[pairs], not self.plugin.packed
        if padded:
            # A row for each answer, padded to the longest answer.
            sizes = 2 * self.tokens.sequences(pairs)[0].reshape(-1, 2).max(1)
        layout = lay_out(sizes, self.plugin.max_tokens, padded)
        micro_batches = [pairs[numbers] for numbers in layout]
        size = BLOCK * self.ranks.size
        for start in range(0, len(micro_batches), size):
            yield micro_batches[start : start + size]

    def compute(self, micro_batches: list[Ints]) -> Values:
        """Return the log-probabilities of all pairs; each rank computes its share."""
        rank, ranks = self.ranks.rank, self.ranks.size
        log_probs = torch.zeros(sum(map(len, micro_batches)), 2, device=self.device)
        starts = np.cumsum([0, *map(len, micro_batches)])
        for step in range(0, len(micro_batches), ranks):
            number = step + rank
            # A rank without a micro-batch still takes part in the collectives of sharded models.
            is_empty = number >= len(micro_batches)
            pairs = micro_batches[0][:0] if is_empty else micro_batches[number]
            own = self._compute_micro_batch(pairs)
            if len(pairs):
                log_probs[starts[number] : starts[number + 1]] = own
        reduced: Values = self.ranks.reduce(log_probs).cpu().numpy()
        return reduced

    def _compute_micro_batch(self, pairs: Ints) -> torch.Tensor:
        targets = torch.from_numpy(self.tokens.sequence_targets(pairs)).to(self.device)
        with self.without_adapters() if self.without_adapters else nullcontext():
            losses = self.model.score(self.tokens, pairs, self.reference)
        sums = torch.segment_reduce(losses, "sum", lengths=targets, unsafe=True, initial=0)
        return -sums.view(-1, 2)

    def recheck(self, stored: LogProbs) -> None:
        """Compute random pairs again; stop if they differ from the stored ones."""
        drawn = torch.zeros(self.plugin.probes, device=self.device, dtype=torch.float64)
        if self.ranks.rank == 0:
            numbers = np.random.default_rng().choice(len(self.tokens), self.plugin.probes)
            drawn += torch.from_numpy(numbers).to(drawn)
        relative, absolute = TOLERANCE[self.model.exact]
        for number in self.ranks.reduce(drawn).cpu().numpy().astype(np.int64):
            # Every rank computes the same pair.
            actual = self.compute([np.array([number])] * self.ranks.size)[0]
            expected = stored.values[number]
            difference = np.abs(actual - expected)
            self.difference = max(self.difference, float(difference.max()))
            if not (difference <= np.maximum(relative * np.abs(expected), absolute)).all():
                raise PluginError(
                    f"plugins.dpo_reference: pair {number} (row {self.tokens.rows[number]}) has "
                    f"the log-probabilities {actual.tolist()}, but {expected.tolist()} in "
                    f"{stored.folder}, which belong to other weights or another kernel, or are "
                    "damaged; remove that folder, and the next run computes them again"
                )
