"""Which kernel can compute a model's attention, and the call of torch's own."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    PretrainedConfig,
)

from plugsft import RecipeError
from plugsft.kit.model import attend_per_document, lone_document

if TYPE_CHECKING:
    from . import Here

BEST_FIRST = ("fa3", "fa2", "torch", "sdpa")
VARLEN = "plugsft_varlen"
"""The name under which transformers finds torch's kernel."""
PACKAGES = {
    "fa3": ("flash-attn-3", "flash_attn_interface", "3.0", "build it: flash-attention/hopper"),
    "fa2": ("flash-attn", "flash_attn", "2.6", "pip install flash-attn --no-build-isolation"),
}
"""Distribution, module, least version, and how to get it."""
VARLEN_NEEDS = {"scale", "window_size", "enable_gqa"}
"""What torch's kernel must take; torch 2.12 was the first whose did."""
WIDEST = 256
"""Numbers of a head that the kernels take at most; a multiple of eight besides."""
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")

Obstacle = tuple[str, str]
"""Why a kernel cannot run, and the cure."""


def least_gpu() -> tuple[int, int] | None:
    """Return the least compute capability of NVIDIA's GPUs, if there is one."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    return min(torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count()))


def unavailable(kernel: str, here: Here) -> Obstacle | None:
    """Say why a kernel cannot run on this machine with this recipe, if it cannot."""
    if kernel == "sdpa":
        return None
    if here.gpu is None:
        return "no NVIDIA GPU", 'run it on one, or set kernel = "auto"'
    capability = ".".join(map(str, here.gpu))
    if kernel == "fa3" and here.gpu[0] != 9:
        return f"made for Hopper (9.0), not for {capability}", 'set kernel = "fa2" or "torch"'
    if here.gpu < (8, 0):
        return f"needs compute capability 8.0, not {capability}", 'set kernel = "sdpa"'
    if not here.half:
        return "takes bfloat16, not float32", 'set model.dtype = "bfloat16", or kernel = "sdpa"'
    if kernel == "torch":
        return too_old(here)
    if here.shared:
        return "cannot share a prompt (plugins.dpo)", 'set kernel = "torch" or "sdpa"'
    return lacking(*PACKAGES[kernel])


def too_old(here: Here) -> Obstacle | None:
    """Say why torch's own kernel cannot be used, if it cannot."""
    if not {*inspect.signature(varlen_attn).parameters} >= VARLEN_NEEDS:
        return f"needs torch 2.12, not {torch.__version__}", "pip install -U torch"
    if not here.built:
        return "this torch was built without it", 'set kernel = "sdpa"'
    if not here.packed:
        return "takes packed rows only", 'add [plugins.bfd_packing], or set kernel = "sdpa"'
    return None


def lacking(distribution: str, module: str, least: str, how: str) -> Obstacle | None:
    """Say why a package cannot be used, if it cannot."""
    cure = f'{how}; or set kernel = "auto"'
    try:
        found = importlib.metadata.version(distribution)
        importlib.import_module(module)
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} is not installed", cure
    except ImportError as error:  # built for another torch, most often
        return f"{distribution} {found} cannot be imported ({error})", cure
    if release(found) < release(least):
        return f"{distribution} {found} is older than {least}", cure
    return None


def release(version: str) -> list[int]:
    """Return the numbers of a version that count: 2.8.3.post1 gives 2 and 8."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def unfit(kernel: str, config: PretrainedConfig, packed: bool) -> Obstacle | None:
    """Say why a kernel cannot compute a model's attention, if it cannot."""
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kernel == "sdpa":
        if not packed and cls is not None and not cls._supports_sdpa:
            return f"{cls.__name__} has attention that SDPA cannot compute", LEAVE
        return None
    if getattr(config, "attention_chunk_size", None):
        return "it cannot compute this model's chunked attention", 'set kernel = "sdpa"'
    own = kernel == "torch" and not getattr(cls, "_supports_attention_backend", True)
    if own or not getattr(cls, "_supports_flash_attn", True):
        return f"{cls.__name__} has attention that it cannot compute", LEAVE
    others = getattr(cls, "_compatible_flash_implementations", None)
    if others:
        return f"{cls.__name__} takes other kernels only", LEAVE
    widths = {*head_widths(config)}
    for width in widths:
        if width > WIDEST or width % 8:
            return f"heads of {width}; it takes multiples of 8, to {WIDEST}", 'set kernel = "sdpa"'
    if any(getattr(config, name, 0) for name in DROPOUTS) and kernel != "fa2":
        return "it has no dropout, and the model's attention has", 'set kernel = "fa2" or "sdpa"'
    if kernel == "torch":
        if getattr(config, "attn_logit_softcapping", None) is not None:
            return (
                "it has no soft cap, and the model's attention has",
                'set kernel = "fa2" or "sdpa"',
            )
        if getattr(config, "v_head_dim", None) not in {None, *widths}:
            return "it wants values as wide as keys", 'set kernel = "fa2" or "sdpa"'
    return None


