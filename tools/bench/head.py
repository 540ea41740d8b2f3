"""The loss head: peak memory and time of fused_loss, the plain head and TRL's.

    .venv/bin/python tools/bench/head.py [--positions 4096] [--vocab 151936] [--hidden 896]
        [--trained 0.6] [--rounds 5] [--dtype float32] [--frozen] [--threads 1]
        [--contenders plain,...,fused] [--json FILE]

Each contender computes the loss of one micro-batch from its hidden states, with the gradients of
the hidden states and (without --frozen) of the head's weight. TRL's loss is `chunked_nll`, with the
settings of its trainer. Each contender is a separate process; they take turns in each round. All
losses and gradients are compared before the rounds. The peak is a process's memory without the
hidden states, the weight and their gradients.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import shared
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from trl.kernels import ChunkedLogProbFunction

from plugsft.kit import target_places
from plugsft.model.fused_head import LogitTransform
from plugsft.plugins.fused_loss.loss import HeadLoss

IGNORED = -100
GIB = 2**30
NAMES = ("plain", "trl", "trl_trained", "fused")
TRL_CHUNK = 32_768
"""Vocabulary entries per chunk, as in TRL's SFTTrainer."""
SAMPLE = 1_000
"""Compared rows of the weight's gradient."""


def main() -> None:
    """Run one contender or all."""
    parser = shared.command_line(__doc__)
    parser.add_argument("--positions", type=int, default=4_096)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--trained", type=float, default=0.6, help="share of the positions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--frozen", action="store_true", help="no gradient of the head, as in LoRA")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--contenders", default=",".join(NAMES))
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.contender:
        serve(options)
    else:
        report(options)


def report(options: argparse.Namespace) -> None:
    """Run the contenders one after the other; print the results."""
    print(
        f"{options.positions:,} positions, {options.trained:.0%} trained, vocabulary "
        f"{options.vocab:,}, width {options.hidden:,}, {options.dtype}, head "
        f"{'frozen' if options.frozen else 'trained'}, {torch.get_num_threads()} threads"
    )
    words = [sys.executable, __file__, *sys.argv[1:]]
    names = options.contenders.split(",")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = {
        name: subprocess.Popen([*words, "--contender", name], **pipes)  # type: ignore[call-overload]
        for name in names
    }
    contenders = {name: partial(run_once, process) for name, process in processes.items()}
    first_results = {name: ask() for name, ask in contenders.items()}  # warm-up
    results = shared.collect_rounds(options.rounds, contenders)
    for process in processes.values():
        process.stdin.close()
        process.wait()
    seconds, processor_seconds = (
        {name: [result[field] for result in results[name]] for name in names}
        for field in ("seconds", "processor_seconds")
    )
    peaks = {name: results[name][-1]["peak"] for name in names}
    differences = {
        name: relative_difference(first_results["plain"], first_results[name]) for name in names[1:]
    }
    # On a busy machine, processor time is more reliable than wall time.
    work = {name: float(np.median(seconds)) for name, seconds in processor_seconds.items()}
    for name in names:
        off = f", off by {differences[name]:.1e}" if name in differences else ""
        print(
            f"{name:>12} {shared.spread(seconds[name], '.2f')} s, against plain "
            f"{shared.compare_speed(seconds[name], seconds['plain'])} ({work[name]:.2f} of "
            f"processor time, {work[name] / work['plain']:.2f} of plain); "
            f"{peaks[name] / GIB:.2f} GiB, {peaks[name] / peaks['plain']:.1%} of plain{off}"
        )
    for name in names[1:-1]:
        print(
            f"fused against {name}: {shared.compare_speed(seconds['fused'], seconds[name])} "
            f"({work['fused'] / work[name]:.2f} of its processor time)"
        )
    shared.write_report(
        {
            "seconds": seconds,
            "processor_seconds": processor_seconds,
            "peaks": peaks,
            "differences": differences,
        },
        options.json,
    )


