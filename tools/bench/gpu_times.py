"""How long the kernels of attention and of the loss take, forward and backward, in bfloat16.

The sizes are those of published figures: attention of 32 heads on 8 of keys, 128 wide, causal, on
rows of 16,384 tokens in documents of 500, 4,096 or 16,384; the loss of 16,384 positions of 2,048
numbers on 248,320 words, all of them trained, with the gradient of the head and without it.
Kernels take turns. The memory is the most that one needs beyond its inputs.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import gpu_checks
import numpy as np
import torch
from gpu_checks import ATTENTIONS, DEVICE, GPU, LOSSES, fused_loss
from torch import Tensor
from torch.nn.functional import cross_entropy

from plugsft import RecipeError
from plugsft.kit.model import LogitTransform
from plugsft.plugins.flash_attention import Conditions
from plugsft.plugins.flash_attention.kernels import find_obstacle, lowest_capability
from plugsft.plugins.fused_loss.loss import compute_losses

ROW, DOCUMENTS = (16_384, (500, 4_096, 16_384)) if GPU else (64, (16, 64))
HEADS, KV_HEADS, WIDTH = (32, 8, 128) if GPU else (4, 2, 32)
POSITIONS, VOCAB, HIDDEN = (16_384, 248_320, 2_048) if GPU else (64, 997, 32)
ROUNDS = 10 if GPU else 2
Step = Callable[[], None]


def times() -> Iterator[dict[str, Any]]:
    """Time all; what cannot run says why."""
    for length in DOCUMENTS:
        yield from attention(length)
    for trained in (True, False):
        yield from loss(trained)


def attention(length: int) -> Iterator[dict[str, Any]]:
    """Time attention on rows of documents of one length."""
    name = f"attention, documents of {length:,}"
    lengths = np.full(ROW // length, length)
    total = int(lengths.sum())
    # The kernels of the checks read these.
    gpu_checks.LENGTHS, gpu_checks.WIDTH = lengths, WIDTH
    built = torch.backends.cuda.is_flash_attention_available()
    conditions = Conditions(lowest_capability(), half=True, packed=True, built=built)
    shapes = [(1, heads, total, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
    pull = torch.randn(1, total, HEADS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    steps: dict[str, Step] = {}
    for kernel, attend in ATTENTIONS.items():
        if obstacle := find_obstacle(kernel, conditions):
            yield {"of": name, "kernel": kernel, "reason": obstacle.reason}
        else:
            steps[kernel] = partial(forth_and_back, partial(attend, window=None), inputs, pull)
    yield from timed(name, steps)


def loss(trained: bool) -> Iterator[dict[str, Any]]:
    """Time the loss against the plain one, which computes all logits in one product."""
    name = f"loss of {POSITIONS:,} positions, head {'trained' if trained else 'frozen'}"
    hidden = torch.randn(1, POSITIONS + 1, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(VOCAB, HIDDEN, device=DEVICE, dtype=torch.bfloat16) * 0.05
    labels = torch.randint(VOCAB, (1, POSITIONS + 1), device=DEVICE)
    inputs = [hidden, weight] if trained else [hidden]

    def plain(hidden: Tensor, weight: Tensor = weight) -> Tensor:
        logits = hidden[0, :-1] @ weight.T
        return cross_entropy(logits.float(), labels[0, 1:], reduction="sum")

    def fused(hidden: Tensor, weight: Tensor = weight, *, plugin: Any) -> Tensor:
        head = SimpleNamespace(weight=weight, bias=None)
        made: Tensor = compute_losses(plugin, head, LogitTransform(), hidden, labels, summed=True)
        return made.sum()

    pull = torch.ones((), device=DEVICE)
    steps: dict[str, Step] = {"plain": partial(forth_and_back, plain, inputs, pull)}
    for kernel in LOSSES:
        try:
            compute = partial(fused, plugin=fused_loss(kernel))
        except RecipeError as refused:
            yield {"of": name, "kernel": kernel, "reason": str(refused)}
        else:
            steps[kernel] = partial(forth_and_back, compute, inputs, pull)
    yield from timed(name, steps)


def forth_and_back(compute: Callable[..., Tensor], inputs: list[Tensor], pull: Tensor) -> None:
    """Compute something and its gradients, and drop both."""
    mine = [one.detach().requires_grad_() for one in inputs]
    result = compute(*mine)
    torch.autograd.grad(result, mine, pull.to(result.dtype))


def timed(name: str, steps: dict[str, Step]) -> Iterator[dict[str, Any]]:
    """Let kernels take turns; the first two rounds warm up."""
    seconds: dict[str, list[float]] = {kernel: [] for kernel in steps}
    peaks: dict[str, float | None] = {}
    failed: dict[str, str] = {}
    for number in range(ROUNDS + 2):
        for kernel, step in steps.items():
            if kernel in failed:
                continue
            try:
                took, peaks[kernel] = once(step)
            except RuntimeError as error:
                failed[kernel] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                continue
            if number > 1:
                seconds[kernel].append(took)
    for kernel in steps:
        made = {"of": name, "kernel": kernel}
        if kernel in failed:
            yield made | {"reason": failed[kernel]}
        else:
            yield made | {"seconds": seconds[kernel], "peak_gib": peaks[kernel]}


def once(step: Step) -> tuple[float, float | None]:
    """Return how long a step takes, until the device is done, and the memory it takes there."""
    if not GPU:
        started = time.perf_counter()
        step()
        return time.perf_counter() - started, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return start.elapsed_time(end) / 1e3, peak
