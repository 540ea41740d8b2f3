"""Model, ranks and cache for plugins that add columns before step 1, in `add_columns`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import Module

from ..base.types import Ints
from ..hooks import Hooks
from ..model.load import Load
from ..tokens.store import Tokens
from .agree import PeerError, agreed, from_main
from .failures import reason_of
from .load_batches import BatchLoader
from .sharding import is_sharded, shard_frozen_model

BUILD, CACHED, FAILED = "build", "cached", "failed"
"""Messages of the main process to the other ranks in `keep`."""


class RunPrelude:
    """Computes with the model on all ranks, caches the results, and loads other models."""

    def __init__(
        self, accelerator: Accelerator, hooks: Hooks, loader: BatchLoader, load: Load
    ) -> None:
        self.rank, self.ranks = accelerator.process_index, accelerator.num_processes
        mixed = accelerator.mixed_precision != "no"
        self.exact = load.kwargs["dtype"] == torch.float32 and not mixed
        self.load = load
        """How the model was loaded."""
        self._accelerator, self._hooks, self._loader = accelerator, hooks, loader
        self._left_by_all = False
        """Whether all ranks left the last build together, because one failed."""

    def add_columns(self, model: Module, tokens: Tokens) -> Tokens:
        """Let plugins add columns that need the model."""
        return self._hooks.add_columns(model=model, tokens=tokens, prelude=self)

    @torch.no_grad()
    def losses(self, model: Module, tokens: Tokens, examples: Ints) -> Tensor:
        """Return -log p of the targets of examples, computed as one micro-batch of the run.

        Under ZeRO-3 and FSDP2 all ranks must call it together, even without examples.
        """
        batch = self._loader.load_batch(tokens, examples)
        return self._hooks.token_nll(model=model, batch=batch, summed=False)

    @contextmanager
    def agreed(self, operation: str) -> Iterator[None]:
        """Run a block without collectives on all ranks; if it fails on one, all raise."""
        try:
            with agreed(self._accelerator, operation):
                yield
        except Exception:
            self._left_by_all = True
            raise

    def added(self, values: Tensor) -> Tensor:
        """All-reduce values: return their sums over all ranks."""
        local = values.to(self._accelerator.device)
        summed: Tensor = self._accelerator.reduce(local, reduction="sum")
        return summed

    def frozen(self, path: str = "", revision: str | None = None) -> Module:
        """Load a frozen model with the run's settings: the run's model again, or another."""
        kwargs = dict(self.load.kwargs)
        if self._accelerator.mixed_precision == "bf16":
            kwargs["dtype"] = torch.bfloat16  # it is not trained
        if path:
            kwargs = {name: value for name, value in kwargs.items() if name != "revision"}
            kwargs |= {"revision": revision} if revision else {}
        load = Load(path or self.load.path, kwargs, is_sharded(self._accelerator))
        return shard_frozen_model(self._accelerator, load, load.build())

    def keep(
        self, key: dict[str, Any], build: Callable[[Path | None], None], read: Callable[..., Any]
    ) -> Any:
        """Return `read` of the cache entry of a key; build the entry if it is missing.

        All ranks build together: the main process with the folder, the others with None.
        """
        if not self._accelerator.is_main_process:
            return self._build_with_main(build)
        failures: list[Exception] = []

        def begin(folder: Path) -> None:
            if failures:
                raise failures[0]
            from_main((BUILD, None))
            self._left_by_all = False
            try:
                build(folder)
            except Exception as error:
                if self.ranks > 1 and not self._left_by_all:
                    failures.append(error)  # the other ranks are still in `build`, so no retry
                raise

        try:
            value = self._hooks.cache(key=key, build=begin, read=read)
        except Exception as error:
            if not failures:
                from_main((FAILED, reason_of(error)))
            raise
        if failures:
            raise failures[0]
        return from_main((CACHED, value))[1]

    def _build_with_main(self, build: Callable[[Path | None], None]) -> Any:
        """Join each build of the main process; return its value."""
        own_error: Exception | None = None
        while True:
            message, value = from_main((FAILED, None))
            if message == CACHED:
                return value
            if message == FAILED:
                raise own_error or PeerError(f"rank 0 failed: {value}")
            self._left_by_all = False
            try:
                build(None)
            except Exception as error:
                if not self._left_by_all:
                    raise
                own_error = None if isinstance(error, PeerError) else error
