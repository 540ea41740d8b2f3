"""Ends the process of a test that hangs inside of C, where the limit's signal is never handled.

A plugin of pytest. pytest-timeout's signal comes first; a tenth later faulthandler's thread, which
needs no lock of Python, prints where each thread is and ends the process. xdist names the test.
"""

import faulthandler
import os
from typing import Any

import pytest

STDERR = pytest.StashKey[int]()
LIMIT = pytest.StashKey[float]()


def watch(config: pytest.Config, limit: float) -> None:
    """End this process if it is not told otherwise within the limit."""
    faulthandler.dump_traceback_later(1.1 * limit, exit=True, file=config.stash[STDERR])


def pytest_configure(config: pytest.Config) -> None:
    """Keep the standard error that tests cannot capture."""
    config.stash[STDERR] = os.dup(2)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Watch the import of a module: less long, since xdist tries it with several workers."""
    watch(collector.config, float(collector.config.getini("timeout")) / 5)


def pytest_collection_finish() -> None:
    """Wait for the first test as long as it takes."""
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Watch a test, by its own limit."""
    item.stash[LIMIT] = settings.timeout
    watch(item.config, settings.timeout)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Watch it still: pytest watches a test no longer once it has failed."""
    watch(item.config, item.stash[LIMIT])


def pytest_runtest_logfinish() -> None:
    """Wait for the next test as long as it takes."""
    faulthandler.cancel_dump_traceback_later()
