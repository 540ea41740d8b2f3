"""What a model's shapes cost: the multiplications of a token, and how many a device makes."""

import math
import time
from typing import Any, NamedTuple

import torch

PEAKS = {
    "B200": 2250,
    "MI300X": 1307,
    "H200": 989,
    "H100": 989,
    "H20": 148,
    "L40S": 362,
    "A100": 312,
    "4090": 165,
}
"""Dense bfloat16 TFLOP/s of GPUs, from their data sheets."""


class Shapes(NamedTuple):
    """What a token costs a model."""

    trained: float
    """Weights that it is multiplied with."""
    frozen: float
    attention: int
    """Width of all heads in all layers."""
    vocabulary: int

    def flops(self, tokens: float, pairs: float) -> float:
        """Return what it takes to learn from tokens, and from so many pairs that see each other."""
        return (6 * self.trained + 4 * self.frozen) * tokens + 12 * self.attention * pairs


def shapes_of(model: Any) -> Shapes:
    """Read a model's shapes. Of experts those count that a token is sent to."""
    config = model.config.get_text_config()
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up = getattr(words, "weight", None)
    experts = [getattr(config, name, None) for name in ("num_local_experts", "num_experts")]
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    share = chosen / next(filter(None, experts), chosen)
    sizes = {True: 0.0, False: 0.0}
    for name, one in model.named_parameters():
        # A table that is looked up in multiplies nothing, unless it is the head too.
        if one.ndim > 1 and (one is not looked_up or one is getattr(head, "weight", None)):
            sizes[one.requires_grad] += one.numel() * (share if ".experts." in name else 1)
    heads = getattr(config, "num_attention_heads", None) or 0
    width = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    attention = heads * width * (getattr(config, "num_hidden_layers", None) or 0)
    return Shapes(sizes[True], sizes[False], attention, config.vocab_size)


def peak_flops(device: torch.device, half: bool) -> tuple[float, str]:
    """Return the FLOP/s that a device makes at most, and who says so."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else ""
    for known, rate in PEAKS.items():
        if known in name and half:
            return rate * 1e12, f"{known}, from its data sheet"
    size, seconds = 8192 if on_gpu else 1024, math.inf
    one = torch.ones(size, size, dtype=torch.bfloat16 if half else torch.float32, device=device)
    for _ in range(5):
        started = time.perf_counter()
        (one @ one).sum().item()
        seconds = min(seconds, time.perf_counter() - started)
    return 2 * size**3 / seconds, "what a large product reaches here"
