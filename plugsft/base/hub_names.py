"""Names of models and data on the Hugging Face hub."""

import re
from pathlib import Path

HUB = "hub:"
"""The beginning of `--to` for a repository on the hub."""
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_name(name: str) -> bool:
    """Tell whether a name belongs to the hub, and is no path here."""
    return bool(_NAME.fullmatch(name)) and not Path(name).exists()
