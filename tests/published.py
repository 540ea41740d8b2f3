"""Tiny folders of models that see, as they are published: eyes, next-token heads, processors."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from conftest import chats
from families import shrink
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from plugsft.data.jsonl import RowList
from plugsft.data.load_tokenizer import train_tokenizer
from plugsft.data.render import render_rows
from plugsft.recipe.tables import Data

SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
INDEX = "model.safetensors.index.json"
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
ROPE = {"rope_type": "default", "rope_theta": 1e4}
ROPE |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
LINEAR |= {"linear_num_value_heads": 4, "head_dim": 16}
LINEAR |= {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
PATCHES = {"depth": 2, "num_position_embeddings": 16, "patch_size": 4, "out_hidden_size": 32}
SQUARE = {"image_size": 8, "patch_size": 4}
# Tokens that stand for images are the last ones, which no text has.
QWEN = {"image_token_id": 511, "video_token_id": 510}
QWEN |= {"vision_start_token_id": 509, "vision_end_token_id": 508}
INDICES = {"image_token_index": 511, "boi_token_index": 510, "eoi_token_index": 509}
GEMMA4 = {"image_token_id": 511, "video_token_id": 510, "audio_token_id": 509}
WINDOW = {"sliding_window": 16, "query_pre_attn_scalar": 8}
# Layers that use the keys of layers below, and wider heads in every second one.
SHARED = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED |= {"hidden_size_per_layer_input": 8, "sliding_window": 16}
SHARED |= {"num_kv_shared_layers": 2, "per_layer_config": {key: {"head_dim": 16} for key in "13"}}
CHUNKS = {"attention_chunk_size": 16, "no_rope_layers": [1, 0]}
CHUNKS |= {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, "moe_layers": [1]}
PIXELS = {"intermediate_size": 128}
PIXELS |= dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)
# What differs from the shrunk configuration of a family: its own, its text's, its eyes'.
MODELS: dict[str, tuple[Any, Any, Any]] = {
    "qwen3_5": (QWEN, LINEAR, PATCHES),
    "qwen3_5_moe": (QWEN, LINEAR, PATCHES),
    "qwen3_vl": (QWEN, {"rope_parameters": ROPE}, PATCHES | {"deepstack_visual_indexes": [0, 1]}),
    "gemma3": (INDICES | {"mm_tokens_per_image": 4}, WINDOW, SQUARE | {"vision_use_head": False}),
    "gemma4": (GEMMA4, SHARED, {"patch_size": 4, "position_embedding_size": 64}),
    "llama4": (INDICES, CHUNKS, SQUARE | PIXELS),
    "mistral3": (INDICES | {"tie_word_embeddings": False}, {}, SQUARE),
}


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
    table, (own, text, eyes) = CONFIG_MAPPING[family]().to_dict(), MODELS[family]
    for part in ("vision", "audio") if family == "gemma4" else ():
        table[f"{part}_config"] = CONFIG_MAPPING[f"gemma4_{part}"]().to_dict()
    table = shrink(table) | own
    table["text_config"] |= text
    table["vision_config"] |= eyes
    config = CONFIG_MAPPING[family].from_dict(table)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
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
