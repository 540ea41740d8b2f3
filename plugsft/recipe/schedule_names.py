"""Schedules of transformers as the keys of a recipe: those of other tools and of older recipes."""

from collections.abc import Iterator, Mapping
from typing import Any

from .tables import short

NAMES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
    "cosine_warmup_with_min_lr": None,
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": None,
    "inverse_sqrt": None,
    "linear": "linear",
    "polynomial": None,
    "warmup_stable_decay": "wsd",
}
"""Name in transformers -> train.schedule; None for those of the plugin alone."""
KEYS = {
    "min_lr_rate": "train.final_rate",
    "min_lr_ratio": "train.final_rate",
    "num_decay_steps": "train.decay",
}
"""Option in transformers -> the recipe's key."""


def keys_of_schedule(name: str, options: Mapping[str, Any], peak: float) -> dict[str, Any]:
    """Return the keys that make a recipe's schedule that of transformers."""
    schedule = NAMES.get(name)
    ours = {} if schedule == "constant" else dict(options)  # transformers passes it none
    falls_on_a_line = ours.pop("decay_type", "cosine") == "linear"
    if peak and "min_lr" in ours:
        ours["min_lr_rate"] = ours.pop("min_lr") / peak
    takes_options = name in ("cosine_with_min_lr", "warmup_stable_decay")
    known = ours.keys() <= KEYS.keys() and bool(ours) == takes_options
    if schedule and known and falls_on_a_line == (schedule == "wsd"):
        keys = {KEYS[option]: value for option, value in ours.items()}
        return {"train.schedule": schedule, **keys}
    given = {f"plugins.hf_schedule.options.{option}": options[option] for option in options}
    return {"plugins.hf_schedule.name": name, **given}


def cures(train: Mapping[str, Any]) -> Iterator[str]:
    """Say what to write in place of keys of older recipes."""
    if train.get("learning_rate_after"):
        yield (
            "train.learning_rate_after: is gone; for another rate, export a checkpoint (plugsft "
            "export CHECKPOINT --to FOLDER) and begin a new run, with model.path = FOLDER and "
            "another train.learning_rate"
        )
    name, options = str(train.get("schedule", "linear")), train.get("schedule_options")
    if not isinstance(options, Mapping):
        options = {}
    if options or NAMES.get(name, name) != name:
        keys = keys_of_schedule(name, options, 0.0)
        lines = ", ".join(f"{key} = {short(keys[key])}" for key in keys)
        yield (
            f"train.schedule: '{name}' is written otherwise now: in place of schedule and "
            f"schedule_options, write {lines}"
        )
