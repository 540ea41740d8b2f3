"""`plugsft export`: hand on what a run has trained: a copy that is verified, or a merged model."""

import importlib
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from ...base.atomic import MANIFEST, damage, is_published, publish
from ...base.checksums import file_digest
from ...base.console import say
from ...base.errors import CheckpointError, PlugsftError
from ...base.load_errors import trust_hint
from ...data.load_tokenizer import end_generation
from ...model.config import ensure_safetensors
from ...output.folder import ADAPTER, base_model
from ...ranks.launch import silence_libraries
from .from_checkpoint import restore
from .model_folder import checkpoint_of, has_model, model_folder

TOKENS = 32
"""Tokens on which the merged model is compared with the model with adapters."""
TOLERANCE = 1e-4
"""How far logits may move in float32, as a share of the largest."""


def export(
    output: Path,
    merge: bool,
    target: Path,
    without: Sequence[str] = (),
    trusted: bool = False,
) -> None:
    """Copy a run's model, or merge its adapters into a whole one, into a new folder.

    The model's Python code runs only if the user trusts it: the run may be someone else's.
    """
    if has_model(output):
        folder = source_of(output)
        if target.resolve().is_relative_to(folder.resolve()) and not merge:
            raise PlugsftError(f"--to: {target} is inside the model's own folder; name another")
        said = merge_into(folder, target, trusted) if merge else copy_to(folder, target)
    else:
        checkpoint = checkpoint_of(output)
        assert checkpoint is not None, "ensure_exportable has looked"
        said = f"model of {checkpoint.name}"
        if merge:
            with TemporaryDirectory(dir=target.parent, prefix=".export-") as place:
                restore(checkpoint, Path(place, "model"), without, trusted)
                said += f", {merge_into(Path(place, 'model'), target, trusted)}"
        else:
            restore(checkpoint, target, without, trusted)
    say(f"{said}: {target}")


def source_of(output: Path) -> Path:
    """Return the whole and unharmed folder of a run's model."""
    folder = model_folder(output)
    ensure_safetensors(str(folder))
    if is_published(folder) and (wrong := damage(folder)) is not None:
        raise CheckpointError(
            f"{folder}: is damaged: {wrong}; remove it, and run its recipe with --resume, which "
            "writes it again from the last checkpoint"
        )
    return folder


def copy_to(folder: Path, target: Path) -> str:
    """Copy a model, and compare every byte; say what was copied."""
    with publish(target) as building:
        shutil.copytree(
            folder, building, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST, ".*")
        )
        for path in building.rglob("*"):
            origin = folder / path.relative_to(building)
            if path.is_file() and file_digest(path) != file_digest(origin):
                raise CheckpointError(f"{path.name}: was not copied as it is; try again")
    base = f", for {base_model(folder)[0]}" if (folder / ADAPTER).is_file() else ""
    return f"model, copied and verified{base}"


def merge_into(folder: Path, target: Path, trusted: bool) -> str:
    """Merge adapters into the weights they are for, with proof; say how exact it is."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped upstream
    silence_libraries()
    model, dtype = adapted(folder, trusted)
    wanted = logits(model)
    with model.disable_adapter():
        moved = apart(logits(model), wanted)
    model = model.merge_and_unload()
    off = ensure_close(logits(model), wanted, "merging")
    tokenizer = tokenizer_of(folder, trusted)
    end_generation(model, tokenizer)
    with publish(target) as building:
        cast(model, dtype).save_pretrained(building)
        tokenizer.save_pretrained(building)
        # What was written is what was merged, rounded to the type of the weights.
        wanted = logits(cast(model, torch.float32))
        del model
        written: Any = AutoModelForCausalLM.from_pretrained(
            building, dtype=torch.float32, trust_remote_code=trusted
        )
        ensure_close(logits(written), wanted, "writing")
    return (
        f"merged model in {str(dtype).removeprefix('torch.')} (its logits are {off:.0e} off those "
        f"of the adapters, which move them by {moved:.0e})"
    )


def adapted(folder: Path, trusted: bool) -> tuple[Any, torch.dtype]:
    """Load a model with adapters in float32; return the type of its own weights, too."""
    base, revision = "", None
    if (folder / ADAPTER).is_file():
        base, revision = base_model(folder)
    if not base:
        raise PlugsftError(f"{folder}: is a whole model, with no adapters; leave out --merge")
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError as error:
        raise PlugsftError("--merge needs the package 'peft': pip install peft") from error
    try:
        plain: Any = AutoModelForCausalLM.from_pretrained(
            base, revision=revision, dtype="auto", trust_remote_code=trusted
        )
        dtype: torch.dtype = plain.dtype
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses what transformers renamed
            model = peft.PeftModel.from_pretrained(plain.float(), folder)
    except Exception as error:  # peft and transformers raise whatever their readers raise
        first = str(error).strip().partition("\n")[0]
        raise PlugsftError(
            f"{folder}: its adapters cannot be loaded onto {base}, which they are for: "
            f"{type(error).__name__}: {first}{trust_hint(error)}"
        ) from error
    if not hasattr(model, "merge_and_unload"):
        raise PlugsftError(f"{folder}: adapters of the kind {model.peft_type} cannot be merged")
    return model.eval(), dtype


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Turn a model's weights into another type, and leave what it computes with as it is."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def tokenizer_of(folder: Path, trusted: bool) -> Any:
    """Load the tokenizer that lies with adapters, or that of the model they are for."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    except Exception:  # transformers raises whatever its readers raise
        base, revision = base_model(folder)
        return AutoTokenizer.from_pretrained(base, revision=revision, trust_remote_code=trusted)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Return what a model makes of a few tokens."""
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    found: Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return found.float()


def apart(one: Tensor, other: Tensor) -> float:
    """Return how far logits are apart, as a share of the largest."""
    return float((one - other).abs().max() / other.abs().max())


def ensure_close(made: Tensor, wanted: Tensor, doing: str) -> float:
    """Refuse a model whose logits have moved."""
    off = apart(made, wanted)
    if not off <= TOLERANCE:
        raise PlugsftError(
            f"{doing} has moved the logits by {off:.1e} of the largest, and {TOLERANCE:.0e} is "
            "allowed; nothing is written. Use the adapters as they are"
        )
    return off
