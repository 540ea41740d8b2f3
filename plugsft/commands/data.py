"""Commands about data: `prepare`, `inspect`, and `cache` with its own."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import Overrides, RecipeFile, Without


def prepare(recipe: RecipeFile, overrides: Overrides = None, without: Without = None) -> None:
    """Tokenize a recipe's data ahead of training."""
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without)
    if not loaded.model.trust_remote_code and all(map(active.is_bundled, active.plugins)):
        hide_torch_from_transformers()  # no code of others runs here
    # A mistake in the recipe is reported before anything heavy is imported.
    from ..audit.prepare import prepare_data

    prepare_data(loaded, active, recipe)


def hide_torch_from_transformers() -> None:
    """Save the two seconds in which transformers would import torch: its tokenizers need none.

    Others may find it: `datasets` asks for what is in sys.modules, and imports that.
    """
    if "torch" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules["torch"] = None  # type: ignore[assignment]  # "not installed"
    from transformers.utils import is_torch_available

    is_torch_available()  # it remembers the answer
    del sys.modules["torch"]


def inspect(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    rows: Annotated[int, typer.Option(metavar="N", min=0, help="Number of rows to show.")] = 3,
    first: Annotated[
        int, typer.Option(metavar="N", min=1, help="First row to show, counted from 1.")
    ] = 1,
    everything: Annotated[
        bool, typer.Option("--all", help="Audit every row, not a sample of 1,000.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a page to this file."),
    ] = None,
) -> None:
    """Show rows as the model will see them, and audit the data."""
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without)
    # A mistake in the recipe is reported before anything heavy is imported.
    from ..audit.inspect_data import inspect_data

    inspect_data(loaded, active, recipe.stem, rows, first - 1, everything, html)


def fetch(
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="s3://BUCKET/chats.jsonl, a folder, a pattern; gs://, hf://."
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the copies go.")] = Path(
        "data"
    ),
) -> None:
    """Copy rows from an object store to disk, for every run; go on where a copy was cut."""
    from ..data import fetch as copies

    copies.fetch(address, folder)


def ls() -> None:
    """List the entries of the cache ($PLUGSFT_CACHE or ~/.cache/plugsft), the last used first."""
    from . import cache_entries

    cache_entries.ls()


def gc(
    keep_days: Annotated[
        float | None,
        typer.Option(metavar="N", min=0, help="Remove entries unused for this many days."),
    ] = None,
) -> None:
    """Remove unfinished builds and, with --keep-days, entries that are unused for long."""
    from . import cache_entries

    cache_entries.gc(keep_days)
