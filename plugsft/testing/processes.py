"""New processes for the laws: each works alone, or as one of several ranks."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from .. import loop
from ..ranks.agree import PeerError
from ..ranks.failures import reason_of

START = multiprocessing.get_context("forkserver")
"""Starts processes that have imported torch, but neither the plugin nor state of this process."""
START.set_forkserver_preload([loop.__name__])


class ProcessError(Exception):
    """The traceback of a failure in another process."""


class Answer(NamedTuple):
    """The result of a function in another process, or why it failed."""

    result: Any = None
    failure: str = ""
    trace: str = ""
    by_peer: bool = False
    """Whether it ended because another rank failed."""


class Worker:
    """A process that calls functions until one fails."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._pipe, far_end = START.Pipe()
        self._process = START.Process(target=_serve, args=(far_end, dict(environment)))
        self._process.start()
        far_end.close()

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function in the process; `answer` waits for it."""
        self._pipe.send((function, arguments))

    def answer(self) -> Answer:
        """Wait for the function's result, or for its failure."""
        try:
            return self._pipe.recv()  # type: ignore[no-any-return]
        except EOFError:
            self._process.join()
            return Answer(failure=f"its process ended with exit code {self._process.exitcode}")

    def end(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


@contextmanager
def workers(*ranks: int) -> Iterator[list[list[Worker]]]:
    """Start groups of so many ranks each; end them after the block."""
    groups = [[Worker(environment) for environment in _environments(size)] for size in ranks]
    try:
        yield groups
    finally:
        for group in groups:
            for worker in group:
                worker.end()


def results(group: Sequence[Worker], who: str) -> list[Any]:
    """Return the results of all ranks; the first rank that failed by itself raises."""
    answers = [worker.answer() for worker in group]
    failures = [answer for answer in answers if answer.failure]
    for answer in sorted(failures, key=lambda answer: answer.by_peer):
        raise AssertionError(f"{who}: {answer.failure}") from ProcessError(f"\n{answer.trace}")
    return [answer.result for answer in answers]


def _environments(size: int) -> list[dict[str, str]]:
    """Return each rank's variables, as torchrun sets them; none for a single process."""
    if size == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    common["LOCAL_WORLD_SIZE"] = str(size)
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(Answer(function(*arguments)))
        except Exception as error:  # whatever a plugin raises
            pipe.send(
                Answer(
                    failure=reason_of(error),
                    trace=traceback.format_exc(),
                    by_peer=isinstance(error, PeerError),
                )
            )
            return  # other ranks notice that this one is gone
