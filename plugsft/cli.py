"""The command line: `plugsft RECIPE` trains; every other command is named."""

import io
import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from . import __version__
from .base.console import print_error, say
from .base.errors import PlugsftError, RecipeError, Stopped, choices
from .base.for_commands import quiet_libraries, refusal_of
from .base.launch_files import explain_missing
from .commands import data, lab, model, recipes, show, train
from .commands.options import RECIPES
from .recipe.explain import elsewhere
from .recipe.tables import Recipe

MAIN_FIRST = 5.0
"""Seconds in which the main process prints an error of all ranks, and the launcher ends them."""


class _Plain:
    """Its help names values by their metavars; typer adds types, such as <list[str]>."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        for parameter in self.get_params(ctx):
            shown = parameter.metavar if parameter.param_type_name == "option" else None
            parameter.display_type_rich = lambda ctx, shown=shown: shown
        super().format_help(ctx, formatter)  # type: ignore[misc]  # of typer's class


class _Command(_Plain, TyperCommand):
    """Names the key of the recipe that somebody writes as an option: --learning_rate."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer has click's own class, or a copy of it
            option = getattr(error, "option_name", "")
            if key := elsewhere(option.lstrip("-").replace("-", "_"), Recipe):
                raise RecipeError(f"{option}: no such option; write {key}=...") from None
            raise


class _Commands(_Plain, TyperGroup):
    """For the shell's completion: a recipe may stand where a command stands."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        recipes = self.commands["train"].params[0].shell_complete(ctx, incomplete)
        return super().shell_complete(ctx, incomplete) + recipes

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if ctx.resilient_parsing and args[0].endswith(RECIPES):
            args = ["train", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="`plugsft RECIPE` trains. On several GPUs: plugsft launch RECIPE",
)

cache_app = typer.Typer(cls=_Commands, no_args_is_help=True, help="List and clean up cached data.")


def _print_version(requested: bool) -> None:
    if requested:
        say(f"plugsft {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Fine-tune language models: one readable loop, every optimisation a plugin."""


COMMANDS = (
    train.quickstart,
    recipes.init,
    recipes.convert,
    train.train,
    train.launch,
    data.fetch,
    data.prepare,
    recipes.check,
    data.inspect,
    recipes.plugins,
    show.show,
    show.diff,
    recipes.schema,
    model.chat,
    model.export,
    recipes.new_plugin,
    lab.bench,
    lab.tune,
    lab.plan,
)
for _command in COMMANDS:
    app.command(cls=_Command)(_command)
for _command in (data.ls, data.gc):
    cache_app.command(cls=_Command)(_command)
app.add_typer(cache_app, name="cache")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; print the user's mistakes without a traceback, and exit with their code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    quiet_libraries()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without UTF-8 shows codes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(with_command(words), prog_name="plugsft")
    except Exception as error:
        refused = error if isinstance(error, PlugsftError) else refusal_of(error)
        if refused is None:
            raise
        _leave(refused)


def with_command(words: list[str]) -> list[str]:
    """Insert `train` if the first word is a recipe instead of a command."""
    commands = [command.__name__.replace("_", "-") for command in COMMANDS] + ["cache"]
    if not words or words[0] in commands:
        return words
    first = words[0]
    if first.endswith(RECIPES) or Path(first).is_file():
        return ["train", *words]
    if first.startswith("-") or "=" in first:
        return ["train", *words] if any(word.endswith(RECIPES) for word in words) else words
    hint = choices(first, commands, "commands:")
    if Path(first).is_dir():
        hint = f", but a folder; try: plugsft show {shlex.quote(first)}"
    raise RecipeError(f"'{first}' is neither a command nor a recipe{hint}")


def _leave(error: PlugsftError) -> None:
    if os.environ.get("PLUGSFT_DEBUG") == "1":
        traceback.print_exception(error)
    if os.environ.get("RANK", "0") != "0":
        # If the main process has the same error, it prints it, and the launcher ends this process.
        # If this process still runs after the wait, only this rank failed.
        with suppress(KeyboardInterrupt):  # a third Ctrl-C
            time.sleep(MAIN_FIRST)
        if isinstance(error, Stopped):
            sys.exit(error.exit_code)  # on every rank, and printed by the main process
    lead = "" if isinstance(error, Stopped) else "error: "  # somebody wanted it
    for line in (*str(error).splitlines(), *getattr(error, "__notes__", ())):
        print_error(f"{lead}{line}")
    for line in explain_missing(str(error)):
        print_error(line)
    sys.exit(error.exit_code)
