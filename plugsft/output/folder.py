"""Checks of the files that a recipe reads, and of the output folder that it writes."""

import fcntl
import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w

from ..base.atomic import (
    HOST_ID,
    foreign_files,
    is_published,
    list_checkpoints,
    parse_step,
    warn_of_changes,
    writing,
)
from ..base.console import say
from ..base.errors import PlugsftError, RecipeError, did_you_mean, reason_of
from ..base.limits import parse_json, parse_toml, read_json_object, read_text
from ..checkpoint.same_run import LOCK, open_lock
from ..recipe.capabilities import Capability
from ..recipe.tables import Recipe
from .metrics import SAMPLES, read_metrics
from .run_record import RunRecord

FILES = ("metrics.jsonl", "recipe.toml", "report.html", "run.json", SAMPLES)
"""Files of a run, besides checkpoints/ and model/."""
ENDINGS = (".jsonl", ".json", ".parquet", ".arrow", ".jinja")
"""Endings of files; no name on the hub has them."""
PAGE = 'name="generator" content="plugsft"'
"""The sign of a page that plugsft wrote."""
ADAPTER = "adapter_config.json"
"""The file that marks a folder of adapters, for peft and transformers."""


def ensure_inputs(recipe: Recipe, path: Path) -> None:
    """Refuse a recipe (the file `path`) with paths that it cannot read."""
    if problems := wrong_inputs(recipe, path):
        raise RecipeError([*problems.values()])


def wrong_inputs(recipe: Recipe, path: Path) -> dict[str, str]:
    """Return the problems of the files and folders that a recipe reads, by their names."""
    output = recipe.folder.resolve()
    results = [output / name for name in ("checkpoints", "model", *FILES)]
    wrong = {}
    for key, name in _inputs(recipe):
        place = Path(name)
        warn_of_changes(place)  # a model, adapters to go on from, a reference
        source = place.resolve()
        nested = source.is_relative_to(output) or output.is_relative_to(source)
        if any(source.is_relative_to(result.resolve()) for result in results):
            wrong[name] = (
                f"{key}: {name} is a result in this recipe's own output, which a new run removes; "
                "give another output"
            )
        elif key == "model.path" and place.is_dir() and nested:
            wrong[name] = (
                f"{key}: {name} and output = {recipe.output} are one folder, or one is inside the "
                "other; a run would write among the model's files: give another output"
            )
        elif (place / "run.json").is_file() and is_model(place / "model"):
            if key in ("model.path", "model.tokenizer"):
                wrong[name] = f"{key}: {name} is a run's folder; its model is {place / 'model'}"
        elif key == "model.path" and is_model(place) and not (place / "config.json").is_file():
            wrong[name] = (
                f"{key}: {name} holds adapters, and no whole model; merge them into their base "
                f"model: plugsft export {shlex.quote(name)} --merge; or go on from them: set "
                "model.path to their base, and their folder as adapter in "
                + Capability.bundled("adapters").table
            )
        elif not place.exists() and _is_path(key, name, recipe):
            wrong[name] = f"{key}: {name}: no such file or folder{_hint(place, path)}"
            if key == "model.path" and name.count("/") == 1 and name[0] not in "./":
                wrong[name] += '; for the one on the hub, set model.revision = "main"'
    return wrong


