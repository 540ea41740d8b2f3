"""Options of a model's answers, checked before torch is imported."""

from dataclasses import dataclass
from typing import Any, get_type_hints

from ..base.errors import PlugsftError


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
        for name, right, wanted in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "at least 0"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            (
                "repetition_penalty",
                self.repetition_penalty is None or 0 < self.repetition_penalty < float("inf"),
                "above 0; 1 changes nothing",
            ),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "from 0 to 2^64 - 1"),
        ):
            if not right:
                raise PlugsftError(f"{name} = {getattr(self, name)}: must be {wanted}")
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
