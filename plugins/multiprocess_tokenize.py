"""Render and tokenize in several processes, each with a tokenizer and slices of its own."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from threading import Lock
from typing import Annotated, Literal

from pydantic import Field

from plugsft import PluginError, PlugsftError, Shard, Slice, Work, hookimpl, look, plugin, state
from plugsft.kit.tokens import tokenizing

MEMORY = 1 << 30
"""Bytes granted to each worker; it takes about half of that, however large the data."""
SLICES = 2
"""Slices that a worker must have to do; for fewer it is not worth its start."""
START = "from plugsft.plugins.multiprocess_tokenize import serve; serve({})"
# A process per core: an engine that started as many threads again would only be in the way.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@plugin()
class MultiprocessTokenize:
    """Render and tokenize in several processes, each with a tokenizer and slices of its own.

    Nothing but the names and counts of finished shards comes back from them. This process takes
    its slices as the others do; small data it does alone.
    """

    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Processes, this one among them; auto takes the cores that the container grants, and one for
    each GiB of memory."""

    used: int = state(0)

    @hookimpl
    def tokenize(self, slices: list[Slice], work: Work) -> list[Shard] | None:
        """Hand slices out to whoever gets free: this process has begun while the others load."""
        self.used = self.processes(len(slices))
        if self.used == 1:
            return None
        left, lock, done = deque(enumerate(slices)), Lock(), dict[int, Shard]()

        def take(do: Callable[[Slice], Shard]) -> None:
            try:
                with suppress(IndexError):  # none is left
                    while True:
                        number, part = left.popleft()
                        shard = do(part)
                        with lock:
                            done[number] = shard
                            advance(shard)
            except BaseException:
                left.clear()
                raise

        others = self.used - 1
        with (
            tokenizing(slices) as advance,
            ThreadPoolExecutor(others) as threads,
            pool(others, work) as workers,
        ):
            futures = [threads.submit(take, partial(worker.do, work=work)) for worker in workers]
            with one_thread(), collector_off():
                take(partial(narrowed, work=work))
            for future in futures:
                future.result()
        return [done[number] for number in range(len(slices))]

    def processes(self, slices: int) -> int:
        """Return how many processes to use for so many slices."""
        if self.workers != "auto":
            return min(self.workers, slices) or 1
        machine = look()
        return max(1, min(machine.cores, machine.memory // MEMORY, slices // SLICES))

    @hookimpl
    def verdict(self) -> str:
        """Say how many processes there were."""
        if not self.used:
            return "nothing to tokenize"
        return f"{self.used} processes" if self.used > 1 else "one process: there was little to do"


class Worker:
    """A process that works on one slice at a time."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        environment = (
            os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        )
        # In a group of its own: ctrl-C is ours to hear, and we end it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", START.format(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            process_group=0,
        )
        theirs.close()

    def teach(self, work: Work) -> None:
        """Tell it what is to be done."""
        with suppress(OSError):
            # One that died at once says so with its first slice.
            self._pipe.send(work)

    def do(self, part: Slice, work: Work) -> Shard:
        """Have a slice done; raise what it raised there."""
        where = work.where(part)
        try:
            self._pipe.send(part)
            shard, error, trace = self._pipe.recv()
        except (EOFError, OSError) as error:
            code = self._process.wait()
            raise PluginError(
                f"{where}: the worker process ended ({_ending(code)}). "
                "Try fewer with plugins.multiprocess_tokenize.workers"
            ) from error
        if error is not None:
            if not isinstance(error, PlugsftError):
                error.add_note(f"in a worker process:\n{trace}")
            raise error
        assert isinstance(shard, Shard)
        return shard

    def end(self, now: bool) -> None:
        """End it; if not now, then where it finds that no slice comes any more."""
        if now:
            self._process.kill()
        else:
            self._pipe.close()
        self._process.wait()


@contextmanager
def pool(count: int, work: Work) -> Iterator[list[Worker]]:
    """Give so many workers; where something fails they end at once."""
    # One after the other takes a moment; they load side by side.
    workers = [Worker() for _ in range(count)]
    failed = True
    try:
        for worker in workers:
            worker.teach(work)
        yield workers
        failed = False
    finally:
        for worker in workers:
            worker.end(now=failed)


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return "killed, most often for want of memory"
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def serve(pipe: int) -> None:
    """Do slice after slice, in a worker process, until none comes any more."""
    ours = Connection(pipe)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError), collector_off():
        work = ours.recv()
        while True:
            part = ours.recv()
            answer: tuple[Shard | None, Exception | None, str]
            try:
                answer = narrowed(part, work), None, ""
            except Exception as error:  # whatever a plugin raises: the main process ends the run
                answer = None, *_told(error)
            ours.send(answer)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let engines that are loaded in this process take one thread, as in its workers."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def collector_off() -> Iterator[None]:
    """Look for cycles after each slice only: rows have none, and looking takes a tenth."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def narrowed(part: Slice, work: Work) -> Shard:
    """Do a slice, and find the row that raises, where an error does not say it."""
    try:
        return work(part)
    except PlugsftError:
        raise
    except Exception as error:
        for row in range(part.start, part.stop):
            place = row - part.start
            try:
                work(Slice(part.source, row, row + 1, part.rows.part(place, place + 1)))
            except Exception as found:
                found.add_note(f"at {work.where(part)}: it was row {row:,}")
                raise found from None
        error.add_note(f"at {work.where(part)}")
        raise
    finally:
        gc.collect()


def _told(error: Exception) -> tuple[Exception, str]:
    """Return an error that travels, with its story."""
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}"), trace
    return error, trace
