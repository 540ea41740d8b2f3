"""axolotl's checkpoints and evaluations: how many steps lie between them."""

import math
from typing import Any

from . import steps
from .axolotl_data import held_out
from .conversion import Conversion
from .training_keys import each_epoch

LAST = 2**31 - 1
"""eval.every for an evaluation at the end alone."""


def saving(c: Conversion) -> None:
    """Write the steps between checkpoints."""
    strategy = c.get("save_strategy", "steps" if c.get("save_steps") else "epoch")
    if c.get("save_steps"):
        steps.set_interval(c, "checkpoint.every", c.number("save_steps", 0), "save_steps")
    elif c.get("saves_per_epoch") is not None:
        per_epoch(c, "checkpoint.every", "saves_per_epoch", 0)
    elif strategy == "no":
        c.set("checkpoint.every", 0, "save_strategy")
    elif strategy == "epoch" and c.lines.get("train.epochs") and epochs(c) == 1:
        c.set("checkpoint.every", 0, "save_strategy", comment="at the end of the epoch")
    elif strategy == "steps":
        c.set("checkpoint.every", 500, "save_strategy")
    elif strategy == "best":
        c.set("checkpoint.keep_best", "eval_loss", "save_strategy")
    elif c.get("save_strategy"):
        each_epoch(c, "checkpoint.every", "save_strategy")
    c.set("checkpoint.keep", c.whole("save_total_limit", 4), "save_total_limit")


def epochs(c: Conversion) -> Any:
    """Return the epochs of the run; None if its steps are given."""
    line = c.lines.get("train.epochs")
    return line.value if line else None


def per_epoch(c: Conversion, to: str, key: str, never: int) -> None:
    """Write saves or evaluations of an epoch as an interval; one in a run is at its end."""
    times = c.number(key, 0)
    total = steps.total_steps(c)
    count = times * (epochs(c) or c.number("num_epochs", 1))
    if times == 0 or count == 1:
        c.set(to, never, key, comment="at the end of the run")
    elif total:
        c.set(to, math.ceil(total / count), key)
    else:
        c.leave(key, steps.per_epoch(to))


def evaluation(c: Conversion) -> None:
    """Write the rows that are held out, and the steps between evaluations."""
    if c.get("evals_per_epoch") == 0 and not c.get("eval_steps"):
        return
    if not held_out(c):
        return
    if c.get("eval_steps"):
        steps.set_interval(c, "eval.every", c.number("eval_steps", 0), "eval_steps")
    elif c.get("evals_per_epoch") is not None:
        per_epoch(c, "eval.every", "evals_per_epoch", LAST)
    elif c.get("eval_strategy") == "epoch" and epochs(c) != 1:
        each_epoch(c, "eval.every", "eval_strategy")
    else:
        c.set("eval.every", LAST, "eval_strategy", comment="at the end of the run")
