"""Proof that the documents of a packed row do not see each other, and are what each is alone.

Two probes: short documents on the run's own model, kernel and dtype; and documents that exceed
every limit of attention on a tiny twin of its configuration, in float32.
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

from .claims import once
from .digests import cache_folder, digest
from .documents import ATTENTION, attend_per_document, documents_of
from .errors import DiskError, PlugsftError, RecipeError
from .publish import write_text
from .twin import NEVER, Longest, build_twin, limits
from .types import Ints

VERSION = 1
"""Raised when the probe of a twin changes: what is cached holds no longer."""
SHORT = (7, 9, 5)
"""Tokens of the documents that the run's model is probed with; the first is changed."""
LONG = (19, 26, 13, 4)
"""Tokens of those that its twin is probed with: all but the last exceed scaled-down limits."""
ROUTED = 2e-6
"""What may move in the neighbours of a changed document where experts are routed, as a share of
what moves in that document: the products of experts change shape, and round otherwise."""
ROUNDED = {True: 1e-4, False: 5e-2}
"""The same on the run's own model with experts, by whether it computes in float32."""
ALONE = {True: 1e-3, False: 5e-2}
"""What a document in a row may differ from the same document alone, as such a share."""
ROUNDING = (2e-5, 1e-3)
"""What a document in a twin's row may differ from the same document alone, as a share of the
logits: at least, and at most where the twin amplifies rounding."""
GAINS = (1.5, 0.5)
"""Scales of a twin's weights: with the first, a few families amplify rounding too much."""
REFUSED = "this model cannot be trained on packed rows"
CURE = "remove [plugins.bfd_packing]; [plugins.length_group] lowers the padding of separate rows"
OWN_CODE = "its type computes attention in code of its own, which takes no document boundaries"


def plain_model(model: Any) -> Any:
    """Return the transformers model inside what launchers and adapters have put around it."""
    plain = getattr(model, "module", model)
    return getattr(plain, "get_base_model", lambda: plain)()


@contextmanager
def takes_documents() -> Iterator[None]:
    """Refuse a model that cannot be loaded with attention per document, in the user's words."""
    try:
        yield
    except RecipeError as error:
        # Such a model looks the name up in a table of its own kinds of attention.
        if repr(error.__cause__) != repr(KeyError(ATTENTION)):
            raise
        raise RecipeError(f"{REFUSED}: {OWN_CODE}; {CURE}") from error


def ensure_twin_apart(model: Any, document: int, row: int) -> str:
    """Prove on a tiny twin that documents of a packed row stay apart; say what was found.

    Limits of attention beyond the longest document and row (in tokens) are never reached.
    """
    causal, longest = plain_model(model), Longest(document, row)
    reached = limits(causal.config, longest)
    found = twin_facts(causal, longest)
    if found["unbuilt"] and reached:
        raise RecipeError(
            f"{REFUSED} of {row:,} tokens: {_named(reached)} cannot be proved to hold inside "
            f"each document, since no small copy of the model can be made ({found['unbuilt']}); "
            f"set capacity below {min(reached.values()):,}, or {CURE}"
        )
    if found["unbuilt"]:
        return f"no small copy of the model to prove more ({found['unbuilt']})"
    problem = problem_of(found)
    if problem and reached and not problem_of(twin_facts(causal, NEVER)):
        raise RecipeError(
            f"{REFUSED} of {row:,} tokens: {_named(reached)} does not hold inside each "
            f"document ({problem}); set capacity below {min(reached.values()):,}, or {CURE}"
        )
    if problem:
        raise RecipeError(f"{REFUSED}: {problem}; {CURE}")
    held = f", beyond its {' and '.join(sorted(reached))}" if reached else ""
    return f"proved on a small copy in float32{held} (a change moves {_moves(found['leak'])})"


def problem_of(found: dict[str, Any]) -> str:
    """Say what is wrong with what a twin showed, if anything."""
    if found["fails"]:
        return str(found["fails"])
    if not found["leak"] <= (ROUTED if found["routed"] else 0):
        return (
            f"where one document changes, the logits of others move by {found['leak']:.1e} of its "
            "own, so a layer carries something from token to token across documents (a "
            "convolution, linear attention, a state space, attention of its own)"
        )
    least, most = ROUNDING
    if not found["strange"] <= min(max(least, found["rounding"]), most):
        return (
            f"a document in a packed row has other logits than alone (by {found['strange']:.1e} of "
            "their size), so positions or a limit of attention are not counted per document"
        )
    return ""


def twin_facts(causal: Any, longest: Longest) -> dict[str, Any]:
    """Return what a twin of a model shows, measured once for each configuration."""
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
    """Return a model's own class: FSDP2 replaces it by one derived from it."""
    return next(one for one in type(causal).__mro__ if not issubclass(one, FSDPModule))


def measured(model_class: type[Any], config: Any, longest: Longest) -> dict[str, Any]:
    """Build a twin, and return what it shows."""
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
    # As transformers computes it, with its own masks, one document at a time.
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
    except Exception as error:  # whatever a model's own code raises
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
    """Change one document of a packed row, and make sure that the others' logits stay.

    On the run's own model, kernel and dtype, on all ranks together; say what was found. `exact`
    says that the model computes in float32.
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
            f"{REFUSED}: its logits stay where its words change, or are no numbers, so that "
            f"nothing can be proved; {CURE}"
        )
    leak, strange = float(moved[SHORT[0] :].max()) / change, float(alone.max()) / change
    # Kernels of some devices give other last bits each time.
    allowed = 2 * float(again.max()) / change + (ROUNDED[exact] if is_routed(model) else 0)
    if not leak <= allowed:
        raise RecipeError(
            f"{REFUSED}: where one document changes, the logits of others move by {leak:.1e} of "
            "its own. Its layers carry a state from token to token (linear attention, a state "
            f"space, a convolution), or its attention does not keep documents apart; {CURE}"
        )
    if not strange <= ALONE[exact]:
        raise RecipeError(
            f"{REFUSED}: a document behind others has other logits than alone (by {strange:.1e} "
            f"of what a change of its words makes): its positions do not begin again; {CURE}"
        )
    return f"documents proved apart (a change moves {_moves(leak)})"


def _moves(leak: float) -> str:
    return f"its neighbours by {leak:.0e} of its own: rounding" if leak else "no neighbour"


def _named(reached: dict[str, int]) -> str:
    return " and ".join(f"{name} = {value:,}" for name, value in sorted(reached.items()))


def _moved(
    model: Module, texts: list[Ints], vocabulary: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the logits of a packed row, and how far they move when its first document changes."""
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
