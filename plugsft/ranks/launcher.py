"""The launcher of this process, from its environment, and whether it still runs."""

import os

WATCHED: list[int] = []
"""Process number of the launcher."""


def started_too_few() -> bool:
    """Tell whether `accelerate launch` was asked for several processes and started one.

    It does so, without a message, on a machine without GPU. Its environment then has the address
    of a main process, but no number of ranks.
    """
    return by_accelerate() and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ


def launcher_ended() -> bool:
    """Tell whether the launcher has ended: this process then has another parent."""
    return bool(WATCHED) and os.getppid() not in WATCHED


def by_accelerate() -> bool:
    """Tell whether `accelerate launch` started this process, alone.

    It always sets this variable. The precision's is no sign: people export that one themselves.
    """
    return "ACCELERATE_DYNAMO_BACKEND" in os.environ
