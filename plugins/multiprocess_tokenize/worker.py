"""Tokenizes slices, in a worker process or in the main process."""

import gc
import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from plugsft import PlugsftError, Shard, Slice, Work


def serve(pipe: int) -> None:
    """Run a worker process: tokenize the slices that arrive, until the pipe closes."""
    connection = Connection(pipe)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError), collector_off():
        work = connection.recv()
        while True:
            part = connection.recv()
            answer: tuple[Shard | None, Exception | None, str]
            try:
                answer = tokenize_slice(part, work), None, ""
            except (
                Exception
            ) as error:  # a plugin may raise any error; the main process ends the run
                answer = None, *_picklable(error)
            connection.send(answer)


def tokenize_slice(part: Slice, work: Work) -> Shard:
    """Tokenize a slice; name the row that an error comes from."""
    try:
        return work(part)
    except PlugsftError:
        raise  # its message names the rows
    except Exception as error:
        for row in range(part.start, part.stop):
            offset = row - part.start
            try:
                work(Slice(part.source, row, row + 1, part.rows.part(offset, offset + 1)))
            except Exception as row_error:
                row_error.add_note(f"at {work.where(part)}: it was row {row:,}")
                raise row_error from None
        error.add_note(f"at {work.where(part)}")
        raise
    finally:
        gc.collect()


@contextmanager
def collector_off() -> Iterator[None]:
    """Turn the garbage collector off: rows have no cycles, and it takes a tenth of the time.

    `tokenize_slice` collects after each slice.
    """
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _picklable(error: Exception) -> tuple[Exception, str]:
    """Return an error that can be pickled, and its traceback."""
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}"), trace
    return error, trace
