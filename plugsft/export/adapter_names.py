"""Adapters of a class for text, under the names of the published class around it.

plugsft 0.1.0 trained transformers' class for text of a model that sees, as other tools do. A server
of the published model finds none of these adapters.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import Module

from ..base.errors import PlugsftError
from ..base.limits import read_json_object
from ..model.config import sees
from ..model.published import auto_class, build, read_config, taken_out
from ..output.folder import ADAPTER

WEIGHTS = "adapter_model.safetensors"
ROOT = "base_model.model."
"""What peft puts before the names of modules."""


def ensure_found(model: Any, folder: Path) -> None:
    """Refuse adapters whose modules a published model does not have; peft would leave them out."""
    if not taken_out(model) or not (folder / WEIGHTS).is_file():
        return
    opened: Any = safe_open(folder / WEIGHTS, "pt")
    lost = {*map(module_of, opened.keys())} - {name for name, _ in model.named_modules()}
    if lost:
        raise PlugsftError(
            f"{folder}: {type(model).__name__} has no module {min(lost)}: the adapters are for its "
            f"class for text. plugsft export {folder} --to FOLDER writes them under the published "
            "names"
        )


def module_of(name: str) -> str:
    """Return the module that a weight of an adapter is for."""
    return name.removeprefix(ROOT).partition(".lora_")[0].removesuffix(".base_layer")


def publish_names(folder: Path, base: str, revision: str | None, trusted: bool) -> str:
    """Rename the adapters in a folder, if their base was published as another class; name it."""
    options = {"revision": revision or "main", "trust_remote_code": trusted}
    try:
        config = read_config(base, options)
    except Exception:  # the hub may be out of reach, and a copy needs no base
        return ""
    if not sees(config):
        return ""
    with torch.device("meta"):
        whole: Any = auto_class(config).from_config(config, trust_remote_code=trusted)
        try:
            text = build(config, text_only=True, trust_remote_code=trusted)
        except ValueError:  # it has no class for text
            return ""
    prefixes, modules = common_modules(text, whole), {name for name, _ in whole.named_modules()}

    def rename(name: str) -> str:
        inner = name.removeprefix(ROOT)
        for old, new in prefixes.items():
            if module_of(name) not in modules and inner.startswith(old):
                return name.removesuffix(inner) + new + inner.removeprefix(old)
        return name

    weights = load_file(folder / WEIGHTS)
    renamed = {rename(name): weight for name, weight in weights.items()}
    if {*renamed} == {*weights}:
        return ""
    if lost := {*map(module_of, renamed)} - modules:
        raise PlugsftError(f"{folder}: {type(whole).__name__} has no module {min(lost)}")
    save_file(renamed, folder / WEIGHTS, {"format": "pt"})
    settings = read_json_object(folder / ADAPTER)
    parameters = [*map(rename, settings.get("target_parameters") or [])]
    owners = {name.rpartition(".")[0] for name in parameters}
    adapted = {module_of(name) for name in renamed if ".lora_" in name}
    settings |= {
        # Ends of names would match modules of the eyes, too.
        "target_modules": sorted(adapted - owners),
        "target_parameters": parameters or None,
        "modules_to_save": [*map(rename, settings.get("modules_to_save") or [])] or None,
    }
    (folder / ADAPTER).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf8")
    return str(type(whole).__name__)


def common_modules(text: Any, whole: Any) -> dict[str, str]:
    """Return the beginnings of names in decoder and head: in a class for text -> in the whole."""
    decoder = type(text.get_decoder())
    inside = next((module for module in whole.modules() if type(module) is decoder), None)
    heads = text.get_output_embeddings(), whole.get_output_embeddings()
    pairs = [heads, (text.get_decoder(), inside)]
    return {
        beginning_of(one, text): beginning_of(other, whole)
        for one, other in pairs
        if one is not None and other is not None
    }


def beginning_of(module: Module, model: Module) -> str:
    """Return how the names of what is in a module begin; "" for the model itself."""
    names = (name for name, other in model.named_modules() if other is module)
    return "".join(f"{name}." for name in names if name)
