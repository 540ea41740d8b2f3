"""Results of runs: `show` and `diff`."""

from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import RecipeError
from .options import Overrides


def show(
    place: Annotated[
        Path, typer.Argument(metavar="PLACE", help="A recipe, or a run's output folder.")
    ],
    overrides: Overrides = None,
) -> None:
    """Show a recipe with all its defaults, or the results of a run."""
    # A recipe has an ending; a name without one is a run's, perhaps misspelt.
    if place.is_dir() or not place.suffix:
        if overrides:
            raise RecipeError(f"{overrides[0]}: {place} is a run's folder, whose results are fixed")
        from ..output.results import show_run

        show_run(place)
    else:
        from .overview import show_recipe

        show_recipe(place, overrides or [])


def diff(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run's output folder.")],
    second: Annotated[
        Path,
        typer.Argument(metavar="RUN_B", help="Another run's output folder."),
    ],
) -> None:
    """Compare two runs: recipe, versions, data and results."""
    from ..output import results

    results.diff(first, second)
