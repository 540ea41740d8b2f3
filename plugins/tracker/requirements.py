"""Checks before the run: packages, logins and servers of the trackers."""

import importlib
import os
from contextlib import suppress
from typing import Any

from plugsft import not_installed

from .values import MLFLOW_CURE, describe_error


def find_problem(kind: str) -> str | None:
    """Return why a tracker cannot be used on this machine, with the cure."""
    if missing := not_installed(kind, "trackers"):
        return f"to: {missing}"
    try:
        package = importlib.import_module(kind)
    except ImportError as error:
        return (
            f'to: "{kind}" cannot be imported: {describe_error(error)}; '
            f"pip install --upgrade {kind}"
        )
    if kind == "wandb":
        return _check_wandb_login(package)
    return _check_mlflow_server(package) if kind == "mlflow" else None


def _check_wandb_login(wandb: Any) -> str | None:
    if wandb.setup().settings.mode != "online":
        return None
    with suppress(Exception):
        if wandb.login(prompt=False):
            return None
    return (
        'to: "wandb" has no API key: run `wandb login`, or set WANDB_MODE=offline to store the '
        "run here, for `wandb sync`"
    )


def _check_mlflow_server(mlflow: Any) -> str | None:
    # By default MLflow tries for minutes, and the run would wait.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    uri = mlflow.get_tracking_uri()
    if uri.startswith("sqlite") and not not_installed("sqlalchemy", "trackers"):
        return None  # a request would create the database
    try:
        mlflow.search_experiments(max_results=1)
    except Exception as error:
        return (
            f'to: "mlflow" cannot use {uri}: {describe_error(error)}; {MLFLOW_CURE}, or '
            "pip install mlflow"
        )
    return None
