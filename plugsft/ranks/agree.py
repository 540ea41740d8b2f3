"""Ranks agree on the host: an operation succeeded on every rank, or all of them end.

A rank that raises between two collectives would leave the others waiting in the next one. So work
that can fail is done inside `agreed`, and what must be equal on all ranks is compared by
`ensure_alike`. Where all is well, both cost one small all-reduce; text is sent on failure only.
Where a rank fails elsewhere, as in a forward, `ending_together` ends the others with its reason.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash
from accelerate import Accelerator
from torch import Tensor

from ..base.build_once import once
from ..base.errors import LaunchError, Stopped, TrainError
from ..hooks import Hooks
from .failures import failure, reason_of

PATIENCE = 60.0
"""Seconds that a failed rank waits for the others to agree, before it notifies them."""
LONGEST = timedelta(hours=4)
"""Longest time for one rank to read or write while the others wait."""
IN_OPERATION = 5.0
"""The same, for a rank that failed inside an operation, where the others may wait for it."""
KNOWN = "plugsft_known_to_all"
"""Attribute of an error that the ranks agreed on."""
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Gloo's messages for a lost process."""
T = TypeVar("T")
BUILD, CACHED, FAILED = "build", "cached", "failed"
"""Messages of the main process to the other ranks in `artefact`."""


class PeerError(TrainError):
    """Another rank failed; this one ends with that rank's reason."""


def is_known_to_all(error: BaseException) -> bool:
    """Tell whether the other ranks know of this error, and end too."""
    return isinstance(error, PeerError) or hasattr(error, KNOWN)


@functools.cache
def host_group() -> dist.ProcessGroup:
    """Return a second group for agreements, with gloo even beside gloo.

    A failed rank can then vote while the others wait in a collective of the model. Making a group
    is a collective, so all ranks make it in `connect`.
    """
    group: dist.ProcessGroup = dist.new_group(timeout=LONGEST, backend="gloo")
    return group


@dataclass(frozen=True)
class Vote:
    """What a rank tells the others as it enters an operation."""

    operation: str
    failure: str | None = None
    """Why this rank failed in it, or before."""
    fatal: bool = True
    """Whether this rank cannot even save a checkpoint after its error."""
    stop: str = ""
    """Why a plugin on this rank asks to end the run in good order."""
    signal: str = ""
    """The signal that asks this rank to end."""

    @property
    def level(self) -> int:
        """How bad it is: 0 fine, 1 stop or failed but able to save, 2 failed."""
        failed = self.failure is not None
        return 2 if failed and self.fatal else int(failed or bool(self.stop or self.signal))


def vote(
    accelerator: Accelerator,
    own: Vote,
    error: Exception | None = None,
    patience: float = PATIENCE,
) -> list[Vote]:
    """Exchange votes before an operation; return those of all ranks, unless all are fine.

    One small all-reduce on the host; texts are sent only if a rank failed or asks to stop.
    """
    if accelerator.num_processes == 1:
        return [own] if own.level else []
    late = error and threading.Timer(patience, failure.publish, [error])
    try:
        if late:
            late.start()
        if _equal(own.operation, own.level):
            return []
        return _gathered(own)
    except Exception as lost:
        # The others have ended, and this rank's own error says why.
        raise_failures([], error)
        raise lost
    finally:
        if late:
            late.cancel()


def raise_failures(votes: Sequence[Vote], error: Exception | None) -> None:
    """Raise this rank's own error, another rank's failure, or that the operations differ."""
    if error is not None:
        setattr(error, KNOWN, True)
        raise error
    for rank, one in enumerate(votes):
        if one.failure is not None:
            raise PeerError(f"rank {rank} failed in {one.operation}: {one.failure}")
    operations = [one.operation for one in votes]
    if len({*operations}) > 1:
        raise TrainError(f"the ranks are at different operations: {_groups(operations)}")


