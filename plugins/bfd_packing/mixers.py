"""Modules that mix tokens by a state or a convolution: they compute each document of a row alone.

Such a module is causal, so padding behind a document changes nothing in front of it. It alone sees
the row's documents as padded batches; everything else sees the packed row. No kernel is needed.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from transformers import GradientCheckpointingLayer

from plugsft import Ints

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "keys")
"""What tells of a row's documents; a document alone has none."""
OF_ROWS = ("attention_mask", "past_key_values", "cache_params")
"""A mask of the whole row, and the memory that generating fills."""
MIXES = 3e-4
"""A change of other documents that is no rounding, relative to the changed one's."""
FILLED = 2 / 3
"""Least share of a padded batch that is no padding."""
FIXED = 4
"""Batches of each row with ZeRO-3."""

APART: dict[type[Any], Callable[..., Any]] = {}
"""Classes of modules that compute documents apart, with their own forward."""


class Batches(NamedTuple):
    """How documents of like length become padded batches, and those a row again."""

    sources: list[Tensor]
    """The places in the row of each batch's tokens."""
    places: Tensor
    """The places of the row's tokens in the batches, one batch behind the other."""


def see_documents(kind: type[Any]) -> None:
    """Let all modules of a class compute documents apart, where they are given any.

    Documents come as an argument: so copies of a model, two models in turn and checkpoints, which
    compute a layer again, have their own.
    """
    inner = kind.forward

    @wraps(inner)
    def forward(module: Any, *inputs: Any, documents: Any = None, **options: Any) -> Any:
        whole = partial(inner, module)
        if documents is None:
            return whole(*inputs, **options)
        # ZeRO-3 gathers weights at each call, so all ranks make as many.
        fixed = FIXED if any(hasattr(weight, "ds_id") for weight in module.parameters()) else 0
        return compute_apart(whole, inputs, options, tuple(documents), fixed)

    # The number of batches and their shapes differ in each row.
    kind.forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    APART[kind] = inner


def compute_apart(
    whole: Callable[..., Any],
    inputs: tuple[Any, ...],
    options: dict[str, Any],
    documents: tuple[int, ...],
    fixed: int = 0,
) -> Any:
    """Compute what a module gives for padded batches of documents; return a row again.

    `fixed`: the number of batches, if all rows have as many.
    """
    total = sum(documents)
    options = {name: value for name, value in options.items() if name not in BOUNDARIES}
    options |= dict.fromkeys({*OF_ROWS} & {*options})
    seen = options.pop("seen", None)

    def is_row(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, total)

    def take(value: Any, source: Tensor) -> Any:
        if isinstance(value, tuple):
            return tuple(take(one, source) for one in value)
        return value[0][source] if is_row(value) else value

    rows = (value for value in (*inputs, *options.values()) if is_row(value))
    batches = batches_of(documents, seen, fixed, next(rows).device)
    outputs = [
        whole(*take(inputs, source), **{name: take(it, source) for name, it in options.items()})
        for source in batches.sources
    ]

    def join(parts: list[Any]) -> Any:
        if isinstance(parts[0], tuple):
            return tuple(join([*one]) for one in zip(*parts, strict=True))
        if not (isinstance(parts[0], Tensor) and parts[0].shape[:2] == batches.sources[0].shape):
            return parts[0]  # as a state, which nothing reads
        return torch.cat([part.flatten(0, 1) for part in parts])[batches.places][None]

    return join(outputs)


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # training uses them again
def batches_of(
    documents: tuple[int, ...], seen: tuple[int, ...] | None, fixed: int, device: torch.device
) -> Batches:
    """Lay out documents of like length as padded batches; each begins with the tokens it sees."""
    lengths = np.array(documents)
    prompts = np.array(seen) if seen else np.zeros_like(lengths)
    starts = np.cumsum(lengths) - lengths
    previous = np.append(0, starts[:-1])
    places, sources, used = np.zeros(lengths.sum(), np.int64), list[Ints](), 0
    for group in grouped(prompts + lengths, fixed):
        sizes = (prompts + lengths)[group, None]
        columns = np.arange(sizes.max())
        tokens = columns % sizes  # behind a document comes the same again
        prompt, before, start = (each[group, None] for each in (prompts, previous, starts))
        source = np.where(tokens < prompt, before + tokens, start + tokens - prompt)
        sources.append(source)
        for row, number in enumerate(group):
            first, length = used + row * len(columns) + prompts[number], lengths[number]
            places[starts[number] :][:length] = np.arange(first, first + length)
        used += source.size
    # One token each: all ranks make as many calls, also backwards.
    sources += [np.zeros((1, 1), np.int64)] * (fixed - len(sources))
    # A copy that waits would wait for all that the device has to do.
    host = [torch.from_numpy(each) for each in (*sources, places)]
    *moved, last = (tensor.to(device, non_blocking=True) for tensor in host)
    return Batches(moved, last)


