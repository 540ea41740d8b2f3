"""A small copy of a model: the same class and kinds of layers, but narrow.

Attention limits (a window, a chunk) that rows of the run can exceed are scaled down to LIMIT
tokens, so that short documents exceed them.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

LIMIT = 6
"""Tokens of a scaled-down attention limit."""
VOCABULARY = 128
NUM_HEADS, NUM_KV_HEADS = 4, 2
NUM_EXPERTS = 8
WIDTH = 64
MAX_PARAMETERS = 200e6
"""Most parameters of a small copy."""
LIMIT_NAMES = re.compile(
    r"window|chunk_size|^floor_scale$|log_scaling_n_floor|index_topk|local_attention$|original_max"
)
NOT_LIMITS = re.compile(r"layer|pattern|feed_forward|lm_head|mamba")
"""Names that only look like attention limits."""
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
PERIODS = re.compile(r"period|interval|offset|every|pattern$|_step$|k_dense|dense_layers|start")
HIDDEN_NAMES = ("hidden_size", "n_embd", "d_model")
HEAD_COUNTS = re.compile(r"^(num_attention_heads|n_heads?|num_heads|\w*num_attention_heads)$")
KV_HEAD_COUNTS = re.compile(r"^(\w*num_key_value_heads|num_kv_heads)$")
WIDTH_NAMES = re.compile(
    r"^(hidden_size|n_embd|d_model|emb_dim|embedding_dim|\w*intermediate_size\w*|ffn_hidden_size|\w*ffn_dim|n_inner|"
    r"[qo]_lora_rank|hidden_size_per_layer_input|expert_ffn_hidden_size)$"
)
MOST = {
    re.compile(r"^\w*vocab_size\w*$"): VOCABULARY,
    re.compile(r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$"): NUM_EXPERTS,
    re.compile(r"^(num_experts_per_tok\w*|moe_topk|moe_k|top_k_experts)$"): 2,
}
"""Names of counts -> the most of them: entries of the vocabulary, experts, experts of a token."""


class Longest(NamedTuple):
    """The longest document and row of a run, in tokens."""

    document: int
    row: int


NO_LIMIT_REACHED = Longest(0, 0)
"""Too short to reach any limit."""


def limits(config: PretrainedConfig, longest: Longest) -> dict[str, int]:
    """Return the attention limits that a run exceeds, by name."""
    reached = {}
    for inner in _nested_configs(config):
        for name, value in vars(inner).items():
            nested = value if name == "rope_parameters" and isinstance(value, dict) else {}
            for key, number in {name: value, **nested}.items():
                if not isinstance(number, int) or NOT_LIMITS.search(key):
                    continue
                # Models that scale queries by position may count from the start of the row.
                most = longest.row if "floor" in key else longest.document
                if LIMIT_NAMES.search(key) and 1 < number <= most:
                    reached[key] = number
    return reached


def build_small_copy(
    model_class: type[Any], config: PretrainedConfig, longest: Longest, gain: float
) -> PreTrainedModel:
    """Build a small float32 model on the CPU; `gain` scales its random weights.

    Raises ValueError, with the reason, if no reduced configuration works.
    """
    reached = limits(config, longest)
    reason: Exception | None = None
    for layers, widths in ((True, True), (False, True), (True, False)):
        small = copy.deepcopy(config)
        try:
            for inner in _nested_configs(small):
                _shrink(inner, reached, layers, widths)
            return _create(model_class, small, gain)
        except Exception as error:  # the model's own code fails on these shapes
            reason = reason or error
    raise ValueError(f"{type(reason).__name__}: {str(reason).strip().partition(chr(10))[0]}")


@torch.no_grad()
def _create(model_class: type[Any], config: PretrainedConfig, gain: float) -> PreTrainedModel:
    """Build a model with random weights and call it once; keeps the run's random state."""
    config._attn_implementation = "eager"
    with torch.device("meta"):
        size = sum(tensor.numel() for tensor in model_class(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"it would still have {size:,} parameters")
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small: Any = model_class(config)
        for weight in small.parameters():
            # Small initial weights would hide leaks between documents.
            if weight.dim() > 1:
                weight.normal_(std=gain * weight.shape[-1] ** -0.5)
            else:
                weight.add_(0.1 * torch.randn_like(weight))
        small.float().eval()
        small(input_ids=torch.arange(2, 2 + 2 * LIMIT)[None], use_cache=False)
    return small  # type: ignore[no-any-return]


def _nested_configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield a configuration and those nested in it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from _nested_configs(value)


def _shrink(config: PretrainedConfig, reached: dict[str, int], layers: bool, widths: bool) -> None:
    """Shrink one configuration in place."""
    numbers = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 1
    }
    for name in {*reached} & {*numbers}:
        setattr(config, name, LIMIT)
    ropes = getattr(config, "rope_parameters", None)
    if isinstance(ropes, dict):
        for name in {*reached} & {*ropes}:
            ropes[name] = LIMIT
    for names, most in MOST.items():
        for name in filter(names.match, numbers):
            setattr(config, name, min(numbers[name], most))
    if layers:
        _drop_layers(config, numbers)
    if widths:
        _narrow(config, numbers)
    for name, value in vars(config).items():
        if name.endswith("_token_id") and value is not None:
            setattr(config, name, [1] if isinstance(value, list) else 1)
    for name in {"n_group", "topk_group", "num_expert_group"} & {*numbers}:
        setattr(config, name, 1)
    config.dtype = torch.float32
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config


def _drop_layers(config: PretrainedConfig, numbers: dict[str, int]) -> None:
    """Keep the first layers that include each kind of layer."""
    name = next((key for key in LAYER_COUNTS if key in numbers), None)
    if name is None or vars(config).get("num_kv_shared_layers"):
        return
    count = numbers[name]
    lists = {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, list | tuple | str) and len(value) == count
    }
    kinds = [tuple(str(values[layer]) for values in lists.values()) for layer in range(count)]
    # A list of distinct values numbers the layers and does not name their kinds.
    numbered = any(len({*map(str, values)}) == count for values in lists.values())
    least = 4 if numbered else max(kinds.index(kind) + 1 for kind in kinds)
    periods = [value + 1 for key, value in numbers.items() if PERIODS.search(key)]
    keep = min(count, max([2, least, *periods]))
    setattr(config, name, keep)
    for key, values in lists.items():
        setattr(config, key, values[:keep])


def _narrow(config: PretrainedConfig, numbers: dict[str, int]) -> None:
    """Reduce the number of heads and all widths."""
    heads = next((value for name, value in numbers.items() if HEAD_COUNTS.match(name)), 0)
    hidden = next((numbers[name] for name in HIDDEN_NAMES if name in numbers), 0)
    split = bool(heads and hidden and hidden % heads == 0)
    own = vars(config).get("head_dim")
    free = own and own * heads != hidden
    width = WIDTH if free or not split else NUM_HEADS * (hidden // heads)
    for name, value in vars(config).items():
        if WIDTH_NAMES.match(name) and isinstance(value, list):
            setattr(config, name, [min(size, WIDTH) for size in value])
    for name, value in numbers.items():
        if HEAD_COUNTS.match(name):
            setattr(config, name, NUM_HEADS)
        elif KV_HEAD_COUNTS.match(name):
            setattr(config, name, NUM_HEADS if value == heads else NUM_KV_HEADS)
        elif WIDTH_NAMES.match(name):
            setattr(config, name, min(value, width if name in HIDDEN_NAMES else WIDTH))
