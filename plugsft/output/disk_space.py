"""The room that a run needs on its disk, as far as it can be known before it begins."""

from pathlib import Path

import huggingface_hub

from ..base.console import format_size
from ..base.errors import RecipeError
from ..base.machine import free_disk
from ..base.step_folders import list_checkpoints
from ..model.config import load_config
from ..recipe.tables import Model, Recipe, Scratch
from ..registry.active import Active

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TOKEN_BYTES = 4.2
"""On disk: an int32 and a bit of mask for each, and little besides for each example."""


def ensure_room(recipe: Recipe, active: Active, overwrite: bool) -> None:
    """Refuse a disk without room for the first checkpoint and the model, where it can be known."""
    free = free_disk(recipe.folder.absolute()) + (taken(recipe) if overwrite else 0)
    need = needed(recipe, 1)
    if need is not None and need > free and not may_shrink(active):
        raise RecipeError(
            f"output: the first checkpoint and the model need about {format_size(need)}, and "
            f"{format_size(free)} are free; free some, or give another folder (output=...)"
        )


def needed(recipe: Recipe, checkpoints: int) -> int | None:
    """Return the bytes of a run's model and checkpoints, if the model's size is known."""
    model = recipe.model
    written = _weights(model)
    # Checkpoints have the weights and AdamW's two moments.
    stored = 3 * BYTES[model.weights] / BYTES[model.dtype]
    return written and written + round(checkpoints * stored * written)


def taken(recipe: Recipe) -> int:
    """Return the bytes of an earlier run's results, which a new run removes."""
    results = [*list_checkpoints(recipe.folder / "checkpoints"), recipe.folder / "model"]
    found = [path for result in results for path in result.rglob("*")]
    return sum(path.stat().st_size for path in found if path.is_file())


def may_shrink(active: Active) -> bool:
    """Tell whether a plugin may train a part of the weights only, and so write far less."""
    hooks = ["optimize_model", "optimizer"]
    return any(active.implements(name, hooks) for name in active.plugins)


def parameters(scratch: Scratch) -> int:
    """Count the weights of a model from scratch whose vocabulary is full."""
    width, mlp = scratch.hidden, scratch.mlp or 4 * scratch.hidden
    narrow = width // scratch.heads * (scratch.kv_heads or scratch.heads)
    layer = 2 * width * width + 2 * width * narrow + 3 * width * mlp + 2 * width
    return scratch.vocab * width + scratch.layers * layer + width


def _weights(model: Model) -> int | None:
    """Return the bytes of the model's weights, as far as they are on this machine."""
    if model.scratch:
        return parameters(model.scratch) * BYTES[model.dtype]
    folder = Path(str(model.path))
    if not folder.is_dir():
        try:
            kept = huggingface_hub.snapshot_download(
                str(folder), revision=model.revision, local_files_only=True
            )
        except Exception:  # whatever the hub raises: it is not on this machine
            return None
        folder = Path(kept)
    found = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    stored = getattr(load_config(model).dtype, "itemsize", BYTES[model.dtype])
    return sum(path.stat().st_size for path in found) * BYTES[model.dtype] // stored or None
