"""Ranks agree on the host: an operation succeeded on every rank, or all of them end.

A rank that raises between two collectives would leave the others waiting in the next one. So work
that can fail is done inside `agreed`, and what must be equal on all ranks is compared by
`ensure_alike`. Where all is well, both cost one small all-reduce; text is sent on failure only.
Where a rank fails elsewhere, as in a forward, `ending_together` ends the others with its reason.
"""

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash
from accelerate import Accelerator

from ..base.errors import LaunchError, Stopped, TrainError
from .failures import failure, reason_of

PATIENCE = 60.0
"""Seconds that a failed rank waits for the others to agree, before it notifies them."""
LONGEST = timedelta(hours=4)
"""Longest time for one rank to read or write while the others wait."""
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Gloo's messages for a lost process."""

T = TypeVar("T")


class PeerError(TrainError):
    """Another rank failed; this one ends with that rank's reason."""


@functools.cache
def host_group() -> dist.ProcessGroup | None:
    """Return a second group with gloo for agreements; None if the default group is gloo.

    Making a group is a collective, so all ranks make it in `connect`.
    """
    if dist.get_backend() == "gloo":
        return None
    group: dist.ProcessGroup = dist.new_group(timeout=LONGEST, backend="gloo")
    return group


@contextmanager
def agreed(accelerator: Accelerator, operation: str) -> Iterator[None]:
    """Run a block without collectives on every rank; if it fails on one, raise on all.

    The failed rank raises its own error, all others a PeerError with its number and reason.
    """
    if accelerator.num_processes == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    late = threading.Timer(PATIENCE, failure.publish, [error])
    try:
        if error is not None:
            late.start()
        if _equal(operation, failed=error is not None):
            return
        reports = _gathered((operation, None if error is None else reason_of(error)))
    finally:
        late.cancel()
        # Even if the gathering failed because the others have ended.
        if error is not None:
            raise error
    for rank, (_, reason) in enumerate(reports):
        if reason is not None:
            raise PeerError(f"rank {rank} failed in {operation}: {reason}")
    names = [name for name, _ in reports]
    raise TrainError(f"the ranks are at different operations: {_groups(names)}")


def ensure_alike(accelerator: Accelerator, facts: Mapping[str, str], cure: str) -> None:
    """Refuse ranks whose facts differ; name the facts."""
    if accelerator.num_processes == 1:
        return
    if _equal(repr(sorted(facts.items())), failed=False):
        return
    reports = _gathered(dict(facts))
    names = sorted({name for report in reports for name in report})
    columns = {name: [report.get(name, "not set") for report in reports] for name in names}
    differing = [
        f"{name}: {_groups(values)}" for name, values in columns.items() if len({*values}) > 1
    ]
    raise LaunchError(f"the ranks differ in {'; '.join(differing)}. {cure}")


def are_alike(accelerator: Accelerator, text: str) -> bool:
    """Tell whether a text is the same on all ranks."""
    return accelerator.num_processes == 1 or _equal(text, failed=False)


def gathered(accelerator: Accelerator, value: Any) -> list[Any]:
    """Return each rank's value, to all of them."""
    return [value] if accelerator.num_processes == 1 else _gathered(value)


def from_main(value: T | None) -> T:
    """Return the main process's value on every rank."""
    values: list[Any] = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(values, src=0, group=host_group())
    return values[0]  # type: ignore[no-any-return]


@contextmanager
def ending_together(output: str) -> Iterator[None]:
    """End all ranks, with the reason, when one fails."""
    try:
        yield
    except (PeerError, Stopped):
        raise
    except Exception as error:
        if not _is_lost(error):
            failure.publish(error)
            raise
        reason = failure.reason() or "another rank has ended; see its message above"
        raise PeerError(f"{reason}. Resume with --resume ({output})") from error
    finally:
        failure.stop_listening()


def _is_lost(error: Exception) -> bool:
    """Tell whether an error means that another rank is gone."""
    lost = isinstance(error, dist.DistBackendError) or any(sign in str(error) for sign in LOST)
    return isinstance(error, RuntimeError) and lost


def _equal(text: str, failed: bool) -> bool:
    """Tell whether all ranks have the same text and none has failed, in one all-reduce."""
    number = xxhash.xxh3_64_intdigest(text.encode()) >> 2  # fits in 64 bits, negated too
    largest = torch.tensor([number, -number, int(failed)])
    dist.all_reduce(largest, dist.ReduceOp.MAX, host_group())
    return bool(largest[0] == -largest[1]) and not largest[2]


def _gathered(value: Any) -> list[Any]:
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, value, host_group())
    return reports


def _groups(values: list[str]) -> str:
    """Group ranks by value: "ranks 0-3 have a, rank 4 has b"."""
    groups = []
    for value in dict.fromkeys(values):
        ranks = [rank for rank, other in enumerate(values) if other == value]
        groups.append(f"{_ranges(ranks)} {'have' if ranks[1:] else 'has'} {value}")
    return ", ".join(groups)


def _ranges(ranks: list[int]) -> str:
    """Format rank numbers: "rank 3", "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)
    return f"rank{'s' if ranks[1:] else ''} {words}"
