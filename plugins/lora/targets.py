"""The modules of a model that get adapters or are trained whole, and the rows of new tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import import_module
from inspect import getsource
from typing import TYPE_CHECKING, Any

from torch.nn import Embedding, Linear, Module
from transformers.pytorch_utils import Conv1D

from plugsft import Capability, ModelLoad, RecipeError
from plugsft.kit import find_modules

from .experts import ensure_adaptable, expert_weights, renamed_by_peft

if TYPE_CHECKING:
    from . import Lora

ALL = "all-linear"


def choose_modules(plugin: Lora, model: Any) -> tuple[list[str], list[str]]:
    """Return the names of modules that get adapters, and of modules that are trained whole."""
    head, embeddings = (name_of(module, model) for module in head_and_embeddings(model))
    adaptable = {name: module for name, module in model.named_modules() if is_adaptable(module)}
    linear = [
        name
        for name, module in adaptable.items()
        if name != head and not isinstance(module, Embedding)
    ]
    untrained = [] if reward_head(model) is None else [head]
    names = [name for name, _ in model.named_modules()]
    chosen = [*plugin.modules_to_save, *untrained]
    whole = find_modules("plugins.lora.modules_to_save: no module", chosen, names, linear)
    ensure_single_modules(whole, model, linear)
    if plugin.targets == ALL:
        targets = [name for name in linear if name not in {*whole, *read_past(model)}]
    elif isinstance(plugin.targets, str):  # a pattern, in a folder of adapters
        targets = [name for name in adaptable if re.fullmatch(plugin.targets, name)]
    else:
        experts = expert_weights(model)
        endings = [
            ending
            for ending in plugin.targets
            if not any(ends_with(name, ending) for name in experts)
        ]
        targets = find_modules("plugins.lora.targets: no module", endings, names, linear)
        if wrong := [name for name in targets if name not in adaptable]:
            raise RecipeError(
                f"plugins.lora.targets: {wrong[0]} is a "
                f"{type(model.get_submodule(wrong[0])).__name__}, which cannot have an adapter; "
                + list_modules(linear)
            )
    if both := [name for name in targets if name in whole]:
        raise RecipeError(f"plugins.lora.modules_to_save: {both[0]} is also one of targets")
    if is_tied(model) and {head, embeddings} & {*targets}:
        raise RecipeError(
            f"plugins.lora.targets: {head} and {embeddings} share one weight in this model, which "
            "peft cannot merge with adapters; name it in modules_to_save to train it whole"
        )
    trained = {*targets, *whole}
    if plugin.fused_head and (head in trained or (is_tied(model) and embeddings in trained)):
        raise RecipeError(
            f"plugins.lora: {head} would be trained, but {plugin.fused_head.table} reads its "
            "frozen weight; remove it from targets and modules_to_save, or remove "
            f"{plugin.fused_head.table}"
        )
    widths = (
        min(layer.in_features, layer.out_features)
        for layer in map(adaptable.get, targets)
        if isinstance(layer, Linear)
    )
    widest = max(widths, default=plugin.r)
    if plugin.r > widest and not plugin.adapter:
        raise RecipeError(
            f"plugins.lora.r: given {plugin.r}, and no target has more than {widest} dimensions, "
            "so that the rest would change nothing; lower it"
        )
    return targets, whole


def choose_weights(plugin: Lora, model: Module, targets: list[str]) -> tuple[list[str], list[str]]:
    """Return the weights that get adapters as parameters: of experts, and of linear `targets`."""
    experts = expert_weights(model)
    if plugin.experts and not experts:
        raise RecipeError(
            "plugins.lora.experts: this model has no fused expert weights; remove experts = true"
        )
    endings = [] if plugin.targets == ALL else plugin.targets
    chosen = {
        name: module
        for name, module in experts.items()
        if plugin.experts or any(ends_with(name, ending) for ending in endings)
    }
    ensure_adaptable(chosen)
    renamed = renamed_by_peft(targets, model)
    ensure_not_quantized("targets", renamed, model, "adapted as parameters, as peft must here")
    linear = [f"{name}.weight" for name in renamed]
    options = {
        "dropout": plugin.dropout > 0,
        "dora": plugin.dora,
        "init": plugin.init == "orthogonal",
    }
    wrong = [option for option, is_set in options.items() if is_set]
    if wrong and (weights := [*chosen, *linear]):
        raise RecipeError(
            f"plugins.lora.{wrong[0]}: peft adapts {weights[0]} as a parameter, without "
            f"{wrong[0]}; remove {wrong[0]}, or choose targets without it"
        )
    return [*chosen], linear


def ensure_single_modules(names: list[str], model: Module, linear: list[str]) -> None:
    """Refuse modules with submodules, which peft would copy, and quantized ones."""
    ensure_not_quantized("modules_to_save", names, model, "trained")
    if nested := [name for name in names if [*model.get_submodule(name).children()]]:
        raise RecipeError(
            f"plugins.lora.modules_to_save: {nested[0]} has submodules; name the submodules to "
            f"train whole; {list_modules(linear)}"
        )


def ensure_not_quantized(option: str, names: list[str], model: Module, use: str) -> None:
    """Refuse quantized layers for a use that needs their weights."""
    for name in names:
        if hasattr(model.get_submodule(name), "source_cls"):
            table = Capability.bundled("quantized_base").table
            raise RecipeError(
                f"plugins.lora.{option}: {name} is quantized, and quantized weights cannot be "
                f"{use}; name it in skip of {table}"
            )


def is_adaptable(module: Module) -> bool:
    """Tell whether a module can have an adapter.

    Some routers are linear layers whose forward returns more than the product.
    """
    # transformers notes the class of a layer that it has quantized.
    kind = getattr(module, "source_cls", type(module))
    is_router = issubclass(kind, Linear) and kind.forward is not Linear.forward
    return isinstance(module, (Linear, Conv1D, Embedding)) and not is_router


def read_past(model: Module) -> list[str]:
    """Return the layers that Mamba's code does not call: it reads their weights, past an adapter.

    Some of them it reads only where it has its kernels; and peft refuses some.
    """
    return [
        f"{name}.{layer}"
        for name, module in model.named_modules()
        if hasattr(module, "A_log")
        for layer in re.findall(
            r"self\.(\w+_proj)\.weight\b", getsource(import_module(module.__module__))
        )
    ]


def head_and_embeddings(model: Any) -> tuple[Any, Any]:
    """Return a model's head and its input embeddings."""
    return model.get_output_embeddings() or reward_head(model), model.get_input_embeddings()


