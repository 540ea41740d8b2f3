"""Every decoder family of transformers as a tiny model, and those that see around a decoder."""

import re
from copy import deepcopy
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from plugsft.model.load import persistent_buffers
from plugsft.plugins.bfd_packing.attention import ATTENTION, attend_per_document

DECODERS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY, CONTEXT, MAX_PARAMETERS = 512, 128, 8_000_000
# The name of a number in a configuration -> its upper limit.
SIZES = {
    r"(^|_)vocab_size|n_token|num_vocab|vocab_size_per_layer_input": VOCABULARY,
    r"position_embeddings|n_positions|n_ctx|max_sequence_length|max_(target|source)_positions"
    r"|context_length|max_seq_len|seq_length|model_max_length": CONTEXT,
    r"(num_attention_heads|n_heads?|num_heads|decoder_attention_heads|encoder_attention_heads)$": 4,
    r"(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num|n_kv_heads)$": 2,
    r"(num_experts_per_tok|moe_topk|moe_top_k|moe_k|top_k_experts|experts_top_k|moe_router_topk"
    r"|num_selected_experts|experts_per_token)$|^(top_k|index_topk)$": 2,
    r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)$": 4,
    r"^(n_group|num_expert_group|topk_group|expert_n_group)$|first_k_dense_replace": 1,
    r"rotary_dim$": 8,
    r"(q_lora_rank|kv_lora_rank)$": 16,
    r"(hidden_size|d_model|n_embd|^dim|emb_dim|word_embed_proj_dim|embedding_size|lru_width)$": 32,
    r"(head_dim|attention_head_size|d_kv|dim_head|d_head|kv_channels|global_head_dim)$": 8,
    r"(moe_intermediate_size|expert_ffn_hidden_size|moe_ffn_hidden_size)$": 16,
    r"(intermediate_size|ffn_dim|n_inner|d_ff|ffn_hidden_size|inner_hidden_size"
    r"|dim_feedforward|dim_ff)$": 48,
    r"(state_size|d_state|mamba_d_state|ssm_state_size)$": 8,
}
# The sizes of a small decoder, for the configuration of any family.
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
PER_LAYER = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers)$")


def shrink(table: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's table with small numbers, and one layer of each kind, or two."""
    count = next((table[name] for name in LAYERS if isinstance(table.get(name), int)), 0)
    layer_kinds = next(iter(layer_lists(table, count)), None) or list(range(count))[:2]
    layers = sorted(
        {str(kind): layer for layer, kind in reversed([*enumerate(layer_kinds)])}.values()
    )
    if len(layers) < 2:
        layers = [*range(min(2, count))]
    small: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            value = {
                number: shrink(value[key]) if isinstance(value[key], dict) else value[key]
                for number, layer in enumerate(layers)
                for key in (layer, str(layer))
                if key in value
            }
        elif isinstance(value, dict):
            value = shrink(value)
        elif isinstance(value, list | tuple) and count and len(value) == count:
            value = [value[layer] for layer in layers]
        elif isinstance(value, float) and re.search("drop|jitter", name):
            value = 0.0  # repeated runs must be equal
        elif isinstance(value, int) and not isinstance(value, bool):
            if PER_LAYER.search(name):
                value = min(value, len(layers) or 2)
            elif name.endswith("token_id"):
                value = min(value, 1)
            else:
                limit = next((limit for key, limit in SIZES.items() if re.search(key, name)), value)
                value = min(value, limit)
        small[name] = value
    if {"qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim"} <= {*small}:
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    if "kv_lora_rank" in small and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def layer_lists(table: dict[str, Any], count: int) -> list[list[Any]]:
    """Return the lists with an entry per layer; lists of layer kinds come first."""
    lists = [
        values for values in table.values() if isinstance(values, list) and len(values) == count > 0
    ]
    return sorted(lists, key=lambda values: not isinstance(values[0], str))


HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8}
MAMBA = {"n_groups": 1, "mamba_num_heads": 8}
CONVOLUTION = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
INDEXER |= {"indexer_budget": 8, "indexer_compress_ratio": 2}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
LINEAR |= {"linear_num_value_heads": 4, "head_dim": 16}
LINEAR |= {"rope_parameters": MROPE["rope_parameters"] | {"partial_rotary_factor": 0.5}}
PATCHES = {"depth": 2, "num_position_embeddings": 16, "patch_size": 4, "out_hidden_size": 32}
STARTS = {"vision_start_token_id": VOCABULARY - 9, "audio_start_token_id": VOCABULARY - 8}
DEEPSTACK = PATCHES | {"deepstack_visual_indexes": [0, 1]}
SQUARE = {"image_size": 8, "patch_size": 4}
PIXELS = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)
# Values that depend on other numbers, or have no default.
SETTINGS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {"4": 2}},
    "bamba": HEADS,
    "cosmos3_edge": {"text_config": MROPE},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 2]}}},
    "falcon_h1": HEADS | {"mamba_d_ssm": 64},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3": {
        "mm_tokens_per_image": 4,
        "text_config": {"sliding_window": 16, "query_pre_attn_scalar": 8},
        "vision_config": SQUARE | {"vision_use_head": False},
    },
    # Layers that use the keys of layers below, and wider heads in every second one.
    "gemma4": {
        "text_config": {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "per_layer_config": {key: {"head_dim": 16} for key in "13"},
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "sliding_window": 16,
        },
        "vision_config": {"patch_size": 4, "position_embedding_size": 64},
    },
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16}},
    "glm46v": {"text_config": MROPE},
    "glm4v": {"text_config": MROPE},
    "glm4v_moe": {"text_config": {"head_dim": 16} | MROPE},
    "glm5_next": {"text_config": {"index_kpool": 1}},
    "glm_ocr": {"text_config": MROPE},
    "glmga": {"text_config": MROPE},
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1] * 4,
        "vision_config": {"hidden_size": 64},
    },
    "granitemoehybrid": HEADS,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2": CONVOLUTION,
    "lfm2_moe": CONVOLUTION,
    "lfm2_vl": {"text_config": CONVOLUTION},
    # Layers that attend to chunks, and experts in one.
    "llama4": {
        "text_config": {
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "moe_layers": [1],
        },
        "vision_config": SQUARE | PIXELS | {"intermediate_size": 128},
    },
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "mistral3": {"tie_word_embeddings": False, "vision_config": SQUARE},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemo_speechlm": {"text_config": MAMBA},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": MAMBA,
    "nemotron_h_omni": {"text_config": MAMBA},
    "paddleocr_vl": {"text_config": MROPE},
    "qwen2_5_omni_thinker": {"text_config": MROPE} | STARTS,
    "qwen2_5_vl": {"text_config": MROPE},
    "qwen2_vl": {"text_config": MROPE, "vision_config": {"embed_dim": 32, "depth": 2}},
    "qwen3_5": {"text_config": LINEAR, "vision_config": PATCHES},
    "qwen3_5_moe": {"text_config": LINEAR, "vision_config": PATCHES},
    "qwen3_omni_moe_thinker": STARTS,
    "qwen3_vl": {"text_config": MROPE, "vision_config": DEEPSTACK},
    "qwen3_vl_moe": {"text_config": MROPE, "vision_config": DEEPSTACK},
    "qwen4_exp": {"text_config": INDEXER, "vision_config": PATCHES},
    "qwen4_exp_text": INDEXER,
    "reformer": {"is_decoder": True},
    "step3p7": {"text_config": {"sliding_window": 16}},
}


