"""Tiny folders of models that see, as they are published: eyes, next-token heads, processors."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from conftest import chats
from families import tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from plugsft.data.jsonl import RowList
from plugsft.data.load_tokenizer import train_tokenizer
from plugsft.data.render import render_rows
from plugsft.recipe.tables import Data

SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
INDEX = "model.safetensors.index.json"
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
MODELS = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "gemma3", "gemma4", "llama4", "mistral3")


@cache
def tokenizer() -> Any:
    """Return the tokenizer of all of them."""
    data, rows = Data(source="none"), [RowList(chats(8))]
    return train_tokenizer(rows, lambda some, _, plain: render_rows(some, plain, data), 500)


def ignored_tensors(family: str) -> dict[str, Tensor]:
    """Return tensors that are published, and that the class ignores by name."""
    if family == "gemma4":
        layers = ("model.language_model.layers.2.", "model.language_model.layers.3.")
        return {f"{layer}self_attn.k_proj.weight": torch.randn(16, 32) for layer in layers}
    if not family.startswith("qwen3_5"):
        return {}
    names, mlps = [f"self_attn.{part}_proj" for part in "qkvo"], ["mlp."]
    names += ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    if family == "qwen3_5_moe":
        mlps = ["mlp.shared_expert.", *(f"mlp.experts.{number}." for number in range(4))]
        names += ["mlp.gate", "mlp.shared_expert_gate"]
    names += [f"{mlp}{part}_proj" for mlp in mlps for part in ("gate", "up", "down")]
    names = [f"layers.0.{name}" for name in names]
    names += ["fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]
    return {f"mtp.{name}.weight": torch.randn([32] * (2 - ("norm" in name))) for name in names}


def publish(family: str, folder: Path, more: dict[str, Tensor] | None = None) -> Path:
    """Write the folder of a published model, with these tensors more; return it."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(tiny_config(family), dtype=torch.bfloat16)
    for tensor in model.state_dict().values():
        tensor.add_(torch.randn_like(tensor), alpha=0.05)
    # Experts are published together; transformers would cut them.
    model.save_pretrained(folder, save_original_format=family != "qwen3_5_moe")
    tokenizer().save_pretrained(folder)
    for name in PROCESSOR:
        (folder / name).write_text(json.dumps({"of": family, "file": name}))
    tensors = load_file(folder / "model.safetensors") | ignored_tensors(family) | (more or {})
    # gemma3 is published under a name of its eyes that transformers has changed since.
    new, old = "vision_tower.", "vision_tower.vision_model." if family == "gemma3" else ""
    tensors = {
        (name.replace(new, old) if old else name): tensor.to(
            torch.float32 if re.search(r"A_log|(mtp|linear_attn)\.norm", name) else torch.bfloat16
        )
        for name, tensor in tensors.items()
    }
    if not family.startswith("qwen3_5"):
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    (folder / "model.safetensors").unlink()
    places = {}
    for number, file in enumerate(SHARDS):  # each has some of everything
        part = {name: tensors[name] for name in sorted(tensors)[number::2]}
        save_file(part, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def stored(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return type, shape and bytes of each tensor that the index, or else the one file, names."""
    index, found = folder / INDEX, {}
    places = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    for file in sorted({*places.values()} or {"model.safetensors"}):
        data = (folder / file).read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__" and places.get(name, file) == file:
                begin, end = (start + offset for offset in entry["data_offsets"])
                found[name] = (entry["dtype"], entry["shape"], data[begin:end])
    assert not places or {*places} == {*found}, "index and files name other tensors"
    return found
