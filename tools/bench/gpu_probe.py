"""The first questions to a machine: its ceilings, its kernels, and what a training step waits for.

Each is an item of a phase of gpu.py. `PROBE`: versions, products, copies, launches, attention
plans, kernels against float32. `WAITS`: 20 steps of a small run, with every wait for the device.
"""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tomli_w
import torch
import torch._dynamo.utils
from gpu_rows import DEVICE, GPU
from launches import counting
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from plugsft import Capability, RecipeError
from plugsft.commands.train import train
from plugsft.plugins.bfd_packing import proof
from plugsft.plugins.bfd_packing.attention import attend_per_document
from plugsft.plugins.flash_attention import varlen
from plugsft.plugins.flash_attention.varlen import largest_error

PACKAGES = (
    *("torch", "triton", "transformers", "accelerate", "datasets", "pyarrow", "trl", "peft"),
    *("liger-kernel", "flash-attn", "flash-attn-3", "flash-attn-4", "cut-cross-entropy"),
)
SIDE = 8192 if GPU else 64
BYTES = 1 << 32 if GPU else 1 << 20
CALLS = 2_000 if GPU else 50
LENGTHS = range(317, 317 + 20 * 37, 37) if GPU else range(5, 25)
"""20 lengths that no kernel has seen before."""
FIRST_CHECKS = ("attention torch", "attention sdpa", "loss torch", "lora")
OTHER_CHECKS = (
    "liger",
    "rows",
    "loss cut_cross_entropy",
    "loss liger",
    "attention fa4",
    "attention fa3",
    "attention fa2",
)
TIMES = ("loss trained", "attention short", "attention middle", "attention long", "loss frozen")
Item = Callable[[], Any]


def describe_versions() -> dict[str, Any]:
    """Return versions of packages and of the machine's parts."""
    versions = dict[str, str | None]()
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions | {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]  # untyped upstream
        "gpu": torch.cuda.get_device_name() if GPU else None,
        "gpu_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1) if GPU else None,
        "cores": len(os.sched_getaffinity(0)),
        "flash_built": torch.backends.cuda.is_flash_attention_available(),
    }


def seconds_of(step: Callable[[], Any], repeat: int = 10) -> float:
    """Return the mean seconds of a step on the device, after three to warm up."""
    for _ in range(3):
        step()
    finish()
    started = time.perf_counter()
    for _ in range(repeat):
        step()
    finish()
    return (time.perf_counter() - started) / repeat


def finish() -> None:
    """Wait for the device."""
    if GPU:
        torch.cuda.synchronize()


def take_step(kernel: Callable[[], Tensor]) -> None:
    """Call a kernel, forward and backward."""
    kernel().sum().backward()  # type: ignore[no-untyped-call]  # untyped upstream


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random numbers: products of zeros would be faster."""
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def multiply() -> dict[str, float]:
    """Return the TFLOP/s of bfloat16 products, of a square and of the shapes of a layer."""
    sizes = {
        "square": (SIDE, SIDE, SIDE),
        "1b mlp": (4096, 2048, 8192),
        "8b mlp": (4096, 4096, 14336),
    }
    speeds = {}
    for name, (m, k, n) in sizes.items():
        m, k, n = (m, k, n) if GPU else (m % 61 + 1, k % 61 + 1, n % 61 + 1)
        a, b = random(m, k), random(k, n)
        speeds[name] = 2 * m * k * n / seconds_of(partial(torch.mm, a, b)) / 1e12
    return speeds


def copy() -> dict[str, float]:
    """Return the GB/s of a copy on the device (reads and writes), and from pinned memory to it."""
    source = torch.empty(BYTES // 2, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    host = torch.empty(BYTES // 8, dtype=torch.uint8, pin_memory=GPU)
    part = target[: len(host)]
    return {
        "on the device": 2 * len(source) / seconds_of(lambda: target.copy_(source)) / 1e9,
        "from pinned memory": len(host)
        / seconds_of(lambda: part.copy_(host, non_blocking=True))
        / 1e9,
    }


def launch() -> dict[str, float]:
    """Return the microseconds of a launch: the host's part, and until the device is done."""
    tiny, square = random(8), random(16, 16)
    weight = random(16, 16).requires_grad_()
    steps: dict[str, Callable[[], Any]] = {
        "add_": lambda: tiny.add_(1),
        "mm": lambda: torch.mm(square, square),
        "linear forward and backward": lambda: torch.autograd.grad((square @ weight).sum(), weight),
    }
    times = {}
    for name, step in steps.items():
        seconds_of(step, 10)
        started = time.perf_counter()
        for _ in range(CALLS):
            step()
        times[f"{name}, host"] = (time.perf_counter() - started) / CALLS * 1e6
        finish()
        times[f"{name}, done"] = (time.perf_counter() - started) / CALLS * 1e6
    return times


