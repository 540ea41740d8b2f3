"""Results, configurations and errors as trackers and messages take them."""

import json
from typing import Any

RESULTS = ("final", "throughput", "batches", "memory")
"""Tables of a run's record that hold results."""
MLFLOW_CURE = "start its server, or name another: MLFLOW_TRACKING_URI"


def results(run: dict[str, Any]) -> dict[str, Any]:
    """Return the results in a run's record by name: {"final/loss": 1.2, ...}."""
    tables = {name: run[name] for name in RESULTS if name in run}
    return {**flatten(tables, "/"), "seconds": run["seconds"]}


def flatten(tables: dict[str, Any], separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """Return {"train.seed": 0, ...}; lists become JSON, which every tracker accepts."""
    values: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, dict):
            values |= flatten(value, separator, f"{prefix}{name}{separator}")
        else:
            values[prefix + name] = json.dumps(value) if isinstance(value, list) else value
    return values


def describe_error(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    first_line = str(error).strip().partition("\n")[0].rstrip(".") or "no reason given"
    return f"{type(error).__name__}: {first_line[:300]}"
