"""Checks of the files that a recipe reads, and of the output folder that it writes."""

import fcntl
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from ..base.atomic import (
    HOST_ID,
    damage,
    foreign_files,
    is_published,
    list_checkpoints,
    parse_step,
    read_manifest,
    writing,
)
from ..base.console import say
from ..base.errors import PlugsftError, RecipeError, did_you_mean
from ..base.limits import parse_toml, read_json_object, read_text
from ..checkpoint.same_run import LOCK, open_lock
from ..recipe.capabilities import Capability
from ..recipe.parse import flatten
from ..recipe.read import read
from ..recipe.tables import Recipe
from .metrics import SAMPLES, read_metrics
from .run_record import RunRecord

FILES = ("run.json", "metrics.jsonl", "recipe.toml", "report.html", SAMPLES)
"""Files of a run, besides checkpoints/ and model/."""
ENDINGS = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".jinja")
"""Endings of files; no name on the hub has them."""
PAGE = b'name="generator" content="plugsft"'
LINE = b'{"step": '
SIGNS = {"report.html": PAGE, "metrics.jsonl": LINE, SAMPLES: LINE}
"""What is in the first characters of a file that a run wrote."""
ADAPTER = "adapter_config.json"
"""The file that marks a folder of adapters, for peft and transformers."""


def ensure_inputs(recipe: Recipe, path: Path) -> None:
    """Refuse a recipe (the file `path`) with paths that it cannot read."""
    if problems := wrong_inputs(recipe, path):
        raise RecipeError([*problems.values()])


def warn_of_changes(folder: Path) -> None:
    """Warn of a folder of plugsft's that is not as it was written, as a quick check finds."""
    with suppress(ValueError):
        read_manifest(folder)
        if wrong := damage(folder, quick=True):
            say(f"warning: {folder}: {wrong}. If you have not changed it, copy the folder again")


def wrong_inputs(recipe: Recipe, path: Path) -> dict[str, str]:
    """The problems of what a recipe reads, by file name: `check` goes on with the other files."""
    wrong = {}
    for key, name in _inputs(recipe):
        warn_of_changes(Path(name))  # a model, adapters to go on from, a reference
        if problem := _problem(recipe, key, name, path):
            wrong[name] = f"{key}: {name}{problem}"
    return wrong


def _problem(recipe: Recipe, key: str, name: str, path: Path) -> str:
    place, output = Path(name), recipe.folder.resolve()
    source, is_model_path = place.resolve(), key == "model.path"
    results = (output / result for result in ("checkpoints", "model", *FILES))
    if any(source.is_relative_to(result.resolve()) for result in results):
        return (
            " is a result in this recipe's own output, which a new run removes; give another output"
        )
    nested = output.is_relative_to(source) or (is_model_path and source.is_relative_to(output))
    if nested and place.is_dir() and (is_model_path or key.endswith("source")):
        return (
            f" and output = {recipe.output} are one folder, or one is inside the other; a run "
            "would write among its files: give another output"
        )
    if (place / "run.json").is_file() and is_model(place / "model"):
        if key in ("model.path", "model.tokenizer"):
            return f" is a run's folder; its model is {place / 'model'}"
    elif is_model_path and is_model(place) and not (place / "config.json").is_file():
        return (
            " holds adapters, and no whole model; merge them into their base model: plugsft export "
            f"{shlex.quote(name)} --merge; or go on from them: set model.path to their base, and "
            f"their folder as adapter in {Capability.bundled('adapters').table}"
        )
    elif not place.exists() and _is_path(key, name, recipe):
        on_hub = is_model_path and name.count("/") == 1 and name[0] not in "./"
        cure = '; for the one on the hub, set model.revision = "main"' if on_hub else ""
        return f": no such file or folder{_hint(place, path)}{cure}"
    return ""


