"""Options of a model's answers, checked before torch is imported."""

import sys
from dataclasses import dataclass
from typing import Any, get_type_hints

from ..base.errors import PlugsftError

LEAST, MOST = 5e-324, sys.float_info.max
LIMITS = {
    "max_tokens": (1, MOST, "at least 1"),
    "temperature": (0, MOST, "at least 0"),
    "top_p": (LEAST, 1, "above 0 and at most 1"),
    "top_k": (1, MOST, "at least 1"),
    "repetition_penalty": (LEAST, MOST, "above 0; 1 changes nothing"),
    "seed": (0, 2**64 - 1, "from 0 to 2^64 - 1"),
}
"""Option -> its smallest and largest value, and the words for them."""


@dataclass(frozen=True)
class Answers:
    """Options of the answers of a trained model.

    Where top_p, top_k or repetition_penalty is None, the model's generation_config decides.
    """

    max_tokens: int = 256
    """Tokens of the longest answer."""
    temperature: float = 0.0
    """0: always the likeliest token."""
    system: str = ""
    """The system message."""
    top_p: float | None = None
    """Sample from the likeliest tokens that have this probability together."""
    top_k: int | None = None
    """Sample from this number of the likeliest tokens."""
    repetition_penalty: float | None = None
    """Above 1: tokens that the chat has already are less likely."""
    seed: int | None = None
    """The seed of the random numbers; None: a new one each time."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Answers).items():
            value, number = getattr(self, name), kind in (float, float | None)
            if not isinstance(value, kind | int if number else kind):
                wanted = "a text" if kind is str else "a number" if number else "a whole number"
                raise PlugsftError(f"{name} = {value!r}: must be {wanted}")
        for name, (least, most, wanted) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise PlugsftError(f"{name} = {value}: must be {wanted}")
        for name in ("top_p", "top_k"):
            if not self.temperature and getattr(self, name) is not None:
                raise PlugsftError(
                    f"{name} has no effect at temperature 0, which always takes the likeliest "
                    "token; set a temperature, such as 0.7"
                )

    @property
    def sampling(self) -> dict[str, Any]:
        """The options that transformers knows by these names."""
        names = ("top_p", "top_k", "repetition_penalty")
        return {name: value for name in names if (value := getattr(self, name)) is not None}
