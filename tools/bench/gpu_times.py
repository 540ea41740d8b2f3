"""Time the attention and loss kernels, forward and backward, in bfloat16.

The sizes are those of published figures. Attention: causal, 32 query heads and 8 key heads of width
128, rows of 16,384 tokens with documents of 500, 4,096 or 16,384. Loss: 16,384 trained positions,
hidden size 2,048, vocabulary 248,320, with and without the gradient of the head. Kernels take
turns. The memory is a kernel's peak, without its inputs.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gpu_checks
import numpy as np
import torch
from gpu_checks import ATTENTIONS, LOSSES, fused_loss, make_fused_loss, obstacle_of
from gpu_rows import DEVICE, GPU
from torch import Tensor
from torch.nn.functional import cross_entropy

from plugsft import RecipeError
from plugsft.model.fused_head import LogitTransform

ROW, DOCUMENTS = (16_384, (500, 4_096, 16_384)) if GPU else (64, (16, 32, 64))
HEADS, KV_HEADS, WIDTH = (32, 8, 128) if GPU else (4, 2, 32)
POSITIONS, VOCAB, HIDDEN = (16_384, 248_320, 2_048) if GPU else (64, 997, 32)
ROUNDS = 10 if GPU else 2
VOCAB_CHUNK = 32_768
"""Vocabulary chunk of TRL's loss, as its trainer has it."""
Step = Callable[[], None]


def time_attention(length: int) -> Iterator[dict[str, Any]]:
    """Time attention on rows with documents of this length."""
    name = f"attention, documents of {length:,}"
    lengths = np.full(ROW // length, length)
    total = int(lengths.sum())
    # The checks' kernels read these two names.
    gpu_checks.LENGTHS, gpu_checks.WIDTH = lengths, WIDTH
    shapes = [(1, heads, total, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
    grad_output = torch.randn(1, total, HEADS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    steps: dict[str, Step] = {}
    for kernel, attend in ATTENTIONS.items():
        if reason := obstacle_of(kernel):
            yield {"name": name, "kernel": kernel, "reason": reason}
        else:
            steps[kernel] = partial(
                run_both_passes, partial(attend, window=None), inputs, grad_output
            )
    yield from time_kernels(name, steps)


def time_loss(trained: bool) -> Iterator[dict[str, Any]]:
    """Time the fused losses and the plain loss, which computes all logits at once."""
    name = f"loss of {POSITIONS:,} positions, head {'trained' if trained else 'frozen'}"
    hidden = torch.randn(1, POSITIONS + 1, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(VOCAB, HIDDEN, device=DEVICE, dtype=torch.bfloat16) * 0.05
    labels = torch.randint(VOCAB, (1, POSITIONS + 1), device=DEVICE)
    inputs = [hidden, weight] if trained else [hidden]

    def plain(hidden: Tensor, weight: Tensor = weight) -> Tensor:
        logits = hidden[0, :-1] @ weight.T
        return cross_entropy(logits.float(), labels[0, 1:], reduction="sum")

    def fused(hidden: Tensor, weight: Tensor = weight, *, plugin: Any) -> Tensor:
        return fused_loss(hidden, weight, plugin, LogitTransform(), labels)

    def of_trl(hidden: Tensor, weight: Tensor = weight) -> Tensor:
        from trl.kernels import ChunkedLogProbFunction

        rows, targets = hidden[0, :-1], labels[0, 1:]
        log_probs: Tensor = ChunkedLogProbFunction.apply(  # type: ignore[no-untyped-call]  # untyped upstream
            rows, weight, None, targets, 1.0, VOCAB_CHUNK, None, 1.0, ()
        )[0]
        return -log_probs.sum()

    grad_output = torch.ones((), device=DEVICE)
    steps: dict[str, Step] = {
        "plain": partial(run_both_passes, plain, inputs, grad_output),
        "trl": partial(run_both_passes, of_trl, inputs, grad_output),
    }
    for kernel in LOSSES:
        try:
            compute = partial(fused, plugin=make_fused_loss(kernel))
        except RecipeError as refused:
            yield {"name": name, "kernel": kernel, "reason": str(refused)}
        else:
            steps[kernel] = partial(run_both_passes, compute, inputs, grad_output)
    yield from time_kernels(name, steps)


def run_both_passes(
    compute: Callable[..., Tensor], inputs: list[Tensor], grad_output: Tensor
) -> None:
    """Run the forward and the backward pass."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    result = compute(*leaves)
    torch.autograd.grad(result, leaves, grad_output.to(result.dtype))


def time_kernels(name: str, steps: dict[str, Step]) -> Iterator[dict[str, Any]]:
    """Run the kernels in turn; the first two rounds warm up."""
    seconds: dict[str, list[float]] = {kernel: [] for kernel in steps}
    peaks: dict[str, float | None] = {}
    failed: dict[str, str] = {}
    for number in range(ROUNDS + 2):
        for kernel, step in steps.items():
            if kernel in failed:
                continue
            try:
                step_seconds, peaks[kernel] = time_step(step)
            except Exception as error:  # the other kernels are still timed
                failed[kernel] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                continue
            if number > 1:
                seconds[kernel].append(step_seconds)
    for kernel in steps:
        result = {"name": name, "kernel": kernel}
        if kernel in failed:
            yield result | {"reason": failed[kernel]}
        else:
            yield result | {"seconds": seconds[kernel], "peak_gib": peaks[kernel]}


def time_step(step: Step) -> tuple[float, float | None]:
    """Return the seconds of a step on the device, and its peak memory in GiB."""
    if not GPU:
        started = time.perf_counter()
        step()
        return time.perf_counter() - started, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped upstream
        for _ in range(2)
    )
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return start.elapsed_time(end) / 1e3, peak


TIMES: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "loss trained": partial(time_loss, True),
    "loss frozen": partial(time_loss, False),
    "attention short": partial(time_attention, DOCUMENTS[0]),
    "attention middle": partial(time_attention, DOCUMENTS[1]),
    "attention long": partial(time_attention, DOCUMENTS[2]),
}
