"""What ranks say to each other on the host.

An agreement is one number: the sum of what each rank says of the operation that it is at. A rank
that has failed, or wants to stop, says another number, and then all of them exchange votes. So an
agreement costs one small all-reduce, and a rank that raises between two collectives never leaves
the others waiting in the next one: it says so at the next agreement, where all of them raise.

`agreed` is for work without collectives, `together` for work with them; `ensure_alike` compares
what must be equal. A rank that fails elsewhere, as in a forward, ends the others by
`ending_together`.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from accelerate import Accelerator
from torch import Tensor

from ..base.errors import LaunchError, Stopped, TrainError
from ..hooks import Hooks
from .failures import PeerError, watch
from .stopping import Stopping, Vote

LONGEST = timedelta(hours=4)
"""Longest time for one rank to read or write while the others wait."""
HANGING = timedelta(seconds=5)
"""After this time a rank that failed among collectives ends the others, which may hang."""
MOST_FACTS = 5
"""Most facts that an error names."""
KNOWN = "plugsft_known_to_all"
"""Attribute of an error that the ranks agreed on."""
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Gloo's messages for a lost process."""


def is_known_to_all(error: BaseException) -> bool:
    """Whether the other ranks know of this error, so that they end too and need not be told."""
    return isinstance(error, PeerError) or hasattr(error, KNOWN)


@functools.cache
def host_group() -> dist.ProcessGroup:
    """Make a second group for agreements, with gloo even beside gloo.

    A failed rank can then speak while the others wait in a collective of the model. Making a group
    is a collective, so all ranks make it in `connect`.
    """
    group: dist.ProcessGroup = dist.new_group(timeout=LONGEST, backend="gloo")
    return group


@contextmanager
def agreed(
    operation: str, stopping: Stopping | None = None, patience: timedelta = LONGEST
) -> Iterator[None]:
    """Run a block without collectives on every rank; if it fails on one, raise on all.

    The failed rank raises its own error, all others a PeerError with its number and reason. With
    `stopping`, they also agree on failed notices, and learn of signals and of plugins' wishes to
    stop. `patience`: how long a rank that failed waits for the others, which may hang.
    """
    stopping, caught = stopping or Stopping(), None
    try:
        yield
    except Exception as raised:
        caught = raised
    error = stopping.own_error or caught  # a notice failed before
    own = stopping.vote(operation, error, in_notice=caught is None)
    goes_on = own == Vote(operation)  # nothing to say but where it is
    try:
        fine = are_alike(operation if goes_on else None, patience)
        votes = [] if fine else gathered(own)
    except RuntimeError:
        if error is None:
            raise
        watch.publish(error)  # the others hang, or have ended
        votes = [own]
    stopping.learn(votes)
    if error is not None:
        setattr(error, KNOWN, True)
        raise error
    for rank, one in enumerate(votes):
        if one.failure:
            raise PeerError(f"rank {rank} failed in {one.operation}: {one.failure}")
    operations = [one.operation for one in votes]
    if len({*operations}) > 1:
        raise TrainError(f"the ranks are at different operations: {_by_rank(operations)}")


@contextmanager
def together(operation: str) -> Iterator[None]:
    """Run a block with collectives, which all ranks must enter; if it fails on one, raise on all.

    A rank that comes to another operation, or has failed before, ends all with its reason.
    """
    with agreed(operation):
        pass  # all ranks have come to it
    with agreed(f"{operation}, inside", patience=HANGING):
        yield


def ensure_alike(facts: Mapping[str, str], cure: str) -> None:
    """Refuse ranks whose facts differ; name the facts."""
    if are_alike(repr(sorted(facts.items()))):
        return
    reports = gathered(dict(facts))
    differing = []
    for name in sorted({*chain(*reports)}):
        values = [report.get(name, "not set") for report in reports]
        if len({*values}) > 1:
            differing.append(f"{name}: {_by_rank(values)}")
    raise LaunchError(f"the ranks differ in {'; '.join(differing[:MOST_FACTS])}. {cure}")


def are_alike(text: str | None, patience: timedelta = LONGEST) -> bool:
    """Compare a text over all ranks, by one all-reduce.

    None, of a rank that failed, is like no other; with it, `patience` is how long to wait.

    Of one number: gloo takes three times as long for several. Unequal numbers have the sum that a
    rank expects with a probability of 2^-40.
    """
    if _ranks() == 1:
        return text is not None
    # Of 40 bits, so that the sum over the ranks fits.
    number = xxhash.xxh3_64_intdigest(text.encode()) >> 24 if text is not None else 0
    total = torch.tensor([number])
    reduction = dist.all_reduce(total, dist.ReduceOp.SUM, host_group(), async_op=True)
    reduction.wait(patience if text is None else LONGEST)
    return text is not None and int(total) == number * _ranks()


def all_done(done: bool) -> bool:
    """Whether something is done on all ranks; each learns the same answer."""
    return are_alike("done" if done else None)


def gathered(value: Any) -> list[Any]:
    """Give each rank's value to all of them."""
    values = [value] * _ranks()
    if _ranks() > 1:
        dist.all_gather_object(values, value, host_group())
    return values


def from_main(value: Any = None) -> Any:
    """Give the main process's value to every rank; the others need not give one."""
    values = [value]
    if _ranks() > 1:
        dist.broadcast_object_list(values, src=0, group=host_group())
    return values[0]


@contextmanager
def ending_together(output: str) -> Iterator[None]:
    """End all ranks, with the reason, when one fails."""
    try:
        yield
    except (PeerError, Stopped):
        raise
    except Exception as error:
        if not is_lost(error):
            watch.publish(error)
            raise
        address = "".join(re.findall(r"( \[[\w.:]+\]):\d", str(error)))
        reason = watch.wait_for_reason() or f"another rank has ended{address}; see its message"
        raise PeerError(f"{reason}. Resume with --resume ({output})") from error
    finally:
        watch.end()


def is_lost(error: Exception) -> bool:
    """Whether an error means that another rank is gone, whose own message says why."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistBackendError) or any(sign in str(error) for sign in LOST)
    )


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _by_rank(values: Sequence[str]) -> str:
    """Name who has which value: "rank 0 and 2 more have a, rank 3 has b"."""
    groups = []
    for value in dict.fromkeys(values):
        first, others = values.index(value), values.count(value) - 1
        who = f"and {others} more have" if others else "has"
        groups.append(f"rank {first} {who} {value}")
    return ", ".join(groups)


class Ranks:
    """What plugins see of the ranks, under the name `Ranks`."""

    def __init__(self, accelerator: Accelerator, hooks: Hooks) -> None:
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self.data_rank, self.data_size = self.rank, self.size
        """The rank's number among those that train on different examples, and their number."""
        self.hooks, self._accelerator = hooks, accelerator

    def agree(self, operation: str) -> AbstractContextManager[None]:
        """Run a block on all ranks; if it fails on one, all ranks raise.

        For code without collectives that may fail on a single rank, such as writing a file.
        """
        return agreed(operation)

    def reduce(self, values: Tensor) -> Tensor:
        """Return the sums of values over all ranks."""
        with together(f"reducing values of a plugin ({values.dtype} {[*values.shape]})"):
            local = values.to(self._accelerator.device)
            summed: Tensor = self._accelerator.reduce(local, reduction="sum")
            return summed
