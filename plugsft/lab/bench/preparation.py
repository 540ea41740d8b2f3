"""Prepare a recipe once, timed: python -m plugsft.lab.bench.preparation RECIPE.

Each preparation is a fresh process; imports happen before the clock starts.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ...base.atomic import MANIFEST
from ...base.checksums import digest
from ...base.errors import PlugsftError
from ...base.machine import look
from ...data.defaults import DataDefaults
from ...data.prepare import prepare
from ...hooks import DATA
from ...model.checks import check_recipe
from ...model.config import check_ids
from ...registry.load import load

IMPORTED = (datasets, torch, AutoTokenizer, PreTrainedTokenizerFast)
"""Packages that preparing imports when it needs them."""


def run(path: Path) -> dict[str, Any]:
    """Prepare; return the seconds, a digest of the tokens, and the error."""
    try:
        recipe, active = load(path)
        started = time.perf_counter()
        active.attach(DataDefaults(recipe.folder))
        with active.name_failing_plugin():
            check_recipe(recipe, active, look(), DATA)
            data = prepare(recipe, active)
            check_ids(recipe, data.largest_id)
        seconds = time.perf_counter() - started
    except (PlugsftError, MemoryError, RuntimeError) as error:
        return {"error": str(error) or type(error).__name__}
    files = json.loads((data.tokens.folder / MANIFEST).read_text())
    shards = {name: stamp for name, stamp in files.items() if name.endswith(".arrow")}
    return {"seconds": seconds, "made": digest(shards), "error": ""}


if __name__ == "__main__":
    recipe_file = Path(sys.argv[1])
    recipe_file.with_name("prepared.json").write_text(json.dumps(run(recipe_file)))
