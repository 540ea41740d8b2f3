"""The recipes we ship are understood, to the last key."""

import pytest
from conftest import ROOT

from plugsft.registry import load


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_a_shipped_recipe_is_valid_and_explained(path):
    recipe, active = load(path)
    assert list(active.plugins) == list(recipe.plugins)
    text = path.read_text(encoding="utf8")
    assert text.startswith("# ") and text.count("#") >= 6
