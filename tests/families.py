"""Every decoder family of transformers as a tiny model."""

import re
from copy import deepcopy
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from plugsft.model.load import persistent_buffers
from plugsft.plugins.bfd_packing.attention import ATTENTION, attend_per_document

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY, CONTEXT, MAX_PARAMETERS = 512, 128, 3_000_000
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
# Values that depend on other numbers, or have no default.
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": HEADS,
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": HEADS | {"mamba_d_ssm": 64},
    "granitemoehybrid": HEADS,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 1, "mamba_num_heads": 8},
    "reformer": {"is_decoder": True},
}


def tiny_config(family: str) -> PretrainedConfig:
    """Return a tiny configuration of a family."""
    config_class = CONFIG_MAPPING[family]
    table = shrink(config_class().to_dict())
    return config_class.from_dict({**table, **SETTINGS.get(family, {})})


def build(family: str) -> Any:
    """Return a tiny model of a family, with random weights."""
    config = tiny_config(family)
    with torch.device("meta"):
        size = sum(
            parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters()
        )
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


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
