"""A model with adapters: how it is built, initialized and saved."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model_state_dict
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils import transformers_weight_conversion as conversion
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Linear, Module
from transformers.pytorch_utils import Conv1D

from plugsft import ModelLoad, PluginError, RecipeError, say
from plugsft.kit import num_weights, whole_shape

from .continued import TrainedAdapters, in_order
from .experts import ExpertAdapter, describe_frozen, hand_factors
from .layers import NAME, FastLinear, adapted_layers
from .targets import (
    ALL,
    choose_modules,
    choose_weights,
    describe_frozen_rows,
    head_and_embeddings,
    is_tied,
    last_parts,
    read_past,
    reward_head,
    shorten,
    trained_rows,
)

if TYPE_CHECKING:
    from . import Lora

MAGNITUDE = "lora_magnitude_vector"


def store_frozen_weights_in(load: ModelLoad, dtype: str) -> None:
    """Load the frozen weights in the dtype that they are computed in."""
    load.kwargs["dtype"] = getattr(torch, dtype)


def add_adapters(
    plugin: Lora, load: ModelLoad, model: Any, trained: TrainedAdapters | None
) -> AdaptedModel:
    """Freeze the model, and add adapters to its layers."""
    folder = Path(load.path)
    # A local path becomes absolute; a hub name is unchanged.
    base = str(folder.resolve()) if folder.is_dir() else load.path
    if trained:
        trained.note_base(load, base)
        adapted = adapt(model, trained.config_for(plugin, model))
    else:
        adapted = adapt(model, new_config(plugin, load, base, model))
    ensure_readable(adapted)
    hand_factors(adapted)
    initialize(adapted, plugin.init, plugin.seed)
    if trained:
        trained.load_into(adapted, plugin)
    # The same on all ranks, and saved for the backward pass, which DDP's copies would break.
    adapted._ddp_params_and_buffers_to_ignore = [*adapted.references()]
    adapted.summary = describe(adapted, plugin)
    if trained:
        adapted.summary += f"; continues {trained.place}"
    for frozen in filter(None, (describe_frozen(adapted), describe_frozen_rows(plugin, load))):
        adapted.summary += f"; {frozen}"
        say(f"warning: plugin lora: {frozen}")
    return adapted


def adapt(model: Any, config: LoraConfig) -> AdaptedModel:
    """Add new adapters to the layers of a model."""
    config._register_custom_module({Linear: FastLinear, Conv1D: FastLinear})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of settings that are right here
        try:
            return AdaptedModel(model, config)
        except ValueError as error:  # peft does not support this model
            raise RecipeError(f"plugins.lora.targets: {error}; name other modules") from error


def new_config(plugin: Lora, load: ModelLoad, base: str, model: Any) -> LoraConfig:
    """Return peft's settings of new adapters."""
    targets, whole = choose_modules(plugin, model)
    experts, linear = choose_weights(plugin, model, targets)
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM if reward_head(model) is None else TaskType.SEQ_CLS,
        base_model_name_or_path=base,
        revision=load.kwargs.get("revision"),
        r=plugin.r,
        lora_alpha=plugin.alpha,
        lora_dropout=plugin.dropout,
        target_modules=shorten([name for name in targets if f"{name}.weight" not in linear], model),
        target_parameters=[*experts, *linear] or None,
        modules_to_save=whole or None,
        use_rslora=plugin.rslora,
        use_dora=plugin.dora,
        trainable_token_indices=trained_rows(plugin, load, model, [*targets, *whole]),
        init_lora_weights=plugin.init if plugin.init in ("gaussian", "orthogonal") else True,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets),
        # A weight that is both head and embeddings stays shared.
        ensure_weight_tying=is_tied(model)
        and any(model.get_submodule(name) in head_and_embeddings(model) for name in whole),
    )


