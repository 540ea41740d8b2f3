"""Tokenizes slices in a worker process."""

from contextlib import suppress
from multiprocessing.connection import Connection


def serve(pipe: int) -> None:
    """Run a worker process: tokenize the slices that arrive, until the pipe closes."""
    connection = Connection(pipe)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        work = connection.recv()
        while True:
            connection.send(work.attempt(connection.recv()))
