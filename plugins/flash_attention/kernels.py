"""Finds the kernels that can compute a model's attention on this machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    PretrainedConfig,
)

from plugsft import Capability, ModelLoad, Recipe, RecipeError

from .varlen import attend, fastest_kernel, operator_is_exact

BEST_FIRST = ("fa3", "fa4", "fa2", "torch", "sdpa")
VARLEN = "plugsft_varlen"
"""Name of torch's kernel in transformers."""
PACKAGES = {
    "fa4": ("flash-attn-4", "flash_attn.cute", "4.0", "pip install flash-attn-4"),
    "fa3": ("flash-attn-3", "flash_attn_interface", "3.0", "build it: flash-attention/hopper"),
    "fa2": (
        "flash-attn",
        "flash_attn",
        "2.6",
        "pip install --no-build-isolation 'plugsft[flash]' (docs/speed.md says what it needs)",
    ),
}
"""Distribution, module, lowest version, and how to install it."""
ARCHITECTURES = {
    "fa3": ("Hopper (9.0)", {9}),
    "fa4": ("Hopper and Blackwell (9.0 to 11.0)", {9, 10, 11}),
}
"""Major compute capabilities of packages that do not run on all others."""
WIDEST_HEAD = {"fa4": 128}
"""Widest head that a kernel supports, if not 256; the width must also be a multiple of eight."""
PACKING = Capability.bundled("packed_rows").table
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


class Conditions(NamedTuple):
    """What decides which kernels can run, before the model is known."""

    gpu: tuple[int, int] | None
    """Compute capability of the GPU; the lowest of several."""
    half: bool
    """Whether attention is computed in 16 bits."""
    packed: bool
    built: bool
    """Whether this torch was built with its own kernel."""
    shared: bool = False
    """Whether two answers share a prompt."""


class Obstacle(NamedTuple):
    """Why a kernel cannot run, and the cure."""

    reason: str
    cure: str


REMOVE = "remove [plugins.flash_attention]"


def conditions_of(recipe: Recipe) -> Conditions:
    """Return the conditions of a recipe on this machine."""
    return Conditions(
        gpu=None if recipe.device == "cpu" else lowest_capability(),
        half=recipe.model.dtype != "float32",
        packed=recipe.provides("packed_rows") is not None,
        built=torch.backends.cuda.is_flash_attention_available(),
        shared=recipe.provides("shared_prompts") is not None,
    )


def lowest_capability() -> tuple[int, int] | None:
    """Return the lowest compute capability of all NVIDIA GPUs; None without any."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    return min(torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count()))


def find_obstacle(kernel: str, conditions: Conditions) -> Obstacle | None:
    """Return why a kernel cannot run on this machine with this recipe, or None."""
    if kernel == "sdpa":
        return None
    if conditions.gpu is None:
        return Obstacle("no NVIDIA GPU", 'run it on one, or set kernel = "auto"')
    capability = ".".join(map(str, conditions.gpu))
    made_for, majors = ARCHITECTURES.get(kernel, ("", {conditions.gpu[0]}))
    if conditions.gpu[0] not in majors:
        reason = f"made for {made_for}, not for {capability}"
        return Obstacle(reason, 'set kernel = "fa2" or "torch"')
    if conditions.gpu < (8, 0):
        reason = f"needs compute capability 8.0, not {capability}"
        return Obstacle(reason, 'set kernel = "sdpa"')
    if not conditions.half:
        cure = 'set model.dtype = "bfloat16", or kernel = "sdpa"'
        return Obstacle("takes bfloat16, not float32", cure)
    if kernel != "torch":
        if conditions.shared:
            return Obstacle("cannot share the prompt of a pair", 'set kernel = "torch" or "sdpa"')
        return find_obstacle_in_package(*PACKAGES[kernel])
    if not conditions.built:
        return Obstacle("this torch was built without it", 'set kernel = "sdpa"')
    if not conditions.packed:
        cure = f'add {PACKING}, or set kernel = "sdpa"'
        return Obstacle("takes packed rows only", cure)
    return None


def find_obstacle_in_package(
    distribution: str, module: str, lowest: str, install: str
) -> Obstacle | None:
    """Return why a package cannot be used, or None."""
    cure = f'{install}; or set kernel = "auto"'
    try:
        version = importlib.metadata.version(distribution)
        importlib.import_module(module)
    except importlib.metadata.PackageNotFoundError:
        return Obstacle(f"{distribution} is not installed", cure)
    except ImportError as error:  # usually built for another torch
        return Obstacle(f"{distribution} {version} cannot be imported ({error})", cure)
    if release(version) < release(lowest):
        return Obstacle(f"{distribution} {version} is older than {lowest}", cure)
    return None


def release(version: str) -> list[int]:
    """Return the first two numbers of a version: 2 and 8 of 2.8.3.post1."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def attention_config(load: ModelLoad) -> PretrainedConfig:
    """Return the configuration of the text model that is about to be loaded."""
    options = {"revision", "trust_remote_code"} & {*load.kwargs}
    config = AutoConfig.from_pretrained(load.path, **{name: load.kwargs[name] for name in options})
    text_config: PretrainedConfig = config.get_text_config()
    return text_config


