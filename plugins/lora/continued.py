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
from torch.nn import Module
from transformers.pytorch_utils import Conv1D

from plugsft import ModelLoad, RecipeError, reason_of, say
from plugsft.kit import ensure_same_base

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


class TrainedAdapters:
    """The adapters to go on from: their settings and weights."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.merge_first = (
            f"merge them first (plugsft export {place} --merge), and name the result in model.path"
        )
        self.config = self._read_config()
        try:
            self.weights = load_file(self._find(SAFETENSORS_WEIGHTS_NAME))
        except Exception as error:  # the hub and safetensors raise whatever their readers raise
            raise self._refusal(
                f": {SAFETENSORS_WEIGHTS_NAME} cannot be read ({reason_of(error)}); a pickle "
                "(adapter_model.bin) is not read: save it again with a peft of today"
            ) from error

    def settings(self, plugin: Lora) -> Lora:
        """Return the plugin's options with those of the adapters; refuse other ones."""
        settings, defaults, problems = copy.copy(plugin), type(plugin)(), []
        for option, name in OPTIONS.items():
            value, theirs = getattr(plugin, option), in_order(getattr(self.config, name) or [])
            theirs = bool(theirs) if isinstance(value, bool) else theirs
            if in_order(value) not in (in_order(getattr(defaults, option)), theirs):
                problems.append(
                    f"{option}: the recipe has {value!r}, and the adapters in {self.place} have "
                    f"{theirs!r}; remove {option}"
                )
            setattr(settings, option, theirs)
        settings.experts = any("expert" in name for name in self.config.target_parameters or ())
        if plugin.experts and not settings.experts:
            problems.append(
                f"experts: the adapters in {self.place} have none for experts; remove it"
            )
        if plugin.init != "default":
            problems.append(f'init: "{plugin.init}" has no effect on trained adapters; remove it')
        if problems:
            raise RecipeError(problems)
        return settings

    def config_for(self, plugin: Lora, model: Any) -> LoraConfig:
        """Return the settings of the adapters for this model."""
        config = self.config
        if reward_head(model) is not None and config.task_type != TaskType.SEQ_CLS:
            raise self._refusal(
                " is of a language model, and this run trains a head of its own; "
                f"{self.merge_first}"
            )
        config.lora_dropout, config.inference_mode = plugin.dropout, False
        config.init_lora_weights = True
        config.fan_in_fan_out = any(isinstance(module, Conv1D) for module in model.modules())
        return config

    def note_base(self, load: ModelLoad, base: str) -> None:
        """Note the base in the settings; refuse other weights, warn of another place or kind."""
        config, revision = self.config, load.kwargs.get("revision")
        ensure_same_base(Path(self.place), base, revision)
        their_base, theirs = str(config.base_model_name_or_path), config.revision or "main"
        then = stored_quantization(self.place)
        quantization = load.kwargs.get("quantization_config")
        now = describe_quantization(quantization.to_dict() if quantization else {})
        differences = []
        if not same_model(their_base, base) or theirs != (revision or "main"):
            differences.append(
                f"{self.place} was trained on {their_base} (revision {theirs}), and model.path is "
                f"{base} (revision {revision or 'main'})"
            )
        if then != now:
            differences.append(f"the base of {self.place} was {then}, and this run's is {now}")
        for difference in differences:
            say(
                f"warning: plugins.lora.adapter: {difference}; with other weights it is another "
                "model"
            )
        config.base_model_name_or_path, config.revision = base, revision

    def ensure_fits(self, model: Any) -> None:
        """Refuse weights that are not those of a model's adapters, or are not finite."""
        names = {name.removesuffix(".weight") for name in model.shapes}
        stored = {name.removesuffix(".weight") for name in self.weights}
        if names != stored:
            extra = sorted(it for it in self.weights if it.removesuffix(".weight") not in names)
            lost, cure = sorted(names - stored), self.merge_first
            if extra and getattr(model, "taken_out", None):
                cure = (
                    "if they are of the model's class for text, model.text_only = true goes on "
                    f"with that class; plugsft export {self.place} --to FOLDER writes those of "
                    "plugsft 0.1.0 and of other tools under the published names"
                )
            raise self._refusal(
                " does not fit this model: "
                + (f"{extra[0]} is not one of its adapters" if extra else f"it lacks {lost[0]}")
                + f"; {cure}"
            )
        if wrong := [name for name, weight in self.weights.items() if not weight.isfinite().all()]:
            raise self._refusal(
                f": {wrong[0]} has values that are not finite; the file is damaged, or its "
                "training diverged; name other adapters"
            )

    def load_into(self, model: Any, plugin: Lora) -> None:
        """Load the weights into a model; the reference becomes the model with them."""
        self.ensure_fits(model)
        try:
            set_peft_model_state_dict(model, self.weights)
        except RuntimeError as error:
            raise self._refusal(
                f" does not fit the model in model.path: {reason_of(error)}"
            ) from error
        if plugin.has_reference:
            self._keep_reference(model, plugin)
            model.initial_digest = self._digest(model)

    def _keep_reference(self, model: Module, plugin: Lora) -> None:
        """Copy the loaded adapters: with adapters off, the model is the one before training."""
        layers = [layer for _, layer in adapted_layers(model)]
        plain = all(isinstance(layer, FastLinear) and not layer.lora_variant for layer in layers)
        if not plain or plugin.modules_to_save:
            raise RecipeError(
                "plugins.lora.adapter: the reference is the model before training, for which these "
                "adapters would have to be copied; that is supported for linear layers without "
                f"dora and modules_to_save only; {self.merge_first}"
            )
        for layer in layers:
            layer.keep_reference()

    def _digest(self, model: Module) -> str:
        """Return a checksum of the adapters, for keys of what their model computed."""
        checksum = sha256()
        for name, weight in sorted(self.weights.items()):
            checksum.update(name.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
        for name, layer in adapted_layers(model):
            checksum.update(f"{name} {layer.scaling[NAME]}".encode())
        return checksum.hexdigest()[:16]

    def _read_config(self) -> LoraConfig:
        """Read the settings; refuse those that training could not go on with."""
        try:
            raw: dict[str, Any] = json.loads(self._find(CONFIG_NAME).read_text(encoding="utf8"))
        except Exception as error:  # the hub raises whatever its readers raise
            inner = Path(self.place) / "model"
            cure = f"; name {inner}" if inner.is_dir() else ""
            if (Path(self.place) / "config.json").is_file():
                cure = "; it holds a whole model: name it in model.path, and remove this option"
            raise self._refusal(f" holds no adapters ({reason_of(error)}){cure}") from error
        try:
            settings = Settings.model_validate(raw)
            re.compile(settings.target_modules if isinstance(settings.target_modules, str) else "")
        except ValidationError as error:
            [first, *_] = error.errors()
            fault = " ".join([*map(str, first["loc"][:1]), first["msg"]])
            raise self._refusal(f": {CONFIG_NAME} is damaged: {fault}") from error
        except re.error as error:
            raise self._refusal(
                f": {CONFIG_NAME}: target_modules is no pattern: {error}"
            ) from error
        if (kind := raw.get("peft_type")) != "LORA":
            raise self._refusal(f" holds adapters of the kind {kind}, not LORA")
        start = str(raw.get("init_lora_weights"))
        if start.startswith(CHANGES_BASE):
            raise self._refusal(
                f" has init_lora_weights = {start!r}, which changed the base model; save it "
                "with peft's path_initial_model_for_weight_conversion"
            )
        defaults = vars(LoraConfig())
        for name, value in raw.items():
            if name not in SUPPORTED and value and value != defaults.get(name):
                raise self._refusal(
                    f" has {name} = {value!r}, which is not supported; {self.merge_first}"
                )
        return LoraConfig(**{name: value for name, value in raw.items() if name in defaults})

    def _find(self, name: str) -> Path:
        """Return a file of the folder, or download it from the hub."""
        if Path(self.place).is_dir() or not HUB_NAME.fullmatch(self.place):
            return Path(self.place) / name
        return Path(huggingface_hub.hf_hub_download(self.place, name))

    def _refusal(self, fault: str) -> RecipeError:
        return RecipeError(f"plugins.lora.adapter: {self.place}{fault}")


def settings_of(plugin: Lora) -> tuple[Lora, TrainedAdapters | None]:
    """Return the plugin's options, and the adapters to go on from, whose options replace them."""
    if not plugin.adapter:
        return plugin, None
    trained = TrainedAdapters(plugin.adapter)
    return trained.settings(plugin), trained


def in_order(value: Any) -> Any:
    """Return names in order; other values as they are."""
    return sorted(value) if isinstance(value, list | set | tuple) else value


def stored_quantization(place: str) -> str:
    """Describe how the base of a folder's adapters was quantized."""
    try:
        return describe_quantization(json.loads(Path(place, RECORD).read_text(encoding="utf8")))
    except (OSError, ValueError, AttributeError):
        return describe_quantization({})


def describe_quantization(settings: dict[str, Any]) -> str:
    """Name the kind of quantized weights, and the layers that are not quantized."""
    kind = settings.get("bnb_4bit_quant_type") or settings.get("quant_method")
    left_out = settings.get("llm_int8_skip_modules") or settings.get("left_out") or ["nothing"]
    known = f"quantized ({kind}, all linear layers but {', '.join(left_out)})"
    return known if settings else "not quantized"


def same_model(one: str, other: str) -> bool:
    """Tell whether two names mean one model."""
    return one == other or (Path(one).exists() and Path(one).resolve() == Path(other).resolve())