def merge(table: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return a table with the values of another, also in the tables inside."""
    inside = {
        name: merge(table[name], value)
        for name, value in other.items()
        if isinstance(value, dict) and isinstance(table.get(name), dict)
    }
    return table | other | inside


def sees(family: str) -> bool:
    """Tell whether a family sees or hears: a decoder, and what makes inputs of it from images."""
    config_class = CONFIG_MAPPING[family]
    return (
        family in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
        and "text_config" in config_class.sub_configs
        and not getattr(config_class, "is_encoder_decoder", False)
    )


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """Return a tiny configuration of a family, with changes."""
    config_class = CONFIG_MAPPING[family]
    table = config_class().to_dict()
    for part in config_class.sub_configs:
        name = f"{family}_{part.removesuffix('_config')}"
        if table.get(part) is None and name in CONFIG_MAPPING:
            table[part] = CONFIG_MAPPING[name]().to_dict()
    table = shrink(table)
    # Tokens that stand for images are the last ones, which no text has.
    marks = [name for name in table if re.search(r"(?<!bos_|eos_|pad_)token_(id|index)$", name)]
    if sees(family):
        table |= {name: VOCABULARY - 1 - number for number, name in enumerate(marks)}
    return config_class.from_dict(merge(table, SETTINGS.get(family, {})) | changes)


def build(family: str, text_only: bool = False) -> Any:
    """Return a tiny model of a family as it is published, with random weights; or its decoder."""
    published = sees(family) and not text_only
    auto: Any = AutoModelForMultimodalLM if published else AutoModelForCausalLM
    config = tiny_config(family)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    return auto.from_config(config)


def saved_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's saved tensors: parameters under all their names, and buffers."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **persistent_buffers(model)}


# Rotary positions whose scale depends on the length of a row.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 48,
    "long_factor": [8.0] * 48,
    "original_max_position_embeddings": 4096,
}
# The sizes that every family calls so.
TOY = {"vocab_size": 97, "hidden_size": 32}
TIED = SMALL | {"tie_word_embeddings": True}
SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa", "flint", "mimo_v2_flash")
# Decoders whose packed rows are computed as their documents alone.
PACKABLE = {
    "llama": LlamaConfig(**TIED),
    "qwen3": Qwen3Config(**TIED),
    "gemma": GemmaConfig(**TIED),
    # Windows shorter than the documents, and scores that are capped.
    "mistral": MistralConfig(**SMALL, sliding_window=6),
    "gemma2": Gemma2Config(**TIED, sliding_window=6, attn_logit_softcapping=0.05),
    "gemma3": Gemma3TextConfig(**TIED, sliding_window=6, layer_types=None),
    # Chunks shorter than the documents, in the first of both layers.
    "llama4": Llama4TextConfig(
        **SMALL,
        intermediate_size_mlp=48,
        attention_chunk_size=6,
        num_local_experts=4,
        no_rope_layers=[1, 0],
        attn_temperature_tuning=False,
    ),
    # A sink for each head, also in layers with windows; in the last family, in some layers only.
    **{name: tiny_config(name, **TOY, sliding_window=6) for name in SINKS},
}


def make_packable(config, attention=ATTENTION, dtype=torch.float32):
    """Build a decoder for packed rows, whose documents would show that they see each other."""
    attend_per_document()
    torch.manual_seed(0)
    # A copy: models that share a configuration share its attention.
    model = AutoModelForCausalLM.from_config(
        deepcopy(config), attn_implementation=attention, dtype=dtype
    )
    # Larger weights: what one document sees of another would be large, too.
    for parameter in model.parameters():
        parameter.data *= 3
    return model