def run_once(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Run a contender once; return its figures."""
    assert process.stdin and process.stdout
    process.stdin.write("go\n")
    process.stdin.flush()
    figures: dict[str, Any] = json.loads(process.stdout.readline())
    return figures


def relative_difference(expected: dict[str, Any], actual: dict[str, Any]) -> float:
    """Return the largest relative difference of losses and gradients."""
    largest: float = abs(expected["loss"] / actual["loss"] - 1)
    for name, values in expected["gradients"].items():
        values, other_values = np.array(values), np.array(actual["gradients"][name])
        largest = max(largest, float(np.abs(values - other_values).max() / np.abs(values).max()))
    return largest


def serve(options: argparse.Namespace) -> None:
    """Run one contender for each line on stdin."""
    hidden, weight, labels = make_inputs(options)
    loss_of = CONTENDERS[options.contender]()
    total = int((labels[:, 1:] != IGNORED).sum())
    gradients = sum(tensor.nbytes for tensor in (hidden, weight) if tensor.requires_grad)
    for _ in sys.stdin:
        hidden.grad = weight.grad = None
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        base = read_memory("VmRSS")
        started, processor_started = time.perf_counter(), time.process_time()
        loss = loss_of(hidden, weight, labels) / total
        loss.backward()  # type: ignore[no-untyped-call]  # untyped upstream
        figures: dict[str, Any] = {"seconds": time.perf_counter() - started}
        figures["processor_seconds"] = time.process_time() - processor_started
        figures["peak"] = read_memory("VmHWM") - base - gradients
        figures |= {"loss": loss.item(), "gradients": {}}
        sample_rows = torch.arange(0, options.vocab, max(1, options.vocab // SAMPLE))
        # Rows that are targets have the largest gradients.
        sample_rows = torch.cat([sample_rows, labels[labels != IGNORED][:SAMPLE]])
        for name, tensor, rows in (
            ("hidden", hidden, slice(None)),
            ("weight", weight, sample_rows),
        ):
            if tensor.grad is not None:
                gradient_rows = tensor.grad.flatten(0, -2)[rows]
                figures["gradients"][name] = gradient_rows[:, :16].float().tolist()
        print(json.dumps(figures), flush=True)


def make_inputs(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weight and labels, the same in every process."""
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(1, options.positions, options.hidden, dtype=dtype)
    weight = torch.randn(options.vocab, options.hidden, dtype=dtype).mul_(0.05)
    labels = torch.randint(options.vocab, (1, options.positions))
    labels[torch.rand(labels.shape) > options.trained] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(not options.frozen), labels


def read_memory(name: str) -> int:
    """Return this process's memory (VmRSS) or its peak memory (VmHWM), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) * 1024


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain() -> Loss:
    """Return plugsft's loss without plugins: the head, then cross-entropy."""

    def compute(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = hidden @ weight.T
        predictions = logits[:, :-1].flatten(0, 1).float()
        targets = labels[:, 1:].flatten()
        return cross_entropy(predictions, targets, ignore_index=IGNORED, reduction="sum")

    return compute


def trl() -> Loss:
    """Return TRL's loss, on all positions."""

    def compute(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        hidden, targets = hidden[:, :-1], labels[:, 1:]
        scored = trl_logprobs(hidden.flatten(0, 1), weight, targets.clamp(min=0).flatten())
        return -scored.view(targets.shape).masked_fill(targets == IGNORED, 0).sum()

    return compute


def trl_trained() -> Loss:
    """Return TRL's loss, on the trained positions."""

    def compute(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        mask = labels[:, 1:] != IGNORED
        return -trl_logprobs(hidden[:, :-1][mask], weight, labels[:, 1:][mask]).sum()

    return compute


def trl_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Call TRL's kernel as its SFTTrainer does."""
    arguments = (hidden, weight, None, targets, 1.0, TRL_CHUNK, None, 1.0, ("log_probs",))
    log_probs: Tensor = ChunkedLogProbFunction.apply(*arguments)[0]  # type: ignore[no-untyped-call]  # untyped upstream
    return log_probs


def fused() -> Loss:
    """Return the loss of the fused_loss plugin."""

    loss = HeadLoss(package="", chunk=None, packed=False)

    def compute(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        head = SimpleNamespace(weight=weight, bias=None)
        rows = target_places({"labels": labels})
        nll: Tensor = loss.compute(head, LogitTransform(), hidden, labels, True, rows)
        return nll.sum()

    return compute


CONTENDERS = {"plain": plain, "trl": trl, "trl_trained": trl_trained, "fused": fused}

if __name__ == "__main__":
    main()
