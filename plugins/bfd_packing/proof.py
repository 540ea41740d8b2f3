"""Prove that a document in a packed row has the same logits as alone.

There are two probes: short documents with the run's model, kernel and dtype; and documents beyond
every attention limit (a window, a chunk) that the run can reach, with one layer of each kind in
float32, compared with transformers' own attention.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from transformers import PretrainedConfig

from plugsft import Capability, Ints, PluginError, RecipeError, reason_of

from .attention import ATTENTION, attend_per_document
from .documents import documents_of
from .layers import ROWS, build_layers, nested_configs
from .mixers import APART, find_mixers, forget
from .packer import Longest

LIMIT_NAMES = re.compile(
    # These only look like attention limits.
    r"(?!.*(layer|pattern|feed_forward|lm_head|mamba))"
    r"(.*(window|chunk_size|log_scaling_n_floor|index_topk|local_attention$|original_max)"
    r"|floor_scale$)"
)
SHORT = (7, 9, 5)
"""Tokens of each document in the probe of the run's model; the first one is changed."""
LONG = (19, 13, 4)
"""Tokens of each document for the layers; all but the last exceed their attention limits."""
ROUTED = 2e-6
"""Allowed change of other documents' logits, relative to the changed document's, in models with
routed experts: their matrix products change shape, and so rounding."""
ROUNDED = {True: 1e-4, False: 5e-2}
"""The same for the run's model, by whether it computes in float32."""
ALONE = {True: 1e-3, False: 5e-2}
"""Allowed difference between a packed document and the same alone, relative to that change."""
ROUNDING = 3e-4
"""The same for the layers, compared with transformers' own attention."""
REFUSED = "this model cannot be trained on packed rows"
OWN_CODE = "it computes attention in its own code, which ignores document boundaries"
NO_LIMIT_REACHED = Longest(0, 0)
"""Too short to reach any limit."""


def limits(config: PretrainedConfig, longest: Longest) -> dict[str, int]:
    """Return the attention limits that a run exceeds, by name."""
    reached = {}
    for inner in nested_configs(config):
        ropes = getattr(inner, "rope_parameters", None) or {}
        for name, number in {**vars(inner), **ropes}.items():
            if isinstance(number, int) and LIMIT_NAMES.match(name):
                # Models that scale queries by position may count from the start of the row.
                most = longest.row if "floor" in name else longest.document
                if 1 < number <= most:
                    reached[name] = number
    return reached


def unwrap(model: Any) -> Any:
    """Unwrap launchers and adapters from a transformers model."""
    plain = getattr(model, "module", model)
    return getattr(plain, "get_base_model", lambda: plain)()


def unpack(packing: Capability) -> str:
    """Return the cure: to train on separate rows."""
    sort = Capability.bundled("sorted_lengths").table
    return (
        f"remove {packing.table}, and raise train.micro_batch as far as memory allows; {sort} then "
        "lowers the padding"
    )


class Probe(NamedTuple):
    """What a probe of layers found."""

    problem: str
    is_built: bool = True
    leak: float = 0.0
    """The change of other documents' logits, relative to that of the changed one's."""


def prove_on_layers(model: Any, longest: Longest, packing: Capability) -> str:
    """Prove on one layer of each kind that packed documents are separate; return it in words.

    Attention limits above the longest document and row do not matter.
    """
    causal, cure = unwrap(model), unpack(packing)
    reached, found = limits(causal.config, longest), probe_layers(causal, longest)
    if not found.problem:
        beyond = f", beyond its {' and '.join(sorted(reached))}" if reached else ""
        return f"proved on one layer of each kind in float32{beyond} ({_moves(found.leak)})"
    if reached and not (found.is_built and probe_layers(causal, NO_LIMIT_REACHED).problem):
        named = " and ".join(f"{name} = {value:,}" for name, value in sorted(reached.items()))
        raise RecipeError(
            f"{REFUSED} of {longest.row:,} tokens: {named} is not proved to count per document "
            f"({found.problem}); set {packing.key} below {min(reached.values()):,}, or {cure}"
        )
    raise RecipeError(f"{REFUSED}: {found.problem}; {cure}")


def probe_layers(causal: Any, longest: Longest) -> Probe:
    """Compare documents that are packed, alone, and next to a changed document."""
    before = {*APART}
    probe = _probe_layers(causal, longest, True)
    if probe.problem and (tried := {*APART} - before):
        forget(tried)
        return _probe_layers(causal, longest, False)  # what is wrong with the model as it is
    return probe