@contextmanager
def agreed(accelerator: Accelerator, operation: str, patience: float = PATIENCE) -> Iterator[None]:
    """Run a block without collectives on every rank; if it fails on one, raise on all.

    The failed rank raises its own error, all others a PeerError with its number and reason.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    own = Vote(operation, None if error is None else reason_of(error))
    raise_failures(vote(accelerator, own, error, patience), error)


@contextmanager
def together(accelerator: Accelerator, operation: str) -> Iterator[None]:
    """Run a block with collectives, which all ranks must enter; if it fails on one, raise on all.

    A rank that comes to another operation, or has failed before, ends all with its reason.
    """
    raise_failures(vote(accelerator, Vote(operation)), None)
    with agreed(accelerator, f"{operation}, inside", IN_OPERATION):
        yield


def ensure_alike(accelerator: Accelerator, facts: Mapping[str, str], cure: str) -> None:
    """Refuse ranks whose facts differ; name the facts."""
    if accelerator.num_processes == 1:
        return
    if _equal(repr(sorted(facts.items()))):
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
    return accelerator.num_processes == 1 or _equal(text)


def all_done(accelerator: Accelerator, done: bool) -> bool:
    """Tell whether something is done on all ranks."""
    return done if accelerator.num_processes == 1 else _equal("done", int(not done))


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
        if not is_lost(error):
            failure.publish(error)
            raise
        address = "".join(re.findall(r"( \[[\w.:]+\]):\d", str(error)))
        reason = failure.reason() or f"another rank has ended{address}; see its message"
        raise PeerError(f"{reason}. Resume with --resume ({output})") from error
    finally:
        failure.stop_listening()


def is_lost(error: Exception) -> bool:
    """Tell whether an error means that another rank is gone."""
    lost = isinstance(error, dist.DistBackendError) or any(sign in str(error) for sign in LOST)
    return isinstance(error, RuntimeError) and lost


def _equal(text: str, level: int = 0) -> bool:
    """Tell whether all ranks have the same text and level 0, in one all-reduce.

    Of one number: gloo takes three times as long for several. Unequal numbers have the sum that a
    rank expects with a probability of 2^-40.
    """
    number = xxhash.xxh3_64_intdigest(f"{level} {text}".encode()) >> 24
    total = torch.tensor([number])
    dist.all_reduce(total, dist.ReduceOp.SUM, host_group())
    return not level and int(total) == number * dist.get_world_size()


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


class RankGroup:
    """What plugins see of the ranks, under the name `Ranks`."""

    def __init__(self, accelerator: Accelerator, hooks: Hooks) -> None:
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self.data_rank, self.data_size = self.rank, self.size
        """The rank's number among those that train on different examples, and their number."""
        self._accelerator, self._hooks = accelerator, hooks
        self._left_by_all = False
        """Whether all ranks left the last build together, because one failed."""

    @contextmanager
    def agree(self, operation: str) -> Iterator[None]:
        """Run a block on all ranks; if it fails on one, all ranks raise.

        For code without collectives that may fail on a single rank, such as writing a file.
        """
        try:
            with agreed(self._accelerator, operation):
                yield
        except Exception:
            self._left_by_all = True
            raise

    def reduce(self, values: Tensor) -> Tensor:
        """Return the sums of values over all ranks."""
        kind = f"{values.dtype} {[*values.shape]}"
        with together(self._accelerator, f"reducing values of a plugin ({kind})"):
            local = values.to(self._accelerator.device)
            summed: Tensor = self._accelerator.reduce(local, reduction="sum")
            return summed

    def artefact(
        self, key: dict[str, Any], build: Callable[[Path | None], None], read: Callable[..., Any]
    ) -> Any:
        """Return `read` of the cache entry of a key; build the entry if it is missing.

        All ranks build together: the main process with the folder, the others with None.
        """
        with together(self._accelerator, "opening an artefact"):
            pass
        if not self._accelerator.is_main_process:
            return self._build_with_main(build)
        failures: list[Exception] = []

        def begin(folder: Path) -> None:
            if failures:
                raise failures[0]
            from_main((BUILD, None))
            self._left_by_all = False
            try:
                build(folder)
            except Exception as error:
                if self.size > 1 and not self._left_by_all:
                    failures.append(error)  # the other ranks are still in `build`, so no retry
                raise

        try:
            value = self._hooks.cache(key=key, build=functools.partial(once, fill=begin), read=read)
        except Exception as error:
            if not failures:
                from_main((FAILED, reason_of(error)))
            raise
        if failures:
            raise failures[0]
        return from_main((CACHED, value))[1]

    def _build_with_main(self, build: Callable[[Path | None], None]) -> Any:
        """Join each build of the main process; return its value."""
        own_error: Exception | None = None
        while True:
            message, value = from_main((FAILED, None))
            if message == CACHED:
                return value
            if message == FAILED:
                raise own_error or PeerError(f"rank 0 failed: {value}")
            self._left_by_all = False
            try:
                build(None)
            except Exception as error:
                if not self._left_by_all:
                    failure.publish(error)  # the others still build, or wait for this rank
                    raise
                own_error = None if isinstance(error, PeerError) else error
