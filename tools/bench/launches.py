"""Count the operators of a step, and where the host waits for the device.

    tools/bench/launches.py [--layers 28] [--plugins lora,bfd_packing,fused_loss] [--json FILE]

It trains the model of gpu.py's case 0.6b-lora, narrowed for a CPU, with all its layers, on packed
rows in bfloat16. An operator counts as one launch, unless it is a view. It may launch several
kernels on a GPU, or none. A wait is an operator that would wait for a GPU: it reads a number or a
mask of the device, or copies memory that is not pinned. `read` waits once a step for the numbers of
the step before, which the device has computed by then.
"""

import argparse
import json
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gpu_cases
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from plugsft import loop
from plugsft.batches import labels
from plugsft.ranks import step_numbers
from plugsft.run import Run
from plugsft.testing import tiny_runs

PACKAGES = ("/torch/", "/contextlib.py", "/tools/bench/launches.py")
"""Files that are no place of a wait."""
WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "lift_fresh"),
}
"""Operators that read the device's memory. `lift_fresh` makes a tensor of memory that is not
pinned: torch.tensor, as_tensor, new_tensor, from_numpy."""
READING = ("tolist", "numpy", "cpu", "__array__")
"""Methods that copy a tensor to the host, and for which a CPU calls no operator."""
FREE = {"detach", "alias", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty"}
"""Operators that launch nothing, besides views."""


class Steps:
    """Counts of launches and waits: in micro-steps, and in the rest of each step."""

    def __init__(self) -> None:
        self.part = ""
        """"micro-step", "step", or "" where the loop is in neither."""
        self.parts: Counter[str] = Counter()
        """How many there were of each part, after the first step; so for launches."""
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        """Part, operator and place in the code -> how often the host waited."""
        self.pinned: set[int] = set()
        """Addresses of buffers that are pinned on a GPU."""

    def wait(self, operator: str) -> None:
        """Count a wait of the line that asked for it."""
        frames = traceback.extract_stack()
        own = [frame for frame in frames if not any(part in frame.filename for part in PACKAGES)]
        place = "/".join(Path(own[-1].filename).parts[-2:])
        self.waits[f"{self.part}: {operator} in {place}, {own[-1].name}"] += 1

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count what happens in the block as a part of a step, or not at all."""
        before, self.part = self.part, part
        self.parts[part] += 1
        try:
            yield
        finally:
            self.part = before

    def per(self, part: str) -> float:
        """Return the launches of one such part."""
        return self.launches[part] / max(1, self.parts[part])


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped upstream
    """Counts operators of forward, backward and the optimizer."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped upstream
        self.steps = steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if self.steps.part and (name in WAITING or has_unknown_size(name, args, kwargs)):
            self.steps.wait(name)
        if not func.is_view and name not in FREE:
            self.steps.launches[self.steps.part] += 1
        return func(*args, **kwargs)


def has_unknown_size(name: str, args: Any, kwargs: Any) -> bool:
    """Tell whether an operator reads a mask or counts to learn the size of its result."""
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masks = (tensor for tensor in args[1] if tensor is not None)
        return any(mask.dtype in (torch.bool, torch.uint8) for mask in masks)
    if name == "segment_reduce":
        return not kwargs.get("unsafe")
    counts = args[:2][-1] if args else None
    return name == "repeat_interleave" and isinstance(counts, Tensor) and not kwargs


class Reads(TorchFunctionMode):
    """Counts copies to the host; that of a pinned buffer is called `read`."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self.steps.part and name in READING:
            pinned = args[0].untyped_storage().data_ptr() in self.steps.pinned
            if not pinned or name == "tolist":  # the host writes into a pinned buffer as numpy
                self.steps.wait("read" if pinned else name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Steps]:
    """Count the steps of a training in the block, but not its evaluations and saves."""
    steps = Steps()
    global_batches, forward_backward = Run.global_batches, loop.forward_backward

    def count_steps(run: Run) -> Iterator[Any]:
        with closing(global_batches(run)) as batches:
            for number, batch in enumerate(batches):
                if number == 1:  # the first step makes the optimizer's states
                    steps.launches.clear()
                    steps.parts.clear()
                with steps.within("step"):
                    yield batch

    def count_micro_steps(run: Run, batch: Any) -> Any:
        steps.parts["micro-step"] += len(batch.micro_batches) - 1
        with steps.within("micro-step"):
            return forward_backward(run, batch)

    def uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with steps.within(""):
                return function(*args)

        return call

    def pinned_buffer(*args: Any) -> Tensor:
        tensor = labels.buffer(*args)
        steps.pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    with ExitStack() as stack:
        for owner, name, replacement in (
            (Run, "global_batches", count_steps),
            (Run, "begin_checkpoint", uncounted(Run.begin_checkpoint)),
            (loop, "evaluate", uncounted(loop.evaluate)),
            (loop, "forward_backward", count_micro_steps),
            (step_numbers, "buffer", pinned_buffer),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(Operators(steps))
        stack.enter_context(Reads(steps))
        yield steps


def main() -> None:
    """Train a few steps; print the launches and the waits of a micro-step and of a step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--plugins", default="lora,bfd_packing,fused_loss")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    case = gpu_cases.shrink(gpu_cases.CASES["0.6b-lora"])
    case = replace(case, shape=replace(case.shape, layers=options.layers))
    with tempfile.TemporaryDirectory() as folder:
        gpu_cases.make_model({"case": asdict(case), "folder": folder})
        tables = recipe_of(Path(folder), options)
        with counting() as steps:
            tiny_runs.train(tables)
    result = {
        "layers": options.layers,
        "plugins": options.plugins,
        "launches per micro-step": round(steps.per("micro-step")),
        "launches per step besides": round(steps.per("step")),
        "waits": {place: count / options.steps for place, count in steps.waits.items()},
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def recipe_of(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write chats; return a recipe of steps of two micro-batches."""
    words = [" ".join(f"w{(row + 3 * n) % 900}" for n in range(30)) for row in range(64)]
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
        for text in words
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plugins: dict[str, Any] = {name: {} for name in options.plugins.split(",") if name}
    if "bfd_packing" in plugins:
        plugins["bfd_packing"] = {"capacity": 256}
    return {
        "output": str(folder / "run"),
        "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
        "data": {"source": str(folder / "data.jsonl"), "max_length": 128},
        "train": {"steps": options.steps, "batch_size": 6, "learning_rate": 1e-4},
        "plugins": plugins,
    }


if __name__ == "__main__":
    main()
