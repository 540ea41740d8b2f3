"""FLOPs of a model per token, and peak FLOP/s of a device."""

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
"""Dense TFLOP/s of GPUs in bfloat16 or float16, from their data sheets."""


class Shapes(NamedTuple):
    """The sizes of a model that determine its FLOPs per token."""

    trained: float
    """Trained weights that a token is multiplied with."""
    frozen: float
    """The same, frozen."""
    attention: int
    """Total width of the attention heads of all layers."""
    vocabulary: int

    def flops(self, tokens: float, pairs: float) -> float:
        """Return the FLOPs of forward and backward; `pairs` attend to each other."""
        return (6 * self.trained + 4 * self.frozen) * tokens + 12 * self.attention * pairs


def shapes_of(model: Any) -> Shapes:
    """Return a model's shapes; of the experts, only those that a token is routed to."""
    config = model.config.get_text_config()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    table = getattr(embeddings, "weight", None)
    experts = [getattr(config, name, None) for name in ("num_local_experts", "num_experts")]
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    share = chosen / next(filter(None, experts), chosen)
    sizes = {True: 0.0, False: 0.0}
    for name, weight in model.named_parameters():
        # Embeddings are looked up, not multiplied, unless they are tied to the head.
        if weight.ndim > 1 and (weight is not table or weight is getattr(head, "weight", None)):
            sizes[weight.requires_grad] += weight.numel() * (share if ".experts." in name else 1)
    heads = getattr(config, "num_attention_heads", None) or 0
    width = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    attention = heads * width * (getattr(config, "num_hidden_layers", None) or 0)
    return Shapes(sizes[True], sizes[False], attention, config.vocab_size)


def peak_flops(device: torch.device, compute: str) -> tuple[float, str]:
    """Return a device's peak FLOP/s in a type, and the source of the figure."""
    half = compute in ("bfloat16", "float16")
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else ""
    for known, rate in PEAKS.items():
        if known in name and half:
            return rate * 1e12, f"{known}, from its data sheet"
    size, seconds = 8192 if on_gpu else 1024, math.inf
    dtype = getattr(torch, compute) if half else torch.float32
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    for _ in range(5):
        started = time.perf_counter()
        (matrix @ matrix).sum().item()
        seconds = min(seconds, time.perf_counter() - started)
    return 2 * size**3 / seconds, "measured with a large matrix product"
