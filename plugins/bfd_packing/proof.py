"""Prove that a document in a packed row has the same logits as alone.

There are two probes: short documents with the run's model, kernel and dtype; and documents beyond
every attention limit, with a small float32 copy of the model: the same class and kinds of layers,
but narrow. Attention limits (a window, a chunk) that rows of the run can exceed are scaled down in
it to LIMIT tokens, so that short documents exceed them.
"""

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import Module
from transformers import PretrainedConfig, PreTrainedModel

from plugsft import (
    Capability,
    DiskError,
    Ints,
    PluginError,
    RecipeError,
    cache_folder,
    digest,
    write_text,
)

from .attention import ATTENTION, attend_per_document
from .documents import documents_of
from .packer import Longest

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
VERSION = 3
"""Raise it when the probe of the small copy changes: cached results are then not used."""
SHORT = (7, 9, 5)
"""Tokens of each document in the probe of the run's model; the first one is changed."""
LONG = (19, 26, 13, 4)
"""Tokens of each document for the small copy; all but the last exceed its attention limits."""
ROUTED = 2e-6
"""Allowed change of other documents' logits, relative to the changed document's, in models with
routed experts: their matrix products change shape, and so rounding."""
ROUNDED = {True: 1e-4, False: 5e-2}
"""The same for the run's model, by whether it computes in float32."""
ALONE = {True: 1e-3, False: 5e-2}
"""Allowed difference between a packed document and the same alone, relative to that change."""
ROUNDING = (2e-5, 1e-3)
"""Bounds of the same for the small copy, relative to its logits. Between them, 20 times its
measured rounding is allowed."""
GAINS = (1.5, 0.5)
"""Weight scales of the small copy; the second is for families that amplify rounding too much."""
REFUSED = "this model cannot be trained on packed rows"
OWN_CODE = "it computes attention in its own code, which ignores document boundaries"


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


def unwrap(model: Any) -> Any:
    """Unwrap launchers and adapters from a transformers model."""
    plain = getattr(model, "module", model)
    return getattr(plain, "get_base_model", lambda: plain)()


def unpack(packing: Capability) -> str:
    """Return the cure: to train on separate rows."""
    sort = Capability.bundled("sorted_lengths").table
    return f"remove {packing.table}; {sort} lowers the padding of separate rows"


def prove_on_small_copy(model: Any, longest: Longest, packing: Capability) -> str:
    """Prove on a small copy that packed documents are separate; return the result in words.

    Attention limits above the longest document and row do not matter.
    """
    causal, row, cure = unwrap(model), longest.row, unpack(packing)
    reached = limits(causal.config, longest)
    facts = cached_probe(causal, longest)
    unbuilt, problem = facts["unbuilt"], find_problem(facts)
    if (
        problem
        and reached
        and (unbuilt or not find_problem(cached_probe(causal, NO_LIMIT_REACHED)))
    ):
        named = " and ".join(f"{name} = {value:,}" for name, value in sorted(reached.items()))
        raise RecipeError(
            f"{REFUSED} of {row:,} tokens: {named} is not proved to count per document "
            f"({problem}); set {packing.key} below {min(reached.values()):,}, or {cure}"
        )
    if unbuilt:
        return f"not proved on a small copy: {problem}"
    if problem:
        raise RecipeError(f"{REFUSED}: {problem}; {cure}")
    beyond = f", beyond its {' and '.join(sorted(reached))}" if reached else ""
    return f"proved on a small copy in float32{beyond} (a change moves {_moves(facts['leak'])})"


def find_problem(facts: dict[str, Any]) -> str:
    """Return the problem that the facts of a probe show, or ""."""
    if facts["fails"]:
        return str(facts["fails"])
    if not facts["leak"] <= (ROUTED if facts["routed"] else 0):
        return (
            f"changing one document moves the logits of others by {facts['leak']:.1e} of its own "
            "change, so a layer leaks across documents (a convolution, linear attention, a state "
            "space, attention in its own code)"
        )
    least, most = ROUNDING
    if not facts["strange"] <= min(max(least, facts["rounding"]), most):
        return (
            "a document's logits in a packed row differ from those alone by "
            f"{facts['strange']:.1e} of their size, so positions or a limit of attention do not "
            "count per document"
        )
    return ""


def cached_probe(causal: Any, longest: Longest) -> dict[str, Any]:
    """Return the facts of a small copy's probe, cached per configuration."""
    model_class = type(causal)
    config = {name: value for name, value in causal.config.to_dict().items() if name[0] != "_"}
    key = {
        "config": json.loads(json.dumps(config, default=str)),
        "class": f"{model_class.__module__}.{model_class.__qualname__}",
        "limits": sorted(limits(causal.config, longest)),
        "versions": [transformers.__version__, torch.__version__, VERSION],
        "attention": ATTENTION,
    }

    file = cache_folder() / "twins" / f"{digest(key)}.json"
    facts: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        facts = json.loads(file.read_text(encoding="utf8"))
    if not facts:
        facts = probe_copy(model_class, causal.config, longest)
        with suppress(DiskError, OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(facts, indent=1))
    return facts


def probe_copy(model_class: type[Any], config: Any, longest: Longest) -> dict[str, Any]:
    """Build a small copy and probe it."""
    facts: dict[str, Any] = {"unbuilt": False, "fails": ""}
    for gain in GAINS:
        try:
            small = build_small_copy(model_class, config, longest, gain)
        except ValueError as error:
            return {"unbuilt": True, "fails": f"it cannot be built: {error}"}
        with torch.device("cpu"), torch.no_grad():
            facts |= {"routed": is_routed(small)} | _compare_logits(small)
        if facts["fails"] or facts["rounding"] <= ROUNDING[1]:
            break
    return facts


