"""`plugsft cache`: list, explain and clean cached data."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Overrides, RecipeFile, Without

CacheFolder = Annotated[
    Path | None,
    typer.Option(help="Default: $PLUGSFT_CACHE, or ~/.cache/plugsft.", show_default=False),
]


def ls(folder: CacheFolder = None) -> None:
    """List the entries, the last used first."""
    from . import cache_entries

    cache_entries.ls(folder)


def explain(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    folder: CacheFolder = None,
) -> None:
    """Say whether a recipe's data is cached; if not, what differs from the entries."""
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without)
    # A mistake in the recipe is reported before anything heavy is imported.
    from .cache_explain import explain_key

    explain_key(loaded, active, recipe, folder)


def gc(
    folder: CacheFolder = None,
    keep_days: Annotated[
        float | None,
        typer.Option(min=0, help="Remove entries unused for this many days.", show_default=False),
    ] = None,
) -> None:
    """Remove unfinished builds and, with --keep-days, entries that are unused for long."""
    from . import cache_entries

    cache_entries.gc(folder, keep_days)


def verify(folder: CacheFolder = None) -> None:
    """Read every byte of every entry; exit with 2 if one is damaged."""
    from . import cache_entries

    cache_entries.verify(folder)