LEAVE = "remove [plugins.flash_attention]"
SINKS = ("it has no attention sinks, and the model has", LEAVE)


def has_sinks(model: Module) -> bool:
    """Tell whether a model's attention has sinks, which the kernels would leave out in silence."""
    return any(name.endswith(".sinks") for name, _ in model.named_parameters())


def head_widths(config: PretrainedConfig) -> list[int]:
    """Return how many numbers a head's queries have, in each layer."""
    view = getattr(config, "per_layer_config", None)
    layers: list[Any] = [config] if view is None else [view[n] for n in range(len(view))]
    return [
        # A head may have two parts; `head_dim` is the size of one.
        layer.qk_nope_head_dim + layer.qk_rope_head_dim
        if hasattr(layer, "qk_nope_head_dim")
        else getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        for layer in layers
    ]


def title(kernel: str, packed: bool) -> str:
    """Name a kernel."""
    if kernel in PACKAGES:
        distribution = PACKAGES[kernel][0]
        return f"{distribution} {importlib.metadata.version(distribution)}"
    if kernel == "torch":
        return f"the kernel of torch {torch.__version__} for packed rows"
    if kernel == "sdpa":
        return "SDPA, document by document" if packed else "SDPA"
    return "left to transformers"


def register(kernel: str, packed: bool) -> str:
    """Make a kernel known to transformers; return its name there."""
    if kernel == "torch":
        AttentionInterface.register(VARLEN, attend)
        return VARLEN
    if kernel == "sdpa":
        return attend_per_document() if packed else "sdpa"
    return {"fa3": "flash_attention_3", "fa2": "flash_attention_2"}.get(kernel, "")


def attend(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    keys: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each document of a row, all of them in one launch, and ask the device nothing.

    The name is none of those for which transformers makes a mask.
    """
    if dropout or softcap is not None or s_aux is not None:
        raise RecipeError(
            'plugins.flash_attention: kernel = "torch" has no dropout, no soft cap and no sinks, '
            'and the model\'s attention has; set kernel = "sdpa"'
        )
    inputs = arguments(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    if keys is not None:
        # What a document sees of the one before it is copied in front of its own.
        inputs |= {name: inputs[name].index_select(0, keys) for name in ("key", "value")}
        inputs |= {"cu_seq_k": cu_seq_lens_k, "max_k": max_length_k}
    output: Any = varlen_attn(**inputs)
    return output[None], None


def arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor | None,
    longest: int | None,
    scaling: float | None,
    window: int | None,
) -> dict[str, Any]:
    """Return what torch's kernel is called with for a row of heads as transformers has them."""
    if bounds is None or longest is None:
        (longest,) = lone_document(query, key)
        bounds = torch.arange(2, dtype=torch.int32, device=query.device) * longest
    dtype = query.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):
        # Norms of queries and keys leave float32 behind where weights are float32.
        dtype = torch.get_autocast_dtype(query.device.type)
    flat = [one.transpose(1, 2).flatten(0, 1).to(dtype) for one in (query, key, value)]
    return {
        **dict(zip(("query", "key", "value"), flat, strict=True)),
        "cu_seq_q": bounds,
        "cu_seq_k": bounds,
        "max_q": longest,
        "max_k": longest,
        "scale": scaling,
        # To the left: a window counts the token itself. To the right: nothing, so it is causal.
        "window_size": (-1 if window is None else window - 1, 0),
        "enable_gqa": query.shape[1] != key.shape[1],
    }