def plan_attention() -> dict[str, Any]:
    """Return the seconds of SDPA, both ways, for 20 new lengths, with cuDNN and with flash."""
    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    default = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]  # untyped upstream
    times: dict[str, Any] = {"cudnn is on by default": default}
    for name, kernel in kernels.items():
        with sdpa_kernel(kernel if GPU else SDPBackend.MATH):
            try:
                attend(1000 if GPU else 30)
                started = time.perf_counter()
                for length in LENGTHS:
                    attend(length)
                times[f"{name}, seconds"] = time.perf_counter() - started
            except RuntimeError as error:
                times[name] = str(error)[:200]
    return times


def attend(length: int) -> None:
    """Compute causal attention of a document, both ways."""
    query, key, value = (random(1, heads, length, 128).requires_grad_() for heads in (16, 8, 8))
    take_step(
        partial(scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=True)
    )
    finish()


def call_attention() -> dict[str, Any]:
    """Compare torch's public kernel of packed rows with the operator behind it."""
    total, count = 4096, 8
    bounds = torch.arange(0, total + 1, total // count, dtype=torch.int32, device=DEVICE)
    tensors = [random(total, heads, 128).requires_grad_() for heads in (16, 8, 8)]
    layout = (bounds, bounds, total // count, total // count)
    kernels = {"varlen_attn": varlen.varlen_kernel(), "operator": varlen.by_operator}
    figures: dict[str, Any] = {"chosen": str(varlen.fastest_kernel(DEVICE))}
    for name, kernel in kernels.items():
        try:
            figures[f"{name}, error"] = largest_error(kernel, DEVICE)
            call = partial(kernel, *tensors, *layout, scale=128**-0.5, window_size=(-1, 0))
            figures[f"{name}, ms"] = 1e3 * seconds_of(partial(take_step, call))
        except (RuntimeError, TypeError, ValueError) as error:
            figures[name] = str(error)[:200]
    return figures


def multiply_into_float32() -> dict[str, float]:
    """Return the error and milliseconds of a bfloat16 product that is added up in float32."""
    a, b = random(SIDE // 2, SIDE), random(SIDE, SIDE // 2)
    exact = a.float() @ b.float()
    total = torch.zeros_like(exact)
    steps: dict[str, Callable[[], Any]] = {"rounded, then added": lambda: total.add_(a @ b)}
    if GPU:
        steps["out_dtype"] = lambda: torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    figures = {}
    for name, step in steps.items():
        total.zero_()
        step()
        figures[f"{name}, error"] = float((total - exact).abs().max() / exact.abs().max())
        figures[f"{name}, ms"] = 1e3 * seconds_of(step)
    return figures


def prove_documents_apart() -> dict[str, Any]:
    """Return what the proof of packed rows measures on a small model, beside what it allows."""
    from gpu_checks import SMALL, small_model

    figures: dict[str, Any] = {"allowed alone, bfloat16": proof.ALONE[False]}
    for kind, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
        model = small_model(dtype)
        model.set_attn_implementation(attend_per_document())
        measured = measure_apart(model, SMALL.vocab_size)
        figures |= {f"{name}, {kind}": value for name, value in measured.items()}
        packing = Capability.bundled("packed_rows")
        try:
            result = proof.prove_on_model(model, kind == "float32", packing)
        except RecipeError as refused:
            result = str(refused)
        figures[f"result, {kind}"] = result
    return figures


@torch.no_grad()
def measure_apart(model: Any, vocab: int) -> dict[str, float]:
    """Return how far a packed document's logits are from those alone."""
    rng, lengths = np.random.default_rng(0), proof.SHORT
    texts = [rng.integers(0, vocab, length) for length in lengths]
    packed, change = proof._change_first(model, texts, vocab)
    alone = (proof._logits(model, texts[-1:]) - packed[-lengths[-1] :]).abs()
    own = float(change[: lengths[0]].max())
    return {"leak": float(change[lengths[0] :].max()) / own, "alone": float(alone.max()) / own}


def listed(module: str, table: str, name: str) -> Item:
    """Return an item that lists what a generator of another module yields."""

    def item() -> list[dict[str, Any]]:
        torch.manual_seed(0)
        results = []
        # Imported here: a package that is missing drops this item only.
        for result in getattr(import_module(module), table)[name]():
            if not isinstance(result, dict):
                result = asdict(result) | {"text": str(result), "failed": result.failed}
            results.append(result)
        return results

    return item


class Warnings:
    """Counts CUDA's warnings of waits, by the place in the code and the step.

    CUDA does not warn of events: the loop waits for one once a step.
    """

    def __init__(self, metrics: Path) -> None:
        self.metrics, self.steps = metrics, list[Counter[str]]()

    def add(self, message: Any, *_: Any, **__: Any) -> None:
        """Count a warning, of this project's innermost lines."""
        if "synchroniz" in str(message):
            done = len(self.metrics.read_bytes().splitlines()) if self.metrics.exists() else 0
            self.steps += [Counter() for _ in range(done + 1 - len(self.steps))]
            self.steps[done][place()] += 1

    def per_step(self) -> dict[str, float]:
        """Return the waits of a step by place; the first half of the steps warms up."""
        counted = self.steps[len(self.steps) // 2 : -1]
        total = sum(counted, Counter[str]())
        return {name: count / len(counted) for name, count in total.most_common()}


def place() -> str:
    """Return the innermost lines of the stack outside of torch and of this file."""
    frame: Any = sys._getframe(1)
    names: list[str] = []
    while frame is not None and len(names) < 3:
        path = frame.f_code.co_filename
        if "/torch/" not in path and path != __file__ and not path.endswith("warnings.py"):
            names.append(f"{'/'.join(Path(path).parts[-2:])}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(names)


def waits_of(train: Callable[[], None], metrics: Path, steps: int) -> dict[str, float]:
    """Train; return the waits of a step by place."""
    if not GPU:
        with counting() as counts:  # which is in the way of the compiler
            train()
        # The last checkpoint describes the run's state; on a GPU the last step is left out.
        once = re.compile(r"checkpoint/tree\.py|loss_scale\.py, state")
        return {it: count / steps for it, count in counts.waits.items() if not once.search(it)}
    counted = Warnings(metrics)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = counted.add
        train()
    torch.cuda.set_sync_debug_mode("default")
    return counted.per_step()


def count_waits(plugins: dict[str, dict[str, Any]], steps: int = 20) -> dict[str, Any]:
    """Train a small model for 20 steps; count the waits, and list recompilations."""
    torch._dynamo.utils.counters.clear()
    with TemporaryDirectory() as folder:
        run, source = Path(folder, "run"), Path(folder, "chats.jsonl")
        write_chats(source, 8 * steps)
        packing = {"bfd_packing": {"capacity": 512}, "async_collate": {}, "flash_attention": {}}
        tables = {
            "output": str(run),
            "model": {"scratch": {"hidden": 64, "layers": 2, "heads": 4, "vocab": 512}},
            "data": {"source": str(source), "max_length": 256},
            "train": {"batch_size": 8, "steps": steps, "learning_rate": 1e-3, "log_every": 1},
            "checkpoint": {"every": 0},
            "plugins": packing | {"fused_loss": {}} | plugins,
        }
        tables["model"]["dtype"] = "bfloat16" if GPU else "float32"  # type: ignore[index]
        recipe = Path(folder, "recipe.toml")
        recipe.write_text(tomli_w.dumps(tables))
        waits = dict[str, float]()
        if GPU or "compile" not in plugins:
            waits = waits_of(partial(train, recipe), run / "metrics.jsonl", steps)
        else:
            train(recipe)
        facts = json.loads((run / "run.json").read_text())
        summaries = {plugin["name"]: plugin["summary"] for plugin in facts["plugins"]}
        counters = torch._dynamo.utils.counters
        compiled = {name: dict(counters[name]) for name in ("graph_break", "stats")}
        return {"waits in a step": waits, **compiled, "plugins": summaries}


def write_chats(path: Path, count: int) -> None:
    """Write chats of several lengths."""
    with path.open("w") as file:
        for number in range(count):
            turns = [
                {"role": role, "content": " ".join(["word", "other"] * (3 + number % length))}
                for role, length in (("user", 7), ("assistant", 19))
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


def driver() -> str:
    """Return what nvidia-smi says of the GPU."""
    words = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm", "--format=csv"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)


PROBE: dict[str, Item] = {
    "versions": describe_versions,
    "driver": driver,
    "launches": launch,
    "products": multiply,
    "copies": copy,
    **{f"check {name}": listed("gpu_checks", "CHECKS", name) for name in FIRST_CHECKS},
    "attention operator": call_attention,
    "attention plans": plan_attention,
    "mm out_dtype": multiply_into_float32,
    "documents apart": prove_documents_apart,
    **{f"check {name}": listed("gpu_checks", "CHECKS", name) for name in OTHER_CHECKS},
}
WAITS: dict[str, Item] = {
    "eager": partial(count_waits, {}),
    "compiled": partial(count_waits, {"compile": {}}),
}
PHASES = {
    "probe": PROBE,
    "sync": WAITS,
    "times": {name: listed("gpu_times", "TIMES", name) for name in TIMES},
}
