"""The trained model as a Hugging Face folder: gathered, written, read back, and only then named."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..base.atomic import publish
from ..base.errors import CheckpointError, RecipeError
from ..hooks import Run
from ..model.load import persistent_buffers
from ..model.published import meta_copy, set_dtype
from ..model.same_base import BASE
from ..model.tensor_shards import TensorShard, shard_of
from ..model.weight_files import WeightFiles, find_weight_files, group_tensors
from ..ranks.agree import agreed
from ..recipe.capabilities import Capability
from ..tokens.ends import end_generation


def ensure_saveable(model: Any) -> None:
    """Refuse a model that transformers could not save and load again.

    Writes nothing: names and shapes go through transformers' renaming in both directions.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model, "hf_quantizer", None) is not None:
        return
    twin = meta_copy(model)
    state = {**dict(twin.named_parameters()), **persistent_buffers(twin)}
    kept = tensors_to_save(twin, state)
    try:
        written = revert_weight_conversion(twin, dict(kept))
        made, *_ = group_tensors(twin, {name: tensor.shape for name, tensor in written.items()})
    except Exception as error:  # from transformers' conversions
        raise _unsaveable(f"{type(error).__name__}: {error}") from error
    lost = [
        name
        for name, tensor in kept.items()
        if name not in made or made[name].shapes[name] != tuple(tensor.shape)
    ]
    if lost:
        raise _unsaveable(f"{lost[0]} and {len(lost) - 1} more tensors would be lost")


def tensors_to_save(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Leave out what transformers does not save, such as tensors that it makes again."""
    ignored = model._keys_to_ignore_on_save or ()
    return {name: tensor for name, tensor in state.items() if name not in ignored}


def save_model(run: Run) -> None:
    """Publish the trained model after comparing the files with the weights."""
    held, plain = run.weights, run.weights.plain
    # The folder of an adapter holds what was trained; its base stays where it is.
    dtype = getattr(torch, run.recipe.model.dtype)
    is_adapter = hasattr(plain, "peft_config")
    weights: dict[str, Tensor] = {}
    shards: dict[str, TensorShard] = {}
    for name, parameter in held.parameters(trained_only=is_adapter).items():
        whole = held.whole(parameter)
        if run.is_main:
            shards[name] = held.shard(parameter)
            weights[name] = whole.to("cpu", None if is_adapter else dtype).contiguous()
    with agreed("writing the trained model"):
        if run.is_main:
            buffers = {} if is_adapter else persistent_buffers(plain)
            shards |= {name: shard_of(buffer) for name, buffer in buffers.items()}
            end_generation(plain, run.tokenizer)
            with publish(run.output / "model", replace=True) as folder:
                plain.save_pretrained(folder, state_dict=weights | buffers)
                if not is_adapter:
                    # transformers writes the type of the weights in memory.
                    set_dtype(plain.config, dtype)
                    plain.config.save_pretrained(folder)
                    run.loaded.load.kept.add_to(folder, finish_later(run.output))
                run.tokenizer.save_pretrained(folder)
                if is_adapter:
                    write_base(folder, run.contents.described(), run.loaded.load.text_only)
                    stored = {name_in_file(name): shard for name, shard in shards.items()}
                    # Adapters keep their names in files, so no model is needed.
                    files = WeightFiles(None, folder.glob("*.safetensors"))
                    ensure_written(folder, files, stored, None)
                else:
                    files = WeightFiles(meta_copy(plain), find_weight_files(str(folder), None))
                    ensure_written(folder, files, tensors_to_save(plain, shards), dtype)


def finish_later(output: Path) -> str:
    """Say how to get the model of a run that could not read its base's files at its end."""
    return (
        "the last checkpoint holds all that was trained. Put the files back; then `plugsft export "
        f"{output} --to FOLDER` writes the model"
    )


def write_base(folder: Path, contents: Mapping[str, Any], text_only: bool) -> None:
    """Note what adapters go with: what their run learned from, and the class of its model."""
    (folder / BASE).write_text(json.dumps({**contents, "text_only": text_only}, indent=1))


def ensure_written(
    folder: Path, files: WeightFiles, shards: dict[str, TensorShard], dtype: torch.dtype | None
) -> None:
    """Compare the tensors of a written folder with the trained weights."""
    wrong = files.differing(shards, dtype)
    if wrong:
        raise CheckpointError(
            f"{folder.parent}: the trained model was not written as it is: {wrong}. The last "
            "checkpoint holds all that was trained: --resume goes on from it"
        )


def name_in_file(name: str) -> str:
    """peft leaves its own words out of the names in files."""
    name = name.replace("modules_to_save.default.", "").removesuffix(".default")
    return name.replace(".default.", ".")


def _unsaveable(why: str) -> RecipeError:
    return RecipeError(
        "model.path: transformers "
        f"{transformers.__version__} could not save and load this model: {why}. "
        "Nothing was trained; use another version of transformers, or adapters "
        f"({Capability.bundled('adapters').table})"
    )
