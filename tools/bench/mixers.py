"""Models with states and convolutions: packed rows beside padded ones, shuffled and by length.

    .venv/bin/python tools/bench/mixers.py [--families lfm2,qwen3_5_text] [--rounds 3] [--json FILE]

A step computes the loss and the gradients of 32 documents with 34 to 660 tokens, in float32. The
models have one layer of each kind, 512 wide. Padded rows come four at a time; a packed row holds at
most 1,024 tokens. Before the rounds, all three are compared: their losses are the same.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import shared
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from plugsft import Ints
from plugsft.plugins.bfd_packing.attention import ATTENTION
from plugsft.plugins.bfd_packing.documents import documents_of
from plugsft.plugins.bfd_packing.layouts import best_fit
from plugsft.plugins.bfd_packing.packer import Longest
from plugsft.plugins.bfd_packing.proof import probe_layers

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from families import tiny_config  # type: ignore[import-not-found]

WIDE = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096}
LINEAR = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
LINEAR |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_ssm": 1024, "mamba_d_state": 64}
NARROW = {"moe_intermediate_size": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR | NARROW | {"shared_expert_intermediate_size": 256},
    "olmo_hybrid": LINEAR,
    "lfm2": {},
    "lfm2_moe": NARROW,
    "lfm3": {},
    "falcon_h1": MAMBA,
    "bamba": MAMBA,
    "granitemoehybrid": MAMBA,
    "nemotron_h": {"mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 64},
    "kimi_linear": NARROW,
    "minimax": {},
    "recurrent_gemma": {"lru_width": 512},
}
DOCUMENTS, ROWS, CAPACITY = 32, 4, 1024
BEGIN, END = "<!-- tools/bench/mixers.py writes this -->\n", shared.END
IGNORED = -100


def main() -> None:
    """Measure family by family."""
    parser = shared.command_line(__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    lengths = shared.draw_lengths(DOCUMENTS, 5.0, 0.8, 34, 660)
    dice = np.random.default_rng(0)
    texts = [torch.from_numpy(dice.integers(2, 2000, length)) for length in lengths]
    print(f"{DOCUMENTS} documents, {lengths.sum():,} tokens, {lengths.min()} to {lengths.max()}")
    report = {
        family: measure(family, lengths, texts, options.rounds)
        for family in options.families.split(",")
    }
    shared.write_report({"seconds": report, "lengths": lengths.tolist()}, options.json)
    if options.json:
        page = Path(__file__).parents[2] / "docs/benchmarks.md"
        shared.write_table(page, BEGIN, table(json.loads(options.json.read_text())))


def table(report: dict[str, Any]) -> str:
    """Return the table of the page: seconds of shuffled rows, and how much faster others are."""
    lines = ["| family | shuffled | padded, by length | packed |", "|---|---|---|---|"]
    for family, seconds in report["seconds"].items():
        others = [
            shared.times_as_fast(seconds[name], seconds["shuffled"])
            for name in ("by length", "packed")
        ]
        shuffled = f"{statistics.median(seconds['shuffled']):.1f} s"
        lines.append(f"| {family} | {shuffled} | {others[0]} | {others[1]} |")
    machine = shared.machine_line(report["machine"])
    note = f"{machine}, {report['date'][:10]}: medians of 4 rounds, with minimum and maximum."
    return "\n".join(lines) + f"\n\n{note}\n"


def measure(family: str, lengths: Ints, texts: list[Tensor], rounds: int) -> dict[str, list[float]]:
    """Time a family's step in the three layouts."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        tiny_config(family, **WIDE, **FAMILIES[family])
    )
    found = probe_layers(model, Longest(int(lengths.max()), CAPACITY))
    assert not found.problem, found
    order = np.random.default_rng(0).permutation(len(texts))
    by_length = np.argsort(lengths, kind="stable")
    items, bins, _ = best_fit(lengths, CAPACITY)
    packed = [items[bins == row] for row in range(bins.max() + 1)]
    layouts: dict[str, tuple[str, list[Any]]] = {
        "shuffled": ("sdpa", [*padded(texts, order)]),
        "by length": ("sdpa", [*padded(texts, by_length)]),
        "packed": (ATTENTION, [*joined(texts, packed)]),
    }
    steps: dict[str, Callable[[], float]] = {
        name: partial(step, model, *layout) for name, layout in layouts.items()
    }
    losses = [run() for run in steps.values()]
    assert max(losses) - min(losses) < 1e-5 * max(losses), losses
    seconds = shared.in_rounds(rounds, **steps)
    print(f"\n{family}: {sum(it.numel() for it in model.parameters()) / 1e6:.1f} million weights")
    for name, times in seconds.items():
        relative = shared.compare_speed(times, seconds["shuffled"])
        print(f"{name:>12} {shared.spread(times)} s; against shuffled {relative}")
    return seconds


def padded(texts: list[Tensor], order: Ints) -> Iterator[dict[str, Any]]:
    """Yield padded micro-batches."""
    for start in range(0, len(order), ROWS):
        rows = [texts[number] for number in order[start : start + ROWS]]
        pad = partial(torch.nn.utils.rnn.pad_sequence, rows, batch_first=True)
        ids, labels = pad(padding_value=0), pad(padding_value=IGNORED)
        labels[:, 0] = IGNORED
        mask = (pad(padding_value=-1) >= 0).long()
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def joined(texts: list[Tensor], rows: list[Ints]) -> Iterator[dict[str, Any]]:
    """Yield packed rows."""
    for row in rows:
        documents = [texts[number] for number in row]
        lengths = np.array([len(document) for document in documents])
        ids = torch.cat(documents)[None]
        labels = ids.clone()
        labels[:, np.cumsum(lengths) - lengths] = IGNORED
        yield {"input_ids": ids, "labels": labels, **documents_of(lengths)}


def step(model: Any, attention: str, batches: list[dict[str, Any]]) -> float:
    """Compute the loss and the gradients of all batches; return the loss."""
    model.set_attn_implementation(attention)
    model.zero_grad()
    total = 0.0
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        loss = cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss)
    return total


if __name__ == "__main__":
    main()
