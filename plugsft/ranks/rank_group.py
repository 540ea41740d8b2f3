"""The ranks of a run, as plugins see them: agree, reduce, and build an artefact together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from ..hooks import Hooks
from .agree import PeerError, agreed, from_main, together
from .failures import failure, reason_of

BUILD, CACHED, FAILED = "build", "cached", "failed"
"""Messages of the main process to the other ranks in `artefact`."""


class RankGroup:
    """What plugins see of the ranks (the protocol `Ranks`)."""

    def __init__(self, accelerator: Accelerator, hooks: Hooks) -> None:
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self.data_rank, self.data_size = self.rank, self.size
        self._accelerator, self._hooks = accelerator, hooks
        self._left_by_all = False
        """Whether all ranks left the last build together, because one failed."""

    @contextmanager
    def agree(self, operation: str) -> Iterator[None]:
        """Run a block without collectives on all ranks; if it fails on one, all raise."""
        try:
            with agreed(self._accelerator, operation):
                yield
        except Exception:
            self._left_by_all = True
            raise

    def reduce(self, values: Tensor) -> Tensor:
        """Return the sums of values over all ranks."""
        kind = f"{values.dtype} {[*values.shape]}"
        with together(self._accelerator, f"reducing values of a plugin ({kind})"):
            local = values.to(self._accelerator.device)
            summed: Tensor = self._accelerator.reduce(local, reduction="sum")
            return summed

    def artefact(
        self, key: dict[str, Any], build: Callable[[Path | None], None], read: Callable[..., Any]
    ) -> Any:
        """Return `read` of the cache entry of a key; build the entry if it is missing.

        All ranks build together: the main process with the folder, the others with None.
        """
        with together(self._accelerator, "opening an artefact"):
            pass
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
                if self.size > 1 and not self._left_by_all:
                    failures.append(error)  # the other ranks are still in `build`, so no retry
                raise

        try:
            value = self._hooks.cache(key=key, build=begin, read=read, share=None)
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
                    failure.publish(error)  # the others still build, or wait for this rank
                    raise
                own_error = None if isinstance(error, PeerError) else error
