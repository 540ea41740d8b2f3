"""The cost of attention, compared with that of a model's weights."""

from typing import Any

TYPICAL = 50_000
"""Length at which attention costs as much as the rest of a model with some billion weights."""


def break_even_length(model: Any) -> float:
    """Return the length at which attention costs a model as much as all its weights.

    A weight takes one multiplication per token. Attention takes two per layer and unit of width
    for each token before, which are half of the document on average.
    """
    config = model.config.get_text_config()
    # Under ZeRO-3 `numel` counts this rank's shard; `ds_numel` has the whole size.
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return float(TYPICAL)  # no attention: the probe decides
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    weights = sum(getattr(weight, "ds_numel", weight.numel()) for weight in model.parameters())
    if head is not None and head.weight is not table:
        weights -= getattr(table, "ds_numel", table.numel())  # looked up, not multiplied
    # A configuration whose layers differ raises where the attribute itself is read.
    width = config.to_dict().get("head_dim") or config.hidden_size // heads
    return float(weights / (config.num_hidden_layers * heads * width))
