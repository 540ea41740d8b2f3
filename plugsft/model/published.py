"""A model as it was published: its class, without what text does not pass.

A model that sees is trained on text as the class that its folder names. What text does not pass is
taken out before plugins see the model, and copied from the base's files when the model is saved. So
all names are those of the published model. Freezing the eyes instead was left: they would take
memory on each rank, adapters, and a place in each strategy. The text-only class of transformers was
left, too: its names are others, so a server finds none of its adapters.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.integrations import deepspeed

from ..base.errors import RecipeError
from .config import ensure_no_code_of_others, sees


def auto_class(config: Any, text_only: bool = False) -> Any:
    """Return transformers' class that builds a model: the published one, or a language model's."""
    return AutoModelForMultimodalLM if sees(config) and not text_only else AutoModelForCausalLM


def build(config: Any, text_only: bool = False, **options: Any) -> Any:
    """Build the model of a configuration, with random weights or none."""
    auto = auto_class(config, text_only)
    attention = None if auto is AutoModelForCausalLM else options.pop("attn_implementation", None)
    model = auto.from_config(config, **options)
    return model if auto is AutoModelForCausalLM else take_out(model, attention)


def read_config(path: str, options: Mapping[str, Any]) -> Any:
    """Read the configuration of a model that is loaded with these options."""
    known = {name: options[name] for name in ("revision", "trust_remote_code") if name in options}
    config = AutoConfig.from_pretrained(path, **known)
    ensure_no_code_of_others(config, bool(known.get("trust_remote_code")))
    return config


def from_files(path: str, text_only: bool = False, **options: Any) -> tuple[Any, set[str]]:
    """Load a model with its weights; return it, and the names that its files lack."""
    auto = auto_class(read_config(path, options), text_only)
    # The eyes may not support the kernel that the language model gets.
    sees_too = auto is AutoModelForMultimodalLM
    attention = options.pop("attn_implementation", None) if sees_too else None
    model, info = auto.from_pretrained(path, output_loading_info=True, **options)
    return take_out(model, attention) if sees_too else model, info["missing_keys"]


def take_out(model: Any, attention: str | None = None) -> Any:
    """Remove what is neither the decoder nor the head of a model that sees; return the model.

    `attention` is the kernel that the rest gets.
    """
    ends = model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()
    kept = {module for end in ends if end is not None for module in end.modules()}
    around = {module for module in model.modules() if not kept.isdisjoint(module.modules())} - kept
    taken = []
    for path, module in [*model.named_modules()]:
        if module not in around:
            continue
        children = [
            name
            for name, child in module.named_children()
            if child not in kept | around and child.state_dict()
        ]
        for name in [*children, *dict(module.named_parameters(recurse=False))]:
            setattr(module, name, None)
            taken.append(f"{path}.{name}" if path else name)
    model.taken_out = taken
    if attention:
        model.set_attn_implementation(attention)
    return model


def ensure_reads_text(model: Any) -> None:
    """Refuse a class whose forward pass asks for more than text, or for what was taken out."""
    if not taken_out(model):
        return
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        meta_copy(model)(input_ids=ids, use_cache=False)
    except (AttributeError, TypeError, ValueError) as error:
        raise RecipeError(
            f"model.path: {type(model).__name__} cannot be trained on text alone, without "
            f"{', '.join(taken_out(model))}: {error}; train its language model, saved as a model "
            "of its own"
        ) from error
    except Exception:  # a forward pass without data says nothing of other models
        return


def set_dtype(config: Any, dtype: torch.dtype) -> None:
    """Note the type of a saved model in its configuration, and in those of its parts."""
    for part in parts_of(config):
        part.dtype = dtype


def parts_of(config: Any) -> list[Any]:
    """Return a configuration, and those of the parts of its model."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    return [part for part in parts if part is not None]


def taken_out(model: Any) -> list[str]:
    """Return the names of what was taken out of a model."""
    return getattr(model, "taken_out", [])


def meta_copy(model: Any, model_class: Any = None) -> PreTrainedModel:
    """Build the model again without weights and undivided; or one of another class, whole."""
    again = model_class is None
    if again:
        # FSDP2 replaces the class by a subclass.
        classes = type(model).__mro__
        model_class = next(one for one in classes if not issubclass(one, FSDPModule))
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # a kernel wants data, and support by all parts
    # Saving replaces dtypes in configurations by their names, but some layers need the dtypes.
    for part in parts_of(config):
        part.dtype = getattr(torch, part.dtype) if isinstance(part.dtype, str) else part.dtype
    copied = without_weights(model_class, config)
    copied._weight_conversions = getattr(model, "_weight_conversions", None)
    if again and taken_out(model):
        take_out(copied)
    return copied  # type: ignore[no-any-return]


def without_weights(model_class: Any, config: Any) -> Any:
    """Build a model on the meta device."""
    # Under ZeRO-3, transformers would shard and initialize the models inside a model.
    zero3_config = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]  # untyped upstream
    try:
        with torch.device("meta"):
            return model_class(config)
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = zero3_config
