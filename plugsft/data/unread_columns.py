"""Columns that nothing reads, though they change the meaning of a row."""

from collections.abc import Collection
from functools import lru_cache

from ..base.types import Row
from ..recipe.capabilities import Capability
from ..tokens.schema import WEIGHT
from .messages import BadRow

_LABELS, _PAIRS, _SCORES = (
    Capability.bundled(name).table
    for name in ("labelled_answers", "preference_pairs", "reward_model")
)
READERS = {
    "label": _LABELS,
    **dict.fromkeys(("chosen", "rejected"), f"{_PAIRS} or {_SCORES}"),
    "margin": _SCORES,
}
"""Column -> the bundled plugins that read it."""
REFUSED = {
    "label": "tells good answers from bad ones",
    **dict.fromkeys(("chosen", "rejected"), "is one of two answers to compare"),
    WEIGHT: "says how much a row counts",
    **dict.fromkeys(
        ("weights", "sample_weight"), "says how much a row counts ([data.columns] weight names it)"
    ),
    **dict.fromkeys(("image", "images", "pixel_values"), "holds images"),
    **dict.fromkeys(("video", "videos"), "holds videos"),
    **dict.fromkeys(("audio", "audios"), "holds sounds"),
    "input_ids": "holds tokens that were made elsewhere",
    "labels": "holds targets that were made elsewhere",
    **dict.fromkeys(
        ("loss_mask", "completion_mask", "assistant_masks"), "says which tokens are trained"
    ),
}
"""Columns that change the meaning of a row -> their own meaning."""
WARNED = {
    **dict.fromkeys(
        ("score", "scores", "reward", "rewards", "rating"),
        "says how good a row is ([data.columns] weight can weigh rows by it)",
    ),
    "margin": "says how much better one answer is",
    **dict.fromkeys(
        ("ref_chosen_logps", "ref_rejected_logps"),
        "holds log-probabilities of a reference",
    ),
    "system": "holds a system prompt",
    "tools": "holds tools",
    "chat_template_kwargs": "holds variables of the chat template",
    "history": "holds earlier turns",
}
"""Columns with information that hardly changes the meaning of a row -> their own meaning."""
_MEANINGFUL = REFUSED.keys() | WARNED.keys()


def ensure_read(row: Row, read: Collection[str]) -> list[str]:
    """Refuse a row with an unread column that changes its meaning; warn of others.

    `read` are the columns that are read. Null or empty columns do not count.
    """
    unread = {
        name: column
        for name, column in _meaningful(tuple(row))
        if column not in read and row[column] not in (None, [], "")
    }
    for name in REFUSED:
        if name in unread:
            add = f"add {READERS[name]} to learn from it, or " if name in READERS else ""
            raise BadRow(
                f"'{unread[name]}' {REFUSED[name]}, and no active plugin reads it; "
                f'{add}set data.ignore = ["{unread[name]}"] to train without it'
            )
    return [
        f"'{unread[name]}' {WARNED[name]}, and nothing reads it"
        + (f" ({READERS[name]} does)" if name in READERS else "")
        for name in sorted(unread)
    ]


@lru_cache(maxsize=256)
def _meaningful(columns: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (name in REFUSED or WARNED, column) for columns in any case."""
    return [(name.lower(), name) for name in columns if name.lower() in _MEANINGFUL]
