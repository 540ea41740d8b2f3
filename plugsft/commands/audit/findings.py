"""The findings of `plugsft check`: printed as they come; problems are raised at the end."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.text import Text

from ...base.console import out
from ...base.errors import PlugsftError

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class Findings:
    """Prints a line per subject, and collects problems until the end."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def ok(self, what: str, text: str) -> None:
        """Print that a subject is fine."""
        self._line("ok", what, text)

    def warn(self, what: str, text: str) -> None:
        """Warn of what works but may not be meant."""
        self._line("warn", what, text)

    @contextmanager
    def about(self, what: str) -> Iterator[None]:
        """Collect errors of the body, so that the rest is checked, too."""
        try:
            yield
        except PlugsftError as error:
            new = [line for line in str(error).splitlines() if line not in self.problems]
            self.problems += new
            if new:
                self._line("fail", what, "see the end" if len(new) == 1 else f"{len(new)} problems")

    def _line(self, mark: str, what: str, text: str) -> None:
        out.print(Text.assemble((f"{mark:<6}", STYLES[mark]), f"{what:<12}", text))