def reward_head(model: Any) -> Any:
    """Return the new head of a reward model; None for a language model."""
    return None if model.can_generate() else getattr(model, "score", None)


def is_tied(model: Any) -> bool:
    """Tell whether head and embeddings share one weight."""
    head, embeddings = head_and_embeddings(model)
    return head is not None and head.weight is embeddings.weight


def name_of(module: Any, model: Module) -> str:
    """Return a module's name in the model."""
    return next((name for name, other in model.named_modules() if other is module), "")


def ends_with(name: str, ending: str) -> bool:
    """Tell whether a name ends with `ending`, at a dot."""
    return f".{name}".endswith(f".{ending}")


def list_modules(linear: list[str]) -> str:
    """List linear layers by the last parts of their names."""
    return f"linear layers: {', '.join(dict.fromkeys(last_parts(linear)))}"


def last_parts(names: Iterable[str]) -> list[str]:
    """Return the last part of each name."""
    return [name.rpartition(".")[2] for name in names]


def shorten(names: list[str], model: Module) -> list[str]:
    """Return the last parts of names, unless they match other modules of the model too.

    What was taken out of a model that sees may have such modules.
    """
    if getattr(model, "taken_out", None):
        return sorted(names)
    endings = {*last_parts(names)}
    matches = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in endings}
    return sorted(endings) if matches == {*names} else names


def trained_rows(
    plugin: Lora, load: ModelLoad, model: Any, adapted: list[str]
) -> dict[str, list[int]] | None:
    """Return peft's setting: module -> the rows that are trained; None for no rows."""
    rows = sorted({*load.new_tokens}) if plugin.train_new_tokens else []
    if not rows:
        return None
    tied = is_tied(model)
    if plugin.strategy == "zero3" or (plugin.strategy and tied):
        shared, or_fsdp2 = (", which are the head too", "") if tied else ("", " or FSDP2")
        raise RecipeError(
            f"plugins.lora.train_new_tokens: the rows are written into whole embeddings{shared}, "
            f"and ranks shard them; launch with DDP{or_fsdp2} (recipes/accelerate/)"
        )
    head, embeddings = (name_of(module, model) for module in head_and_embeddings(model))
    # The head of a reward model has no rows of tokens.
    weights = [embeddings] if reward_head(model) is not None else [embeddings, head]
    if both := [name for name in weights if name in adapted]:
        raise RecipeError(
            f"plugins.lora.train_new_tokens: {both[0]} is in targets or modules_to_save, which "
            "train all of its rows; remove one of them"
        )
    return dict.fromkeys(weights[:1] if tied else weights, rows)


def describe_frozen_rows(plugin: Lora, load: ModelLoad) -> str:
    """Describe the rows of new tokens, if they are frozen."""
    if not load.new_tokens or plugin.train_new_tokens or plugin.modules_to_save:
        return ""
    return (
        f"rows of {len({*load.new_tokens})} new tokens are frozen; train_new_tokens = true in "
        "[plugins.lora] trains them"
    )
