"""LLaMA-Factory's keys, and its data sets: dataset_info.json, which lies in dataset_dir."""

from pathlib import Path

from ...base.errors import RecipeError, reason_of
from ...base.limits import read_json_object
from . import training
from .conversion import (
    KEYS,
    Conversion,
    Table,
    Tool,
    hold_out,
    part,
    rows_of,
    set_eval_source,
    set_sources,
    with_subset,
)

INFO = "dataset_info.json"
COLUMNS = KEYS["llamafactory"]["columns"]
"""Column in dataset_info.json -> plugsft's column."""
CHATS = ("messages", "conversations", "conversation")
"""Columns that plugsft reads as chats."""


def convert(c: Conversion) -> None:
    """Write the recipe."""
    stage, kind = c.read("stage", "sft"), c.read("finetuning_type", "lora")
    if c.settings.get("export_dir") and not c.get("dataset"):
        raise c.refuse("export_dir", "merges adapters; use `plugsft export MODEL --merge --to OUT`")
    if stage not in ("sft", "pt", "rm", "dpo", "kto"):
        reason = "plugsft trains on rows, and generates none while it trains; use LLaMA-Factory"
        raise c.refuse("stage", reason)
    if kind not in ("lora", "full"):
        raise c.refuse("finetuning_type", "plugsft trains all weights or LoRA; use one of them")
    c.require("model_name_or_path")
    if stage == "rm":
        c.set("plugins.reward", {}, "stage")
    elif stage in ("dpo", "kto"):
        c.copy(stage, "llamafactory")
        if c.get("pref_loss") == "simpo":
            c.copy("simpo", "llamafactory")
    _set_data(c)
    _set_texts(c)
    if kind == "lora":
        _set_lora(c)
    if c.get("quantization_bit"):
        training.set_quantization(c, c.read("quantization_bit", 4), "quantization_bit")
    training.set_training(c, "llamafactory")
    c.set("plugins.gradient_checkpointing", {})


def _set_texts(c: Conversion) -> None:
    """Write the longest example, packing, and the tokens that are trained."""
    longest, plain = c.read("cutoff_len", 2048), c.get("stage") == "pt"
    c.set("data.max_length", longest, "cutoff_len", comment="longer ones are cut at their end")
    if c.read("packing", plain) or c.read("neat_packing", False):
        training.set_packing(c, longest, "packing", "neat_packing")
        c.remarks.append(
            "packed examples attend to themselves alone; LLaMA-Factory lets them attend to each "
            "other, but for neat_packing: true"
        )
    if plain:
        c.set("data.train_on", "all", "stage", comment="every token")
    elif c.read("mask_history", False):
        c.set("data.train_on", "last", "mask_history")
    else:
        c.set("data.train_on", "assistant", comment="every answer")


def _set_lora(c: Conversion) -> None:
    """Write adapters; alpha is twice the rank by default."""
    rank = c.read("lora_rank", 8)
    c.set("plugins.lora.r", rank, "lora_rank")
    c.set("plugins.lora.alpha", c.read("lora_alpha", 2 * rank), "lora_alpha")
    c.copy("lora", "llamafactory")
    if c.get("stage") in ("dpo", "kto"):
        c.set("plugins.lora.dropout", 0.0, "lora_dropout")
    training.set_targets(c, "lora_target", ["all"])


def _set_data(c: Conversion) -> None:
    """Write the sources, their columns, and the rows that are held out."""
    c.require("dataset")
    names, evaluated = c.names("dataset"), c.names("eval_dataset")
    folder, info = _read_info(c)
    if not info:
        c.leave(
            "dataset",
            f"there is no {INFO} in {folder}, so file and columns are guesses; use data.source "
            "and [data.columns], or convert again where that file is",
        )
    parts = [_source(c, name, info, folder) for name in names]
    columns = [_columns_of(c, info[name]) for name in names if info]
    if columns and all(each == columns[0] for each in columns):
        if columns[0]:
            c.set("data.columns", columns[0], comment=f"columns of {INFO}")
    else:
        for part_of, own in zip(parts, columns, strict=False):
            part_of |= {"columns": own} if own else {}
    set_sources(c, parts, "dataset")
    size = c.read("val_size", 0.0)
    if evaluated:
        set_eval_source(c, [_source(c, name, info, folder) for name in evaluated], "eval_dataset")
    elif size:
        hold_out(c, "val_size", size)


def _read_info(c: Conversion) -> tuple[Path, Table]:
    """Return dataset_dir and what its dataset_info.json holds: from here, or from the file's."""
    named = c.read("dataset_dir", "data")
    folders = [Path(named), *(parent / named for parent in c.path.absolute().parents[:4])]
    folder = next((folder for folder in folders if (folder / INFO).is_file()), None)
    if folder is None:
        return Path(named), {}
    try:
        return folder, read_json_object(folder / INFO)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{folder / INFO}: {reason_of(error)}; correct it") from error


def _source(c: Conversion, name: str, info: Table, folder: Path) -> Table:
    """Return one source, cut at max_samples."""
    if info and name not in info:
        raise RecipeError(f"{c.path}: {INFO} of {folder} has no data set '{name}'; add it")
    entry = info.get(name, {})
    if {"images", "videos", "audios"} & entry.get("columns", {}).keys():
        raise c.refuse(
            "dataset", "plugsft trains on texts, not on images or sounds; use LLaMA-Factory"
        )
    hub = entry.get("hf_hub_url")
    place = str(folder / entry.get("file_name", f"{name}.json"))
    if hub:
        place = with_subset(hub, entry.get("subset"))
    split, limit = entry.get("split", "train"), c.read("max_samples", 0)
    rows = None if hub else rows_of(place)
    if limit and (rows is None or len(rows) > limit):
        split += f"[:{limit}]"
    return part(place, split)


def _columns_of(c: Conversion, entry: Table) -> dict[str, str]:
    """Return the columns that a data set names: ours -> theirs."""
    columns = {"messages": "conversations", **entry.get("columns", {})}
    chats = entry.get("formatting", "alpaca") in ("sharegpt", "openai")
    names = {COLUMNS[key]: name for key, name in columns.items() if key in COLUMNS}
    if chats and columns["messages"] not in CHATS:
        names["messages"] = columns["messages"]
    if entry.get("ranking"):
        names["prompt"] = columns["messages"] if chats else columns.get("prompt", "instruction")
        names.pop("instruction", None)
        if not chats:
            c.leave(
                "dataset",
                "LLaMA-Factory writes texts to compare as chats, and plugsft as they are; use "
                "messages in the columns prompt, chosen and rejected",
            )
    return {ours: theirs for ours, theirs in names.items() if ours != theirs}


TOOL = Tool("LLaMA-Factory", convert, ("shared", "trainer", "llamafactory"))
