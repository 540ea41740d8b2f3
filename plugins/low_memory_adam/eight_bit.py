"""AdamW of bitsandbytes, with moments of 8 bits."""

from typing import Any

import torch
from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit

from plugsft import RecipeError

CLASSES: dict[str, Any] = {"adamw_8bit": AdamW8bit, "paged_adamw_8bit": PagedAdamW8bit}


def ensure_gpu() -> None:
    """Refuse moments in the host's memory where there is no GPU."""
    if not torch.cuda.is_available():
        raise RecipeError('kind: "paged_adamw_8bit" needs an NVIDIA GPU; set kind = "adamw_8bit"')
