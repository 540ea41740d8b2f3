"""Why transformers could not load a model or tokenizer from a folder, and the cure."""

from pathlib import Path

from .limits import read_json_object

SETTINGS = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "tokenizer.json",
)
"""Files of a model that each hold one JSON object."""
TRUST = "trust_remote_code"
"""Every error of transformers about a model's own code says this."""


def explain_load_error(path: str, error: Exception) -> str:
    """Say why transformers failed to load a folder: a broken file, or its own message."""
    for name in SETTINGS:
        file = Path(path) / name
        try:
            if file.is_file():
                read_json_object(file)
        except (OSError, ValueError) as broken:
            return f"{name}: {broken}. Take the file from the model's source again"
    first, _, rest = str(error).strip().partition("\n")
    # "Validation error for field 'x':", and what is wrong with it on the next line.
    detail = " " + rest.strip().partition("\n")[0] if first.endswith(":") else ""
    return f"{type(error).__name__}: {first}{detail}{trust_hint(error)}"


def trust_hint(error: Exception) -> str:
    """Return the cure for a model or tokenizer whose own code may not run."""
    if TRUST not in str(error):
        return ""
    return (
        ". Python code that comes with a model runs only if you say so: model.trust_remote_code = "
        "true in your recipe, or --trust-remote-code for chat and export"
    )
