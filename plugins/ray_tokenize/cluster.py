"""Hands slices to a Ray cluster, a few at a time, and waits for their shards."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from plugsft import PluginError, Shard, ShardWriter, Slice, reason_of

if TYPE_CHECKING:
    from . import RayTokenize

PER_CPU = 2
"""Slices in flight per CPU: while a worker tokenizes one, the next waits."""
STORE_BYTES = 256 << 20
"""Memory of a cluster that is started here, for slices that wait."""
PATIENCE = 10.0
"""Seconds in which a cluster must answer."""
HERE = ""
"""In place of a node: this process."""

_works: dict[str, ShardWriter] = {}
"""In a worker: the work of the data set, so that its tokenizer is loaded once."""


def connect(plugin: RayTokenize) -> None:
    """Connect to a cluster, or start one here."""
    # Ray sends figures about its use to its makers, unless told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = plugin.address or os.environ.get("RAY_ADDRESS") or "local"
    own = {"num_cpus": plugin.machine.cores, "object_store_memory": STORE_BYTES}
    options: dict[str, Any] = own if address == "local" else {}
    try:
        if re.fullmatch(r"[^/]+:\d+", address):
            # Ray itself would try for ten minutes.
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=PATIENCE).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise PluginError(
            f"plugins.ray_tokenize.address: cannot connect to {address}: {reason_of(error)}. "
            "Start a cluster with `ray start --head`, or leave address out"
        ) from error


def most_in_flight(plugin: RayTokenize) -> int:
    """Return how many slices the cluster may have at a time; nodes come and go."""
    if plugin.in_flight != "auto":
        return plugin.in_flight
    resources: Any = ray
    cpus = int(resources.cluster_resources().get("CPU", 1))
    return PER_CPU * max(1, cpus)


def make_task(work: ShardWriter, retries: int) -> Callable[[Slice], Any]:
    """Return a function that sends a slice to the cluster."""
    paths = os.pathsep.join(filter(None, sys.path))
    task: Any = ray.remote(
        num_cpus=1,
        max_retries=retries,
        runtime_env={"env_vars": work.one_thread | {"PYTHONPATH": paths}},
    )(run_slice)
    # In a list: Ray would unpickle an argument for every slice.
    stored = [ray.put(work)]
    return lambda part: task.remote(part, stored)


def run_slice(part: Slice, stored: list[Any]) -> tuple[Any, str]:
    """Tokenize a slice in a worker; return its result and the node."""
    key = stored[0].hex()
    if key not in _works:
        _works.clear()
        _works[key] = ray.get(stored[0])
    return _works[key].attempt(part), ray.get_runtime_context().get_node_id()


def tokenize_on_cluster(
    plugin: RayTokenize, slices: list[Slice], work: ShardWriter
) -> tuple[list[Shard], str]:
    """Tokenize slices; return their shards, and which nodes wrote them."""
    waiting, nodes = deque(enumerate(slices)), Counter[str]()
    shards = dict[int, Shard]()

    def add(number: int, shard: Shard, node: str) -> None:
        shards[number] = shard
        nodes[node] += 1
        advance(shard)

    def tokenize_here() -> None:
        number, part = waiting.popleft()
        add(number, work.tokenize(part), HERE)

    with work.progress(slices) as advance, connecting(plugin) as starting:
        while waiting and not starting.done():
            tokenize_here()
        starting.result()
        send, running = make_task(work, plugin.retries), dict[Any, tuple[int, Slice]]()
        while waiting or running:
            while waiting and len(running) < most_in_flight(plugin):
                number, part = waiting.popleft()
                running[send(part)] = number, part
            # Until the first worker has started, this process goes on.
            starts = bool(waiting) and nodes.keys() <= {HERE}
            ready, _ = ray.wait([*running], timeout=0 if starts else None)
            for reference in ready:
                number, part = running.pop(reference)
                add(number, *receive(reference, work.where(part), plugin.retries))
            if starts and not ready:
                tokenize_here()
    return [shards[number] for number in range(len(slices))], describe(nodes)


def receive(reference: Any, where: str, retries: int) -> tuple[Shard, str]:
    """Return the shard of a finished task, and its node; raise its error here."""
    try:
        result, node = ray.get(reference)
    except RayTaskError as error:
        raise PluginError(
            f"{where}: failed on the Ray cluster: {reason_of(error.cause)}. All nodes need the "
            "same plugsft and plugins, and the files of the data"
        ) from error
    except RayError as error:
        reason = str(error).partition("\n")[0]
        raise PluginError(
            f"{where}: its worker or node was lost {retries + 1} times ({reason}). Raise "
            "plugins.ray_tokenize.retries, or give workers more memory"
        ) from error
    return result.get(), node


@contextmanager
def connecting(plugin: RayTokenize) -> Iterator[Future[None]]:
    """Connect in another thread; disconnect at the end, which ends a cluster started here."""
    if ray.is_initialized():
        ready: Future[None] = Future()
        ready.set_result(None)
        yield ready
        return
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(connect, plugin)
        try:
            yield starting
        finally:
            wait([starting])
            ray.shutdown()


def describe(nodes: Counter[str]) -> str:
    """Say which nodes wrote the shards."""
    here = nodes.pop(HERE, 0)
    counts = ", ".join(str(count) for _, count in nodes.most_common())
    return f"slices by node: {counts or 'none'}; in this process: {here}"
