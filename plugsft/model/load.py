"""Load a model from a folder or the hub, or create a new one from its sizes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import set_seed
from torch import Tensor
from torch.nn import Module
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ..base.console import say
from ..base.errors import PluginError, PlugsftError, RecipeError
from ..recipe.tables import Model, Scratch
from .config import ensure_weights_inside, load_error, sees
from .kept_tensors import KeptTensors, kept_tensors, refuse_missing
from .published import (
    build,
    ensure_reads_text,
    from_files,
    meta_copy,
    read_config,
    without_weights,
)
from .tensor_shards import whole_shape
from .weight_files import WeightFiles, find_weight_files

NAME_IN_FILES = "name_in_files"
"""Attribute of a parameter whose weights are not loaded yet."""

# Typed here: transformers' own has no types.
zero3_enabled: Callable[[], bool] = is_deepspeed_zero3_enabled


@dataclass
class ModelLoad:
    """How to load the model; plugins edit this first."""

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of transformers' `from_pretrained`."""
    empty: bool = False
    """Whether weights may be read after sharding, when each rank reads its own shards. A plugin
    that needs the weights sets it to False."""
    new_tokens: Sequence[int] = ()
    """The ids of tokens that the recipe adds; the embeddings get a row for each."""
    text_only: bool = False
    """Whether a model that sees is loaded as transformers' class for text."""
    proofs: list[Callable[[Any], object]] = field(default_factory=list, init=False)
    """What plugins prove of each model that is loaded with these settings, frozen ones too."""
    files: WeightFiles = field(default_factory=WeightFiles, init=False)
    """The files of weights that are not loaded yet."""
    kept: KeptTensors = field(default_factory=KeptTensors, init=False)
    """What of the model's files is not trained, and goes into the saved model."""

    def load_model(self) -> PreTrainedModel:
        """Load the model."""
        ensure_weights_inside(self.path)
        try:
            config = read_config(self.path, self.kwargs)
            skeleton = self._skeleton(config) if self.empty and not self.new_tokens else None
            model: PreTrainedModel = skeleton or self._whole()
            revision = self.kwargs.get("revision")
            if self.text_only and sees(config):
                # Refuses what neither class knows.
                whole = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
                kept_tensors(without_weights(whole, config), self.path, revision)
                say(
                    f"model: trained and saved as {type(model).__name__}, as transformers loads "
                    f"the published {config.architectures[0]} for text"
                )
            else:
                ensure_reads_text(model)
                self.kept = kept_tensors(model, self.path, revision, self.files.names)
        except PlugsftError:
            raise
        except Exception as error:  # transformers passes on all errors of its parsers and the hub
            raise load_error(self.path, error) from error
        grow_embeddings(model, max(self.new_tokens, default=-1) + 1)
        return keep_soft_cap(model)

    def names_in_files(self, model: Module) -> dict[str, str]:
        """Return parameters without weights: their names in the model -> in the files."""
        names = {}
        for name, parameter in model.named_parameters():
            if hasattr(parameter, NAME_IN_FILES):
                names[name] = getattr(parameter, NAME_IN_FILES)
            elif parameter.is_meta:
                raise PluginError(
                    f"a plugin created {name} from weights that are not loaded yet; set "
                    "load.empty = False before the yield of its optimize_model"
                )
        return names

    def _whole(self) -> Any:
        """Load the model with its weights, by transformers."""
        # A pickle could run code.
        options = {"use_safetensors": True} | self.kwargs
        model, missing = from_files(self.path, self.text_only, **options)
        refuse_missing(missing, self.path)
        return model

    def _skeleton(self, config: Any) -> PreTrainedModel | None:
        """Build the model without weights, if its files hold all of them as they are."""
        options = dict(self.kwargs)
        revision = options.pop("revision", None)
        # DeepSpeed shards each tensor as it is created; else tensors get no memory.
        with nullcontext() if zero3_enabled() else init_empty_weights(include_buffers=False):
            model: PreTrainedModel = build(config, self.text_only, **options)
        model.tie_weights()
        files = WeightFiles(meta_copy(model), find_weight_files(self.path, revision))
        if model._get_dtype_plan(config.dtype) or not has_all_weights(model, files):
            return None
        with torch.no_grad():
            for name, buffer in persistent_buffers(model).items():
                buffer.copy_(files.whole(name))
        for name, parameter in model.named_parameters():
            setattr(parameter, NAME_IN_FILES, name)
        # As in transformers: saving reverses the conversions of loading.
        model._weight_conversions = files.conversions  # type: ignore[assignment]
        self.files = files
        return model


