"""The places that a recipe names: what it reads, and the folder that it writes."""

import fcntl
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import tomli_w

from ..base.atomic import foreign_files, is_published, writing
from ..base.console import say
from ..base.errors import PlugsftError, RecipeError, did_you_mean
from ..base.limits import parse_toml, read_json_object, read_text
from ..base.step_folders import newest_checkpoint, parse_step
from ..recipe.tables import TRL, Recipe
from .report import read_metrics, read_record

FILES = ("metrics.jsonl", "recipe.toml", "report.html", "run.json")
"""What a run writes, besides checkpoints/ and model/."""
ENDINGS = (".jsonl", ".json", ".parquet", ".arrow", ".jinja")
"""By these a name is known to be a file's, not one on the hub."""
PAGES = ('name="generator" content="plugsft"', "The page asks nothing of any network")
"""Signs of a page that plugsft wrote; the second in those of earlier versions."""
LOCK = ".lock"
ADAPTER = "adapter_config.json"
"""By this peft and transformers know a folder of adapters, which are for a model elsewhere."""


def ensure_inputs(recipe: Recipe, path: Path) -> None:
    """Refuse a recipe (the file `path`) that reads from places where nothing can be read."""
    if found := wrong_inputs(recipe, path):
        raise RecipeError([*found.values()])


def wrong_inputs(recipe: Recipe, path: Path) -> dict[str, str]:
    """Return what is wrong with the files and folders that a recipe reads, by their names."""
    results = [(recipe.folder / name).resolve() for name in ("checkpoints", "model", *FILES)]
    wrong = {}
    for key, name in _inputs(recipe):
        place = Path(name)
        apart = {recipe.folder.resolve(), place.resolve()}
        nested = any(one.is_relative_to(other) for one, other in permutations(apart, 2))
        if any(place.resolve().is_relative_to(result) for result in results):
            wrong[name] = (
                f"{key}: {name} is a result in this recipe's own output, which a new run removes; "
                "give another output"
            )
        elif key == "model.path" and place.is_dir() and (nested or len(apart) == 1):
            wrong[name] = (
                f"{key}: {name} and output = {recipe.output} are one folder, or one is inside the "
                "other; a run would write among the model's files: give another output"
            )
        elif (place / "run.json").is_file() and is_model(place / "model"):
            if key in ("model.path", "model.tokenizer"):
                wrong[name] = f"{key}: {name} is a run's folder; its model is {place / 'model'}"
        elif key == "model.path" and is_model(place) and not (place / "config.json").is_file():
            wrong[name] = (
                f"{key}: {name} holds adapters, and no whole model; make one of them and the model "
                f"they are for: plugsft export {shlex.quote(name)} --merge"
            )
        elif not place.exists() and _is_path(key, name, recipe):
            wrong[name] = f"{key}: {name}: no such file or folder{_instead(place, path)}"
            if key == "model.path" and name.count("/") == 1 and name[0] not in "./":
                wrong[name] += '; for the one on the hub, set model.revision = "main"'
            if key == "model.path" and (maker := _maker(place, path)):
                wrong[name] += f"; it is made by: plugsft {maker}"
    return wrong


def is_model(folder: Path) -> bool:
    """Tell whether a folder holds a model, whole or as adapters of another."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER))


def base_of(folder: Path) -> tuple[str, str | None]:
    """Return the model that adapters are for, and its revision."""
    try:
        config = read_json_object(folder / ADAPTER)
        base, revision = str(config["base_model_name_or_path"]), config.get("revision")
    except (ValueError, LookupError) as error:
        raise PlugsftError(f"{folder / ADAPTER}: names no model that it is for") from error
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise PlugsftError(
            f"{folder}: the model that its adapters are for is gone: {base}; move it back, or name "
            f"its new place in {folder / ADAPTER} (base_model_name_or_path)"
        )
    return base, revision


def near(place: Path) -> str:
    """Return "; did you mean 'x'?" for the name nearest to the first one that is missing."""
    while not place.parent.exists():
        place = place.parent
    others = place.parent.glob("*")
    known = [one.name for one in others if one.suffix in ENDINGS or one.is_dir()]
    return did_you_mean(place.name, known)


def _inputs(recipe: Recipe) -> Iterator[tuple[str, str]]:
    model, data = recipe.model, recipe.data
    places = {
        "model.path": model.path,
        "model.tokenizer": model.tokenizer,
        "model.chat_template": None if model.chat_template == TRL else model.chat_template,
        "data.tokens": data.tokens,
        # The rows of tokens that were prepared elsewhere need not be here.
        "data.source": None if data.tokens else data.source,
        "eval.source": recipe.eval and recipe.eval.source,
        **{
            f"data.sources.{n}.source": one.source
            for n, one in enumerate(() if data.tokens else data.sources or ())
        },
        **{
            f"plugins.{plugin}.{option}": value
            for plugin, options in recipe.plugins.items()
            for option, value in options.items()
            if isinstance(value, str) and Path(value[:255]).exists()
        },
    }
    return ((key, name) for key, name in places.items() if name)


def _is_path(key: str, name: str, recipe: Recipe) -> bool:
    """Tell whether a name means a file or folder: one on the hub has one slash at most."""
    if name.startswith((".", "/")) or name.count("/") > 1 or name.endswith(ENDINGS):
        return True
    if key == "model.path":
        return "/" in name and Path(name).parts[0] in os.listdir() and not recipe.model.revision
    return key == "model.chat_template"


def _instead(place: Path, recipe: Path) -> str:
    """Say what may be meant, and where a relative path was looked for."""
    home = recipe.absolute().parent
    if place.is_absolute() or home == Path.cwd():
        return near(place)
    hint = f"; did you mean '{home / place}'?" if (home / place).exists() else near(place)
    return f" in {Path.cwd()}, where relative paths begin{hint}"


def _maker(place: Path, recipe: Path) -> Path | None:
    """Return the recipe, of those beside this one, whose run leaves a model at a place."""
    for other in sorted(recipe.parent.glob("*.toml")):
        with suppress(OSError, ValueError):
            output = parse_toml(read_text(other)).get("output")
            if isinstance(output, str) and Path(output, "model") == place:
                return other
    return None


@contextmanager
def alone(recipe: Recipe) -> Iterator[None]:
    """Hold the output folder: a second run that writes into it would spoil both."""
    with writing(recipe.folder):
        recipe.folder.mkdir(parents=True, exist_ok=True)
        lock = (recipe.folder / LOCK).open("a")
    with lock:
        try:
            # The system lets go of it when we end, however we end.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(
                f"output: another run is writing into {recipe.output}; wait for its end, or give "
                "another folder (output=...)"
            ) from None
        except OSError:
            say(f"warning: {recipe.output} is on a file system without locks; keep other runs out")
        try:
            yield
        finally:
            if os.listdir(recipe.folder) == [LOCK]:
                # The recipe was refused: nothing stays behind.
                (recipe.folder / LOCK).unlink()
                recipe.folder.rmdir()


def is_held(folder: Path) -> bool:
    """Tell whether a run writes into an output folder right now."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no run has held it, or the file system has no locks
    return False


