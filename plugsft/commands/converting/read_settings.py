"""Read a configuration file: YAML, JSON, or the words of a shell line."""

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from ...base.errors import RecipeError, did_you_mean, reason_of
from ...base.limits import TABLES, NestedTooDeep, read_text
from ...recipe.read_yaml import MOST_VALUES
from .conversion import flat

TOOLS = {"axolotl": "axolotl", "llamafactory": "LLaMA-Factory", "trl": "TRL"}
"""Value of --from -> the tool's name."""
MARKS = {
    "axolotl": {
        *("base_model", "sequence_len", "micro_batch_size", "num_epochs", "adapter", "datasets"),
        *("sample_packing", "optimizer", "lr_scheduler", "val_set_size"),
    },
    "llamafactory": {
        *("finetuning_type", "stage", "template", "cutoff_len", "dataset", "dataset_dir"),
        *("lora_rank", "lora_target", "preprocessing_num_workers", "overwrite_cache", "plot_loss"),
    },
    "trl": {
        *("dataset_name", "dataset_train_split", "max_length", "max_seq_length", "dataset_mixture"),
        *("dataset_mixer", "use_peft", "lora_r", "torch_dtype", "dtype", "completion_only_loss"),
        *("assistant_only_loss", "dataset_num_proc", "datasets", "loss_type"),
    },
}
"""Tool -> keys that tell it from the others."""


def read_settings(path: Path) -> tuple[dict[str, Any], str]:
    """Return the settings of a file, and the trainer that a shell line names."""
    try:
        text = read_text(path)
        words = shell_words(text)
        if words:
            return read_words(words, path)
        if path.suffix == ".json":
            settings = json.loads(text, object_pairs_hook=_object)
        else:
            settings = yaml.load(text, _Loader)  # a SafeLoader
        ensure_small(settings)
        if isinstance(settings, dict):
            json.dumps(settings, default=str, ensure_ascii=False).encode()
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({reason_of(error)})") from error
    except (TypeError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{path}: cannot be read as YAML or JSON: {reason_of(error)}") from error
    if not isinstance(settings, dict) or not settings:
        raise RecipeError(f"{path}: has no settings; name a configuration file of {_names()}")
    return {str(key): value for key, value in settings.items()}, ""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Loads YAML; refuses keys that are written twice, of which the last would win silently."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node, seen = super().compose_mapping_node(anchor), set[str]()
        for name in [name for name, _ in node.value if isinstance(name, yaml.ScalarNode)]:
            if name.value in seen:
                line = name.start_mark.line + 1
                raise ValueError(f"{name.value} is written twice, again at line {line}; remove one")
            seen.add(name.value)
        return node


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON; refuse keys that are written twice."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{name} is written twice; remove one")
    return dict(pairs)


def ensure_small(settings: Any) -> None:
    """Refuse settings that are nested too deeply, or whose aliases (*name) repeat too much."""
    if sum(1 for _ in islice(values(settings), MOST_VALUES + 1)) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values, as its aliases repeat them")


def values(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield a value, and all values inside it."""
    if depth > TABLES:
        raise NestedTooDeep(f"nested deeper than {TABLES} levels")
    yield value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from values(inner, depth + 1)


def shell_words(text: str) -> list[str]:
    """Return the words of a file that holds one command with options, else nothing."""
    joined = text.replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines()]
    commands = [line for line in lines if line and not line.startswith("#") and " --" in line]
    return shlex.split(commands[0]) if len(commands) == 1 and "\n-" not in text else []


def read_words(words: list[str], path: Path) -> tuple[dict[str, Any], str]:
    """Read options of a shell line, and the file that --config names."""
    settings: dict[str, Any] = {}
    options = [(index, word) for index, word in enumerate(words) if word.startswith("--")]
    for (index, word), (stop, _) in zip(options, [*options[1:], (len(words), "")], strict=True):
        key, sign, value = word[2:].partition("=")
        values = [value] if sign else words[index + 1 : stop]
        read = [yaml.safe_load(each) for each in values]
        key = key.replace("-", "_")
        if not read and key.startswith("no_"):
            settings[key.removeprefix("no_")] = False
        else:
            settings[key] = read[0] if len(read) == 1 else read or True
    before = words[: options[0][0]] if options else words
    trainer = next((word for word in before if word in TRAINERS), "")
    config = settings.pop("config", None)
    if isinstance(config, str):
        file = Path(config) if Path(config).exists() else path.parent / config
        settings = read_settings(file)[0] | settings
    return settings, trainer


TRAINERS = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "distillation")
"""Commands of `trl`."""


def tool_of(settings: Mapping[str, Any], path: Path, named: str) -> str:
    """Return the tool that a configuration is for: the one named, or that of its keys."""
    if named:
        if named not in TOOLS:
            hint = did_you_mean(named, TOOLS) or f"; choose one of {', '.join(TOOLS)}"
            raise RecipeError(f"--from {named}: is not known{hint}")
        return named
    if {"model", "train"} <= settings.keys() and isinstance(settings["train"], dict):
        raise RecipeError(f"{path}: is a recipe of plugsft already; run `plugsft check {path}`")
    keys = {key.split(".")[0].split("[")[0] for key, _ in flat(settings)}
    counts = {tool: len(keys & marks) for tool, marks in MARKS.items()}
    best = max(counts, key=counts.__getitem__)
    if not counts[best] or list(counts.values()).count(counts[best]) > 1:
        raise RecipeError(
            f"{path}: its keys are not those of {_names()}; name its tool with --from "
            f"{'|'.join(TOOLS)}"
        )
    return best


def _names() -> str:
    return "axolotl, LLaMA-Factory or TRL"
