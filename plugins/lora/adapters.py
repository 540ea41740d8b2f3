"""Adapters: where they stand, how they begin, and how they are computed and saved."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModelForCausalLM, TaskType, get_peft_model_state_dict
from peft.tuners import lora
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Embedding, Linear, Module
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

from plugsft import ModelLoad, PluginError, Recipe, RecipeError

if TYPE_CHECKING:
    from . import Lora

ALL = "all-linear"
NAME = "default"
"""What peft calls the one adapter that there is."""
MAGNITUDE = "lora_magnitude_vector"


def adapt(plugin: Lora, load: ModelLoad, model: Any) -> Adapted:
    """Freeze the model, and add adapters to its layers."""
    targets, saved = choose(plugin, model)
    here = Path(load.path)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        # A local path becomes absolute; a hub name is unchanged.
        base_model_name_or_path=str(here.resolve()) if here.is_dir() else load.path,
        revision=load.kwargs.get("revision"),
        r=plugin.r,
        lora_alpha=plugin.alpha,
        lora_dropout=plugin.dropout,
        target_modules=shortened(targets, model),
        modules_to_save=saved or None,
        use_rslora=plugin.rslora,
        use_dora=plugin.dora,
        init_lora_weights=plugin.init if plugin.init != "default" else True,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets),
        # One weight that is both head and embeddings stays one.
        ensure_weight_tying=is_tied(model)
        and any(model.get_submodule(name) in ends(model) for name in saved),
    )
    config._register_custom_module({Linear: FastLinear, Conv1D: FastLinear})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what these say of other settings is settled above
        try:
            adapted = Adapted(model, config)
        except ValueError as error:  # peft does not support this model
            raise RecipeError(f"plugins.lora.targets: {error}; name other modules") from error
    begin(adapted, plugin.init, plugin.seed)
    plugin.said = describe(adapted, targets, plugin.r)
    return adapted


def choose(plugin: Lora, model: Any) -> tuple[list[str], list[str]]:
    """Return the names of modules that get adapters, and of those that are trained whole."""
    head, table = (name_of(one, model) for one in ends(model))
    fit = {name: one for name, one in model.named_modules() if is_fit(one)}
    plain = [name for name, one in fit.items() if head != name and not isinstance(one, Embedding)]
    whole = found("modules_to_save", plugin.modules_to_save, model, plain)
    if wide := [name for name in whole if [*model.get_submodule(name).children()]]:
        raise RecipeError(
            f"plugins.lora.modules_to_save: {wide[0]} holds other modules; name those of them "
            f"that are trained whole; {told(plain)}"
        )
    if plugin.targets == ALL:
        targets = [name for name in plain if name not in whole]
    else:
        targets = found("targets", plugin.targets, model, plain)
        if odd := [name for name in targets if name not in fit]:
            raise RecipeError(
                f"plugins.lora.targets: {odd[0]} is a "
                f"{type(model.get_submodule(odd[0])).__name__}, beside which no adapter can "
                f"stand; {told(plain)}"
            )
    if both := [name for name in targets if name in whole]:
        raise RecipeError(f"plugins.lora.modules_to_save: {both[0]} is one of targets, too")
    if is_tied(model) and {head, table} & {*targets}:
        raise RecipeError(
            f"plugins.lora.targets: {head} and {table} are one weight in this model, which "
            "peft cannot merge with adapters; name it in modules_to_save to train it whole"
        )
    ours = {*targets, *whole}
    if plugin.fused and (head in ours or (is_tied(model) and table in ours)):
        raise RecipeError(
            f"plugins.lora: {head} would be trained, and [plugins.fused_loss] reads the "
            "frozen weight below it; leave it out of targets and modules_to_save, or remove "
            "[plugins.fused_loss]"
        )
    return targets, whole


class Adapted(PeftModelForCausalLM):
    """peft's model, that saves its adapters so that every reader finds them, or not at all."""

    def __init__(self, model: Any, config: LoraConfig) -> None:
        super().__init__(model, config)
        for module in self.modules():
            if isinstance(module, ModulesToSaveWrapper):
                keep_float32(module.modules_to_save[NAME])
        named = self.written(dict(self.named_parameters(remove_duplicate=False)))
        self.shapes = {name: true_shape(one) for name, one in named.items()}

    def written(self, given: dict[str, Any]) -> dict[str, Tensor]:
        """Return what is saved of the weights, under the names that it has in files."""
        weights, names = dict(given), dict[int, str]()
        for name, one in self.named_parameters(remove_duplicate=False):
            # One that is tied to another is given once, and files hold it under both names.
            first = names.setdefault(id(one), name)
            if first in given and name not in given:
                weights[name] = given[first].clone()
        kept = get_peft_model_state_dict(self, weights, save_embedding_layers=False)
        # peft finds these under both names, transformers only under the whole one.
        return {
            name + ".weight" if name.endswith(MAGNITUDE) else name: one
            for name, one in kept.items()
        }

    def save_pretrained(self, save_directory: str, *_: Any, **options: Any) -> None:
        """Write the adapters, as they are in the weights that are given (state_dict)."""
        weights = self.written(options.get("state_dict") or self.state_dict())
        wrong = [
            name
            for name, shape in self.shapes.items()
            if name not in weights or tuple(weights[name].shape) != shape
        ]
        if wrong:
            raise PluginError(
                f"plugins.lora: {len(wrong)} of {len(self.shapes)} weights of adapters could not "
                f"be saved ({wrong[0]} first): they are empty, or parts of what they should be. "
                "Nothing is written; the checkpoints stand"
            )
        whole = {name: weights[name].contiguous() for name in self.shapes}
        save_file(whole, Path(save_directory) / "adapter_model.safetensors", {"format": "pt"})
        config: Any = copy.copy(self.peft_config[NAME])
        config.inference_mode = True
        config.target_modules = sorted(config.target_modules)
        config.save_pretrained(save_directory)


