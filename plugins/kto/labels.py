"""Labels of answers: read from rows, counted, and balanced. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from plugsft import Data, Rendered, say
from plugsft.data_kit import Tokens

if TYPE_CHECKING:
    from . import Kto

LABEL = "label"
BALANCED = 1.0, 4 / 3
"""The KTO paper's range of desirable answers, by weight, for each undesirable one."""
SLACK = 1.1
"""How far outside of this range the data may be without a warning."""


def read_labels(rows: list[dict[str, Any]], rendered: Rendered, data: Data) -> Rendered:
    """Add the column `label`; a row without true or false is bad, and one without a prompt."""
    column = data.columns.get(LABEL, LABEL)
    labels = [row.get(column) for row in rows]
    for number, label in enumerate(labels):
        if label is None:
            others = ", ".join(sorted(rows[number])[:8])
            reason = f"no '{column}' that is true or false for [plugins.kto]: the row has {others}"
            rendered.bad.setdefault(number, f"{reason}; [data.columns] label names another column")
        elif not isinstance(label, bool):
            reason = f"'{column}' is {repr(label)[:20]}, and should be true or false"
            rendered.bad.setdefault(number, f"{reason} for [plugins.kto]")
    for number, spans in zip(rendered.rows, rendered.spans, strict=True):
        if min(start for start, _ in spans) == 0:
            rendered.bad.setdefault(number, "no prompt before the answer")
    rendered.columns[LABEL] = [label is True for label in labels]
    if rendered.read is not None:
        rendered.read = {*rendered.read, LABEL}
    return rendered


def describe_balance(plugin: Kto, entry: Any) -> str:
    """Count the labels of prepared data; warn if their weights are far from balanced."""
    # With data.tokens, the first entry is the evaluation data.
    if plugin.recipe.data.tokens or not isinstance(entry, Tokens) or LABEL not in entry.columns:
        return ""
    labels = entry.columns[LABEL]
    counts = [int(np.count_nonzero(labels == label)) for label in (True, False)]
    sizes = [source["examples"] for source in entry.facts["sources"]]
    factors = np.repeat([source.weight for source in plugin.recipe.data.all_sources()], sizes)
    weights = factors * entry.weights(np.arange(len(entry)))
    desirable, undesirable = (float(weights[labels == label].sum()) for label in (True, False))
    text = f"{counts[0]:,} desirable and {counts[1]:,} undesirable answers"
    if warning := balance_warning(plugin, desirable, undesirable):
        say(f"warning: plugins.kto: {text}: {warning}")
    return text


def balance_warning(plugin: Kto, desirable: float, undesirable: float) -> str:
    """Return what is wrong with the ratio of the labels' weights, and the cure."""
    if not desirable or not undesirable:
        return "KTO learns from both; add rows of the other label"
    ratio = plugin.desirable_weight * desirable / (plugin.undesirable_weight * undesirable)
    low, high = BALANCED
    if low / SLACK <= ratio <= high * SLACK:
        return ""
    # The weight that is raised is that of the rarer label.
    if ratio < low:
        cure = f"desirable_weight = {plugin.desirable_weight * low / ratio:.3g}"
    else:
        cure = f"undesirable_weight = {plugin.undesirable_weight * ratio / high:.3g}"
    return (
        f"desirable ones weigh {ratio:.3g} times as much as undesirable ones; 1 to 1.33 times is "
        f"advised; set {cure}"
    )
