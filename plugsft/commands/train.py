"""`plugsft RECIPE`, or `plugsft train RECIPE`: train."""

from ..start.resume import Resume
from ..start.train import train_recipe
from .options import (
    Overrides,
    Overwrite,
    RecipeFile,
    ResumeAuto,
    ResumeFrom,
    ResumeLatest,
    Without,
)


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    resume: ResumeLatest = False,
    resume_auto: ResumeAuto = False,
    resume_from: ResumeFrom = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a model; `plugsft RECIPE` does the same."""
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without)
    start = Resume(resume, resume_auto, resume_from, overwrite)
    train_recipe(loaded, active, recipe, start)
