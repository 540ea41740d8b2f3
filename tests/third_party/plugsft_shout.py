"""Make the assistant shout."""

from collections.abc import Generator
from typing import Any, Literal

from plugsft import RecipeError, Rendered, hookimpl, plugin


@plugin(conflicts={"whisper": "nobody can do both"})
class Shout:
    """Make the assistant shout. Changes what is learned."""

    mark: str = "!"
    """Written after each answer."""
    times: int = 1
    """How often it is written."""
    who: Literal["assistant", "user"] = "assistant"
    """Whose turns are shouted."""

    @hookimpl
    def check(self) -> None:
        """Refuse what makes no sense."""
        if self.times < 0:
            raise RecipeError(f"times: given {self.times}; it should be 0 or more")

    @hookimpl(wrapper=True)
    def render(
        self, rows: list[dict[str, Any]]
    ) -> Generator[None, Rendered | None, Rendered | None]:
        """Edit the messages before they are rendered."""
        for row in rows:
            for message in row.get("messages", []):
                if message["role"] == self.who:
                    message["content"] = message["content"].upper() + self.mark * self.times
        rendered = yield
        return rendered

    @hookimpl
    def summary(self) -> str:
        """Say how loud it was."""
        return f"every {self.who} turn shouted, with '{self.mark * self.times}'"
