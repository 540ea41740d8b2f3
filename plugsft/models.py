"""The model: loaded from a folder or the hub, or made new from a few numbers."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from .context import not_loaded
from .digests import digest, remembered_digest
from .errors import PluginError, RecipeError
from .recipe import Model, Scratch

Rows = Callable[[str, int, int], Tensor]
"""The name of a tensor in the files, its first row and the one after its last -> these rows."""


@dataclass
class Load:
    """How the model will be loaded; plugins edit it before it is."""

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `AutoModelForCausalLM.from_pretrained`."""
    empty: bool = False
    """Whether weights stay in their files until the model is spread, and each rank reads its own;
    a plugin that needs to see them says False."""
    _names: Any = field(default_factory=WeakTensorKeyDictionary, init=False)
    """Parameter without weights -> its name in the files. An entry ends with its parameter: the
    id of a freed one may come back as another's."""
    _files: dict[str, str] = field(default_factory=dict, init=False)
    """Of each name, the file that has it."""

    def build(self) -> PreTrainedModel:
        """Load it."""
        try:
            if self.empty:
                return self._without_weights() or self.build()
            model = AutoModelForCausalLM.from_pretrained(self.path, **self.kwargs)
        except RecipeError:
            raise
        except Exception as error:  # transformers raises whatever its readers and the hub raise
            raise not_loaded(self.path, error) from error
        return model

    def names_in(self, model: Module) -> dict[str, str]:
        """Return the names of tensors that have no weights yet, with those in the files."""
        found = {name: self._names.get(one) for name, one in model.named_parameters()}
        lost = [name for name, one in model.named_parameters() if one.is_meta and not found[name]]
        if lost:
            raise PluginError(
                f"a plugin made {lost[0]} of weights that are not loaded yet; in its "
                "optimize_model it should set load.empty = False before the yield"
            )
        return {name: stored for name, stored in found.items() if stored}

    @contextmanager
    def files(self) -> Iterator[Rows]:
        """Open the files of the weights, to be read by rows."""
        with self._opened() as opened:
            yield lambda name, start, stop: opened[self._files[name]].get_slice(name)[start:stop]

    @contextmanager
    def _opened(self) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            paths = sorted({*self._files.values()})
            yield {path: stack.enter_context(safe_open(path, "pt")) for path in paths}

    def _without_weights(self) -> PreTrainedModel | None:
        """Make the model without its weights, if its files name them as it does."""
        known = ("revision", "trust_remote_code")
        found = {name: self.kwargs[name] for name in known if name in self.kwargs}
        config = AutoConfig.from_pretrained(self.path, **found)
        rest = {name: value for name, value in self.kwargs.items() if name != "revision"}
        # DeepSpeed takes each tensor apart as it is made; else it is made without memory.
        zero3: Any = is_deepspeed_zero3_enabled
        with nullcontext() if zero3() else init_empty_weights(include_buffers=False):
            make: Any = AutoModelForCausalLM.from_config
            model: PreTrainedModel = make(config, **rest)
        model.tie_weights()
        self._names = WeakTensorKeyDictionary({one: name for name, one in model.named_parameters()})
        self._files = files_of(self.path, self.kwargs.get("revision"))
        self.empty = self._can_be_read(model)
        if not self.empty:
            self._names = WeakTensorKeyDictionary()
            return None
        return model

    def _can_be_read(self, model: PreTrainedModel) -> bool:
        """Tell whether the files have each tensor as the model has it, and nothing else is kept."""
        shapes = {
            self._names[one]: list(getattr(one, "ds_shape", one.shape))
            for one in model.parameters()
        }
        lasting = {name for name, _ in model.named_buffers()} & {*model.state_dict()}
        # A tensor without rows is not read by rows.
        if lasting or not {*shapes} <= {*self._files} or [] in shapes.values():
            return False
        with self._opened() as opened:
            return all(
                opened[self._files[name]].get_slice(name).get_shape() == shape
                for name, shape in shapes.items()
            )


def decoder_layers(model: Any, that: str) -> list[Any]:
    """Return the layers of a model; `that` says, of one without any, what for and the cure."""
    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        raise RecipeError(f"a model of type '{model.config.model_type}' has no layers that {that}")
    return layers


def files_of(path: str, revision: str | None) -> dict[str, str]:
    """Return the tensors of a pretrained model, each with its file; none without safetensors."""
    have = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    if index := cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **have):
        names: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        paths = {name: str(cached_file(path, name, **have)) for name in {*names.values()}}
        return {name: paths[file] for name, file in names.items()}
    if single := cached_file(path, SAFE_WEIGHTS_NAME, **have):
        with safe_open(single, "pt") as file:
            return {name: str(single) for name in file.keys()}  # noqa: SIM118  # no dict
    return {}


def weights_digest(path: str, revision: str | None) -> str:
    """Return a checksum of a pretrained model's weights, remembered while its files stay."""
    files = sorted({*files_of(path, revision).values()})
    if not files:
        raise RecipeError(f"{path}: its weights are not in safetensors; save them so")
    return digest({Path(file).name: remembered_digest(Path(file)) for file in files})


def load_of(model: Model, scratch: Path, empty: bool = False) -> Load:
    """Return how a recipe's model is loaded, before any plugin."""
    kwargs: dict[str, Any] = {
        "dtype": getattr(torch, model.dtype),
        "trust_remote_code": model.trust_remote_code,
    }
    if model.revision:
        kwargs["revision"] = model.revision
    return Load(model.path or str(scratch), kwargs, empty)


def make_model(scratch: Scratch, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Make a small decoder with random weights that follow from the seed."""
    set_seed(seed)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return LlamaForCausalLM(scratch_config(scratch, len(tokenizer), **ends))


def scratch_config(scratch: Scratch, vocabulary: int, **ends: Any) -> LlamaConfig:
    """Return the configuration of a new model, for a tokenizer of so many entries."""
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
