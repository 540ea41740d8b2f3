"""Tiny folders of models that see, as they are published: eyes, next-token heads, processors."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from conftest import chats
from families import VOCABULARY, shrink
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from plugsft.data.jsonl import RowList
from plugsft.data.load_tokenizer import train_tokenizer
from plugsft.data.render import render_rows
from plugsft.recipe.tables import Data

INDEX = "model.safetensors.index.json"
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def marks(*names: str) -> dict[str, int]:
    """Return tokens that stand for images: the last ones, which no text has."""
    return {name: VOCABULARY - 1 - number for number, name in enumerate(names)}


ROPE = {"rope_type": "default", "rope_theta": 1e4}
ROPE |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
LINEAR |= {"linear_num_value_heads": 4, "head_dim": 16}
LINEAR |= {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
PATCHES = {"depth": 2, "num_position_embeddings": 16, "patch_size": 4, "out_hidden_size": 32}
SQUARE = {"image_size": 8, "patch_size": 4}
QWEN = marks("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
INDICES = marks("image_token_index", "boi_token_index", "eoi_token_index")
GEMMA4 = marks("image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id")
# Layers that use the keys of layers below, and wider heads in every second one.
SHARED = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED |= {"num_kv_shared_layers": 2, "per_layer_config": {key: {"head_dim": 16} for key in "13"}}
CHUNKS = {"attention_chunk_size": 16, "no_rope_layers": [1, 0]}
CHUNKS |= {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, "moe_layers": [1]}
PIXELS = {"intermediate_size": 128}
PIXELS |= dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)
# What differs from the shrunk configuration of a family: its own, its text's, its eyes'.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (QWEN, LINEAR, PATCHES),
    "qwen3_5_moe": (QWEN, LINEAR, PATCHES),
    "qwen3_vl": (QWEN, {"rope_parameters": ROPE}, PATCHES | {"deepstack_visual_indexes": [0, 1]}),
    "gemma3": (
        INDICES | {"mm_tokens_per_image": 4},
        {"sliding_window": 16, "query_pre_attn_scalar": 8},
        SQUARE | {"vision_use_head": False},
    ),
    "gemma4": (
        GEMMA4,
        SHARED | {"hidden_size_per_layer_input": 8, "sliding_window": 16},
        {"patch_size": 4, "position_embedding_size": 64},
    ),
    "llama4": (INDICES, CHUNKS, SQUARE | PIXELS),
    "mistral3": (INDICES | {"tie_word_embeddings": False}, {}, SQUARE),
}


@cache
def tokenizer() -> Any:
    """Return the tokenizer of all of them."""
    data, rows = Data(source="none"), [RowList(chats(8))]
    return train_tokenizer(rows, lambda some, _, plain: render_rows(some, plain, data), 500)


def config_of(family: str) -> Any:
    """Return a tiny configuration of a published model."""
    table, (own, text, eyes) = CONFIG_MAPPING[family]().to_dict(), MODELS[family]
    if family == "gemma4":
        for part in ("vision", "audio"):
            table[f"{part}_config"] = CONFIG_MAPPING[f"gemma4_{part}"]().to_dict()
    table = shrink(table) | own
    table["text_config"] |= text
    table["vision_config"] |= eyes
    return CONFIG_MAPPING[family].from_dict(table)


def random(*shape: int) -> Tensor:
    """Return random numbers in the type of published weights."""
    return torch.randn(shape).to(torch.bfloat16)


def ignored_tensors(family: str) -> dict[str, Tensor]:
    """Return tensors that are published, and that the class ignores by name."""
    if family == "gemma4":
        layers = ("model.language_model.layers.2.", "model.language_model.layers.3.")
        return {f"{layer}self_attn.k_proj.weight": random(16, 32) for layer in layers}
    if not family.startswith("qwen3_5"):
        return {}
    weights, mlps = [f"self_attn.{part}_proj" for part in "qkvo"], ["mlp."]
    if family == "qwen3_5_moe":
        mlps = ["mlp.shared_expert.", *(f"mlp.experts.{number}." for number in range(4))]
        weights += ["mlp.gate", "mlp.shared_expert_gate"]
    weights += [f"{mlp}{part}_proj" for mlp in mlps for part in ("gate", "up", "down")]
    norms = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    tensors = {f"mtp.layers.0.{name}.weight": random(32, 32) for name in weights}
    tensors |= {f"mtp.layers.0.{name}.weight": random(32) for name in norms}
    tensors |= {f"mtp.pre_fc_norm_{of}.weight": random(32) for of in ("embedding", "hidden")}
    return tensors | {"mtp.fc.weight": random(32, 64), "mtp.norm.weight": random(32).float()}


def publish(family: str, folder: Path, more: dict[str, Tensor] | None = None) -> Path:
    """Write the folder of a published model, with these tensors more."""
    torch.manual_seed(0)
    config = config_of(family)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor), alpha=0.05)
    # Experts are published together; transformers would cut them.
    fused = family == "qwen3_5_moe"
    model.save_pretrained(folder, save_original_format=not fused)
    tokenizer().save_pretrained(folder)
    for name in PROCESSOR:
        (folder / name).write_text(json.dumps({"of": family, "file": name}))
    file = folder / "model.safetensors"
    tensors = load_file(file) | ignored_tensors(family) | (more or {})
    if family == "gemma3":  # published under a name that transformers has changed since
        old = "vision_tower.vision_model."
        tensors = {name.replace("vision_tower.", old): one for name, one in tensors.items()}
    for name in tensors:
        if name.endswith(("A_log", "linear_attn.norm.weight")):
            tensors[name] = tensors[name].float()
    if family.startswith("qwen3_5"):
        file.unlink()
        write_shards(folder, tensors)
    else:
        save_file(tensors, file, {"format": "pt"})
    return folder


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write two files of weights, each with some of everything, and their index."""
    places = {}
    for number in (0, 1):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number::2]}
        save_file(part, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index))


def stored(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return type, shape and bytes of each tensor that the index, or else the one file, names."""
    index, found = folder / INDEX, {}
    places = json.loads(index.read_text())["weight_map"] if index.exists() else None
    for file in sorted({*places.values()} if places else {"model.safetensors"}):
        data = (folder / file).read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__" and (places is None or places.get(name) == file):
                begin, end = (start + offset for offset in entry["data_offsets"])
                found[name] = (entry["dtype"], entry["shape"], data[begin:end])
    assert places is None or {*places} == {*found}, "the index names tensors that no file has"
    return found
