"""`plugsft export`: copy a trained model and verify the copy, or merge its adapters."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from ..base.atomic import MANIFEST, publish, temporary_ending
from ..base.checksums import file_digest
from ..base.console import say
from ..base.errors import CheckpointError, PlugsftError, explain_load_error
from ..base.machine import look
from ..batches.defaults import BatchDefaults
from ..checkpoint.files import ShardReader
from ..checkpoint.final_model import finish_later, write_base
from ..checkpoint.same_run import read_state
from ..checkpoint.state import WEIGHTS, ensure_same_parameters
from ..data.defaults import DataDefaults
from ..data.load_tokenizer import load_tokenizer
from ..model.config import ensure_safetensors
from ..model.defaults import ModelDefaults
from ..model.kept_tensors import KeptTensors, kept_tensors
from ..model.load import grow_embeddings, make_load
from ..model.published import build, from_files, read_config, set_dtype
from ..model.same_base import base_changes, is_text_only
from ..model.tensor_shards import shard_of
from ..output.folder import ADAPTER, base_model
from ..ranks.connect import silence_libraries
from ..recipe.read import read
from ..registry.active import check
from ..registry.load import load
from ..tokens.ends import end_generation, new_ids
from .adapter_names import publish_names
from .card import add_card, run_of
from .folder import checkpoint_of, ensure_no_links, find_model, is_reward_model
from .quantized import (
    add_adapters,
    copy_restored_weights,
    keep_stored_weights,
    quantization,
    rows_with_added_tokens,
)
from .verified import source_of

TOKENS = 32
"""Tokens on which merged model and adapters are compared."""
TOLERANCE = 1e-4
"""Largest difference of logits in float32, relative to the largest logit."""
ROUNDING = 5e-2
"""The same between a model that computes in bfloat16 and one in float32."""
SHARE = 5e-2
"""Share of the adapters' effect that rounding may take without a warning."""


def export(
    output: Path,
    merge: bool,
    target: Path,
    without: Sequence[str] = (),
    trusted: bool = False,
    place: str = "",
    dtype: str | None = None,
) -> None:
    """Copy a run's model, or merge its adapters, into a new folder.

    The model's Python code runs only if the user trusts it: the run may be someone else's.
    `place` is the name that loads the model, if it is not the folder's. `dtype` is the type of
    merged weights.
    """
    name = place or target.name
    if find_model(output):
        folder = source_of(output)
        if merge:
            result = merge_into(folder, target, trusted, folder, name, dtype)
        else:
            result = copy_to(folder, target, name, trusted)
    else:
        checkpoint = checkpoint_of(output)
        assert checkpoint is not None, "ensure_exportable found one"
        result = f"model of {checkpoint.name}"
        if merge:
            with TemporaryDirectory(temporary_ending(), ".export-", target.parent) as temporary:
                adapters = Path(temporary, "model")
                restore(checkpoint, adapters, without, trusted, name)
                merged = merge_into(adapters, target, trusted, checkpoint, name, dtype)
                result += f", {merged}"
        else:
            restore(checkpoint, target, without, trusted, name)
    say(result if place else f"{result}: {target}")


def copy_to(folder: Path, target: Path, name: str, trusted: bool) -> str:
    """Copy a model and compare every byte; return a description.

    Adapters get the names of their published base.
    """
    base, names = "", ""
    with publish(target, replace=True) as building:
        ensure_no_links(folder)
        shutil.copytree(
            folder, building, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST, ".*")
        )
        for path in building.rglob("*"):
            origin = folder / path.relative_to(building)
            if path.is_file() and file_digest(path) != file_digest(origin):
                raise CheckpointError(f"{path.name}: the copy differs from the original; try again")
        if (folder / ADAPTER).is_file():
            base, revision = base_model(folder)
            if not is_text_only(folder):
                names = publish_names(building, base, revision, trusted)
        add_card(building, folder, name)
    text = "model, copied and verified" + (f", for {base}" if base else "")
    return text + (f"; its adapters have the names of {names} now" if names else "")


