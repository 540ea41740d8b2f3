"""Tell whether the cache holds a recipe's data, and what differs from the nearest entries."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..base.atomic import damage
from ..base.checksums import digest
from ..base.console import say
from ..base.errors import PlugsftError
from ..data.cache_key import differences, key_of
from ..data.defaults import DataDefaults
from ..data.prepare import eval_source, open_data
from ..data.sources import open_source
from ..output.folder import ensure_inputs
from ..recipe.tables import Recipe
from ..registry.active import Active
from .cache_entries import entries, time_of, tokens_folder

NEAREST = 2
"""Entries that a recipe is compared with."""


def explain_key(recipe: Recipe, active: Active, path: Path, folder: Path | None) -> None:
    """Tell whether a recipe's data is cached; if not, how the nearest entries differ."""
    ensure_inputs(recipe, path)
    if recipe.data.tokens:
        raise PlugsftError(f"data.tokens: {recipe.data.tokens} is taken, whatever the cache holds")
    active.attach(DataDefaults(recipe.folder))
    option = recipe.plugins.get("arrow_cache", {}).get("folder")
    places = {
        "cache": tokens_folder(folder or (Path(option) if option else None)),
        "output": recipe.folder / "tokens",
    }
    with TemporaryDirectory() as elsewhere:
        # A model from scratch has a tokenizer trained: not in the output of a run to come.
        data = open_data(recipe.model_copy(update={"output": elsewhere}), active)
    _explain("data", key_of(data.work, data.sources, active), places)
    if recipe.eval is not None:
        data.work.sources = [eval_source(recipe)]
        opened = [open_source(one) for one in data.work.sources]
        _explain("eval", key_of(data.work, opened, active), places)


def _explain(what: str, key: dict[str, Any], places: dict[str, Path]) -> None:
    name = digest(key)
    say(f"{what}: {name}")
    there = False
    for place, home in places.items():
        harm = damage(home / name, quick=True) if (home / name).exists() else "it is not there"
        there |= harm is None
        say(f"  {place:<8} {'miss' if harm else 'hit'}: {home / name}{f': {harm}' if harm else ''}")
    others = [
        one
        for home in places.values()
        for one in entries(home)
        if "key_parts" in one.facts and "kind" not in one.facts
    ]
    compared = [
        (list(dict.fromkeys(differences(one.facts["key_parts"], key))), one) for one in others
    ]
    for lines, one in sorted(compared, key=lambda pair: len(pair[0]))[: 0 if there else NEAREST]:
        say(f"  nearest  {one.folder} ({one.sources}), last used {time_of(one.used)}")
        for line in lines:
            say(f"           {line}")