def ensure_ours(folder: Path) -> None:
    """Refuse an output where something else stands in the places of a run's results."""
    steps = folder / "checkpoints"
    others = foreign_files(folder / "model", sized=True)
    others += [steps] if steps.is_file() else []
    # A damaged checkpoint is ours, too: --resume goes on from the one before.
    others += [file for path in sorted(steps.glob("step-*")) for file in strange_files(path)]
    others += [folder / name for name in FILES if not is_result(folder / name)]
    if others:
        more = f" and {len(others) - 5:,} more" if others[5:] else ""
        raise RecipeError(
            f"output: {', '.join(map(str, others[:5]))}{more} {'were' if others[1:] else 'was'} "
            "not written by plugsft, or changed since, and a run would replace it; move it away, "
            "or give another folder (output=...)"
        )


def strange_files(path: Path) -> list[Path]:
    """Return the files in the place of a checkpoint that are not of one."""
    # Any other name is a user's own copy, which no run touches.
    return foreign_files(path) if parse_step(path) is not None else []


def is_result(path: Path) -> bool:
    """Tell whether a run may replace a file: it is not there, or a run wrote it."""
    if not path.exists():
        return True
    begin = beginning(path)
    if path.name == "run.json":
        return "format" in read_run(path.parent)
    if path.name == "metrics.jsonl":
        return not begin or begin.startswith('{"step": ')
    if path.name == "report.html":
        return is_page(begin)
    # A run writes its recipe beside its record, in a form that a person hardly writes.
    try:
        text = read_text(path)
        canonical = tomli_w.dumps(parse_toml(text)) == text
    except (OSError, ValueError):
        return False
    return canonical and "format" in read_run(path.parent)


def beginning(path: Path) -> str:
    """Return the first characters of a file."""
    try:
        with path.open("rb") as file:
            return file.read(2000).decode("utf8", errors="replace")
    except OSError:
        return "?"


def is_page(text: str) -> bool:
    """Tell whether a page's beginning says that plugsft wrote it."""
    return any(sign in text for sign in PAGES)


def ensure_page(path: Path, option: str) -> None:
    """Refuse to write a page in place of a file that plugsft did not write."""
    if not path.parent.is_dir():
        raise PlugsftError(f"{option}: {path.parent}: no such folder")
    if path.exists() and not is_page(beginning(path)):
        raise PlugsftError(
            f"{option}: {path} exists and was not written by plugsft; give another name"
        )


def leftovers(folder: Path) -> str:
    """Say what an earlier run left that a new one would remove, and the cure."""
    last = newest_checkpoint(folder / "checkpoints")
    steps = len([line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line])
    other = "start again with --overwrite, or choose another folder (output=...)"
    if is_published(folder / "model"):
        model, first = folder / "model", ""
        if (model / ADAPTER).is_file():
            model, first = folder / "merged", f"plugsft export {folder} --merge, then "
        return (
            f"a finished run: {other}. To train its model further, {first}set model.path = "
            f'"{model}" and another output'
        )
    if last:
        return f"checkpoints up to {last.name}: resume with --resume, {other}"
    return f"{steps:,} steps of a run without a checkpoint: {other}" if steps else ""


def is_finished(recipe: Recipe, checkpoint: Path) -> bool:
    """Tell whether a recipe's run came to its end, with this checkpoint."""
    folder, run = recipe.folder, read_run(recipe.folder)
    had = {one["name"]: one["options"] for one in run.get("plugins", [])}
    if run.get("status") != "finished" or not is_published(folder / "model"):
        return False
    if parse_step(checkpoint) != run["steps"]["total"]:
        return False
    if differing := sorted(
        name for name in {*had, *recipe.plugins} if had.get(name) != recipe.plugins.get(name)
    ):
        raise RecipeError(
            f"--resume: the run in {folder} is finished, and had other options of "
            f"{', '.join(f'plugins.{name}' for name in differing)}; undo the changes, or give "
            "another output"
        )
    return True


def read_run(folder: Path) -> dict[str, Any]:
    """Return a run's run.json; nothing, where there is none."""
    try:
        return read_record(folder)
    except (OSError, ValueError):
        return {}
