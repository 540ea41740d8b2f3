"""The command line: `plugsft RECIPE` trains; every other command is named."""

import errno
import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .arguments import Overrides, RecipeFile, Trusted, Without
from .base.console import print_error, say
from .base.errors import PlugsftError, RecipeError, Stopped, did_you_mean
from .measuring import measuring

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="`plugsft RECIPE` trains. On several processes: accelerate launch -m plugsft RECIPE",
)

AUTO = "--resume-auto"
"""The internal flag for `--resume auto`."""
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Refusals of the operating system, whose own message is enough."""

cache = typer.Typer(no_args_is_help=True, help="List, explain and clean cached data.")

CacheFolder = Annotated[
    Path | None,
    typer.Option(help="Default: $PLUGSFT_CACHE, or ~/.cache/plugsft.", show_default=False),
]


def _say_version(asked: bool) -> None:
    if asked:
        say(f"plugsft {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Fine-tune language models: SFT in one readable loop, every optimisation a plugin."""


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume from the latest checkpoint; --resume auto starts if there is none.",
        ),
    ] = False,
    resume_auto: Annotated[bool, typer.Option(AUTO, hidden=True)] = False,
    resume_from: Annotated[
        Path | None, typer.Option(help="Resume from this checkpoint.", show_default=False)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove what an earlier run left in the output.")
    ] = False,
) -> None:
    """Train. The same as `plugsft RECIPE`."""
    from .commands import train

    train.train(recipe, overrides or [], without or [], resume, resume_from, overwrite, resume_auto)


@app.command()
def prepare(recipe: RecipeFile, overrides: Overrides = None, without: Without = None) -> None:
    """Tokenize a recipe's data ahead of training."""
    from .commands import train

    train.prepare(recipe, overrides or [], without or [])


@app.command()
def check(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Processes it will be launched with.", show_default=False),
    ] = None,
) -> None:
    """Find mistakes in recipe, plugins, data and disk before training."""
    from .commands.audit import recipe as check

    check.check(recipe, overrides or [], without or [], ranks)


@app.command()
def inspect(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 3,
    first: Annotated[int, typer.Option(min=0, help="The first row to show.")] = 0,
    everything: Annotated[
        bool, typer.Option("--all", help="Look at every row, not at a sample of 1,000.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write it all as a page, too.", show_default=False)
    ] = None,
) -> None:
    """Show rows as the model will see them, and audit the data before it costs anything."""
    from .commands.audit import inspect as inspection

    inspection.inspect(recipe, overrides or [], without or [], rows, first, everything, html)


@app.command()
def plugins(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="A recipe in TOML.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    without: Without = None,
) -> None:
    """List the plugins; with a recipe, who answers and wraps each hook."""
    if recipe is None:
        from .commands import listing

        listing.list_plugins()
    else:
        from .commands import overview

        overview.list_hooks(recipe, overrides or [], without or [])


@app.command()
def show(
    place: Annotated[
        Path, typer.Argument(metavar="PLACE", help="A recipe, or a run's output folder.")
    ],
    overrides: Overrides = None,
) -> None:
    """Show a recipe with all its defaults, or the results of a run."""
    if place.is_dir():
        from .commands import listing

        listing.show_run(place)
    else:
        from .commands import overview

        overview.show_recipe(place, overrides or [])