def grouped(lengths: Ints, most: int) -> list[list[int]]:
    """Group documents of like lengths in at most so many groups; 0: in any number."""
    groups, share = like_lengths(lengths, FILLED), FILLED
    while most and len(groups) > most:
        share *= FILLED
        groups = like_lengths(lengths, share)
    return groups


def like_lengths(lengths: Ints, share: float) -> list[list[int]]:
    """Group documents, the longest first, so that at least a share of each group is no padding."""
    groups, filled = list[list[int]](), 0
    for number in np.argsort(-lengths, kind="stable").tolist():
        group = groups[-1] if groups else []
        filled += lengths[number]
        if not group or filled < share * (len(group) + 1) * lengths[group[0]]:
            group, filled = [], lengths[number]
            groups.append(group)
        group.append(number)
    return groups


def find_mixers(model: Module, compute: Callable[[], Any], first: int) -> None:
    """Let the classes of modules that mix documents compute these alone.

    `compute` runs the model on a row, and once more with another first document, of `first` tokens.
    """
    while (kind := find_mixing(model, compute, first)) and kind not in APART:
        see_documents(kind)


def forget(kinds: Iterable[type[Any]]) -> None:
    """Leave classes as they were: they cannot compute documents alone, as attention."""
    for kind in kinds:
        kind.forward = APART.pop(kind)


def find_mixing(model: Module, compute: Callable[[], Any], first: int) -> type[Any] | None:
    """Return the class of the innermost module that is given documents, and mixes or refuses them.

    A layer is too much: it also computes what sees each token alone, and chooses experts.
    """
    running, outputs = list[Module](), list[tuple[Module, Tensor]]()

    def begin(module: Module, _: Any, options: dict[str, Any]) -> None:
        if options.get("documents") is not None:
            running.append(module)

    def end(module: Module, _: Any, options: dict[str, Any], output: Any) -> None:
        if options.get("documents") is not None:
            running.pop()
            outputs.append((module, output[0] if isinstance(output, tuple) else output))

    hooks = [
        hook
        for module in model.modules()
        for hook in (
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(end, with_kwargs=True),
        )
    ]
    try:
        compute()
        half = len(outputs) // 2
        mixing = [
            module
            for (module, before), (_, after) in zip(outputs[:half], outputs[half:], strict=True)
            if isinstance(before, Tensor) and mixes((after - before).abs(), first)
        ]
    except Exception:  # from the model's own code
        mixing = running[-1:]
    finally:
        for hook in hooks:
            hook.remove()
    kinds = [type(module) for module in mixing[:1]]
    return next((it for it in kinds if not issubclass(it, GradientCheckpointingLayer)), None)


def mixes(change: Tensor, first: int) -> bool:
    """Tell whether a change of the first document moves the others."""
    return bool(change[:, first:].max() > MIXES * change[:, :first].max())
