"""The launcher of this process, found in its environment, and the signal of its death."""

import os
import signal

LAUNCHER_ENDED = signal.SIGUSR2
"""What the system sends to a rank when its launcher ends; without a handler, it ends the rank."""


def started_too_few() -> bool:
    """Whether `accelerate launch` was asked for several processes and started one.

    It does so, without a message, on a machine without GPU. Its environment then has the address
    of a main process, but no number of ranks.
    """
    return by_accelerate() and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ


def by_accelerate() -> bool:
    """Whether `accelerate launch` started this process, alone.

    It always sets this variable. The precision's is no sign: people export that one themselves.
    """
    return "ACCELERATE_DYNAMO_BACKEND" in os.environ
