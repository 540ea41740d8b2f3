"""Hands slices to this process and to workers, one at a time."""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Pipe
from threading import Lock

from plugsft import PluginError, Shard, ShardWriter, Slice, child_environment

START = "from plugsft.plugins.multiprocess_tokenize.worker import serve; serve({})"


def tokenize_together(slices: list[Slice], work: ShardWriter, num_workers: int) -> list[Shard]:
    """Tokenize slices in this process and in workers; each takes the next when it is free.

    This process begins while the workers still start.
    """
    waiting, lock, shards = deque(enumerate(slices)), Lock(), dict[int, Shard]()

    def tokenize_waiting(tokenize: Callable[[Slice], Shard]) -> None:
        try:
            with suppress(IndexError):  # raised once no slice is waiting
                while True:
                    number, part = waiting.popleft()
                    shard = tokenize(part)
                    with lock:
                        shards[number] = shard
                        advance(shard)
        except BaseException:
            waiting.clear()
            raise

    with (
        work.progress(slices) as advance,
        ThreadPoolExecutor(num_workers) as threads,
        start_workers(num_workers, work) as workers,
    ):
        futures = [
            threads.submit(tokenize_waiting, partial(worker.tokenize, work=work))
            for worker in workers
        ]
        with one_thread(work):
            tokenize_waiting(work.tokenize)
        for future in futures:
            future.result()
    return [shards[number] for number in range(len(slices))]


class Worker:
    """A process that tokenizes one slice at a time."""

    def __init__(self, work: ShardWriter) -> None:
        self._pipe, child_pipe = Pipe()
        path = os.pathsep.join(filter(None, sys.path))
        # In its own process group: ctrl-C reaches only this process, which ends the workers.
        self._process = subprocess.Popen(
            [sys.executable, "-c", START.format(child_pipe.fileno())],
            pass_fds=[child_pipe.fileno()],
            env=child_environment(**work.one_thread, PYTHONPATH=path),
            process_group=0,
        )
        child_pipe.close()

    def send_work(self, work: ShardWriter) -> None:
        """Send the work that each slice needs."""
        with suppress(OSError):
            # If the worker has died already, its first slice reports it.
            self._pipe.send(work)

    def tokenize(self, part: Slice, work: ShardWriter) -> Shard:
        """Let the worker tokenize a slice; raise its error here."""
        where = work.where(part)
        try:
            self._pipe.send(part)
            result = self._pipe.recv()
        except (EOFError, OSError) as error:
            code = self._process.wait()
            raise PluginError(
                f"{where}: the worker process ended ({_describe_exit(code)}). "
                "Try fewer with plugins.multiprocess_tokenize.workers"
            ) from error
        shard: Shard = result.get()
        return shard

    def end(self, kill: bool) -> None:
        """End the process: at once, or after its slice."""
        if kill:
            self._process.kill()
        else:
            self._pipe.close()
        self._process.wait()


@contextmanager
def start_workers(count: int, work: ShardWriter) -> Iterator[list[Worker]]:
    """Start workers; kill them if the block fails."""
    workers = [Worker(work) for _ in range(count)]
    failed = True
    try:
        for worker in workers:
            worker.send_work(work)
        yield workers
        failed = False
    finally:
        for worker in workers:
            worker.end(kill=failed)


@contextmanager
def one_thread(work: ShardWriter) -> Iterator[None]:
    """Let tokenizer engines that this process loads use one thread, as in the workers."""
    before = {name: os.environ.get(name) for name in work.one_thread}
    os.environ.update(work.one_thread)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _describe_exit(code: int) -> str:
    if code == -signal.SIGKILL:
        return "killed, most often for lack of memory"
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
