"""The launch files that a message names and that do not exist yet."""

import re
from pathlib import Path


def explain_missing(text: str) -> list[str]:
    """Return a line about a message's launch files, if they are not here."""
    names = re.findall(r"recipes/accelerate/(?:\w+\.yaml)?", text)
    if all(Path(name).exists() for name in names):
        return []
    return [f"{names[0]} is not here yet: `plugsft init launch` writes it"]
