"""In what numbers a run computes, and where: the recipe and the launcher made to agree."""

import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from .errors import LaunchError
from .recipe import Recipe
from .spread import Held


def on_cpu(recipe: Recipe) -> bool:
    """Tell whether the run is on the CPU; refuse to leave a GPU idle that nobody said to leave."""
    if not torch.cuda.is_available() or recipe.device == "cpu":
        return True
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        raise LaunchError(
            "the launcher was told to use the CPU (use_cpu), and a GPU is visible: launch with a "
            'file of recipes/accelerate/ for GPUs, or set device = "cpu" in the recipe'
        )
    return False


def mixed(dtype: str, deepspeed: bool) -> str:
    """Return the mixed precision that accelerate gets, for weights of a type."""
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if asked not in ("no", "bf16"):
        raise LaunchError(
            f"the launcher asks for mixed_precision {asked}, and plugsft computes in float32 or "
            "bfloat16; set mixed_precision: bf16 (or no) in its file"
        )
    if dtype == "bfloat16":
        # Weights of this type are computed with as they are. But DeepSpeed, told of no mixed
        # precision, makes float32 of them, and FSDP2, told of it, does as well.
        return "bf16" if deepspeed else "no"
    return asked


def ensure_no_other(config: dict[str, Any], mixed: str) -> None:
    """Refuse a DeepSpeed file that wants other numbers than the recipe."""
    for name, wanted in (("fp16", False), ("bf16", mixed == "bf16")):
        given = config.get(name, {}).get("enabled", "auto")
        if given != "auto" and bool(given) != wanted:
            raise LaunchError(
                f"the DeepSpeed file sets {name}.enabled = {str(given).lower()}, and the recipe's "
                f"model.dtype with the launcher's mixed_precision wants {str(wanted).lower()}; "
                'leave it out, or set it to "auto"'
            )


def truth(accelerator: Accelerator, held: Held) -> str:
    """Say in one line what the run really computes with, read from what was loaded."""
    sizes: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for one in held.parameters(trained=False).values():
        kinds = sizes[one.requires_grad]
        kind = str(one.dtype).removeprefix("torch.")
        kinds[kind] = kinds.get(kind, 0) + getattr(one, "ds_numel", one.numel())
    trained, frozen = (" and ".join(sorted(sizes[kind])) for kind in (True, False))
    said = [f"weights {trained}"]
    if frozen:
        said = [f"frozen weights {frozen}, trained ones {trained}"]
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        master = held.optimizer.optimizer.fp32_partitioned_groups_flat[0].dtype
        states = str(master).removeprefix("torch.")
        said[0] += f", updated in {states}" if states != trained else ""
    else:
        states = trained
    computed = "bfloat16" if accelerator.mixed_precision == "bf16" else frozen or trained
    where = accelerator.device.type
    if where == "cuda":
        where = torch.cuda.get_device_name(accelerator.device)
    return ", ".join(
        [*said, f"computed in {computed}", f"optimizer states {states}", f"on {where}"]
    )
