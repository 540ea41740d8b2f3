"""PLUGSFT_TRACE=1: print each call of a hook, with its plugins and its time."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import pluggy

from ..base.console import print_error


def trace_calls(manager: pluggy.PluginManager) -> None:
    """Print each call that pluggy makes, indented by depth."""
    # A thread may load batches: each thread has its own depth.
    local = threading.local()

    def before(*_: object) -> None:
        local.started = [*getattr(local, "started", ()), time.perf_counter()]

    def after(outcome: pluggy.Result[Any], hook: str, impls: Any, args: Any) -> None:
        started = local.started.pop()
        who = ", ".join(impl.plugin_name for impl in reversed(impls))
        result = "raised" if outcome.excinfo else type(outcome.get_result()).__name__
        print_call(len(local.started), hook, args, who, result, started)

    manager.add_hookcall_monitoring(before, after)


def print_call(
    depth: int, hook: str, arguments: Mapping[str, Any], who: str, result: str, started: float
) -> None:
    """Print one call, with the depth at which it was made."""
    took = (time.perf_counter() - started) * 1e3
    call = f"{'  ' * depth}{hook}({', '.join(arguments)})"
    print_error(f"trace {call} by {who} -> {result}, {took:.3f} ms")
