"""LLaMA-Factory's data sets: dataset_info.json, which lies in dataset_dir."""

import json
from pathlib import Path
from typing import Any

from ...base.errors import RecipeError
from . import sources
from .conversion import Conversion
from .steps import count_rows

INFO = "dataset_info.json"
MAPPED = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "tools": "tools",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "label",
}
"""Column in dataset_info.json -> plugsft's column."""
SPEAKERS = {
    "role_tag": ("role", "from"),
    "content_tag": ("content", "value"),
    "user_tag": ("user", "human"),
    "assistant_tag": ("assistant", "gpt", "model"),
    "observation_tag": ("tool", "observation", "function_response"),
    "function_tag": ("function_call", "tool_call"),
    "system_tag": ("system",),
}
"""Tag -> the names that plugsft reads."""
MEDIA = ("images", "videos", "audios")
VISION = "plugsft trains on texts, not on images or sounds; use LLaMA-Factory for this run"
TEXT_PAIRS = (
    "LLaMA-Factory writes texts to compare as chats, and plugsft as they are; use messages in "
    "the columns prompt, chosen and rejected"
)


def data(c: Conversion) -> None:
    """Write the sources, their columns, and the rows of evaluations."""
    names = names_of(c, "dataset")
    if not names:
        raise RecipeError(f"{c.path}: names no data set to train on; set dataset")
    folder, info = read_info(c)
    parts = [_source(c, name, info.get(name, {}), folder, "dataset") for name in names]
    if info and (unknown := [name for name in names if name not in info]):
        raise RecipeError(f"{c.path}: {INFO} of {folder} has no data set '{unknown[0]}'; add it")
    if not info:
        c.leave(
            "dataset",
            f"there is no {INFO} in {folder}, so file and columns are guesses; use data.source "
            "and [data.columns], or convert again where that file is",
        )
    sources.set_sources(c, parts, "dataset")
    columns = _columns(c, [info[name] for name in names if name in info])
    if columns:
        c.set("data.columns", columns, comment=f"columns of {INFO}")
    _held_out(c, info, folder)


def names_of(c: Conversion, key: str, default: str = "") -> list[str]:
    """Return the names of a setting: a list, or a text with commas."""
    value = c.get(key) or default
    names = value.split(",") if isinstance(value, str) else value
    return [str(name).strip() for name in names if str(name).strip()]


def read_info(c: Conversion) -> tuple[Path, dict[str, Any]]:
    """Return dataset_dir and what its dataset_info.json holds: from here, or from the file's."""
    named = str(c.get("dataset_dir", "data"))
    folders = [Path(named), *(parent / named for parent in c.path.absolute().parents[:4])]
    folder = next((folder for folder in folders if (folder / INFO).is_file()), None)
    if folder is None:
        return Path(named), {}
    try:
        info = json.loads((folder / INFO).read_text("utf8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{folder / INFO}: is not JSON ({error}); correct it") from error
    return folder, info if isinstance(info, dict) else {}


def _source(
    c: Conversion, name: str, entry: dict[str, Any], folder: Path, key: str
) -> dict[str, Any]:
    """Return one source, cut at max_samples."""
    columns = entry.get("columns", {})
    if any(medium in columns for medium in MEDIA):
        raise c.refuse(key, VISION)
    if entry.get("subset"):
        c.leave(key, sources.CONFIG)
    for tag, value in entry.get("tags", {}).items():
        if value not in SPEAKERS.get(tag, ()):
            c.leave(key, f"{tag} {value}: rename it in the data to {' or '.join(SPEAKERS[tag])}")
    hub = entry.get("hf_hub_url")
    place = str(hub or folder / str(entry.get("file_name", f"{name}.json")))
    split = str(entry.get("split", "train"))
    limit = c.get("max_samples") or entry.get("num_samples")
    if limit:
        rows = None if hub else count(Path(place))
        split += f"[:{limit}]" if rows is None or rows > limit else ""
    return sources.part(place, split)


def count(path: Path) -> int | None:
    """Count the rows of a json or jsonl file."""
    if path.suffix == ".jsonl":
        return count_rows(path)
    try:
        return len(json.loads(path.read_text("utf8")))
    except (OSError, ValueError, TypeError):
        return None


def _columns(c: Conversion, entries: list[dict[str, Any]]) -> dict[str, str]:
    """Return data.columns; they are the same for all sources."""
    renamed: dict[str, str] = {}
    for entry in entries:
        columns = {"messages": "conversations"} | entry.get("columns", {})
        chats = entry.get("formatting", "alpaca") in ("sharegpt", "openai")
        names = {MAPPED[key]: name for key, name in columns.items() if key in MAPPED}
        if chats and columns["messages"] not in ("messages", "conversations", "conversation"):
            names["messages"] = columns["messages"]
        if entry.get("ranking"):
            names["prompt"] = columns["messages"] if chats else columns.get("prompt", "instruction")
            names.pop("instruction", None)
            if not chats:
                c.leave("dataset", TEXT_PAIRS)
        for ours, theirs in names.items():
            if renamed.setdefault(ours, theirs) != theirs:
                c.leave("dataset", f"the sources name '{ours}' differently; rename it in the data")
    return {ours: theirs for ours, theirs in renamed.items() if ours != theirs}


def _held_out(c: Conversion, info: dict[str, Any], folder: Path) -> None:
    names = names_of(c, "eval_dataset")
    if names:
        part = _source(c, names[0], info.get(names[0], {}), folder, "eval_dataset")
        c.set("eval.source", part["source"], "eval_dataset")
        if "split" in part:
            c.set("eval.split", part["split"], "eval_dataset")
        if len(names) > 1:
            c.leave("eval_dataset", "evaluations read one source; use one file for all")
    elif c.number("val_size", 0):
        sources.hold_out(c, "val_size", c.number("val_size", 0))