def _compare_logits(small: PreTrainedModel) -> dict[str, Any]:
    """Compare logits of documents packed, alone, and next to a changed document."""
    rng = np.random.default_rng(0)
    embeddings: Any = small.get_input_embeddings()
    vocabulary = len(embeddings.weight)
    texts = [rng.integers(2, vocabulary, length) for length in LONG]
    # Each document alone, with transformers' own attention masks.
    alone = torch.cat([_plain_logits(small, text) for text in texts])
    size = float(alone.abs().max())
    hook = embeddings.register_forward_hook(_perturb)
    noise = torch.cat([_plain_logits(small, text) for text in texts]) - alone
    hook.remove()
    small.set_attn_implementation(attend_per_document())
    if small.config.get_text_config()._attn_implementation != ATTENTION:
        return {"fails": OWN_CODE}
    try:
        packed, change = _change_first(small, texts, vocabulary)
    except (PluginError, RecipeError) as error:
        return {"fails": str(error).partition(";")[0]}
    except Exception as error:  # from the model's own code
        first = str(error).strip().partition("\n")[0]
        return {"fails": f"its code fails on several documents ({type(error).__name__}: {first})"}
    return {
        "leak": float(change[LONG[0] :].max() / change[: LONG[0]].max()),  # NaN without a change
        "strange": float((alone - packed).abs().max()) / size,
        "rounding": 20 * float(noise.abs().max()) / size,
    }


def _plain_logits(model: Module, text: Ints) -> Tensor:
    logits: Tensor = model(input_ids=torch.from_numpy(text)[None], use_cache=False).logits[0]
    return logits.float()


def _perturb(_module: Module, _inputs: Any, output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return output * (1 + 2**-22 * torch.randn(output.shape, generator=generator))


def is_routed(model: Module) -> bool:
    """Tell whether the model routes tokens to experts."""
    return any("expert" in name for name, _ in model.named_parameters())


@torch.no_grad()
def prove_on_model(model: Module, exact: bool, packing: Capability) -> str:
    """Prove on the run's model that packed documents are separate; return the result in words.

    All ranks call it together. `exact`: the model computes in float32.
    """
    training, cure = model.training, unpack(packing)
    vocabulary = unwrap(model).config.get_text_config().vocab_size
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, vocabulary, length) for length in SHORT]
    model.eval()
    try:
        packed, change = _change_first(model, texts, vocabulary)
        again = (_logits(model, texts) - packed).abs()
        alone = (_logits(model, texts[-1:]) - packed[-SHORT[-1] :]).abs()
    # The model's own code refuses packed rows by any of these; PLUGSFT_DEBUG=1 shows its traceback.
    except (TypeError, ValueError, NotImplementedError) as error:
        raise RecipeError(f"{REFUSED}: its code fails on them ({error}); {cure}") from error
    finally:
        model.train(training)
    own_change = float(change[: SHORT[0]].max())
    if not own_change > 0:
        raise RecipeError(
            f"{REFUSED}: its logits do not depend on its tokens, or are NaN, so nothing can be "
            f"proved; {cure}"
        )
    leak, difference = (float(part.max()) / own_change for part in (change[SHORT[0] :], alone))
    # Some kernels are not deterministic in the last bits.
    allowed = 2 * float(again.max()) / own_change + (ROUNDED[exact] if is_routed(model) else 0)
    if not leak <= allowed:
        raise RecipeError(
            f"{REFUSED}: changing one document moves the logits of others by {leak:.1e} of its "
            "own change. Its layers carry a state from token to token (linear attention, a state "
            f"space, a convolution), or its attention ignores document boundaries; {cure}"
        )
    measured = f"{difference:.1e} of the effect of other tokens ({ALONE[exact]:.0e} is allowed)"
    if not difference <= ALONE[exact]:
        raise RecipeError(
            f"{REFUSED}: a document's logits after others differ from those alone by {measured}: "
            f"its positions do not restart; {cure}"
        )
    moved = f"a change moves {_moves(leak)}"
    return f"documents proved apart ({moved}); alone, their logits differ by {measured}"


def _moves(leak: float) -> str:
    return f"its neighbours by {leak:.0e} of its own: rounding" if leak else "no neighbour"


def _change_first(model: Module, texts: list[Ints], vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return a packed row's logits, and their change when the first document changes."""
    packed = _logits(model, texts)
    changed = (texts[0] + 1) % vocabulary
    return packed, (_logits(model, [changed, *texts[1:]]) - packed).abs()


def _logits(model: Module, texts: list[Ints]) -> Tensor:
    device = next(model.parameters()).device
    batch = {
        "input_ids": torch.from_numpy(np.concatenate(texts))[None],
        **documents_of(np.array([len(text) for text in texts])),
    }
    inputs = {name: it.to(device) if isinstance(it, Tensor) else it for name, it in batch.items()}
    logits: Tensor = model(**inputs, use_cache=False).logits[0]
    return logits.float()


@contextmanager
def naming_own_attention(packing: Capability) -> Iterator[None]:
    """Explain why a model without attention per document cannot be loaded with it."""
    try:
        yield
    except RecipeError as error:
        # Such a model looks up the name in a table of its own.
        if repr(error.__cause__) != repr(KeyError(ATTENTION)):
            raise
        raise RecipeError(f"{REFUSED}: {OWN_CODE}; {unpack(packing)}") from error
