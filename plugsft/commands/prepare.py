"""`plugsft prepare`: tokenize a recipe's data ahead of training."""

import os
import sys

from .options import Overrides, RecipeFile, Without


def prepare(recipe: RecipeFile, overrides: Overrides = None, without: Without = None) -> None:
    """Tokenize a recipe's data ahead of training."""
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without)
    if not loaded.model.trust_remote_code and all(map(active.is_bundled, active.plugins)):
        # No code of others runs here, and transformers would import torch: two seconds.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # "not installed"
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # A mistake in the recipe is reported before anything heavy is imported.
    from .audit.prepare import prepare_data

    prepare_data(loaded, active, recipe)
