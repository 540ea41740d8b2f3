"""The loss head: peak memory and time of fused_loss, the plain head and TRL's.

    .venv/bin/python tools/bench/head.py [--positions 4096] [--vocab 151936] [--hidden 896]
        [--trained 0.6] [--rounds 5] [--dtype float32] [--frozen] [--threads 1]
        [--contenders plain,...,fused] [--json FILE]

Each has the hidden states of one micro-batch and makes the loss with its gradients, of the hidden
states and (unless --frozen) of the head's weight. TRL's is the loss of its `chunked_nll`, with the
settings it has there. Each runs in a process of its own, which takes its turn in every round;
before the rounds all losses and gradients are compared. The peak is what a process held beyond
the hidden states, the weight and their gradients.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import shared
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from trl.kernels import ChunkedLogProbFunction

from plugsft.kit.model import LogitTransform
from plugsft.plugins.fused_loss import FusedLoss
from plugsft.plugins.fused_loss.loss import compute_losses

IGNORED = -100
GIB = 2**30
NAMES = ("plain", "trl", "trl_trained", "fused")
TRL_CHUNK = 32_768
"""Words of the vocabulary at a time, as its SFTTrainer sets it."""
SAMPLE = 1_000
"""So many rows of the weight's gradient are compared."""


def main() -> None:
    """Measure, and print one line for each."""
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
    started = {
        name: subprocess.Popen([*words, "--contender", name], **pipes)  # type: ignore[call-overload]
        for name in names
    }
    contenders = {name: partial(asked, process) for name, process in started.items()}
    found = {name: ask() for name, ask in contenders.items()}  # they warm up, and are compared
    said = shared.collect_rounds(options.rounds, contenders)
    for process in started.values():
        process.stdin.close()
        process.wait()
    seconds, worked = (
        {name: [one[what] for one in said[name]] for name in names}
        for what in ("seconds", "worked")
    )
    peaks = {name: said[name][-1]["peak"] for name in names}
    differences = {name: compare(found["plain"], found[name]) for name in names[1:]}
    # Where others keep the machine busy, processor time tells more than the clock.
    work = {name: float(np.median(took)) for name, took in worked.items()}
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
        {"seconds": seconds, "worked": worked, "peaks": peaks, "differences": differences},
        options.json,
    )


def asked(process: subprocess.Popen) -> dict[str, Any]:
    """Run a contender once; return its figures."""
    process.stdin.write("go\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def compare(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest relative difference of losses and gradients."""
    largest = abs(one["loss"] / other["loss"] - 1)
    for name, values in one["gradients"].items():
        expected, seen = np.array(values), np.array(other["gradients"][name])
        largest = max(largest, float(np.abs(expected - seen).max() / np.abs(expected).max()))
    return largest


def serve(options: argparse.Namespace) -> None:
    """Run one contender whenever a line comes in."""
    hidden, weight, labels = inputs(options)
    loss_of = CONTENDERS[options.contender]()
    total = int((labels[:, 1:] != IGNORED).sum())
    gradients = sum(one.nbytes for one in (hidden, weight) if one.requires_grad)
    for _ in sys.stdin:
        hidden.grad = weight.grad = None
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        base = memory("VmRSS")
        started, worked = time.perf_counter(), time.process_time()
        loss = loss_of(hidden, weight, labels) / total
        loss.backward()
        said: dict[str, Any] = {"seconds": time.perf_counter() - started}
        said["worked"] = time.process_time() - worked
        said["peak"] = memory("VmHWM") - base - gradients
        said |= {"loss": loss.item(), "gradients": {}}
        some = torch.arange(0, options.vocab, max(1, options.vocab // SAMPLE))
        # Rows that are targets have the largest gradients.
        some = torch.cat([some, labels[labels != IGNORED][:SAMPLE]])
        for name, one, rows in (("hidden", hidden, slice(None)), ("weight", weight, some)):
            if one.grad is not None:
                picked = one.grad.flatten(0, -2)[rows]
                said["gradients"][name] = picked[:, :16].float().tolist()
        print(json.dumps(said), flush=True)


def inputs(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weight and labels: the same numbers in every process."""
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(1, options.positions, options.hidden, dtype=dtype)
    weight = torch.randn(options.vocab, options.hidden, dtype=dtype).mul_(0.05)
    labels = torch.randint(options.vocab, (1, options.positions))
    labels[torch.rand(labels.shape) > options.trained] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(not options.frozen), labels


def memory(name: str) -> int:
    """Return what this process holds (VmRSS), or has held at most (VmHWM), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) * 1024


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain() -> Loss:
    """The head and token cross-entropy, as plugsft's core has them."""

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = hidden @ weight.T
        predictions = logits[:, :-1].flatten(0, 1).float()
        targets = labels[:, 1:].flatten()
        return cross_entropy(predictions, targets, ignore_index=IGNORED, reduction="sum")

    return loss


def trl() -> Loss:
    """TRL's head, on all positions."""

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        kept, targets = hidden[:, :-1], labels[:, 1:]
        scored = trl_logprobs(kept.flatten(0, 1), weight, targets.clamp(min=0).flatten())
        return -scored.view(targets.shape).masked_fill(targets == IGNORED, 0).sum()

    return loss


def trl_trained() -> Loss:
    """TRL's head, on the trained positions."""

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        mask = labels[:, 1:] != IGNORED
        return -trl_logprobs(hidden[:, :-1][mask], weight, labels[:, 1:][mask]).sum()

    return loss


def trl_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Call TRL's kernel as its SFTTrainer does."""
    given = (hidden, weight, None, targets, 1.0, TRL_CHUNK, None, 1.0, ("log_probs",))
    return ChunkedLogProbFunction.apply(*given)[0]


def fused() -> Loss:
    """The plugin's."""

    class Head:
        bias = None

    plugin, head = FusedLoss(kernel="torch"), Head()

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        head.weight = weight
        return compute_losses(plugin, head, LogitTransform(), hidden, labels, summed=True).sum()

    return loss


CONTENDERS = {"plain": plain, "trl": trl, "trl_trained": trl_trained, "fused": fused}

if __name__ == "__main__":
    main()
