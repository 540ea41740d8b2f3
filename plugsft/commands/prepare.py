"""`plugsft prepare`: tokenize a recipe's data ahead of training."""

from .options import Overrides, RecipeFile, Without


def prepare(recipe: RecipeFile, overrides: Overrides = None, without: Without = None) -> None:
    """Tokenize a recipe's data ahead of training."""
    from ..registry.load import load

    loaded, active = load(recipe, overrides or [], without or [])
    # A mistake in the recipe is reported before anything heavy is imported.
    from .audit.prepare import prepare_data

    prepare_data(loaded, active, recipe)
