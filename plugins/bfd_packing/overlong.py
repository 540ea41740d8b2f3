"""Cut examples that have more tokens than a micro-batch may hold."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from plugsft import DataError, Ints
from plugsft.data_kit import Tokens, cut


class Cuts(NamedTuple):
    """Numbers of examples that were cut."""

    overlong: int
    added: int = 0
    """Additional examples made by splitting."""
    untrained: int = 0
    """Cut examples and parts that were left out because they have no target."""


def cut_overlong(tokens: Tokens, max_tokens: int, overlong: str) -> tuple[Tokens, Cuts]:
    """Return tokens whose examples all fit into a micro-batch and have a target."""
    long = np.flatnonzero(tokens.lengths > max_tokens)
    if not len(long):
        return tokens, Cuts(0)
    if overlong == "error" or tokens.facts["pairs"]:
        raise DataError(_explain_overlong(tokens.lengths, max_tokens, tokens.rows[long]))
    numbers = np.arange(len(tokens))
    if overlong == "truncate":
        skips, kind = 0 * numbers, "the first"
    else:
        parts, kind = -(-tokens.lengths // max_tokens), "a part of"
        numbers = np.repeat(numbers, parts)
        first_parts = np.repeat(np.cumsum(parts) - parts, parts)
        skips = (np.arange(len(numbers)) - first_parts) * max_tokens
    lengths = np.minimum(tokens.lengths[numbers] - skips, max_tokens)
    cut_tokens = cut(tokens, numbers, skips, lengths)
    trained = cut_tokens.targets > 0
    cuts = Cuts(len(long), len(numbers) - len(tokens), int(np.count_nonzero(~trained)))
    if not cuts.untrained:
        return cut_tokens, cuts
    reason = f"no trained token in {kind} {max_tokens:,} tokens of an example"
    if not trained.any():
        raise DataError(f"plugins.bfd_packing: {reason}, for every example; raise capacity")
    targets = cut_tokens.targets[trained]
    result = cut(tokens, numbers[trained], skips[trained], lengths[trained], targets)
    bad = {"count": cuts.untrained, "rows": np.unique(cut_tokens.rows[~trained])[:10].tolist()}
    result.facts["bad_rows"] = {**tokens.facts.get("bad_rows", {}), reason: bad}
    return result, cuts


def limit_lengths(lengths: Ints, max_tokens: int, overlong: str) -> Ints:
    """Return lengths of at most `max_tokens`; refuse longer ones if `overlong` is "error"."""
    if (lengths > max_tokens).any() and overlong == "error":
        raise DataError(_explain_overlong(lengths, max_tokens))
    return np.minimum(lengths, max_tokens)


def describe_cuts(all_cuts: Sequence[Cuts], overlong: str) -> str:
    """Describe the cuts in the training and the evaluation data; "" without any."""
    count, added, untrained = map(sum, zip(Cuts(0), *all_cuts, strict=True))
    if not count:
        return ""
    text = f"{count:,} longer examples cut"
    if overlong == "split":
        text = f"{count:,} longer examples split, which made {added:,} more"
    if untrained:
        text += f"; {untrained:,} of them or their parts left out: no trained token"
    return text


def _explain_overlong(lengths: Ints, max_tokens: int, rows: Any = None) -> str:
    """Explain that examples do not fit, with the cure; without rows, the numbers are estimates."""
    count = int((lengths > max_tokens).sum())
    where = ""
    if rows is not None:
        where = f" (rows {', '.join(map(str, rows[:5]))}{', ...' if count > 5 else ''})"
    return (
        f"plugins.bfd_packing: {'about ' if rows is None else ''}{count:,} of "
        f"{len(lengths):,} examples have more than {max_tokens:,} tokens, the longest"
        f"{' that was seen' if rows is None else ''} {int(lengths.max()):,}{where}. Raise "
        'capacity, or set overlong = "truncate" or "split"'
    )
