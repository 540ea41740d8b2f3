"""Render and tokenize on a Ray cluster, a slice per task."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from plugsft import Machine, Shard, ShardWriter, Slice, hookimpl, plugin, state

MIN_SLICES = 3
"""Fewer are done before a cluster has started."""


@plugin(needs={"ray": "ray"})
class RayTokenize:
    """Render and tokenize on a Ray cluster, a slice per task.

    Workers write their shards themselves, to a file system that all nodes share, and send only
    names and counts. This process tokenizes until the first worker has started. Ray runs a slice
    again if its worker or its node is lost.
    """

    address: str | None = None
    """Address of a cluster, as for ray.init: "auto" for the one that runs on this machine, or
    HOST:PORT. Default: $RAY_ADDRESS; if that is not set, a cluster of this machine alone is
    started, and ended with the data."""
    in_flight: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Most slices that Ray has at a time. auto: two per CPU of the cluster, also as nodes join."""
    retries: NonNegativeInt = 3
    """How often a slice is tried again after its worker or node was lost."""

    machine: Machine = state()
    result: str = state("nothing to tokenize")

    @hookimpl
    def check(self, machine: Machine) -> None:
        """Remember the machine."""
        self.machine = machine

    @hookimpl
    def tokenize(self, slices: list[Slice], work: ShardWriter) -> list[Shard] | None:
        """Tokenize slices on the cluster; None for small data."""
        if len(slices) < MIN_SLICES:
            return None
        from .cluster import tokenize_on_cluster

        shards, self.result = tokenize_on_cluster(self, slices, work)
        return shards

    @hookimpl
    def summary(self) -> str:
        """Report the workers and nodes."""
        return self.result
