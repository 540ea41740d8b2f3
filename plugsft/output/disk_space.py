"""Disk space that a run needs, estimated before it begins."""

from ..base.atomic import list_checkpoints
from ..base.console import format_size
from ..base.errors import RecipeError
from ..base.machine import free_disk
from ..model.config import load_config, local_folder
from ..recipe.tables import Model, Recipe, Scratch
from ..registry.active import Active

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TOKEN_BYTES = 4.2
"""Bytes of a token on disk: an int32, a bit of mask, and its share of an example's columns."""


def ensure_room(
    recipe: Recipe, active: Active, overwrite: bool, checkpoints: int = 1, tokens: float = 0.0
) -> str:
    """Refuse a disk without space for a run's checkpoints and model; return what it needs."""
    free, model = free_disk(recipe.folder.absolute()), recipe.model
    if overwrite:
        results = [*list_checkpoints(recipe.folder / "checkpoints"), recipe.folder / "model"]
        paths = [path for result in results for path in result.rglob("*")]
        free += sum(path.stat().st_size for path in paths if path.is_file())
    adapters = recipe.provides("adapters") if model.path else None
    written = _weights(model)
    if written is None:
        return f"{format_size(free)} free; the model's size is known after its download"
    # Checkpoints have the weights and AdamW's two moments.
    stored = 3 * BYTES[model.weights] / BYTES[model.dtype]
    if adapters:  # two matrices of this rank for each square one, in float32
        width = load_config(model).get_text_config().hidden_size
        written = round(written * min(1, 2 * adapters.value / width) * 4 / BYTES[model.dtype])
        stored = 3
    need = round(written + checkpoints * stored * written + tokens * TOKEN_BYTES)
    text = f"about {format_size(need)} needed, {format_size(free)} free"
    if need < free:
        return text
    hooks = ["optimize_model", "optimizer"]
    if not adapters and any(active.implements(name, hooks) for name in active.plugins):
        return f"{text}; but a plugin may train few weights, and so write far less"
    raise RecipeError(f"output: {text}; free some, lower checkpoint.keep, or name another output")


def parameters(scratch: Scratch) -> int:
    """Count the weights of a model from scratch whose vocabulary is full."""
    width, mlp = scratch.hidden, scratch.mlp or 4 * scratch.hidden
    narrow = width // scratch.heads * (scratch.kv_heads or scratch.heads)
    layer = 2 * width * width + 2 * width * narrow + 3 * width * mlp + 2 * width
    return scratch.vocab * width + scratch.layers * layer + width


def _weights(model: Model) -> int | None:
    """Bytes of the weights as they are written; None if the model is not on this machine."""
    if model.scratch:
        return parameters(model.scratch) * BYTES[model.dtype]
    folder = local_folder(model)
    if folder is None:
        return None
    stored = getattr(load_config(model).dtype, "itemsize", BYTES[model.dtype])
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return size * BYTES[model.dtype] // stored or None
