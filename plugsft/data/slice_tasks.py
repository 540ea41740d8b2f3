"""Tokenizes a slice for plugins that do so in several processes."""

import gc
import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..base.errors import PlugsftError
from ..base.types import Shard, Slice, Work

ONE_THREAD = {
    "FASTOKENS_BPE_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of a worker, one per core: more threads would only compete for it."""


@dataclass(frozen=True)
class SliceResult:
    """The shard of a slice, or the error, as a worker sends it."""

    shard: Shard | None
    error: Exception | None = None
    trace: str = ""

    def get(self) -> Shard:
        """Return the shard; raise the worker's error here."""
        if self.error is not None:
            if not isinstance(self.error, PlugsftError):
                self.error.add_note(f"in a worker process:\n{self.trace}")
            raise self.error
        assert self.shard is not None
        return self.shard


def try_slice(part: Slice, work: Work) -> SliceResult:
    """Tokenize a slice in a worker; return its shard, or an error that can be pickled."""
    try:
        return SliceResult(tokenize_slice(part, work))
    except Exception as error:  # a plugin may raise any error; the main process ends the run
        trace = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return SliceResult(None, RuntimeError(f"{type(error).__name__}: {error}"), trace)
        return SliceResult(None, error, trace)


def tokenize_slice(part: Slice, work: Work) -> Shard:
    """Tokenize a slice; name the row that an error comes from."""
    with _collector_off():
        try:
            return work(part)
        except PlugsftError:
            raise  # its message names the rows
        except Exception as error:
            for offset in range(len(part.rows)):
                row, one = part.start + offset, part.rows.part(offset, offset + 1)
                try:
                    work(replace(part, start=row, stop=row + 1, rows=one))
                except Exception as row_error:
                    row_error.add_note(f"at {work.where(part)}: it was row {row:,}")
                    raise row_error from None
            error.add_note(f"at {work.where(part)}")
            raise


@contextmanager
def _collector_off() -> Iterator[None]:
    """Turn the garbage collector off: rows have no cycles, and it takes a tenth of the time."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.enable()
        gc.unfreeze()
