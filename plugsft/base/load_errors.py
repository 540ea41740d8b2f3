"""Explains why transformers could not load a model or tokenizer."""

from pathlib import Path

from .errors import reason_of
from .limits import read_json_object

SETTINGS = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "tokenizer.json",
)
"""Model files with one JSON object each."""
TRUST = "trust_remote_code"
"""Occurs in each error of transformers about a model's own code."""


def explain_load_error(path: str, error: Exception) -> str:
    """Return the reason: a broken file of the folder, or transformers' message."""
    for name in SETTINGS:
        file = Path(path) / name
        try:
            if file.is_file():
                read_json_object(file)
        except (OSError, ValueError) as broken:
            return f"{name}: {reason_of(broken)}. Download the file again"
    if "couldn't find them in the cached files" in str(error):
        return (
            "there is no such folder, it is not in the hub's cache, and the hub cannot be reached. "
            "Name a folder, or connect (and unset HF_HUB_OFFLINE)"
        )
    first, _, rest = str(error).strip().partition("\n")
    # "Validation error for field 'x':" has its reason on the next line.
    detail = " " + rest.strip().partition("\n")[0] if first.endswith(":") else ""
    return f"{type(error).__name__}: {first}{detail}{trust_hint(error)}"


def trust_hint(error: Exception) -> str:
    """Return how to allow a model's or tokenizer's own code, if the error is about that."""
    if TRUST not in str(error):
        return ""
    return (
        ". Python code that comes with a model runs only if you allow it: model.trust_remote_code "
        "= true in your recipe, or --trust-remote-code for chat and export"
    )
