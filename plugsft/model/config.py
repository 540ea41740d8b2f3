"""Checks on a model's configuration, before its weights are read."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

# By their own names: what stands in them imports torch, when it is asked for.
import huggingface_hub
import transformers

from ..base.errors import (
    PlugsftError,
    RecipeError,
    TrainError,
    explain_load_error,
    out_of_memory,
    reason_of,
)
from ..base.limits import path_inside, read_json_object
from ..recipe.tables import Model, Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load_config(model: Model) -> PretrainedConfig:
    """Read the configuration of a model, without its weights."""
    try:
        config: PretrainedConfig = transformers.AutoConfig.from_pretrained(
            str(model.path),
            trust_remote_code=model.trust_remote_code,
            revision=model.revision,
        )
    except Exception as error:  # transformers passes on all errors of its parsers and of the hub
        raise load_error(str(model.path), error) from error
    ensure_no_code_of_others(config, model.trust_remote_code)
    return config


def local_folder(model: Model) -> Path | None:
    """Return the folder of a model that is on this machine: its own, or one in the hub's cache."""
    folder = Path(str(model.path))
    if folder.is_dir():
        return folder
    try:
        snapshot = huggingface_hub.snapshot_download(
            str(folder), revision=model.revision, local_files_only=True
        )
    except Exception:  # any error of the hub: the model is not on this machine
        return None
    return Path(snapshot)


def ensure_no_code_of_others(config: PretrainedConfig, trusted: bool) -> None:
    """Refuse a configuration that asks for a kernel of the hub, whose code would run."""
    kernel = str(config._attn_implementation)
    if "/" in kernel and not trusted:
        raise RecipeError(
            f"model.path: config.json asks for the kernel {kernel} of the hub, whose code would "
            "run here; remove attn_implementation from config.json, or set "
            "model.trust_remote_code = true if you trust its author"
        )


def ensure_model_fits(recipe: Recipe) -> None:
    """Refuse a model that cannot train this recipe: its loss, its files, its context."""
    model = recipe.model
    if model.scratch:
        ensure_within_context(recipe, model.scratch.context, ", or raise model.scratch.context")
        return
    config = load_config(model)
    if model.text_only:
        ensure_text_class(config)
    ensure_plain_loss(config, str(model.path))
    ensure_safetensors(str(model.path), model.revision)
    ensure_one_rope(config, recipe)
    ensure_within_context(recipe, max_context(config))


def sees(config: PretrainedConfig) -> bool:
    """Tell whether a model was published as one that sees or hears, around a language model."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    published = names.get(config.model_type)
    has_text = "text_config" in config.sub_configs and not config.is_encoder_decoder
    return has_text and published in (config.architectures or ())


def ensure_text_class(config: PretrainedConfig) -> None:
    """Refuse model.text_only where transformers has no other class for the text of a model."""
    family, named = config.model_type, config.architectures or ["language model"]
    if not sees(config):
        raise RecipeError(f"model.text_only: the model is a {named[0]} already; remove this key")
    classes = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if classes.get(family, named[0]) == named[0]:
        raise RecipeError(
            f"model.text_only: transformers has no class for the text of '{family}' alone; remove "
            "this key"
        )


def ensure_within_context(recipe: Recipe, context: int | None, other_cure: str = "") -> None:
    """Refuse examples longer than the model's context."""
    if context is not None and recipe.data.max_length > context:
        raise RecipeError(
            f"data.max_length: given {recipe.data.max_length}, but the model's context is "
            f"{context} tokens; set data.max_length = {context}{other_cure}"
        )


def ensure_one_rope(config: PretrainedConfig, recipe: Recipe) -> None:
    """Refuse positions that depend on a micro-batch's longest row (longrope, as in Phi-3.5)."""
    text = config.get_text_config()
    rope: Any = getattr(text, "rope_parameters", None) or {}
    pairs = recipe.provides("preference_pairs")  # two rows in each forward pass
    if rope.get("rope_type") != "longrope" or (recipe.train.micro_batch == 1 and not pairs):
        return
    short = rope.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    if short is not None and recipe.data.max_length > short:
        raise RecipeError(
            f"data.max_length: given {recipe.data.max_length}, but where one row of a micro-batch "
            f"has more than {short} tokens, this model (longrope) changes the positions of all; "
            f"set data.max_length = {short}" + ("" if pairs else ", or train.micro_batch = 1")
        )