@torch.no_grad()
def grow_embeddings(model: Any, rows: int) -> None:
    """Resize embeddings and head to at least `rows` rows; a new row is the mean of the old ones."""
    old = model.get_input_embeddings().num_embeddings
    if rows <= old:
        return
    if zero3_enabled():
        raise RecipeError(
            f"model.add_tokens: the embeddings have {old:,} rows and need {rows:,}, and ZeRO-3 has "
            "sharded them already; launch with DDP or FSDP2 (recipes/accelerate/)"
        )
    model.resize_token_embeddings(rows, mean_resizing=False)
    for module in filter(None, (model.get_input_embeddings(), model.get_output_embeddings())):
        for values in (module.weight, getattr(module, "bias", None)):
            if values is not None:
                # In parts: all rows in float64 would take gigabytes.
                sums = [part.double().sum(0) for part in values[:old].split(4096)]
                values[old:] = (torch.stack(sums).sum(0) / old).to(values.dtype)


def keep_soft_cap(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model whose attention computes its soft cap: SDPA of transformers 5.17 drops it."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model._supports_sdpa = False
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation("eager")
    return model


def has_all_weights(model: PreTrainedModel, files: WeightFiles) -> bool:
    """Whether the files hold each tensor of a model with its shape, and tied ones alike."""
    tensors = dict(model.named_parameters()) | persistent_buffers(model)
    if any(files.shapes.get(name) != whole_shape(it) for name, it in tensors.items()):
        return False
    first_name = {parameter: name for name, parameter in model.named_parameters()}
    names = model.named_parameters(remove_duplicate=False)
    tied_pairs = [(first_name[it], name) for name, it in names if name in files.shapes]
    # transformers does not tie tensors whose values in the files differ.
    return all(
        torch.equal(files.whole(one), files.whole(other))
        for one, other in tied_pairs
        if one != other
    )


def persistent_buffers(model: Any) -> dict[str, Tensor]:
    """Return the buffers that are saved with a model."""
    saved = {*model.state_dict()}
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def make_load(
    model: Model, scratch: Path, empty: bool = False, device: torch.device | None = None
) -> ModelLoad:
    """Return how to load a recipe's model, before plugins edit it; straight to a GPU if whole."""
    kwargs: dict[str, Any] = {
        "dtype": getattr(torch, model.weights),
        "trust_remote_code": model.trust_remote_code,
    }
    if model.revision:
        kwargs["revision"] = model.revision
    if device is not None and device.type == "cuda" and not empty:
        kwargs["device_map"] = {"": device}
    return ModelLoad(model.path or str(scratch), kwargs, empty, text_only=model.text_only)


def make_scratch_model(
    scratch: Scratch, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """Create a small decoder with random weights from the seed."""
    set_seed(seed)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return LlamaForCausalLM(scratch_config(scratch, len(tokenizer), **ends))


def scratch_config(scratch: Scratch, vocabulary: int, **ends: Any) -> LlamaConfig:
    """Return the configuration of a new model; `vocabulary` is the size of its tokenizer."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=scratch.hidden,
        intermediate_size=scratch.mlp or 4 * scratch.hidden,
        num_hidden_layers=scratch.layers,
        num_attention_heads=scratch.heads,
        num_key_value_heads=scratch.kv_heads or scratch.heads,
        max_position_embeddings=scratch.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ends,
    )