def is_model(folder: Path) -> bool:
    """Tell whether a folder holds a model or adapters."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER))


def base_model(folder: Path) -> tuple[str, str | None]:
    """Return the base model of a folder of adapters, and its revision."""
    try:
        config = read_json_object(folder / ADAPTER)
        base, revision = str(config["base_model_name_or_path"]), config.get("revision")
    except (ValueError, LookupError) as error:
        raise PlugsftError(f"{folder / ADAPTER}: names no base model") from error
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise PlugsftError(
            f"{folder}: the model that its adapters are for is gone: {base}; move it back, or name "
            f"its new place in {folder / ADAPTER} (base_model_name_or_path)"
        )
    return base, revision


def suggest_name(path: Path) -> str:
    """Return "; did you mean 'x'?" for the first missing part of a path."""
    while not path.parent.exists():
        path = path.parent
    siblings = path.parent.glob("*")
    names = [other.name for other in siblings if other.suffix in ENDINGS or other.is_dir()]
    return did_you_mean(path.name, names)


def _inputs(recipe: Recipe) -> Iterator[tuple[str, str]]:
    model, data = recipe.model, recipe.data
    places = {
        "model.path": model.path,
        "model.tokenizer": model.tokenizer,
        "model.chat_template": model.template_file,
        "data.tokens": data.tokens,
        # Tokens that were prepared on another machine do not need their source.
        "data.source": None if data.tokens else data.source,
        "eval.source": recipe.eval and recipe.eval.source,
        **{
            f"data.sources.{n}.source": source.source
            for n, source in enumerate(() if data.tokens else data.sources or ())
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
    """Tell whether a name is a path; a name on the hub has at most one slash."""
    if "://" in name and key.endswith("source"):
        return False
    if name.startswith((".", "/")) or name.count("/") > 1 or name.endswith(ENDINGS):
        return True
    if key == "model.path":
        return "/" in name and Path(name).parts[0] in os.listdir() and not recipe.model.revision
    return key == "model.chat_template"


def _hint(place: Path, recipe: Path) -> str:
    """Suggest a path that exists, and name the folder where a relative path begins."""
    home = recipe.absolute().parent
    if place.is_absolute() or home == Path.cwd():
        return suggest_name(place)
    exists = (home / place).exists()
    hint = f"; did you mean '{home / place}'?" if exists else suggest_name(place)
    return f" in {Path.cwd()}, where relative paths begin{hint}"


@contextmanager
def lock_output(recipe: Recipe) -> Iterator[None]:
    """Lock the output folder: no second run may write into it."""
    with writing(recipe.folder):
        recipe.folder.mkdir(parents=True, exist_ok=True)
        lock = open_lock(recipe.folder)
    with lock:
        try:
            # The system releases the lock when the process ends, for any reason.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(
                f"output: another run is writing into {recipe.output}; wait for its end, or give "
                "another folder (output=...)"
            ) from None
        except OSError:
            say(f"warning: {recipe.output} is on a file system without locks; start no second run")
        with writing(recipe.folder):
            # Other machines compare it: all must see this folder.
            lock.truncate(0)
            print(HOST_ID, os.getpid(), time.time_ns(), end="", file=lock, flush=True)
        try:
            yield
        finally:
            # If the folder was moved or unmounted, the run's own error says so.
            with suppress(OSError):
                if os.listdir(recipe.folder) == [LOCK]:
                    # The recipe was refused: remove the empty folder.
                    (recipe.folder / LOCK).unlink()
                    recipe.folder.rmdir()


def is_locked(folder: Path) -> bool:
    """Tell whether a run is writing into an output folder."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no run has locked it, or the file system has no locks
    return False


def ensure_ours(folder: Path) -> None:
    """Refuse an output in which a run would replace files that plugsft did not write."""
    checkpoints = folder / "checkpoints"
    foreign = foreign_files(folder / "model", sized=True)
    foreign += [checkpoints] if checkpoints.is_file() else []
    for path in sorted(checkpoints.glob("step-*")):
        # Folders with other names are the user's own copies, which no run changes.
        if parse_step(path) is not None:
            foreign += foreign_files(path)
    foreign += [folder / name for name in FILES if not is_result(folder / name)]
    if foreign:
        more = f" and {len(foreign) - 5:,} more" if foreign[5:] else ""
        names = ", ".join(f"{path}{_damage(path)}" for path in foreign[:5])
        raise RecipeError(
            f"output: {names}{more} {'were' if foreign[1:] else 'was'} "
            "not written by plugsft, or changed since, and a run would replace it; move it away "
            "(a run that resumes writes its own again), or give another folder (output=...)"
        )


def _damage(path: Path) -> str:
    """Return where a result cannot be parsed, in brackets."""
    parse = {"run.json": parse_json, "recipe.toml": parse_toml}.get(path.name)
    try:
        if parse:
            parse(read_text(path))
    except (OSError, ValueError) as error:
        return f" ({reason_of(error)})"
    return ""