def ensure_safetensors(path: str, revision: str | None = None) -> None:
    """Refuse weights that are only pickled: loading a pickle can run code."""
    ensure_weights_inside(path)
    try:
        if Path(path).is_dir():
            names = [file.name for file in Path(path).iterdir()]
        else:
            names = huggingface_hub.list_repo_files(path, revision=revision)
    except Exception:  # no network: loading will refuse the pickle
        return
    prefixes = ("pytorch_model", "adapter_model")
    pickles = [name for name in names if name.startswith(prefixes) and name.endswith(".bin")]
    if not pickles or any(name.endswith(".safetensors") for name in names):
        return
    target = f"{Path(path).name}-safetensors"
    pinned = f", revision={revision!r}" if revision else ""
    command = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer; [kind.from_pretrained("
        f"{path!r}{pinned}).save_pretrained({target!r}) for kind in (AutoModelForCausalLM, "
        "AutoTokenizer)]"
    )
    raise RecipeError(
        f"model.path: '{path}' has its weights as a pickle ({min(pickles)}), which can run code "
        "when it is read; plugsft reads safetensors. If you trust who made it, convert it with: "
        f'python -c {shlex.quote(command)} and set model.path = "{target}"'
    )


def ensure_weights_inside(path: str) -> None:
    """Refuse an index of files outside of the model's folder, which loading would read, or of none.

    An index beside model.safetensors, or of another name, is not read.
    """
    for index in Path(path).glob("*.safetensors.index.json"):
        is_read = index.name == INDEX and not index.with_name(WEIGHTS).exists()
        try:
            for name in sorted({*read_json_object(index)["weight_map"].values()}):
                file = path_inside(index.parent, name)
                if is_read and not file.exists():
                    raise ValueError(f"it names {name}, which is missing")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise RecipeError(
                f"model.path: {index}: cannot be used: {reason_of(error)}; download the model again"
            ) from error


def ensure_ids_known(recipe: Recipe, largest: int) -> None:
    """Refuse token ids beyond the vocabulary of the model's configuration."""
    if recipe.model.scratch or recipe.model.add_tokens:  # the embeddings fit the tokenizer
        return
    size = getattr(load_config(recipe.model).get_text_config(), "vocab_size", None)
    if isinstance(size, int) and largest >= size:
        raise RecipeError(
            f"model: the tokenizer gives the token id {largest}, but the model knows only {size} "
            "ids; use the model's own tokenizer (model.tokenizer), or a model whose embeddings "
            "were resized for this one"
        )


def ensure_plain_loss(config: PretrainedConfig, path: str) -> None:
    """Refuse a model whose own loss has more terms than the cross-entropy of tokens.

    A load-balancing loss is a product of two means over the tokens of one forward pass, so its
    gradient depends on how a step is split into micro-batches and ranks.
    """
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False):
        raise RecipeError(
            f"model.path: {path}/config.json has output_router_logits = true, which asks for a "
            "load-balancing loss of the router. Its value depends on which tokens share a "
            "micro-batch, so ranks and micro-batches would change what is learned. Set "
            "output_router_logits = false in a copy of the model (router_aux_loss_coef alone does "
            "nothing); docs/experts.md has a router loss that depends on the example only"
        )
    if weight := getattr(text, "z_loss_coefficient", 0):
        raise RecipeError(
            f"model.path: {path}/config.json has z_loss_coefficient = {weight:g}, a second loss "
            "on the logits; plugsft trains the cross-entropy of tokens only. Set "
            "z_loss_coefficient = 0 in a copy of the model"
        )


def max_context(config: PretrainedConfig) -> int | None:
    """Return the model's longest sequence, if its configuration names it."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    # XLNet says -1: no limit.
    return context if context is None or context > 0 else None


def load_error(path: str, error: Exception) -> PlugsftError:
    """Return the error for a model that could not be loaded, with the reason."""
    if out_of_memory(error):
        return TrainError(f"model.path: out of memory while loading '{path}'")
    reason = explain_load_error(path, error)
    if isinstance(error, KeyError):
        reason += ", which config.json lacks, or asks for and transformers does not know"
    return RecipeError(
        f"model.path: no causal language model could be loaded from '{path}': {reason}"
    )
