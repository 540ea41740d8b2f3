"""The findings of `plugsft check`: printed as they come; problems are raised at the end."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.text import Text

from ...base.console import out
from ...base.errors import PlugsftError

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class Findings:
    """Print a line per subject, and collect problems until the end."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def ok(self, subject: str, text: str) -> None:
        """Print that a subject is fine."""
        self._line("ok", subject, text)

    def warn(self, subject: str, text: str) -> None:
        """Warn of something that works but may be a mistake."""
        self._line("warn", subject, text)

    @contextmanager
    def about(self, subject: str) -> Iterator[None]:
        """Collect errors of the body, so that the checks go on."""
        try:
            yield
        except PlugsftError as error:
            new = [line for line in str(error).splitlines() if line not in self.problems]
            self.problems += new
            if new:
                self._line(
                    "fail", subject, "see the end" if len(new) == 1 else f"{len(new)} problems"
                )

    def _line(self, mark: str, subject: str, text: str) -> None:
        out.print(Text.assemble((f"{mark:<6}", STYLES[mark]), f"{subject:<12}", text))