def is_model(folder: Path) -> bool:
    """Whether transformers or peft would load the folder."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER))


def base_model(folder: Path) -> tuple[str, str | None]:
    """The model that a folder of adapters is for, and its revision."""
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
    """A hint for the first part of a path that is missing: those behind it are missing anyway."""
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
        "eval.source": recipe.eval and recipe.eval.source,
    }
    if not data.tokens:  # tokens that were prepared on another machine do not need their source
        places["data.source"] = data.source
        for number, source in enumerate(data.sources or ()):
            places[f"data.sources.{number}.source"] = source.source
    if reference := recipe.provides("reference_model"):
        places[reference.key] = reference.value
    for key, value in flatten(recipe.plugins, "plugins.").items():
        if isinstance(value, str) and Path(value[:255]).exists():
            places[key] = value
    return ((key, name) for key, name in places.items() if name)


def _is_path(key: str, name: str, recipe: Recipe) -> bool:
    """Whether a name is a path: one on the hub has at most one slash, and no ending of a file."""
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
                if not (recipe.folder / "run.json").exists():
                    # The recipe was refused: leave what it has prepared, and no empty folder.
                    (recipe.folder / LOCK).unlink()
                    for folder in (recipe.folder / "tokens", recipe.folder):
                        with suppress(OSError):
                            folder.rmdir()


def is_locked(folder: Path) -> bool:
    """Whether a run writes into the folder now: a killed one has left its record as running."""
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
        names = ", ".join(map(str, foreign[:5]))
        more = f" and {len(foreign) - 5:,} more" if foreign[5:] else ""
        raise RecipeError(
            f"output: {names}{more}: not written by plugsft, or changed since, and a run would "
            "replace it; move it away (a run that resumes writes its own again), or give another "
            "folder (output=...)"
        )


def is_result(path: Path) -> bool:
    """Whether a run may replace a file: it does not exist, or a run wrote it."""
    if not path.exists():
        return True
    if path.name in SIGNS:
        return has_sign(path)
    recorded = bool(find_run(path.parent).format)
    if path.name == "run.json":
        return recorded
    with suppress(OSError, ValueError):
        text = read_text(path)
        # A run writes its recipe beside its record, in a format that nobody writes by hand.
        if tomli_w.dumps(parse_toml(text)) == text:
            return recorded or bool(list_checkpoints(path.parent / "checkpoints"))
    return False


def has_sign(path: Path) -> bool:
    """Whether plugsft wrote a page or lines of JSON, by the first characters: they may be large."""
    begin, sign = b"?", SIGNS.get(path.name, PAGE)
    with suppress(OSError), path.open("rb") as file:
        begin = file.read(2000)
    # A killed run leaves a part of its first line.
    return sign in begin or sign.startswith(begin)


def ensure_page(path: Path, option: str) -> None:
    """Refuse to replace a file that plugsft did not write by a page."""
    if not path.parent.is_dir():
        raise PlugsftError(f"{option}: {path.parent}: no such folder")
    if path.exists() and not has_sign(path):
        raise PlugsftError(
            f"{option}: {path} exists and was not written by plugsft; give another name"
        )


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The published checkpoint of the last step: half-written ones have no name yet."""
    return next(reversed(list_checkpoints(checkpoints)), None)


def describe_results(folder: Path) -> str:
    """Describe the results of an earlier run that a new one would remove, with the cure."""
    return ": ".join(filter(None, results_of(folder)))


def results_of(folder: Path) -> tuple[str, str]:
    """What an earlier run left, and the cure; empty texts if nothing."""
    last = newest_checkpoint(folder / "checkpoints")
    other = "start again with --overwrite, or choose another folder (output=...)"
    if is_published(folder / "model"):
        model, first = folder / "model", ""
        if (model / ADAPTER).is_file():
            model, first = folder / "merged", f"plugsft export {folder} --merge, then "
        other += f". To train its model further, {first}set model.path = "
        return "a finished run", f'{other}"{model}" and another output'
    if last:
        return f"checkpoints up to {last.name}", f"resume with --resume, {other}"
    steps = sum("loss" in line for line in read_metrics(folder / "metrics.jsonl"))
    return (f"{steps:,} steps of a run without a checkpoint", other) if steps else ("", "")


def read_run(folder: Path) -> RunRecord:
    """A run's record; run.json of a run that was killed is older than its last step."""
    path = folder / "run.json"
    try:
        facts = read_json_object(path)
        run = RunRecord.model_validate({**facts, "facts": facts, "folder": folder})
    except OSError as error:
        reason = "is no run's output: it has no readable run.json; name a run's output folder"
        if is_locked(folder):
            reason = "its run prepares its data, and has no record yet; try again in a while"
        elif not folder.is_dir():
            why = "is a file" if folder.exists() else f"no such folder{suggest_name(folder)}"
            reason = f"{why}; name a run's output folder"
        raise RecipeError(f"{folder}: {reason}") from error
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise RecipeError(
            f"{path}: was not written by this plugsft: {place}: {wrong['msg']}"
        ) from error
    except ValueError as error:
        raise RecipeError(
            f"{path}: is damaged: {error}; copy it again, or run its recipe again"
        ) from error
    if run.status != "running":
        return run
    steps = (line["step"] for line in run.metrics if "loss" in line)
    return as_of(run, max(steps, default=0), "running" if is_locked(folder) else "killed")


def as_of(run: RunRecord, step: int, status: str) -> RunRecord:
    """What was known of a run after a step; means of the whole run are left out."""
    known = run.model_copy(
        update={
            "status": status,
            "steps": run.steps.model_copy(update={"done": step}),
            "seconds": None,
            "throughput": {},
            "memory": {},
        }
    )
    known.metrics = [line for line in run.metrics if line["step"] <= step]
    return known


def read_recipe(folder: Path) -> dict[str, Any]:
    """The recipe as the run had it, with all defaults."""
    path = folder / "recipe.toml"
    if not path.is_file():
        raise RecipeError(
            f"{path}: is missing: a run keeps its recipe there; copy it back, or run again with "
            "--overwrite"
        )
    return read(path)


def find_run(folder: Path) -> RunRecord:
    """A run's record; an empty one if it cannot be read, where the record only adds to a text."""
    with suppress(RecipeError):
        return read_run(folder)
    return RunRecord(folder=folder, status="unknown")


def how_to_continue(folder: Path) -> str:
    """The command for a run that was killed: without a checkpoint it begins again."""
    option = "--resume" if newest_checkpoint(folder / "checkpoints") else "--overwrite"
    return f"plugsft {shlex.quote(str(folder / 'recipe.toml'))} {option}"
