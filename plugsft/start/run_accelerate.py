"""Runs accelerate's launcher, and ends with the exit code of the rank that failed."""

import os
import signal
import sys
from subprocess import CalledProcessError
from types import FrameType

import psutil
from accelerate.commands.launch import main
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..base.console import print_error

SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds that several ranks have to save after a signal, before the launcher kills them."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLOSED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a rank that the launcher ended: at once, or after it has saved."""


def run_accelerate() -> None:
    """Run `accelerate launch` with this process's arguments.

    Its own traceback only says that a rank failed; the rank has printed the reason.
    """
    os.environ.setdefault(SHUTDOWN, "600")  # by default 30: a large checkpoint takes longer
    for number in SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            # Under nohup; with a handler of torch's, it would end the run.
            signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        else:
            signal.signal(number, _raise)
    try:
        main()
    except (SignalException, ChildFailedError, CalledProcessError) as error:
        if os.environ.get("PLUGSFT_DEBUG") == "1":
            raise
        sys.exit(exit_code(error))


def _raise(number: int, frame: FrameType | None) -> None:
    """Raise as torch's launcher does, which has its own handlers while several ranks run."""
    raise SignalException(f"got signal {number}", sigval=signal.Signals(number))


def exit_code(error: SignalException | ChildFailedError | CalledProcessError) -> int:
    """End as the rank ended that failed first; name one that was killed, which said nothing."""
    if isinstance(error, SignalException):
        return _end_single(error.sigval)
    if isinstance(error, CalledProcessError):
        code, who = error.returncode, "the run"
    else:
        # Ranks that the launcher ended, as another had failed, come last.
        first = min(
            error.failures.values(),
            key=lambda one: (one.exitcode in CLOSED, one.timestamp, one.exitcode),
        )
        code, who = first.exitcode, f"local rank {first.local_rank}"
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    cause = "; the kernel does so when memory is full" if name == "SIGKILL" else ""
    print_error(f"error: {who} was ended by {name}{cause}")
    return 128 - code


def _end_single(number: signal.Signals) -> int:
    """Pass a signal on to a single rank, and wait for it: accelerate would leave it alone."""
    codes = []
    for rank in psutil.Process().children():  # none are left of several ranks
        rank.send_signal(number)
        codes.append(rank.wait())
    return next((code for code in codes if code and code > 0), 128 + number)


if __name__ == "__main__":
    run_accelerate()