class AdaptedModel(PeftModel):
    """peft's model; saves all adapters under names that every reader finds, or nothing."""

    _ddp_params_and_buffers_to_ignore: Any
    initial_digest = ""
    """A checksum of the adapters that belong to the reference."""
    summary = ""
    """What was adapted, in one line."""

    def __init__(self, model: Any, config: LoraConfig) -> None:
        # peft shortens long lists of names by the modules of this model, which may lack the eyes.
        self.targets = in_order(config.target_modules)
        super().__init__(model, config)
        for module in self.modules():
            if isinstance(module, ModulesToSaveWrapper):
                train_in_float32(module.modules_to_save[NAME])
        weights = self._weights_to_save(dict(self.named_parameters(remove_duplicate=False)))
        self.shapes = {name: whole_shape(weight) for name, weight in weights.items()}

    def references(self) -> dict[str, Tensor]:
        """Return the copies of adapters that belong to the reference, by name."""
        return {
            f"{name}.{half}": getattr(layer, half)
            for name, layer in adapted_layers(self)
            if getattr(layer, "has_reference", False)
            for half in ("reference_A", "reference_B")
        }

    def fixed_state(self) -> dict[str, Any]:
        """Return what files of adapters do not show: the reference, and factors of outputs."""
        scales = {name: float(it.scaling[NAME]) for name, it in adapted_layers(self)}
        return {"reference": self.references(), "scales": scales}

    @torch.no_grad()
    def load_fixed_state(self, state: Mapping[str, Any]) -> None:
        """Restore the reference from a checkpoint, whose adapters must have the same settings."""
        own = self.fixed_state()
        if {*own["reference"]} != {*state["reference"]} or own["scales"] != state["scales"]:
            raise PluginError(
                "plugins.lora: the checkpoint has adapters with other settings (alpha or "
                "reference); the folder in plugins.lora.adapter may have changed since; start "
                "again in another output folder"
            )
        for name, values in state["reference"].items():
            own["reference"][name].copy_(values)

    def _weights_to_save(self, trained: dict[str, Any]) -> dict[str, Tensor]:
        """Return the weights to save, under their names in files."""
        weights, first_names = dict(trained), dict[int, str]()
        for name, parameter in self.named_parameters(remove_duplicate=False):
            # `trained` has a tied weight once; files have it under both names.
            first_name = first_names.setdefault(id(parameter), name)
            if first_name in trained and name not in trained:
                weights[name] = trained[first_name].clone()
        adapters = get_peft_model_state_dict(self, weights, save_embedding_layers=False)
        # peft reads magnitudes with and without this ending, transformers only with it.
        return {
            name + ".weight" if name.endswith(MAGNITUDE) else name: weight
            for name, weight in adapters.items()
        }

    def save_pretrained(self, save_directory: str, *_: Any, **options: Any) -> None:
        """Write the adapters from `state_dict`, or from the model."""
        weights = self._weights_to_save(options.get("state_dict") or self.state_dict())
        wrong = [
            name
            for name, shape in self.shapes.items()
            if name not in weights or tuple(weights[name].shape) != shape
        ]
        if wrong:
            raise PluginError(
                f"plugins.lora: {len(wrong)} of {len(self.shapes)} weights of adapters could not "
                f"be saved, first {wrong[0]}: they are missing or incomplete. Nothing is written; "
                "resume from the last checkpoint"
            )
        # Tied modules share memory, which safetensors refuses.
        complete = {name: weights[name].contiguous().clone() for name in self.shapes}
        config: Any = copy.copy(self.peft_config[NAME])
        config.inference_mode = True
        save_file(complete, Path(save_directory) / "adapter_model.safetensors", {"format": "pt"})
        config.target_modules = self.targets
        config.target_parameters = in_order(config.target_parameters)
        config.save_pretrained(save_directory)


def ensure_readable(model: AdaptedModel) -> None:
    """Refuse adapters that peft would not find in their file: it renames some as it reads them."""
    stored = {name: torch.empty(shape, device="meta") for name, shape in model.shapes.items()}
    names = {
        *conversion.convert_peft_adapter_state_dict_for_transformers(
            model, model.peft_config[NAME], stored
        )
    }
    if lost := [name.partition(".lora_")[0] for name in stored if name not in names]:
        modules = list(dict.fromkeys(name.removeprefix("base_model.model.") for name in lost))
        raise RecipeError(
            f"plugins.lora.targets: peft {version('peft')} would lose the adapters of "
            f"{modules[0]} and {len(modules) - 1} more modules as it reads them, because it "
            f"renames them; name targets without {', '.join(dict.fromkeys(last_parts(modules)))}"
        )


def initialize(model: Module, method: str, seed: int) -> None:
    """Initialize the adapters on the CPU: the same on all ranks, and wherever the model is.

    If the model's weights are not loaded yet, peft has created the adapters without memory.
    """
    torch.manual_seed(seed)
    for _, layer in adapted_layers(model):
        device = next(weight.device for name, weight in layer.named_parameters() if "lora_" in name)
        halves = [
            getattr(layer, f"lora_{half}") for half in ("A", "B", "embedding_A", "embedding_B")
        ]
        if device.type != "cpu":
            for half in halves:
                half.to_empty(device="cpu")
        if method == "orthogonal" and layer.lora_A:
            layer.orthogonal_init(NAME)
            for weights in (layer.lora_A, layer.lora_B):
                weights.float()
        else:
            layer.reset_lora_parameters(NAME, "gaussian" if method == "gaussian" else True)
        if device.type != "meta":
            for half in halves:
                half.to(device)


def train_in_float32(module: Any) -> None:
    """Convert a module to float32; modules around it still see their own dtype."""
    dtype = next(module.parameters()).dtype
    if dtype == torch.float32:
        return
    module.float()
    module.register_forward_pre_hook(
        lambda module, inputs: tuple(
            value.to(next(module.parameters()).dtype) if value.is_floating_point() else value
            for value in inputs
        )
    )
    module.register_forward_hook(lambda _, inputs, output: output.to(dtype))


def describe(model: Module, plugin: Lora) -> str:
    """Describe the adapters, and count the trained parameters."""
    layers = dict(adapted_layers(model))
    experts = [it.parameter_name for it in layers.values() if isinstance(it, ExpertAdapter)]
    targets = [name for name, it in layers.items() if not isinstance(it, ExpertAdapter)]
    total = sum(map(num_weights, model.parameters()))
    trained = sum(num_weights(weight) for weight in model.parameters() if weight.requires_grad)
    kinds = ", ".join(sorted({*last_parts(targets)}))
    whole = last_parts(
        name for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)
    )
    weights = ", ".join(sorted({*experts}))
    rows = max(
        (
            len(it.token_indices[NAME])
            for it in model.modules()
            if isinstance(it, TrainableTokensLayer)
        ),
        default=0,
    )
    past = ", ".join(sorted({*last_parts(read_past(model))})) if plugin.targets == ALL else ""
    parts = {
        f"{len(targets)} modules with adapters of rank {plugin.r} ({kinds})": targets,
        f"{len(experts)} expert weights, rank {plugin.r} per expert ({weights})": experts,
        f"{', '.join(whole)} trained whole": whole,
        f"rows of {rows} new tokens trained": rows,
        f"{past} left out: Mamba's code reads their weights, past adapters": past,
        f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%}), in float32": 1,
    }
    return "; ".join(part for part, there in parts.items() if there)
