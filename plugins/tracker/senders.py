"""Starts the run in each tracker, or continues it; stores the ids that trackers give to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from plugsft import PluginError, Recipe, say, write_text

from .runs import NewRun, start
from .sender import Sender
from .values import MLFLOW_CURE, describe_error, flatten

if TYPE_CHECKING:
    from . import Tracker

RUN_IDS = "trackers.json"
"""File in the output: the ids that trackers gave to the run, to continue it after a resume."""


def start_senders(plugin: Tracker, recipe: Recipe, step: int) -> list[Sender]:
    """Start a run in each tracker, or continue it after a step; return their senders."""
    senders: list[Sender] = []
    path = recipe.folder / RUN_IDS
    # A run from step 0 starts new runs in its trackers.
    run_ids = json.loads(path.read_text(encoding="utf8")) if step and path.is_file() else {}
    configuration = flatten(recipe.model_dump(mode="json", exclude_none=True))
    name = plugin.name or recipe.folder.name
    folder = Path(plugin.folder) if plugin.folder else recipe.folder / "trackers"
    for kind in plugin.to:
        key = f"{kind}/{plugin.project}"
        run_id = run_ids.get(key)
        try:
            run = NewRun(plugin.project, name, folder, configuration, step, run_id)
            tracker, run_ids[key], view = start(kind, run)
            senders.append(Sender(kind, tracker))
            if run_id is None:
                tracker.store_init_configuration(configuration)
        except Exception as error:
            for sender in senders:
                sender.finish("failed")
            cure = MLFLOW_CURE if kind == "mlflow" else "correct that"
            raise PluginError(
                f"plugins.tracker: {kind} cannot start: {describe_error(error)}; {cure}, or "
                f'remove "{kind}" from `to`'
            ) from error
        say(f"tracker: {view}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(run_ids, indent=1) + "\n")
    return senders
