"""The quantized base of a run's adapters, and the same base with whole weights."""

import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from transformers import AutoTokenizer
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoQuantizationConfig

from ..base.errors import PlugsftError
from ..base.limits import read_json_object
from ..base.machine import not_installed
from ..model.same_base import ensure_same_base
from ..output.folder import base_model
from ..recipe.capabilities import Capability
from .adapter_names import ensure_found

RECORD = "quantization_config.json"
"""Says how the base of a folder's adapters was quantized; plugins that quantize write it."""

INT8 = f"plugsft.plugins.{Capability.bundled('quantized_base').plugin}.int8"
"""The layers in 8 bits."""


def quantization(folder: Path) -> dict[str, Any]:
    """Return the arguments that load the base of adapters as it was trained on; maybe none."""
    path = folder / RECORD
    if not path.is_file():
        return {}
    try:
        values = read_json_object(path)
        needs_bitsandbytes = values["quant_method"] == "bitsandbytes"
        if not needs_bitsandbytes:
            import_module(INT8)  # transformers then knows this kind
        elif missing := not_installed("bitsandbytes", "quantize"):
            raise PlugsftError(f"{folder}: its base is quantized, and {missing}")
        config: Any = AutoQuantizationConfig.from_dict(values)
        dtype: torch.dtype = (
            config.bnb_4bit_compute_dtype if needs_bitsandbytes else getattr(torch, config.dtype)
        )
    except PlugsftError:
        raise
    except Exception as error:  # a damaged file, or a kind that transformers does not know
        raise PlugsftError(f"{path}: cannot be read: {error}; copy the folder again") from error
    return {"quantization_config": config, "dtype": dtype}


def add_adapters(model: Any, folder: Path) -> Any:
    """Return a model with the adapters of a folder.

    Refuses another base. By peft: transformers 5.17 leaves the modules of modules_to_save at random
    values.
    """
    ensure_same_base(folder, *base_model(folder))
    ensure_found(model, folder)
    peft: Any = import_module("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses what transformers renamed
        # GPT-2's layers are stored transposed, unless they are quantized.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
        warnings.filterwarnings("error", "Found missing adapter keys")
        return peft.PeftModel.from_pretrained(model, folder)


def rows_with_added_tokens(folder: Path, trusted: bool) -> int:
    """Count the rows that a base needs for the tokens that its run added; 0 if it added none.

    Some models have fewer rows than their own tokenizers have tokens.
    """
    if not (folder / "tokenizer_config.json").is_file():
        return 0
    base, revision = base_model(folder)
    rows, own = len(AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)), 0
    with suppress(OSError, ValueError):  # the base may come without a tokenizer
        options = {"revision": revision, "trust_remote_code": trusted}
        own = len(AutoTokenizer.from_pretrained(base, **options))
    return rows if rows > own else 0


def keep_stored_weights(model: Any) -> Any:
    """Keep bitsandbytes from rounding the scales of weights on a CPU with bfloat16; return it."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def copy_restored_weights(quantized: Module, plain: Module) -> None:
    """Copy the weights of a quantized model, restored, into an unquantized one."""
    modules = dict(quantized.named_modules())
    for name, module in plain.named_modules():
        layer: Any = modules[name]
        if not hasattr(layer, "source_cls"):  # the class before quantization
            continue
        values = layer.weight
        if (state := getattr(values, "quant_state", None)) is not None:
            values = import_module("bitsandbytes").functional.dequantize_4bit(values.data, state)
        # transformers quantizes on a GPU if there is one, and stores GPT-2's layers transposed.
        values = values.detach().cpu()
        module.weight.data = values.t().contiguous() if isinstance(module, Conv1D) else values