def find_obstacle_in_model(kernel: str, config: PretrainedConfig, packed: bool) -> Obstacle | None:
    """Return why a kernel cannot compute a model's attention, or None."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    if kernel == "sdpa":
        # Transformers 5.17: SDPA drops a soft cap, and Gemma 2 says that it supports SDPA.
        if not packed and model_class is not None and (capped or not model_class._supports_sdpa):
            reason = f"{model_class.__name__} has attention that SDPA cannot compute"
            return Obstacle(reason, REMOVE)
        return None
    if getattr(config, "attention_chunk_size", None):
        reason = "it cannot compute this model's chunked attention"
        return Obstacle(reason, 'set kernel = "sdpa"')
    own = kernel == "torch" and not getattr(model_class, "_supports_attention_backend", True)
    if own or not getattr(model_class, "_supports_flash_attn", True):
        return Obstacle(f"{model_class.__name__} has attention that it cannot compute", REMOVE)
    if getattr(model_class, "_compatible_flash_implementations", None):
        return Obstacle(f"{model_class.__name__} takes other kernels only", REMOVE)
    widest = WIDEST_HEAD.get(kernel, 256)
    for width in {*head_widths(config)}:
        if width > widest or width % 8:
            reason = f"heads of {width}; it takes multiples of 8, to {widest}"
            return Obstacle(reason, 'set kernel = "sdpa"')
    cure = 'set kernel = "fa2" or "sdpa"'
    if any(getattr(config, name, 0) for name in DROPOUTS) and kernel != "fa2":
        return Obstacle("it has no dropout, and the model's attention has", cure)
    if kernel == "torch":
        if capped:
            return Obstacle("it has no soft cap, and the model's attention has", cure)
        if getattr(config, "v_head_dim", None) not in {None, *head_widths(config)}:
            return Obstacle("it needs values as wide as keys", cure)
    return None


def choose(
    asked: str, config: PretrainedConfig, conditions: Conditions
) -> tuple[str, Obstacle | None, str]:
    """Return the kernel for a model ("": transformers' own), its obstacle, and a description."""
    packed = conditions.packed
    if asked != "auto":
        obstacle = find_obstacle_in_model(asked, config, packed)
        return asked, obstacle, "" if obstacle else describe(asked, packed)
    chosen, refused = "", dict[str, list[str]]()
    for kernel in BEST_FIRST:
        obstacle = find_obstacle(kernel, conditions) or find_obstacle_in_model(
            kernel, config, packed
        )
        if obstacle is None:
            chosen = kernel
            break
        refused.setdefault(obstacle.reason, []).append(kernel)
    reasons = [f"not {', '.join(kernels)}: {reason}" for reason, kernels in refused.items()]
    return chosen, None, "; ".join([describe(chosen, packed), *reasons])


def find_unused(kernel: str, name: str, model: Any) -> Obstacle | None:
    """Return why a loaded model does not use a kernel as it should, or None."""
    used = model.config.get_text_config()._attn_implementation
    if name and used != name:
        return Obstacle(f"the model uses {used} instead of {name}", REMOVE)
    sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    if sinks and kernel in (*PACKAGES, "torch"):
        return Obstacle("it does not support attention sinks, which the model has", REMOVE)
    return None


def head_widths(config: PretrainedConfig) -> list[int]:
    """Return the width of a query head in each layer."""
    per_layer = getattr(config, "per_layer_config", None)
    layers: list[Any] = [config]
    if per_layer is not None:
        layers = [per_layer[number] for number in range(len(per_layer))]
    return [
        # A head may have two parts; `head_dim` is the size of one part.
        layer.qk_nope_head_dim + layer.qk_rope_head_dim
        if hasattr(layer, "qk_nope_head_dim")
        else getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        for layer in layers
    ]


def describe(kernel: str, packed: bool) -> str:
    """Return a kernel's name and version."""
    if kernel in PACKAGES:
        distribution = PACKAGES[kernel][0]
        cure = f"; on rows that are not packed it waits for the GPU in each layer: add {PACKING}"
        return f"{distribution} {importlib.metadata.version(distribution)}{'' if packed else cure}"
    if kernel == "torch":
        slower = "" if operator_is_exact("cuda") else ", called by varlen_attn"
        return f"the kernel of torch {torch.__version__} for packed rows{slower}"
    if kernel == "sdpa":
        return "SDPA, document by document" if packed else "SDPA"
    return "left to transformers"


def register_kernel(kernel: str, packed: bool) -> str:
    """Register a kernel in transformers; return its name there."""
    if kernel == "torch":
        AttentionInterface.register(VARLEN, partial(attend, kernel=fastest_kernel("cuda")))
        return VARLEN
    if kernel == "sdpa" and not packed:  # a packer has an attention of its own
        return kernel
    return f"flash_attention_{kernel[-1]}" if kernel in PACKAGES else ""


INDEXED_BY_32_BITS = ("fa2", "torch")
"""Kernels that index the sums of the queries' gradients by 32 bits, at least in older releases."""
ROOM = 128
"""Tokens for which those sums have room between two documents."""


def sums_of_token(kernel: str, config: PretrainedConfig) -> int:
    """Return how many sums a token's gradient takes; 0 if a kernel can index any number."""
    if kernel not in INDEXED_BY_32_BITS:
        return 0
    widest = max(head_widths(config))
    step = 32 if widest <= 128 else 64
    heads: int = config.num_attention_heads
    return heads * -(-widest // step) * step


def ensure_indexable(batch: Mapping[str, Any], sums: int, option: str) -> None:
    """Refuse a row that would end in wrong gradients, or in an illegal memory access."""
    bounds = batch.get("cu_seq_lens_q")
    if bounds is None:
        return
    documents, tokens = len(bounds) - 1, batch["input_ids"].numel()
    if (tokens + ROOM * documents) * sums >= 2**31:
        raise RecipeError(
            "plugins.flash_attention: the kernel cannot index the gradients of a packed row of "
            f"{tokens:,} tokens in {documents:,} documents: (tokens + {ROOM} x documents) x "
            f"{sums:,}, which is heads x width, must be below 2**31; lower {option}, or set "
            'plugins.flash_attention.kernel = "sdpa"'
        )
