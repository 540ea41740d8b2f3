"""The cost of attention, compared with that of a model's weights."""

from typing import Any

from plugsft.kit import num_weights

from . import TYPICAL


def break_even_length(model: Any) -> float:
    """Return the length at which attention costs a model as much as all its weights.

    A weight takes one multiplication per token. Attention takes two per layer and unit of width
    for each token before, which are half of the document on average.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return TYPICAL  # no attention: the probe decides
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    weights = sum(map(num_weights, model.parameters()))
    if head is not None and head.weight is not table:
        weights -= num_weights(table)  # looked up, not multiplied
    # A configuration whose layers differ raises where the attribute itself is read.
    width = config.to_dict().get("head_dim") or config.hidden_size // heads
    return float(weights / (config.num_hidden_layers * heads * width))
