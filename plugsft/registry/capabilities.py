"""The capabilities of a recipe's active plugins."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..recipe.capabilities import CAPABILITIES, SHARED
from ..recipe.tables import Recipe
from .contracts import contract_of


def provided_by(plugins: Mapping[str, Any]) -> dict[str, list[tuple[str, str | None]]]:
    """Return each capability of plugins: who provides it, and the option that tunes it."""
    provided: dict[str, list[tuple[str, str | None]]] = {}
    for name, plugin in sorted(plugins.items()):
        for capability, option in contract_of(plugin).provides.items():
            provided.setdefault(capability, []).append((name, option))
    return provided


def provided_twice(recipe: Recipe) -> Iterator[str]:
    """Yield capabilities that two plugins provide where one must."""
    for capability in sorted({*CAPABILITIES} - SHARED):
        names = [provider.plugin for provider in recipe.providers(capability)]
        if len(names) > 1:
            yield (
                f"plugins.{names[1]}: provides {capability}, and so does '{names[0]}': "
                "remove one, or switch it off with --without"
            )
