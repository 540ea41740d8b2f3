"""`plugsft quickstart`: write its recipe, train, ask, and let the user talk."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ..base.console import is_terminal, say
from ..registry.load import load
from ..start.train import Start, train_recipe
from .load_recipe import OFFLINE
from .model import chat
from .starting_files import write_missing

KIND = "quickstart"
LESSONS = "recipes/data/quickstart.jsonl"
QUESTION = "What is plugsft?"
SUGGESTED = ("What are cumulative sequence lengths?", "What fills GPU memory in training?")


def first_model(folder: Path, overrides: Sequence[str], overwrite: bool) -> None:
    """Train the quickstart's model in a folder, and ask it a question."""
    # Nothing here needs the network. Libraries read these when they are imported.
    os.environ |= OFFLINE
    # Threads of so small a model wait for each other, for minutes where other programs run.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for path in write_missing(KIND, folder):
        say(f"written: {folder / path}")
    go = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))}; "
    os.chdir(folder)  # the paths of a recipe are those of the folder in which it runs
    recipe = Path(f"recipes/{KIND}.toml")
    loaded, active = load(recipe, overrides)
    train_recipe(loaded, active, recipe, Start(overwrite=overwrite))
    run = loaded.folder
    say(f"\n> {QUESTION}")
    chat(run, ask=[QUESTION])
    say(f"\nIt knows only the lessons of {LESSONS}. Two of them:")
    for question in SUGGESTED:
        say(f"    {question}")
    say(f"\nreport:       {run}/report.html")
    if sys.stdin.isatty() and is_terminal():
        chat(run)
    else:
        say(f"keep talking: {go}plugsft chat {run}")
