"""Read a recipe for a command; without a network, use the hub's cache."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ..base.console import say
from ..output.folder import ensure_inputs
from ..recipe.tables import Recipe, is_hub_name
from ..registry.active import Active
from ..registry.load import load

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
PATIENCE = 5.0
"""Seconds that the hub has to answer."""


def load_recipe(
    path: Path,
    overrides: Sequence[str] | None,
    without: Sequence[str] | None,
    inputs: bool = False,
) -> tuple[Recipe, Active]:
    """Read a recipe and create its plugins; with `inputs`, refuse paths that cannot be read."""
    recipe, active = load(path, overrides or [], without or [])
    if inputs:
        ensure_inputs(recipe, path)
    sources = (source.source for source in recipe.data.all_sources())
    names = filter(None, (recipe.model.path, recipe.model.tokenizer, *sources))
    if any(map(is_hub_name, names)):
        use_cache_without_network()
    return recipe, active


def use_cache_without_network() -> None:
    """Switch an unreachable hub off: its library would retry for minutes."""
    offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")
    if offline or any(name.upper() in ("HTTPS_PROXY", "ALL_PROXY") for name in os.environ):
        return
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "", port), PATIENCE).close()
    except OSError as error:
        os.environ |= OFFLINE
        say(
            f"{hub.hostname} cannot be reached ({error.strerror or error}); models and data come "
            "from its cache"
        )