def is_result(path: Path) -> bool:
    """Tell whether a run may replace a file: it does not exist, or a run wrote it."""
    if not path.exists():
        return True
    begin = read_beginning(path)
    if path.name == "run.json":
        return bool(find_run(path.parent).format)
    if path.name in ("metrics.jsonl", SAMPLES):
        return not begin or re.search(r'^\{"step": ', begin, re.M) is not None
    if path.name == "report.html":
        return is_page(begin)
    # A run writes its recipe next to its record, in a format that nobody writes by hand.
    try:
        text = read_text(path)
        canonical = tomli_w.dumps(parse_toml(text)) == text
    except (OSError, ValueError):
        return False
    own = find_run(path.parent).format or list_checkpoints(path.parent / "checkpoints")
    return canonical and bool(own)


def read_beginning(path: Path) -> str:
    """Return the first characters of a file."""
    try:
        with path.open("rb") as file:
            return file.read(2000).decode("utf8", errors="replace")
    except OSError:
        return "?"


def is_page(text: str) -> bool:
    """Tell from a page's beginning whether plugsft wrote it."""
    return PAGE in text


def ensure_page(path: Path, option: str) -> None:
    """Refuse to replace a file that plugsft did not write by a page."""
    if not path.parent.is_dir():
        raise PlugsftError(f"{option}: {path.parent}: no such folder")
    if path.exists() and not is_page(read_beginning(path)):
        raise PlugsftError(
            f"{option}: {path} exists and was not written by plugsft; give another name"
        )


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """Return the published checkpoint of the last step, if any."""
    return next(reversed(list_checkpoints(checkpoints)), None)


def describe_results(folder: Path) -> str:
    """Describe the results of an earlier run that a new one would remove, with the cure."""
    return ": ".join(filter(None, results_of(folder)))


def results_of(folder: Path) -> tuple[str, str]:
    """Return what an earlier run left, and the cure; empty texts if nothing."""
    last = newest_checkpoint(folder / "checkpoints")
    steps = len([line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line])
    other = "start again with --overwrite, or choose another folder (output=...)"
    if is_published(folder / "model"):
        model, first = folder / "model", ""
        if (model / ADAPTER).is_file():
            model, first = folder / "merged", f"plugsft export {folder} --merge, then "
        other += f". To train its model further, {first}set model.path = "
        return "a finished run", f'{other}"{model}" and another output'
    if last:
        return f"checkpoints up to {last.name}", f"resume with --resume, {other}"
    return (f"{steps:,} steps of a run without a checkpoint", other) if steps else ("", "")


def read_run(folder: Path) -> RunRecord:
    """Return a run's record; that of a run which has not ended is as of its last step."""
    if not folder.is_dir():
        why = "is a file" if folder.exists() else f"no such folder{suggest_name(folder)}"
        raise RecipeError(f"{folder}: {why}; name a run's output folder")
    try:
        run = RunRecord.read(folder)
    except OSError as error:
        raise RecipeError(
            f"{folder}: is no run's output: it has no readable run.json; name a run's output folder"
        ) from error
    except ValueError as error:
        raise RecipeError(
            f"{folder / 'run.json'}: is damaged: {error}; copy it again, or run its recipe again"
        ) from error
    if run.status != "running":
        return run
    steps = (line["step"] for line in run.metrics if "loss" in line)
    return as_of(run, max(steps, default=0), "running" if is_locked(folder) else "killed")


def as_of(run: RunRecord, step: int, status: str) -> RunRecord:
    """Return what was known of a run after a step."""
    known: dict[str, Any] = {"status": status, "seconds": None, "throughput": {}, "memory": {}}
    known["facts"] = run.facts | {"status": status}
    known["steps"] = run.steps.model_copy(update={"done": step})
    series = {name: dict(run.series.get(name, [])) for name in ("loss", "eval_loss")}
    known["final"] = {name: points.get(step) for name, points in series.items()}
    return run.model_copy(update=known)


def find_run(folder: Path) -> RunRecord:
    """Return a run's record; an empty one if it cannot be read."""
    with suppress(RecipeError):
        return read_run(folder)
    return RunRecord(folder=folder, status="unknown")


def how_to_continue(folder: Path) -> str:
    """Return the command that continues a run which was killed."""
    option = "--resume" if newest_checkpoint(folder / "checkpoints") else "--overwrite"
    return f"plugsft {shlex.quote(str(folder / 'recipe.toml'))} {option}"
