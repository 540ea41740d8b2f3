"""The trained model as a Hugging Face folder: gathered, written, read back, and then published."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedTokenizerBase

from .errors import CheckpointError
from .parts import Part
from .publish import publish
from .recipe import Recipe
from .spread import Held

SAMPLE = 64
"""Numbers of each tensor that are compared with those that this rank trained."""


def save_model(
    accelerator: Accelerator,
    model: Module,
    held: Held,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
) -> None:
    """Publish the trained model, once what was written is seen to be what was trained."""
    plain: Any = accelerator.unwrap_model(model)
    # The folder of an adapter holds what was trained; its base stays where it is.
    dtype = getattr(torch, recipe.model.dtype)
    adapter = hasattr(plain, "peft_config")
    weights: dict[str, Tensor] = {}
    mine: dict[str, Part] = {}
    for name, one in held.parameters(trained=adapter).items():
        whole = held.whole(one)
        if accelerator.is_main_process:
            mine[name] = held.part(one)
            weights[name] = whole.to("cpu", None if adapter else dtype).contiguous()
    if accelerator.is_main_process:
        lasting = set() if adapter else {*plain.state_dict()}
        kept = {name: one for name, one in plain.named_buffers() if name in lasting}
        with publish(recipe.folder / "model", replace=True) as folder:
            plain.save_pretrained(folder, state_dict=weights | kept)
            tokenizer.save_pretrained(folder)
            ensure_written(folder, weights, mine)
    accelerator.wait_for_everyone()


def ensure_written(folder: Path, weights: dict[str, Tensor], mine: dict[str, Part]) -> None:
    """Read a model's folder back: each tensor is there, in its shape, and begins as it should."""
    names = {_in_file(name): name for name in weights}
    missing, size = {*names}, 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for there in file.keys():  # noqa: SIM118  # no dict
                tensor = file.get_tensor(there)
                size += tensor.numel()
                if there in names:
                    missing.remove(there)
                    name = names[there]
                    if wrong := _differs(tensor, weights[name].shape, mine[name]):
                        raise _broken(folder, f"{there} {wrong}")
    # transformers writes the experts of some models under other names, cut otherwise.
    if missing and size != sum(one.numel() for one in weights.values()):
        raise _broken(folder, f"{min(missing)} is missing, as are {len(missing) - 1} more")


def _differs(tensor: Tensor, shape: torch.Size, part: Part) -> str:
    """Say in what a tensor that was read back differs from what was trained."""
    if tensor.shape != shape or not tensor.numel():
        return f"has the shape {list(tensor.shape)}"
    sample = part.values[:SAMPLE].to("cpu", tensor.dtype)
    same = torch.equal(tensor.view(-1)[part.start : part.start + len(sample)], sample)
    return "" if same else "has other values than were trained"


def _in_file(name: str) -> str:
    """Return the name in a file: peft leaves its own words out."""
    return name.replace("modules_to_save.default.", "").replace(".default.", ".")


def _broken(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder.parent}: the trained model was not written as it is: {what}. The last checkpoint "
        "holds all that was trained: --resume goes on from it"
    )
