"""`plugsft.api`: the commands as functions.

They run in scripts and notebooks. Each call restores environment, signal handlers and warnings;
random numbers, torch's settings and what libraries print stay as a run set them. Mistakes are
exceptions of `plugsft` with the words of the command line, never SystemExit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ..base.errors import PlugsftError
from .messages import PathLike, PluginsLike, RecipeLike, ensure_kind
from .results import FinishedRun, Inspection, PreparedData, Turns, inspected_source


def train(
    recipe: RecipeLike,
    *,
    plugins: PluginsLike = (),
    ranks: int = 1,
    without: Sequence[str] = (),
    resume: bool | Literal["auto"] = False,
    resume_from: PathLike | None = None,
    overwrite: bool = False,
    **overrides: Any,
) -> FinishedRun:
    """Train a model; return the finished run.

    `recipe`: a file, or its tables. `overrides`: tables that are merged into it; None removes
    a key. `plugins`: objects of plugin classes, or tables as in the recipe. `ranks`: processes
    that train together on this machine. The others are the options of `plugsft train`.

        run = plugsft.api.train("my.toml", train={"epochs": 1}, output="runs/short")
        print(run.metrics["loss"].iloc[-1])
    """
    from ..start.train import Start, train_recipe
    from .recipes import opened

    if resume not in (True, False, "auto"):
        raise PlugsftError(f'resume={resume!r}: give True, False or "auto"')
    ensure_kind("ranks", ranks, int, "a whole number")
    ensure_kind("resume_from", resume_from, PathLike | None, "the folder of a checkpoint")
    checkpoint = None if resume_from is None else Path(resume_from)
    start = Start(resume is True, resume == "auto", checkpoint, overwrite)
    with opened(recipe, plugins, without, overrides) as (source, loaded, active):
        if ranks == 1:
            from .isolation import isolated

            with isolated():
                train_recipe(loaded, active, source.path, start)
        else:
            from .ranks import train_on_ranks

            train_on_ranks(source, loaded, active, ranks, start)
        return FinishedRun(loaded.folder)


def prepare(
    recipe: RecipeLike,
    *,
    plugins: PluginsLike = (),
    without: Sequence[str] = (),
    **overrides: Any,
) -> PreparedData:
    """Tokenize a recipe's data ahead of training; `train` then finds it.

    The arguments are those of `train`.

        plugsft.api.prepare("my.toml").trained_tokens
    """
    from .recipes import opened

    with opened(recipe, plugins, without, overrides) as (source, loaded, active):
        from ..audit.prepare import prepare_data
        from .isolation import isolated

        with isolated():
            tokens = prepare_data(loaded, active, source.path).tokens
            facts = tokens.facts
            return PreparedData(
                tokens.folder,
                facts["rows"],
                facts["examples"],
                facts["tokens"],
                facts["trained_tokens"],
                {reason: entry["count"] for reason, entry in facts["bad_rows"].items()},
                facts["truncated"]["count"],
            )


def inspect(
    recipe: RecipeLike,
    *,
    rows: int = 3,
    first: int = 0,
    everything: bool = False,
    plugins: PluginsLike = (),
    without: Sequence[str] = (),
    **overrides: Any,
) -> Inspection:
    """Return rows as the model will see them, and findings about the data.

    `rows`: how many rows of each source, from `first` on. `everything`: audit every row, not a
    sample of 1,000. Problems are returned, not raised: see `Inspection.errors`.

        seen = plugsft.api.inspect("my.toml", rows=1)
        print(seen.rows[0].trained_text, seen.warnings)
    """
    from .recipes import opened

    for name, number in (("rows", rows), ("first", first)):
        ensure_kind(name, number, int, "a whole number")
    with opened(recipe, plugins, without, overrides) as (_, loaded, active):
        from ..audit.inspect_data import opened_rows, views_of
        from ..audit.rows import audit, choose_ranges
        from .isolation import isolated

        with isolated(), opened_rows(loaded, active) as (work, sources):
            numbers = range(len(sources))
            views = [view for n in numbers for view in views_of(work, sources, n, first, rows)]
            ranges = [choose_ranges(len(source), everything) for source in sources]
            audits = [audit(work, sources, n, active, loaded.data, ranges[n]) for n in numbers]
            return Inspection(views, [*map(inspected_source, audits)])


def load_run(folder: PathLike) -> FinishedRun:
    """Return the run in an output folder, finished or not.

    run = plugsft.api.load_run("runs/my-model")
    run.metrics.tail()
    """
    ensure_kind("folder", folder, PathLike, "a run's output folder")
    run = FinishedRun(Path(folder))
    run.record  # noqa: B018  # raises if the folder holds no run
    return run


def generate(
    run: FinishedRun | PathLike, prompts: str | Sequence[str | Turns], **options: Any
) -> list[str]:
    """Return a model's answers to questions or chats, in their order.

    `run`: a run, its output folder, or a Hugging Face folder. `options`: those of
    `FinishedRun.generate`, such as system, max_tokens and temperature.

        plugsft.api.generate("runs/my-model", ["What is a checkpoint?"], max_tokens=64)
    """
    ensure_kind("run", run, FinishedRun | PathLike, "a run, or its output folder")
    finished = run if isinstance(run, FinishedRun) else FinishedRun(Path(run))
    return finished.generate(prompts, **options)
