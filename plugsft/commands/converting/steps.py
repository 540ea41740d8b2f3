"""Batches, schedules, optimizers and intervals, for the tables of all tools."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

from ...base.console import format_count
from ...base.errors import RecipeError
from ...recipe.tables import Schedule, short
from .conversion import Conversion

ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused")
IN_32_BITS = ("paged_adamw", "paged_adamw_32bit")
IN_8_BITS = {
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit",
    "adamw_torch_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
}
"""Name in transformers -> kind of [plugins.low_memory_adam]."""
OF_TORCH = ("sgd", "adagrad", "rmsprop")
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


def set_batch(c: Conversion, micro: str, accumulation: str, default: int, rows: int = 1) -> None:
    """Write the global batch: micro-batch x accumulation x GPUs; `rows` of them packed in one."""
    size, steps = c.number(micro, default), c.number(accumulation, 1)
    if not (isinstance(size, int) and isinstance(steps, int) and size > 0 and steps > 0):
        key = micro if not isinstance(size, int) else accumulation
        raise RecipeError(
            f"{c.path}: {key} = {short(c.get(key))}: it should be a whole number; set one, and "
            "convert again"
        )
    total = size * steps * c.gpus // rows
    gpus = f"x {c.gpus} GPUs" if c.gpus > 1 else "on 1 GPU"
    c.set("train.batch_size", total, micro, accumulation, comment=gpus)
    if not packs(c) and size > 1:
        c.set("train.micro_batch", size, micro)
    batch = format_count(total, "packed row" if packs(c) else "example")
    c.remarks.append(
        f"global batch: {batch}, for {format_count(c.gpus, 'GPU')}; for another number, convert "
        "with --gpus"
    )


def packs(c: Conversion) -> bool:
    """Tell whether the recipe packs rows."""
    return "plugins.bfd_packing.scope" in c.lines


def set_packing(c: Conversion, capacity: int, *keys: str) -> None:
    """Write packing over the whole data set: batch_size counts packed rows, as in other tools."""
    c.plugin("bfd_packing", *keys, scope="dataset")
    c.set("plugins.bfd_packing.capacity", capacity, comment="tokens of a packed row")


def set_schedule(c: Conversion, name: str, options: dict[str, Any], *keys: str) -> None:
    """Write the schedule, or name it if transformers alone has it."""
    if name not in get_args(Schedule):
        c.leave(keys[0], f"plugsft has no schedule of this name; use {', '.join(SHORT)}, ...")
        return
    c.set("train.schedule", name, *keys)
    if options:
        c.set("train.schedule_options", options, *keys[1:])


SHORT = ("cosine", "linear", "constant_with_warmup")


def set_warmup(c: Conversion, warmup: float, *keys: str, rounds_up: bool = True) -> None:
    """Write the warm-up: a share of the run, or its steps where these are known."""
    if c.lines.get("train.schedule") and c.lines["train.schedule"].value == "constant":
        warmup = 0  # transformers' schedule "constant" has none
    total = total_steps(c)
    if 0 < warmup < 1 and total is not None:
        warmup = math.ceil(total * warmup) if rounds_up else int(total * warmup)
    c.set("train.warmup", float(warmup), *keys)


def set_length(c: Conversion, epochs: str, steps: str, default: float) -> None:
    """Write the length of the run."""
    count, limit = c.number(epochs, default), c.number(steps, -1)
    if limit > 0:
        c.set("train.steps", int(limit), steps)
        return
    if isinstance(count, int):
        c.set("train.epochs", count, epochs)
        return
    if one_epoch := epoch_steps(c):
        c.set("train.steps", math.ceil(count * one_epoch), epochs)
    else:
        c.leave(epochs, "epochs are whole; use train.steps (`plugsft check` prints an epoch's)")


def total_steps(c: Conversion) -> int | None:
    """Return the steps of the run, if they are known."""
    if "train.steps" in c.lines:
        return int(c.lines["train.steps"].value)
    steps, epochs = epoch_steps(c), c.lines.get("train.epochs")
    return steps * epochs.value if steps and epochs else None


def epoch_steps(c: Conversion) -> int | None:
    """Return the steps of an epoch, if the rows can be counted here."""
    source, split = c.lines.get("data.source"), c.lines.get("data.split")
    if source is None or packs(c) or (split and split.value != "train"):
        return None
    rows = count_rows(Path(str(source.value)))
    batch = c.lines["train.batch_size"].value
    return -(-rows // batch) if rows else None


@cache
def count_rows(path: Path) -> int | None:
    """Count the rows of a jsonl file."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def set_optimizer(c: Conversion, key: str, default: str) -> None:
    """Write the optimizer; AdamW needs no line."""
    name = str(c.get(key, default))
    if name in IN_8_BITS:
        c.plugin("low_memory_adam", key, kind=IN_8_BITS[name])
    elif name in OF_TORCH:
        c.plugin("torch_optimizer", key, name=name)
    elif name not in (*ADAMW, *IN_32_BITS):
        c.leave(
            key,
            "plugsft has no such optimizer, and trains with AdamW; use [plugins.low_memory_adam], "
            "[plugins.torch_optimizer], or a plugin of your own",
        )


def set_interval(c: Conversion, to: str, value: float, *keys: str) -> None:
    """Write an interval in steps; a share of the run only if the steps are known."""
    total = total_steps(c)
    if value >= 1:
        c.set(to, int(value), *keys)
    elif total:
        c.set(to, max(1, math.ceil(value * total)), *keys)
    else:
        c.leave(keys[0], per_epoch(to))


def per_epoch(to: str) -> str:
    """Return the reason why an interval is not converted."""
    return f"plugsft counts steps; use {to} (`plugsft check` prints the steps of an epoch)"


def set_trackers(c: Conversion, names: Sequence[str], key: str, name: str, project: str) -> None:
    """Write where metrics are sent."""
    known = [each for each in names if each in TRACKERS]
    if [each for each in names if each not in (*TRACKERS, "none")]:
        c.leave(key, f"[plugins.tracker] sends to {', '.join(TRACKERS)}; use one of these")
    if known:
        c.plugin("tracker", key, to=known)
        for option, setting in (("name", name), ("project", project)):
            if c.get(setting):
                c.set(f"plugins.tracker.{option}", str(c.get(setting)), setting)


def set_precision(c: Conversion, bfloat16: bool, *keys: str) -> None:
    """Write the type of computation; without bfloat16, float16 or float32."""
    float16 = [key for key in ("fp16", "float16") if c.on(key)]
    if float16 and not bfloat16:
        c.set("model.dtype", "float16", *float16, comment="with loss scaling")
    else:
        c.set("model.dtype", "bfloat16" if bfloat16 else "float32", *keys)