@app.command()
def diff(
    first: Annotated[
        Path, typer.Argument(metavar="RUN_A", help="A run's output folder.", show_default=False)
    ],
    second: Annotated[
        Path, typer.Argument(metavar="RUN_B", help="Another run's.", show_default=False)
    ],
    html: Annotated[
        Path | None,
        typer.Option(help="Write it as a page, with both runs' curves.", show_default=False),
    ] = None,
) -> None:
    """Compare two runs: recipe, versions, data and results."""
    from .commands.runs import diff

    diff.diff(first, second, html)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes, plugins included, for editors."""
    from .commands import listing

    listing.schema()


@app.command()
def chat(
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="A run's output folder, or a model's.")
    ],
    ask: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Ask this, print the answer, and end.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 always takes the likeliest token.")
    ] = 0.0,
    trust_remote_code: Trusted = False,
) -> None:
    """Talk to a trained model."""
    from .commands import chat

    chat.chat(output, ask or [], max_tokens, temperature, trust_remote_code)


@app.command()
def export(
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT", help="A run's output folder, a model's, or a checkpoint's."
        ),
    ],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge adapters into their base model.")
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="A new folder; OUTPUT/merged with --merge.", show_default=False
        ),
    ] = None,
    without: Without = None,
    trust_remote_code: Trusted = False,
) -> None:
    """Copy a trained model, or make one from a checkpoint; or merge adapters."""
    from .commands import export

    export.export(output, merge, to, without or [], trust_remote_code)


@app.command()
def new_plugin(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Its name in recipes: lower case, underscores.")
    ],
    folder: Annotated[Path, typer.Option(help="Where to make its folder.")] = Path(),
) -> None:
    """Write the skeleton of a plugin of your own, with its test."""
    from .commands import new_plugin as skeleton

    skeleton.new_plugin(name, folder)


@cache.command()
def ls(folder: CacheFolder = None) -> None:
    """List the entries, the last used first."""
    from .commands import cache

    cache.ls(folder)


@cache.command()
def explain(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    folder: CacheFolder = None,
) -> None:
    """Say whether a recipe's data is cached, and if not, what differs from the entries."""
    from .commands import cache

    cache.explain(recipe, overrides or [], without or [], folder)


@cache.command()
def gc(
    folder: CacheFolder = None,
    keep_days: Annotated[
        float | None,
        typer.Option(min=0, help="Remove entries unused for this many days.", show_default=False),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Remove the longest unused until the rest is within 20GiB, 500MB, ...",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be removed; remove nothing.")
    ] = False,
) -> None:
    """Remove unfinished builds of dead processes and, if asked to, unused entries."""
    from .commands import cache

    cache.gc(folder, keep_days, max_size, dry_run)


@cache.command()
def verify(
    folder: CacheFolder = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove damaged entries.")] = False,
) -> None:
    """Read every byte of every entry; one that is damaged ends with exit code 2."""
    from .commands import cache

    cache.verify(folder, remove)


app.add_typer(cache, name="cache")
app.registered_commands += measuring.registered_commands


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; mistakes end with one line each and exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(with_auto(with_command(words)), prog_name="plugsft")
    except PlugsftError as error:
        _leave(error)
    except OSError as error:
        # For a full disk or a missing permission the system's message is enough. An error with
        # notes comes from a plugin or names rows, and needs its traceback.
        if error.errno not in REFUSED or hasattr(error, "__notes__"):
            raise
        refused = PlugsftError(f"{error.filename or 'disk'}: {error.strerror}")
        refused.__cause__ = error
        _leave(refused)


def with_command(words: list[str]) -> list[str]:
    """Put `train` before a recipe that stands in a command's place."""
    commands = [
        command.name or command.callback.__name__.replace("_", "-")
        for command in app.registered_commands
        if command.callback
    ] + [str(group.name) for group in app.registered_groups]
    if not words or words[0] in commands:
        return words
    first = words[0]
    if first.endswith(".toml") or Path(first).is_file():
        return ["train", *words]
    if first.startswith("-") or "=" in first:
        return ["train", *words] if any(word.endswith(".toml") for word in words) else words
    hint = did_you_mean(first, commands) or f"; commands: {', '.join(commands)}"
    if Path(first).is_dir():
        hint = f" but a folder; try: plugsft show {shlex.quote(first)}"
    raise RecipeError(f"'{first}' is neither a command nor a recipe{hint}")


def with_auto(words: list[str]) -> list[str]:
    """Write `--resume auto` as one word: an option is a flag or takes a value, never both."""
    if words[:1] != ["train"]:
        return words
    joined: list[str] = []
    for word in words:
        if word == "--resume=auto" or (word == "auto" and joined[-1] == "--resume"):
            joined = [*joined[: -1 if word == "auto" else None], AUTO]
        else:
            joined.append(word)
    return joined


def _leave(error: PlugsftError) -> None:
    if os.environ.get("PLUGSFT_DEBUG") == "1":
        traceback.print_exception(error)
    if os.environ.get("RANK", "0") != "0":
        # Only the main process speaks. Most mistakes are everyone's, and it ends us all; if we
        # are still here after a while, this one was ours alone.
        time.sleep(5)
        if isinstance(error, Stopped):
            sys.exit(error.exit_code)  # all ranks have this error, and the main process printed it
    for line in (*str(error).splitlines(), *getattr(error, "__notes__", ())):
        print_error(f"error: {line}")
    sys.exit(error.exit_code)