class FastLinear(lora.Linear):
    """peft's layer, with fewer passes over memory: adapters are computed in the type of inputs.

    peft makes a float32 copy of every input instead, and three of every output.
    """

    def __init__(self, base_layer: Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(base_layer, *args, **kwargs)
        self.is_target_conv_1d_layer = isinstance(base_layer, Conv1D)
        if not self.lora_variant:
            self.lora_A[NAME].__class__, self.lora_B[NAME].__class__ = Down, Up

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer, and add what its adapter says."""
        if self.lora_variant:
            return super().forward(x, *args, **kwargs)
        result: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        inner = self.lora_A[NAME](self.lora_dropout[NAME](x))
        added: Tensor = self.lora_B[NAME](inner, result, self.scaling[NAME])
        return added


class Down(Linear):
    """The first half of an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply in the type of the input."""
        return linear(input, self.weight.to(input.dtype))


class Up(Linear):
    """The second half of an adapter. A module of its own: ZeRO-3 gathers weights for modules."""

    def forward(self, input: Tensor, base: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        """Multiply, scale and add to what the layer gave, all in one."""
        weight = self.weight.to(input.dtype).t()
        return torch.addmm(base.flatten(0, -2), input.flatten(0, -2), weight, alpha=scale).view(
            base.shape
        )


KINDS = (Linear, Conv1D, Embedding)
"""Kinds of modules that can have an adapter."""


def is_fit(module: Module) -> bool:
    """Tell whether a module can have an adapter.

    Some routers are linear layers whose forward returns more than the product.
    """
    odd = isinstance(module, Linear) and type(module).forward is not Linear.forward
    return isinstance(module, KINDS) and not odd


def without_weights(recipe: Recipe) -> Any:
    """Make the recipe's model with no memory behind it, for its names; or None, if it cannot be."""
    given = recipe.model
    options: dict[str, Any] = {"trust_remote_code": given.trust_remote_code}
    with suppress(Exception), torch.device("meta"):  # the core will say what is wrong with it
        if given.scratch:
            config = LlamaConfig(num_hidden_layers=given.scratch.layers, tie_word_embeddings=True)
        else:
            revision = {"revision": given.revision} if given.revision else {}
            config = AutoConfig.from_pretrained(str(given.path), **options, **revision)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, **options)
        model.tie_weights()
        return model
    return None


def ends(model: Any) -> tuple[Any, Any]:
    """Return a model's head and its table of embeddings."""
    return model.get_output_embeddings(), model.get_input_embeddings()


