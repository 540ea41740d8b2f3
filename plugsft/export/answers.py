"""Options of a model's answers, checked before torch is imported."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from ..base.errors import PlugsftError


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True))
class Answers:
    """Options of the answers of a trained model.

    Where top_p, top_k or repetition_penalty is None, the model's generation_config decides.
    """

    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens of the longest answer."""
    temperature: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """0: always the likeliest token."""
    system: str = ""
    """The system message."""
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    """Sample from the likeliest tokens that have this probability together."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Sample from this number of the likeliest tokens."""
    repetition_penalty: Annotated[FiniteFloat, Field(ge=0.01)] | None = None
    """Above 1: tokens that the chat has already are less likely."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    """The seed of the random numbers; None: a new one each time."""

    @model_validator(mode="wrap")
    @classmethod
    def _name_option(cls, options: Any, check: Any) -> Any:
        try:
            return check(options)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            why = wrong["msg"].replace("Input should", "it should")
            name = wrong["loc"][0]
            raise PlugsftError(f"{name} = {wrong['input']!r}: {why}") from error

    def __post_init__(self) -> None:
        for name in ("top_p", "top_k"):
            if not self.temperature and getattr(self, name) is not None:
                raise PlugsftError(
                    f"{name} has no effect at temperature 0, which always takes the likeliest "
                    "token; set a temperature, such as 0.7"
                )

    @property
    def sampling(self) -> dict[str, Any]:
        """The options that are set, of those that transformers knows by the same names."""
        names = ("top_p", "top_k", "repetition_penalty")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