def merge_into(
    folder: Path, target: Path, trusted: bool, origin: Path, name: str, dtype: str | None
) -> str:
    """Merge adapters into their base model and verify it; return a description.

    `origin` is the run's model or checkpoint that they come from.
    """
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped upstream
    silence_libraries()
    model, computes, trained = load_adapters(folder, trusted)
    run = run_of(origin)
    weights = dtype or (read(run / "recipe.toml")["model"]["dtype"] if run else computes)
    adapted = compute_logits(model)
    onto = ""
    if trained is not None:
        noise = TOLERANCE if computes == "float32" else ROUNDING
        ensure_close(adapted, trained, "restoring the quantized base", noise)
        onto = ", onto the base as it was trained: restored from its quantized weights"
    with model.disable_adapter():
        effect = (compute_logits(model) - adapted).norm()
    model = model.merge_and_unload()
    kept = KeptTensors()
    if not (is_reward_model(folder) or is_text_only(folder)):
        kept = kept_tensors(model, *base_model(folder))
    kept.open()
    ensure_close(compute_logits(model), adapted, "merging")
    tokenizer = tokenizer_of(folder, trusted)
    end_generation(model, tokenizer)
    with publish(target, replace=True) as building:
        set_dtype(model.config, getattr(torch, weights))
        cast(model, getattr(torch, weights)).save_pretrained(building)
        kept.add_to(building, "put them back, and run this again")
        tokenizer.save_pretrained(building)
        rounded = compute_logits(cast(model, torch.float32))
        del model
        written = load_model(folder, building, dtype=torch.float32, trust_remote_code=trusted)
        logits = compute_logits(written)
        ensure_close(logits, rounded, "writing")
        add_card(building, origin, name)
    # The written file against the adapters in float32: what is lost is lost to every reader.
    lost = float((logits - adapted).norm() / effect.clamp(min=torch.finfo(effect.dtype).tiny))
    if lost > SHARE:
        say(
            f"warning: rounding the merged weights to {weights} takes {min(lost, 1):.0%} of the "
            "adapters' effect; add --dtype float32, or load the adapters onto their base"
        )
    return (
        f"merged model in {weights}{onto}: its logits are off by {lost:.0e} of the adapters' effect"
    )


def load_adapters(folder: Path, trusted: bool) -> tuple[Any, str, Tensor | None]:
    """Load a model with adapters in float32; return it and the type of its base.

    If its base was quantized, also return the logits of the model as it was trained.
    """
    if not (folder / ADAPTER).is_file():
        raise PlugsftError(f"{folder}: is a whole model without adapters; remove --merge")
    base, revision = base_model(folder)
    ensure_safetensors(base, revision)
    quantized, trained = quantization(folder), None
    try:
        options: dict[str, Any] = {
            "revision": revision,
            "trust_remote_code": trusted,
            "use_safetensors": True,
        }
        # In float32 at once: a model that was loaded in bfloat16 has rounded constants.
        dtype = quantized.get("dtype", torch.float32)
        plain = load_model(folder, base, **options | {"dtype": dtype})
        config = read_config(base, options)
        stored = config.dtype or config.get_text_config().dtype or dtype
        rows = rows_with_added_tokens(folder, trusted)
        grow_embeddings(plain, rows)
        if quantized:
            model = load_model(folder, base, **options | quantized)
            grow_embeddings(model, rows)
            copy_restored_weights(model, plain)
            trained = compute_logits(add_adapters(keep_stored_weights(model), folder))
        model = add_adapters(plain.float(), folder)
    except PlugsftError:
        raise
    except Exception as error:  # peft and transformers raise whatever their readers raise
        raise PlugsftError(
            f"{folder}: the adapters cannot be loaded onto their base model {base}: "
            f"{explain_load_error(base, error)}"
        ) from error
    if not hasattr(model, "merge_and_unload"):
        raise PlugsftError(f"{folder}: adapters of the kind {model.peft_type} cannot be merged")
    computes = quantized.get("dtype", stored)
    return model.eval(), str(computes).removeprefix("torch."), trained


