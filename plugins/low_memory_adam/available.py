"""Refuses kinds whose package or GPU is missing."""

import importlib.util

import torch

from plugsft import RecipeError


def ensure_available(kind: str, paged: bool) -> None:
    """Refuse a kind of bitsandbytes that cannot run here."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(f"kind: \"{kind}\" needs bitsandbytes: pip install 'plugsft[quantize]'")
    if paged and not torch.cuda.is_available():
        raise RecipeError(f'kind: "{kind}" needs an NVIDIA GPU; set kind = "adamw_8bit"')
