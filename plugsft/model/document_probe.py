"""Proof that a document in a packed row has the same logits as alone.

Two probes: short documents on the run's own model, kernel and dtype; and documents that exceed
every limit of attention, on a tiny float32 twin of its configuration.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from transformers import PreTrainedModel

from ..base.atomic import write_text
from ..base.build_once import once
from ..base.checksums import cache_folder, digest
from ..base.errors import DiskError, PlugsftError, RecipeError
from ..base.types import Ints
from ..batches.packed_rows import ATTENTION, attend_per_document, documents_of
from .twin import NEVER, Longest, build_twin, limits

VERSION = 2
"""To be raised when the probe of a twin changes, so that cached results are not used."""
SHORT = (7, 9, 5)
"""Lengths of the documents in the probe of the run's model; the first is changed."""
LONG = (19, 26, 13, 4)
"""Lengths in the probe of its twin: all but the last exceed the scaled-down limits."""
ROUTED = 2e-6
"""Allowed change of the other documents' logits in models with routed experts, relative to the
change of the changed document. Expert matrix products change shape, and so their rounding."""
ROUNDED = {True: 1e-4, False: 5e-2}
"""The same for the run's own model; key: whether it computes in float32."""
ALONE = {True: 1e-3, False: 5e-2}
"""Allowed difference of a document in a row and alone, relative to the same change."""
ROUNDING = (2e-5, 1e-3)
"""Bounds of the allowed difference of a twin's document in a row and alone, relative to its logits.
Between them, the rounding of the twin decides."""
GAINS = (1.5, 0.5)
"""Scales of a twin's weights; the second is for families that amplify rounding too much."""
REFUSED = "this model cannot be trained on packed rows"
CURE = "remove [plugins.bfd_packing]; [plugins.length_group] lowers the padding of separate rows"
OWN_CODE = "it computes attention in its own code, which ignores document boundaries"


def plain_model(model: Any) -> Any:
    """Unwrap launchers and adapters from a transformers model."""
    plain = getattr(model, "module", model)
    return getattr(plain, "get_base_model", lambda: plain)()


@contextmanager
def takes_documents() -> Iterator[None]:
    """Refuse a model that cannot be loaded with attention per document."""
    try:
        yield
    except RecipeError as error:
        # Such a model looks the name up in a table of its own kinds of attention.
        if repr(error.__cause__) != repr(KeyError(ATTENTION)):
            raise
        raise RecipeError(f"{REFUSED}: {OWN_CODE}; {CURE}") from error


def ensure_twin_apart(model: Any, document: int, row: int) -> str:
    """Prove on a tiny twin that packed documents are separate; return the result in words.

    Limits of attention beyond the longest document and row (in tokens) are never reached.
    """
    causal, longest = plain_model(model), Longest(document, row)
    reached = limits(causal.config, longest)
    found = twin_facts(causal, longest)
    if found["unbuilt"] and reached:
        raise RecipeError(
            f"{REFUSED} of {row:,} tokens: {_named(reached)} cannot be proved to count per "
            f"document, since no small copy of the model can be made ({found['unbuilt']}); "
            f"set capacity below {min(reached.values()):,}, or {CURE}"
        )
    if found["unbuilt"]:
        return f"not proved on a small copy, which cannot be made ({found['unbuilt']})"
    problem = problem_of(found)
    if problem and reached and not problem_of(twin_facts(causal, NEVER)):
        raise RecipeError(
            f"{REFUSED} of {row:,} tokens: {_named(reached)} does not count per "
            f"document ({problem}); set capacity below {min(reached.values()):,}, or {CURE}"
        )
    if problem:
        raise RecipeError(f"{REFUSED}: {problem}; {CURE}")
    beyond = f", beyond its {' and '.join(sorted(reached))}" if reached else ""
    return f"proved on a small copy in float32{beyond} (a change moves {_moves(found['leak'])})"


def problem_of(found: dict[str, Any]) -> str:
    """Return the problem that a twin's facts show, or an empty text."""
    if found["fails"]:
        return str(found["fails"])
    if not found["leak"] <= (ROUTED if found["routed"] else 0):
        return (
            f"changing one document moves the logits of others by {found['leak']:.1e} of its own "
            "change, so a layer leaks across documents (a convolution, linear attention, a state "
            "space, attention in its own code)"
        )
    least, most = ROUNDING
    if not found["strange"] <= min(max(least, found["rounding"]), most):
        return (
            "a document's logits in a packed row differ from those alone by "
            f"{found['strange']:.1e} of their size, so positions or a limit of attention do not "
            "count per document"
        )
    return ""


def twin_facts(causal: Any, longest: Longest) -> dict[str, Any]:
    """Return the facts of a model's twin, cached for each configuration."""
    model_class = class_of(causal)
    config = {name: value for name, value in causal.config.to_dict().items() if name[0] != "_"}
    key = {
        "config": json.loads(json.dumps(config, default=str)),
        "class": f"{model_class.__module__}.{model_class.__qualname__}",
        "limits": sorted(limits(causal.config, longest)),
        "versions": [transformers.__version__, torch.__version__, VERSION],
        "attention": ATTENTION,
    }

    def build(folder: Path) -> None:
        facts = measured(model_class, causal.config, longest)
        write_text(folder / "facts.json", json.dumps(facts, indent=1))

    try:
        folder = once(cache_folder() / "twins" / digest(key), build)
        found: dict[str, Any] = json.loads((folder / "facts.json").read_text(encoding="utf8"))
    except (DiskError, OSError, ValueError):
        return measured(model_class, causal.config, longest)
    return found


