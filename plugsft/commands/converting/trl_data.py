"""TRL's data sets: one name, a mixture, or alignment-handbook's mixer."""

from typing import Any

from ...base.errors import RecipeError
from . import sources
from .conversion import Conversion
from .training_keys import evaluates


def data(c: Conversion) -> None:
    """Write the sources, and the rows that are held out."""
    mixture = c.get("dataset_mixture", {})
    if c.get("datasets") or mixture:
        _mixture(c, "dataset_mixture.datasets" if mixture else "datasets")
    elif c.get("dataset_mixer"):
        split = next((name for name in c.get("dataset_splits", []) if "train" in name), "train")
        shares = c.get("dataset_mixer").items()
        parts = [sources.part(name, split, float(share)) for name, share in shares]
        sources.set_sources(c, parts, "dataset_mixer")
    elif c.get("dataset_name"):
        part = sources.part(c.get("dataset_name"), c.get("dataset_train_split"))
        sources.set_sources(c, [part], "dataset_name")
    else:
        raise RecipeError(f"{c.path}: names no data; set dataset_name or datasets")
    for key in ("dataset_config", "name"):
        if c.get(key) not in (None, "default"):
            c.leave(key, sources.CONFIG)
    if evaluates(c) != "no":
        _held_out(c)


def _mixture(c: Conversion, key: str) -> None:
    parts: list[dict[str, Any]] = []
    for index, item in enumerate(c.get(key)):
        place = f"{key}[{index}]"
        if item.get("config", item.get("name", "default")) not in (None, "default"):
            c.leave(f"{place}.config" if "config" in item else f"{place}.name", sources.CONFIG)
        if item.get("fraction") is not None:
            c.leave(
                f"{place}.fraction",
                "a share of the mixture; use the weight of the source, a share of its rows",
            )
        files = item.get("data_files") or item.get("path") or item.get("id")
        for name in files if isinstance(files, list) else [files]:
            parts.append(sources.part(name, item.get("split"), float(item.get("weight") or 1.0)))
    sources.set_sources(c, parts, key)


def _held_out(c: Conversion) -> None:
    size = c.first("dataset_mixture.test_split_size", "test_split_size")
    test = next((name for name in c.get("dataset_splits", []) if "train" not in name), None)
    if c.get(size) is not None:
        sources.hold_out(c, size, c.number(size, 0))
    elif "data.source" in c.lines:
        split = str(test or c.get("dataset_test_split", "test"))
        c.set("eval.split", split, "dataset_splits" if test else "dataset_test_split")
    else:
        c.leave(
            c.first("eval_strategy", "evaluation_strategy"),
            "a mixture has no split for evaluations; use eval.source and eval.split",
        )