def load_model(folder: Path, place: str | Path, **options: Any) -> Any:
    """Load a model of the kind that a folder's model, or its adapters, are for."""
    if is_reward_model(folder):
        auto: Any = AutoModelForSequenceClassification
        # The class for text got the head; its configuration may be a part of the folder's.
        with torch.device("meta"):
            config = build(read_config(str(place), options), text_only=True).config
        config.num_labels = 1
        return auto.from_pretrained(place, config=config, **options)
    return from_files(str(place), is_text_only(folder), **options)[0]


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Convert the parameters of a model; buffers stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def tokenizer_of(folder: Path, trusted: bool) -> Any:
    """Load the tokenizer of the adapters' folder, or that of their base model."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    except Exception:  # transformers raises whatever its readers raise
        base, revision = base_model(folder)
        return AutoTokenizer.from_pretrained(base, revision=revision, trust_remote_code=trusted)


@torch.no_grad()
def compute_logits(model: Any) -> Tensor:
    """Return a model's logits on a few tokens."""
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    logits: Tensor = model.eval()(input_ids=ids.to(model.device), use_cache=False).logits
    return logits.float().cpu()


def ensure_close(logits: Tensor, expected: Tensor, act: str, tolerance: float = TOLERANCE) -> None:
    """Refuse a model whose logits have changed; compare with the largest."""
    error = float((logits - expected).abs().max() / expected.abs().max())
    if not error <= tolerance:
        raise PlugsftError(
            f"{act} has changed the logits by {error:.1e} of the largest, and {tolerance:.0e} is "
            "allowed; nothing is written. Use the adapters as they are"
        )


def restore(path: Path, target: Path, without: Sequence[str], trusted: bool, name: str) -> None:
    """Write a checkpoint's model as its run would have at the end.

    `trusted` overrides the run's recipe, which may be someone else's. `name` loads the model.
    """
    silence_libraries()
    state, output = read_state(path), path.parent.parent
    overrides = [
        f"output={json.dumps(str(output))}",
        f"model.trust_remote_code={str(trusted).lower()}",
    ]
    recipe, active = load(output / "recipe.toml", overrides, without)
    base = Path(recipe.model.path or "")
    if base.is_absolute() and not base.is_dir():
        raise PlugsftError(
            f"{path}: the model that its run began with is gone: {base}; move it back, or name its "
            f"new place in {output / 'recipe.toml'} (model.path)"
        )
    hooks = active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults()).hooks
    check(active, recipe, look(), ["optimize_model"])  # no other hook is called here
    from_scratch = recipe.model.scratch is not None
    scratch = find_folder(output / "scratch", "model-*") if from_scratch else Path()
    trained_tokenizer = from_scratch and not recipe.model.tokenizer
    folder = find_folder(output / "scratch", "tokenizer-*") if trained_tokenizer else Path()
    tokenizer = load_tokenizer(recipe.model, folder)
    how = make_load(recipe.model, scratch)
    how.new_tokens = new_ids(recipe.model, tokenizer)
    model: Any = hooks.optimize_model(load=how)
    how.kept.open()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    untrained = bool(how.kept.tensors) or len(trained) < len([*model.parameters()])
    changes = base_changes(state["contents"], how.path, how.kwargs.get("revision"), untrained)
    if changes:
        raise CheckpointError(
            f"{path}: {how.path} has changed since this run: {'; '.join(changes)}; put the old "
            "files back"
        )
    reader = ShardReader(path)
    ensure_same_parameters(reader, trained, state["weights"])
    with torch.no_grad():
        for weight_name, weight in trained.items():
            reader.fill(f"{WEIGHTS}/{weight_name}", shard_of(weight), exact=False)
    end_generation(model, tokenizer)
    if not hasattr(model, "peft_config"):
        dtype = getattr(torch, recipe.model.dtype)
        cast(model, dtype)
        set_dtype(model.config, dtype)
    with publish(target, replace=True) as building:
        model.save_pretrained(building)
        tokenizer.save_pretrained(building)
        if (building / ADAPTER).is_file():
            write_base(building, state["contents"], how.text_only)
        else:
            how.kept.add_to(building, finish_later(output))
        add_card(building, path, name)


def find_folder(folder: Path, pattern: str) -> Path:
    """Return the only folder that matches a pattern."""
    matches = sorted(folder.glob(pattern))
    if len(matches) != 1:
        raise PlugsftError(
            f"{folder}: should hold one {pattern}, and holds {len(matches)}; resume the run "
            "(--resume), which knows its own"
        )
    return matches[0]
