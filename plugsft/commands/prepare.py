"""`plugsft prepare`: tokenize a recipe's data ahead of training."""

from .options import Overrides, RecipeFile, Without


def prepare(recipe: RecipeFile, overrides: Overrides = None, without: Without = None) -> None:
    """Tokenize a recipe's data ahead of training."""
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without)
    # A mistake in the recipe is reported before anything heavy is imported.
    from .audit.prepare import prepare_data

    prepare_data(loaded, active, recipe)