def is_tied(model: Any) -> bool:
    """Tell whether head and embeddings are one weight."""
    head, table = ends(model)
    return head is not None and head.weight is table.weight


def name_of(module: Any, model: Module) -> str:
    """Return the name that a module has in the model."""
    return next((name for name, one in model.named_modules() if one is module), "")


def matching(ending: str, model: Module) -> list[str]:
    """Return the names of modules that are, or end with, a name."""
    names = (name for name, _ in model.named_modules())
    return [name for name in names if f".{name}".endswith(f".{ending}")]


def found(key: str, endings: Iterable[str], model: Module, plain: list[str]) -> list[str]:
    """Return the modules of these names, each of which must be that of one at least."""
    chosen: dict[str, None] = {}
    for ending in endings:
        if not (names := matching(ending, model)):
            known = {name.rpartition(".")[2]: 0 for name, _ in model.named_modules()}
            near = get_close_matches(ending.rpartition(".")[2], known, n=1)
            hint = f" did you mean '{near[0]}'?" if near else ""
            raise RecipeError(
                f"plugins.lora.{key}: no module is named '{ending}';{hint} {told(plain)}"
            )
        chosen |= dict.fromkeys(names)
    return [*chosen]


def told(plain: list[str]) -> str:
    """List the linear layers there are, by the ends of their names."""
    return f"linear layers: {', '.join(dict.fromkeys(shorter(plain)))}"


def shorter(names: Iterable[str]) -> list[str]:
    """Return the ends of names."""
    return [name.rpartition(".")[2] for name in names]


def shortened(names: list[str], model: Module) -> list[str]:
    """Return modules by the ends of their names, where these mean no others."""
    endings = sorted({*shorter(names)})
    meant = [name for ending in endings for name in matching(ending, model)]
    return endings if {*meant} == {*names} else names


def begin(model: Module, how: str, seed: int) -> None:
    """Fill the adapters: the same on all ranks, and wherever the weights are.

    Where these are still in their files, peft has left the adapters without memory, too.
    """
    torch.manual_seed(seed)
    layers: list[Any] = [one for one in model.modules() if isinstance(one, lora.LoraLayer)]
    for layer in layers:
        if any(one.is_meta for name, one in layer.named_parameters() if "lora_" in name):
            for part in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
                getattr(layer, part).to_empty(device="cpu")
        if how == "orthogonal" and layer.lora_A:
            layer.orthogonal_init(NAME)
            for half in (layer.lora_A, layer.lora_B):
                half.float()
        else:
            layer.reset_lora_parameters(NAME, "gaussian" if how == "gaussian" else True)


def keep_float32(module: Any) -> None:
    """Train a whole module in float32, and let those around it see their own type."""
    dtype = next(module.parameters()).dtype
    if dtype == torch.float32:
        return
    module.float()
    module.register_forward_pre_hook(
        lambda one, inputs: tuple(
            given.to(next(one.parameters()).dtype) if given.is_floating_point() else given
            for given in inputs
        )
    )
    module.register_forward_hook(lambda _, inputs, output: output.to(dtype))


def true_shape(parameter: Any) -> tuple[int, ...]:
    """Return the whole shape of a parameter, even if ZeRO-3 has sharded it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def describe(model: Module, targets: list[str], rank: int) -> str:
    """Say what is trained."""
    sizes = [
        (getattr(one, "ds_numel", one.numel()), one.requires_grad) for one in model.parameters()
    ]
    trained, everything = sum(size for size, on in sizes if on), sum(size for size, _ in sizes)
    kinds = ", ".join(sorted({*shorter(targets)}))
    whole = [
        name.rpartition(".")[2]
        for name, one in model.named_modules()
        if isinstance(one, ModulesToSaveWrapper)
    ]
    experts = any(len(true_shape(one)) > 2 for one in model.parameters())
    return (
        f"{len(targets)} modules got adapters of rank {rank} ({kinds}); "
        + (f"{', '.join(whole)} trained whole; " if whole else "")
        + f"{trained:,} of "
        f"{everything:,} parameters are trained ({trained / everything:.2%}), in float32"
        + ("; experts stay as they are, for they are no linear layers" if experts else "")
    )