def class_of(causal: Any) -> type[Any]:
    """Return a model's own class: FSDP2 replaces it by a subclass."""
    return next(one for one in type(causal).__mro__ if not issubclass(one, FSDPModule))


def measured(model_class: type[Any], config: Any, longest: Longest) -> dict[str, Any]:
    """Build a twin and probe it."""
    found: dict[str, Any] = {"unbuilt": "", "fails": "", "leak": 0.0, "strange": 0.0}
    for gain in GAINS:
        try:
            twin = build_twin(model_class, config, longest, gain)
        except ValueError as error:
            return found | {"routed": False, "unbuilt": str(error)}
        with torch.device("cpu"), torch.no_grad():
            found |= {"routed": is_routed(twin)} | _examined(twin)
        if found["fails"] or found["rounding"] <= ROUNDING[1]:
            break
    return found


def _examined(twin: PreTrainedModel) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    embeddings: Any = twin.get_input_embeddings()
    vocabulary = len(embeddings.weight)
    texts = [rng.integers(2, vocabulary, length) for length in LONG]
    # Each document alone, with transformers' own attention masks.
    alone = torch.cat([_plain_logits(twin, text) for text in texts])
    size = float(alone.abs().max())
    nudge = embeddings.register_forward_hook(_nudged)
    noise = torch.cat([_plain_logits(twin, text) for text in texts]) - alone
    nudge.remove()
    twin.set_attn_implementation(attend_per_document())
    if twin.config.get_text_config()._attn_implementation != ATTENTION:
        return {"fails": OWN_CODE}
    try:
        base, moved = _moved(twin, texts, vocabulary, torch.device("cpu"))
    except PlugsftError as error:
        return {"fails": str(error).partition(";")[0]}
    except Exception as error:  # from the model's own code
        first = str(error).strip().partition("\n")[0]
        return {"fails": f"its code fails on several documents ({type(error).__name__}: {first})"}
    change = float(moved[: LONG[0]].max())
    return {
        "leak": float(moved[LONG[0] :].max()) / change if change > 0 else float("inf"),
        "strange": float((alone - base).abs().max()) / size,
        "rounding": 20 * float(noise.abs().max()) / size,
    }


def _plain_logits(model: Module, text: Ints) -> Tensor:
    logits: Tensor = model(input_ids=torch.from_numpy(text)[None], use_cache=False).logits[0]
    return logits.float()


def _nudged(_module: Module, _inputs: Any, output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return output * (1 + 2**-22 * torch.randn(output.shape, generator=generator))


def is_routed(model: Module) -> bool:
    """Tell whether tokens are routed to experts."""
    return any("expert" in name for name, _ in model.named_parameters())


@torch.no_grad()
def ensure_apart(model: Module, exact: bool) -> str:
    """Prove on the run's model that changing one packed document leaves the others' logits.

    All ranks call it together; returns the result in words. `exact`: the model computes in float32.
    """
    training, device = model.training, next(model.parameters()).device
    vocabulary = plain_model(model).config.get_text_config().vocab_size
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, vocabulary, length) for length in SHORT]
    model.eval()
    try:
        base, moved = _moved(model, texts, vocabulary, device)
        again = (_logits(model, texts, device) - base).abs()
        alone = (_logits(model, texts[-1:], device) - base[-SHORT[-1] :]).abs()
    except (TypeError, ValueError, NotImplementedError) as error:
        raise RecipeError(f"{REFUSED}: its code fails on them ({error}); {CURE}") from error
    finally:
        model.train(training)
    change = float(moved[: SHORT[0]].max())
    if not change > 0:
        raise RecipeError(
            f"{REFUSED}: its logits do not depend on its tokens, or are NaN, so nothing can be "
            f"proved; {CURE}"
        )
    leak, strange = float(moved[SHORT[0] :].max()) / change, float(alone.max()) / change
    # Some kernels are not deterministic in the last bits.
    allowed = 2 * float(again.max()) / change + (ROUNDED[exact] if is_routed(model) else 0)
    if not leak <= allowed:
        raise RecipeError(
            f"{REFUSED}: changing one document moves the logits of others by {leak:.1e} of its "
            "own change. Its layers carry a state from token to token (linear attention, a state "
            f"space, a convolution), or its attention ignores document boundaries; {CURE}"
        )
    if not strange <= ALONE[exact]:
        raise RecipeError(
            f"{REFUSED}: a document's logits after others differ from those alone (by "
            f"{strange:.1e} of what other tokens change): its positions do not restart; {CURE}"
        )
    return f"documents proved apart (a change moves {_moves(leak)})"


def _moves(leak: float) -> str:
    return f"its neighbours by {leak:.0e} of its own: rounding" if leak else "no neighbour"


def _named(reached: dict[str, int]) -> str:
    return " and ".join(f"{name} = {value:,}" for name, value in sorted(reached.items()))


def _moved(
    model: Module, texts: list[Ints], vocabulary: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return a packed row's logits, and their change when the first document changes."""
    base = _logits(model, texts, device)
    other = (texts[0] + 1) % vocabulary
    return base, (_logits(model, [other, *texts[1:]], device) - base).abs()


def _logits(model: Module, texts: list[Ints], device: torch.device) -> Tensor:
    batch = {
        "input_ids": torch.from_numpy(np.concatenate(texts))[None],
        **documents_of(np.array([len(text) for text in texts])),
    }
    inputs = {
        name: one.to(device) if isinstance(one, Tensor) else one for name, one in batch.items()
    }
    logits: Tensor = model(**inputs, use_cache=False).logits[0]
    return logits.float()
