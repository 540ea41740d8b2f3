"""Tell whether a recipe's data is cached, and how the nearest entries differ."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..base.atomic import damage
from ..base.checksums import digest
from ..base.console import say
from ..base.errors import PlugsftError
from ..data.cache_key import differences, key_of
from ..data.defaults import DataDefaults
from ..data.prepare import open_data
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
        raise PlugsftError(f"data.tokens: {recipe.data.tokens} is used as it is, without the cache")
    active.attach(DataDefaults(recipe.folder))
    cache = recipe.provides("cached_tokens")
    option = cache and cache.value
    homes = {
        "cache": tokens_folder(folder or (Path(option) if option else None)),
        "output": recipe.folder / "tokens",
    }
    with TemporaryDirectory() as temporary:
        # The tokenizer of a model from scratch is trained here, not in the run's output.
        data = open_data(recipe.model_copy(update={"output": temporary}), active)
    _explain("data", key_of(data.work, data.sources, active), homes)
    if recipe.eval is not None:
        data.work.sources = [recipe.eval_source()]
        opened = [open_source(source, "eval.source") for source in data.work.sources]
        _explain("eval", key_of(data.work, opened, active), homes)


def _explain(data: str, key: dict[str, Any], homes: dict[str, Path]) -> None:
    name = digest(key)
    say(f"{data}: {name}")
    hit = False
    for label, home in homes.items():
        folder = home / name
        problem = damage(folder, quick=True) if folder.exists() else "not found"
        hit |= problem is None
        say(f"  {label:<8} {f'miss: {folder}: {problem}' if problem else f'hit: {folder}'}")
    if hit:
        return
    compared = [
        (list(dict.fromkeys(differences(entry.facts["key_parts"], key))), entry)
        for home in homes.values()
        for entry in entries(home)
        if "key_parts" in entry.facts and "kind" not in entry.facts
    ]
    for lines, entry in sorted(compared, key=lambda pair: len(pair[0]))[:NEAREST]:
        say(f"  nearest  {entry.folder} ({entry.sources}), last used {time_of(entry.used)}")
        for line in lines:
            say(f"           {line}")
