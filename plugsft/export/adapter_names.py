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

from ..base.errors import PlugsftError
from ..base.limits import read_json_object
from ..model.config import sees
from ..model.published import build, read_config, taken_out
from ..output.folder import ADAPTER

WEIGHTS = "adapter_model.safetensors"
ROOT = "base_model.model."
"""What peft puts before the names of modules."""


def ensure_found(model: Any, folder: Path) -> None:
    """Refuse adapters whose modules a published model does not have; peft would leave them out."""
    if not taken_out(model) or not (folder / WEIGHTS).is_file():
        return
    opened: Any = safe_open(folder / WEIGHTS, "pt")
    names = [*opened.keys()]
    adapted = {module_of(name) for name in names if ".lora_" in name}
    lost = adapted - {name for name, _ in model.named_modules()}
    if lost:
        raise PlugsftError(
            f"{folder}: {type(model).__name__} has no module {min(lost)}: the adapters are for its "
            f"class for text. plugsft export {folder} --to FOLDER writes them under the published "
            "names"
        )


def module_of(name: str) -> str:
    """Return the module that a weight of an adapter is for."""
    name = name.removeprefix(ROOT).removesuffix(".weight").partition(".token_adapter.")[0]
    return name.partition(".lora_")[0].removesuffix(".base_layer")


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
        model = build(config, trust_remote_code=trusted)
    modules = [name for name, _ in model.named_modules()]

    def rename(name: str) -> str:
        module = module_of(name)
        tail = module.removeprefix("model.")
        found = [one for one in modules if f".{one}".endswith(f".{tail}")]
        return name if module in modules or not found else name.replace(module, found[0])

    weights = load_file(folder / WEIGHTS)
    renamed = {rename(name): weight for name, weight in weights.items()}
    if {*renamed} == {*weights}:
        return ""
    save_file(renamed, folder / WEIGHTS, {"format": "pt"})
    settings = read_json_object(folder / ADAPTER)
    # Ends of names would match modules of the eyes, too.
    adapted = {module_of(name) for name in renamed if ".lora_" in name}
    owners = {module for module in adapted if module.endswith("experts")}
    settings["target_modules"] = sorted(adapted - owners)
    settings["modules_to_save"] = [*map(rename, settings.get("modules_to_save") or [])] or None
    parameters = [name.rpartition(".") for name in settings.get("target_parameters") or []]
    settings["target_parameters"] = [f"{rename(one)}.{last}" for one, _, last in parameters] or None
    (folder / ADAPTER).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf8")
    ensure_found(model, folder)
    return str(type(model).__name__)
