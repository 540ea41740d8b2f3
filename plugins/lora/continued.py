"""Adapters to go on from: a folder in peft's format, or a name on the hub."""

from __future__ import annotations

import copy
import json
import re
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import torch
from peft import LoraConfig, TaskType, set_peft_model_state_dict
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from pydantic import BaseModel, Field, ValidationError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Module
from transformers.pytorch_utils import Conv1D

from plugsft import ModelLoad, RecipeError, reason_of, say

from .layers import NAME, FastLinear, adapted_layers
from .targets import reward_head

if TYPE_CHECKING:
    from . import Lora

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
OPTIONS = {
    "r": "r",
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "modules_to_save": "modules_to_save",
    "rslora": "use_rslora",
    "dora": "use_dora",
}
"""Option of the recipe -> setting of a folder of adapters."""
SUPPORTED = {
    *OPTIONS.values(),
    *("task_type", "peft_type", "peft_version", "auto_mapping", "inference_mode", "runtime_config"),
    *("base_model_name_or_path", "revision", "lora_dropout", "init_lora_weights"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    *("fan_in_fan_out", "ensure_weight_tying", "target_parameters"),
    "eva_config",
}
"""Settings of peft under which training goes on as it began."""
RECORD = "quantization_config.json"
"""Says how the base of a folder's adapters was quantized; plugins that quantize write it."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations of peft that change the base, unless they are converted when saved."""


class Settings(BaseModel, strict=True):
    """The settings of a folder of adapters that this plugin reads, and their types."""

    r: int = Field(8, ge=1)
    lora_alpha: float = Field(8, gt=0)
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None


def read_config(place: str) -> LoraConfig:
    """Read the settings of adapters; refuse those that training could not go on with."""
    where = f"plugins.lora.adapter: {place}"
    try:
        raw: dict[str, Any] = json.loads(find_file(place, CONFIG_NAME).read_text(encoding="utf8"))
    except Exception as error:  # the hub raises whatever its readers raise
        inner = Path(place) / "model"
        cure = f"; name {inner}" if inner.is_dir() else ""
        if (Path(place) / "config.json").is_file():
            cure = "; it holds a whole model: name it in model.path, and remove this option"
        raise RecipeError(f"{where} holds no adapters ({reason_of(error)}){cure}") from error
    ensure_well_formed(raw, f"{where}: {CONFIG_NAME}")
    if (kind := raw.get("peft_type")) != "LORA":
        raise RecipeError(f"{where} holds adapters of the kind {kind}, not LORA")
    start = str(raw.get("init_lora_weights"))
    if start.startswith(CHANGES_BASE):
        raise RecipeError(
            f"{where} has init_lora_weights = {start!r}, which changed the base model; save it "
            "with peft's path_initial_model_for_weight_conversion"
        )
    defaults = vars(LoraConfig())
    for name, value in raw.items():
        if name not in SUPPORTED and value and value != defaults.get(name):
            raise RecipeError(
                f"{where} has {name} = {value!r}, which is not supported; {merge_first(place)}"
            )
    return LoraConfig(**{name: value for name, value in raw.items() if name in defaults})


def ensure_well_formed(raw: Any, where: str) -> None:
    """Refuse settings of other types than peft writes."""
    try:
        settings = Settings.model_validate(raw)
        re.compile(settings.target_modules if isinstance(settings.target_modules, str) else "")
    except ValidationError as error:
        [first, *_] = error.errors()
        option = " ".join(map(str, first["loc"][:1]))
        raise RecipeError(
            f"{where} is damaged: {option} {first['msg']}".replace("  ", " ")
        ) from error
    except re.error as error:
        raise RecipeError(f"{where}: target_modules is no pattern: {error}") from error


def find_file(place: str, name: str) -> Path:
    """Return a file of a folder, or download it from the hub."""
    if Path(place).is_dir() or not HUB_NAME.fullmatch(place):
        return Path(place) / name
    return Path(huggingface_hub.hf_hub_download(place, name))


def merge_first(place: str) -> str:
    """Say how to train on without going on from adapters."""
    return f"merge them first (plugsft export {place} --merge), and name the result in model.path"


def settings_of(plugin: Lora) -> Lora:
    """Return the plugin's options, or those of the adapters to go on from; refuse other ones."""
    if not plugin.adapter:
        return plugin
    config, settings, defaults = read_config(plugin.adapter), copy.copy(plugin), type(plugin)()
    read_weights(plugin.adapter)
    problems = []
    for option, name in OPTIONS.items():
        value, theirs = getattr(plugin, option), comparable(getattr(config, name) or [])
        theirs = bool(theirs) if isinstance(value, bool) else theirs
        if comparable(value) not in (comparable(getattr(defaults, option)), theirs):
            problems.append(
                f"{option}: the recipe has {value!r}, and the adapters in {plugin.adapter} have "
                f"{theirs!r}; remove {option}"
            )
        setattr(settings, option, theirs)
    settings.experts = any("expert" in name for name in config.target_parameters or ())
    if plugin.experts and not settings.experts:
        problems.append(
            f"experts: the adapters in {plugin.adapter} have none for experts; remove it"
        )
    if plugin.init != "default":
        problems.append(f'init: "{plugin.init}" has no effect on trained adapters; remove it')
    if problems:
        raise RecipeError(problems)
    return settings


def comparable(value: Any) -> Any:
    """Return names in order; other values as they are."""
    return sorted(value) if isinstance(value, list | set | tuple) else value


def config_to_go_on(plugin: Lora, load: ModelLoad, base: str, model: Any) -> LoraConfig:
    """Return the settings of the adapters to go on from, for this base model."""
    config = read_config(str(plugin.adapter))
    if reward_head(model) is not None and config.task_type != TaskType.SEQ_CLS:
        raise RecipeError(
            f"plugins.lora.adapter: {plugin.adapter} is of a language model, and this run trains a "
            f"head of its own; {merge_first(str(plugin.adapter))}"
        )
    theirs = str(config.base_model_name_or_path), config.revision or "main"
    ours = base, load.kwargs.get("revision") or "main"
    if not same_model(theirs[0], base) or theirs[1] != ours[1]:
        say(
            f"warning: plugins.lora.adapter: {plugin.adapter} was trained on {theirs[0]} (revision "
            f"{theirs[1]}), and model.path is {ours[0]} (revision {ours[1]}); with other weights "
            "it is another model"
        )
    then, now = stored_quantization(str(plugin.adapter)), quantization_of(load)
    if then != now:
        kinds = [
            f"quantized ({weights})" if weights else "not quantized" for weights in (then, now)
        ]
        say(
            f"warning: plugins.lora.adapter: the base of {plugin.adapter} was {kinds[0]}, and this "
            f"run's is {kinds[1]}; with other weights it is another model"
        )
    config.base_model_name_or_path, config.revision = base, load.kwargs.get("revision")
    config.lora_dropout, config.inference_mode = plugin.dropout, False
    config.init_lora_weights = True
    config.fan_in_fan_out = any(isinstance(module, Conv1D) for module in model.modules())
    return config


def stored_quantization(place: str) -> str:
    """Return how the base of a folder's adapters was quantized; "" if nothing says so."""
    path = Path(place, RECORD)
    try:
        return describe_quantization(json.loads(path.read_text(encoding="utf8")))
    except (OSError, ValueError, AttributeError):
        return ""


def quantization_of(load: ModelLoad) -> str:
    """Return how a run quantizes its base; "" if it does not."""
    config = load.kwargs.get("quantization_config")
    return describe_quantization(config.to_dict()) if config else ""


def describe_quantization(settings: dict[str, Any]) -> str:
    """Name the kind of quantized weights, and the layers that are not quantized."""
    kind = settings.get("bnb_4bit_quant_type") or settings.get("quant_method")
    left_out = settings.get("llm_int8_skip_modules") or settings.get("left_out") or ["nothing"]
    return f"{kind}, all linear layers but {', '.join(left_out)}"


def same_model(one: str, other: str) -> bool:
    """Tell whether two names mean one model."""
    return one == other or (Path(one).exists() and Path(one).resolve() == Path(other).resolve())


def read_weights(place: str) -> dict[str, Tensor]:
    """Read the weights of adapters."""
    try:
        return load_file(find_file(place, SAFETENSORS_WEIGHTS_NAME))
    except Exception as error:  # the hub and safetensors raise whatever their readers raise
        raise RecipeError(
            f"plugins.lora.adapter: {place}: {SAFETENSORS_WEIGHTS_NAME} cannot be read "
            f"({reason_of(error)}); a pickle (adapter_model.bin) is not read: save it again with "
            "a peft of today"
        ) from error


def load_adapters(model: Any, plugin: Lora) -> None:
    """Load trained adapters into a model; the reference becomes the model with them."""
    place = str(plugin.adapter)
    weights = read_weights(place)
    names = {name.removesuffix(".weight") for name in model.shapes}
    extra = sorted(name for name in weights if name.removesuffix(".weight") not in names)
    lost = sorted(names - {name.removesuffix(".weight") for name in weights})
    if extra or lost:
        raise RecipeError(
            f"plugins.lora.adapter: {place} does not fit this model: "
            + (f"{extra[0]} is not one of its adapters" if extra else f"it lacks {lost[0]}")
            + f"; {merge_first(place)}"
        )
    if wrong := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        raise RecipeError(
            f"plugins.lora.adapter: {place}: {wrong[0]} has values that are not finite; the file "
            "is damaged, or its training diverged; name other adapters"
        )
    try:
        set_peft_model_state_dict(model, weights)
    except RuntimeError as error:
        raise RecipeError(
            f"plugins.lora.adapter: {place} does not fit the model in model.path: "
            f"{reason_of(error)}"
        ) from error
    if plugin.has_reference:
        freeze_reference(model, plugin)
        model.initial_digest = digest_of(model, weights)


def digest_of(model: Module, weights: dict[str, Tensor]) -> str:
    """Return a checksum of adapters, for keys of what their model computed."""
    checksum = sha256()
    for name, weight in sorted(weights.items()):
        checksum.update(name.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
    for name, layer in adapted_layers(model):
        checksum.update(f"{name} {layer.scaling[NAME]}".encode())
    return checksum.hexdigest()[:16]


def freeze_reference(model: Module, plugin: Lora) -> None:
    """Copy the loaded adapters: with adapters off, the model is the one before training."""
    layers = dict(adapted_layers(model))
    plain = all(
        isinstance(layer, FastLinear) and not layer.lora_variant for layer in layers.values()
    )
    if not plain or plugin.modules_to_save:
        raise RecipeError(
            "plugins.lora.adapter: the reference is the model before training, for which these "
            "adapters would have to be copied; that is supported for linear layers without dora "
            f"and modules_to_save only; {merge_first(str(plugin.adapter))}"
        )
    for layer in layers.values():
        layer.keep_reference()