@torch.no_grad()
def _probe_layers(causal: Any, longest: Longest, with_mixers: bool) -> Probe:
    with torch.device("cpu"):
        try:
            layers: Any = build_layers(type(causal), causal.config, limits(causal.config, longest))
            vocabulary = min(ROWS, len(layers.get_input_embeddings().weight))
            texts = random_texts(LONG, vocabulary)
            # Each document alone, with transformers' own attention masks.
            alone = [
                layers(input_ids=torch.from_numpy(text)[None], use_cache=False).logits[0]
                for text in texts
            ]
        except Exception as error:  # the model's own code fails on these shapes
            return Probe(f"its layers cannot be built alone: {reason_of(error)}", is_built=False)
        layers.set_attn_implementation(attend_per_document())
        if layers.config.get_text_config()._attn_implementation != ATTENTION:
            return Probe(OWN_CODE)
        if with_mixers:
            find_mixers(layers, partial(_change_first, layers, texts, vocabulary), LONG[0])
        try:
            packed, change = _change_first(layers, texts, vocabulary)
        except (PluginError, RecipeError) as error:
            return Probe(str(error).partition(";")[0])
        except Exception as error:  # from the model's own code
            return Probe(f"its code fails on several documents ({reason_of(error)})")
        leak, difference = _measure(packed, change, LONG[0], torch.cat(alone))
        return Probe(
            find_problem(leak, ROUTED * is_routed(layers), difference, ROUNDING), leak=leak
        )


@torch.no_grad()
def prove_on_model(model: Module, exact: bool, packing: Capability) -> str:
    """Prove on the run's model that packed documents are separate; return the result in words.

    All ranks call it together. `exact`: the model computes in float32.
    """
    training, cure = model.training, unpack(packing)
    vocabulary = unwrap(model).config.get_text_config().vocab_size
    texts = random_texts(SHORT, vocabulary)
    model.eval()
    try:
        packed, change = _change_first(model, texts, vocabulary)
        again = (_logits(model, texts) - packed).abs()
        alone = _logits(model, texts[-1:])
    # The model's own code refuses packed rows by any of these; PLUGSFT_DEBUG=1 shows its traceback.
    except (TypeError, ValueError, NotImplementedError) as error:
        raise RecipeError(f"{REFUSED}: its code fails on them ({error}); {cure}") from error
    finally:
        model.train(training)
    leak, difference = _measure(packed, change, SHORT[0], alone)
    # Some kernels are not deterministic in the last bits.
    allowed = 2 * float(again.max() / change[: SHORT[0]].max())
    allowed += ROUNDED[exact] * is_routed(model)
    if problem := find_problem(leak, allowed, difference, ALONE[exact]):
        raise RecipeError(f"{REFUSED}: {problem}; {cure}")
    return (
        f"documents proved apart ({_moves(leak)}); alone, their logits differ by "
        f"{difference:.1e} of the effect of other tokens ({ALONE[exact]:.0e} is allowed)"
    )


def find_problem(leak: float, allowed: float, difference: float, most: float) -> str:
    """Return what is wrong with documents, or ""; all numbers are relative to a changed one's."""
    if math.isnan(leak):
        return "its logits do not depend on its tokens, or are NaN, so nothing can be proved"
    if not leak <= allowed:
        return (
            f"changing one document moves the logits of others by {leak:.1e} of its own "
            "change, so a layer leaks across documents (a convolution, linear attention, a state "
            "space, attention in its own code or without its documents)"
        )
    if not difference <= most:
        return (
            f"a document's logits in a packed row differ from those alone by {difference:.1e} of "
            f"the effect of other tokens ({most:.0e} is allowed), so positions or a limit of "
            "attention do not count per document"
        )
    return ""


def random_texts(lengths: Sequence[int], vocabulary: int) -> list[Ints]:
    """Return documents of random tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(2, vocabulary, length) for length in lengths]


def is_routed(model: Module) -> bool:
    """Tell whether the model routes tokens to experts."""
    return any("expert" in name for name, _ in model.named_parameters())


def _moves(leak: float) -> str:
    if not leak:
        return "a change moves no neighbour"
    return f"a change moves its neighbours by {leak:.0e} of its own: rounding"


def _measure(packed: Tensor, change: Tensor, first: int, alone: Tensor) -> tuple[float, float]:
    """Return the change of others than the first document, and of documents that are alone.

    Both are relative to the first one's change.
    """
    own = change[:first].max()
    apart = (alone - packed[-len(alone) :]).abs()
    return float(change[first:].max() / own), float(apart.max() / own)


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
