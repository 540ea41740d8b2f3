"""`plugsft prepare`: tokens on disk, before training."""

from pathlib import Path

from ..base.console import say
from ..base.errors import RecipeError
from ..base.machine import look
from ..data.defaults import DataDefaults
from ..data.prepare import Prepared, prepare
from ..data.shared_slices import share_slices
from ..hooks import DATA
from ..model.checks import check_recipe
from ..model.config import check_ids
from ..output.folder import ensure_inputs
from ..recipe.tables import Recipe
from ..registry.active import Active


def prepare_data(recipe: Recipe, active: Active, path: Path) -> Prepared:
    """Tokenize a recipe's data into its output folder; return it."""
    ensure_inputs(recipe, path)
    if recipe.data.tokens:
        raise RecipeError(
            f"data.tokens: {recipe.data.tokens} is prepared already; leave data.tokens out to "
            "prepare data.source"
        )
    active.attach(DataDefaults(recipe.folder))
    with active.name_failing_plugin():
        # Only the data hooks: the data may be for another machine.
        check_recipe(recipe, active, look(), DATA)
        data = prepare(recipe, active, share_slices)
        check_ids(recipe, data.largest_id)
    for name, summary in active.summaries(DATA).items():
        if summary != "active":
            say(f"plugin {name}: {summary}")
    if recipe.model.scratch and not recipe.model.tokenizer:
        say(f"tokenizer: {data.tokenizer_folder}")
    say(f"tokens: {data.tokens.folder}")
    return data
