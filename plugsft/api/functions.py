"""`plugsft.train` and its like: what the commands do, from a script or a notebook.

Each call leaves the process as it was. Mistakes are exceptions of `plugsft` with the words of the
command line, never SystemExit.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .finished_run import FinishedRun, Turns
from .messages import errors

PathLike = str | Path
RecipeLike = PathLike | Mapping[str, Any]


def train(
    recipe: RecipeLike,
    *,
    plugins: Sequence[object] | Mapping[str, Any] = (),
    ranks: int = 1,
    without: Sequence[str] = (),
    resume: bool | Literal["auto"] = False,
    resume_from: PathLike | None = None,
    overwrite: bool = False,
    **overrides: Any,
) -> FinishedRun:
    """Train a model; return the finished run.

    `recipe`: a TOML file, or its tables. `overrides`: tables that are merged into it; None removes
    a key. `plugins`: objects of plugin classes, or tables as in the recipe. `ranks`: processes
    that train together on this machine. The others are the options of `plugsft train`.

        run = plugsft.train("my.toml", train={"epochs": 1}, output="runs/short")
        run.metrics["loss"].plot()
    """
    from ..commands.train import train_recipe
    from ..registry.load import resolve
    from .own_plugins import found_by_others
    from .recipes import read_source

    with errors():
        source = read_source(recipe, plugins, without, overrides)
        with found_by_others(source.own):
            loaded, active = resolve(source.tables, source.without, source.path)
            checkpoint = None if resume_from is None else Path(resume_from)
            start = (resume is True, resume == "auto", checkpoint, overwrite)
            if ranks > 1:
                from .processes import train_on_ranks

                train_on_ranks(source, loaded, ranks, start)
            else:
                from .isolation import isolated

                with isolated():
                    train_recipe(loaded, active, source.path, start)
        return FinishedRun(loaded.folder)


def load_run(folder: PathLike) -> FinishedRun:
    """Return the run in an output folder, finished or not.

    run = plugsft.load_run("runs/my-model")
    run.metrics.tail()
    """
    run = FinishedRun(Path(folder))
    run.record  # noqa: B018  # raises if the folder holds no run
    return run


def generate(
    run: FinishedRun | PathLike, prompts: str | Sequence[str | Turns], **options: Any
) -> list[str]:
    """Return a model's answers to questions or chats, in their order.

    `run`: a run, its output folder, or a Hugging Face folder. `options`: those of
    `FinishedRun.generate`, such as system, max_tokens and temperature.

        plugsft.generate("runs/my-model", ["What is a checkpoint?"], max_tokens=64)
    """
    finished = run if isinstance(run, FinishedRun) else FinishedRun(Path(run))
    return finished.generate(prompts, **options)
