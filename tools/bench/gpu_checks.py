"""Check every kernel against float32, before gpu.py measures anything.

Inputs have the kernel's type, and the reference computes with the same numbers in float32. An error
is the largest difference, as a share of the largest number of the reference. What cannot run on
this machine says why.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import shared
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from plugsft import RecipeError, StepPlan
from plugsft.batches.packed_rows import attend as attend_documents
from plugsft.kit.model import documents_of, pack
from plugsft.kit.tokens import Tokens
from plugsft.plugins.async_collate import AsyncCollate
from plugsft.plugins.flash_attention import Conditions
from plugsft.plugins.flash_attention.kernels import find_obstacle, lowest_capability
from plugsft.plugins.flash_attention.varlen import attend as attend_varlen
from plugsft.plugins.fused_loss import FusedLoss
from plugsft.plugins.fused_loss.loss import LogitTransform, compute_losses
from plugsft.plugins.liger import Liger
from plugsft.plugins.lora import Lora
from plugsft.ranks.load_batches import BatchLoader

IGNORED = -100
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
"""bfloat16 has 8 bits, so that each number is off by 1/256 at most: and sums add a few of these."""
LENGTHS = np.array([700, 1, 300, 47, 1000] if GPU else [37, 1, 64, 2, 12])
WINDOW = 256 if GPU else 16
"""Shorter than some documents, longer than others."""
HEADS, KV_HEADS, WIDTH = (16, 4, 128) if GPU else (4, 2, 32)
POSITIONS, VOCAB, HIDDEN = (4096, 128_256, 2048) if GPU else (64, 997, 32)
LOSSES = ("torch", "cut_cross_entropy", "liger")
SMALL = LlamaConfig(
    vocab_size=997,
    hidden_size=HEADS * WIDTH,
    intermediate_size=3 * HEADS * WIDTH,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=WIDTH,
    tie_word_embeddings=True,
)

Numbers = Sequence[Tensor]
"""A result, and the gradients of its inputs."""


@dataclass(frozen=True)
class Check:
    """What came of one check: how far off it is, or why it was not run."""

    name: str
    error: float | None = None
    tolerance: float = 0.0
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether it ran and is off by too much; what is no number is."""
        return self.error is not None and not self.error <= self.tolerance

    def __str__(self) -> str:
        if self.error is None:
            return f"NOT RUN  {self.name}: {self.reason}"
        verdict = "FAILED " if self.failed else "ok     "
        return f"{verdict}  {self.name}: off by {self.error:.1e}, of {self.tolerance:.0e} allowed"


def checks() -> Iterator[Check]:
    """Run all."""
    for check in (attention, loss, liger, lora, feeding):
        torch.manual_seed(0)
        yield from check()


def compare(
    name: str, kind: str, make: Callable[[], Numbers], reference: Callable[[], Numbers]
) -> Check:
    """Compare what a kernel makes with the reference; the worst counts."""
    name, there = f"{name}, {kind}", reference()
    try:
        made = make()
    except Exception as error:  # whatever it is, other kernels are still to be seen
        return Check(f"{name} ({type(error).__name__}: {error})", float("inf"), TOLERANCES[kind])
    errors = []
    for one, other in zip(made, there, strict=True):
        assert one.shape == other.shape, f"{name}: {one.shape} in place of {other.shape}"
        errors.append(float((one.float() - other).abs().max() / other.abs().max()))
    # Unlike max(), this keeps what is no number.
    return Check(name, float(np.max(errors)), TOLERANCES[kind])


def with_gradients(compute: Callable[..., Tensor], inputs: Numbers, pull: Tensor) -> Numbers:
    """Return a result, and its gradients when it is pulled at."""
    mine = [one.detach().clone().requires_grad_() for one in inputs]
    result = compute(*mine)
    return result.detach(), *torch.autograd.grad(result, mine, pull.to(result.dtype))


def attention() -> Iterator[Check]:
    """Packed rows with fewer heads of keys than of queries, with and without a window."""
    total = int(LENGTHS.sum())
    shapes = [(1, heads, total, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    built = torch.backends.cuda.is_flash_attention_available()
    for kernel, attend in ATTENTIONS.items():
        for kind, dtype in TYPES.items():
            conditions = Conditions(
                lowest_capability(), half=kind == "bfloat16", packed=True, built=built
            )
            if obstacle := find_obstacle(kernel, conditions):
                yield Check(f"attention {kernel}, {kind}", reason=obstacle.reason)
                continue
            for window in (None, WINDOW):
                name = f"attention {kernel}, {'no window' if window is None else 'window'}"
                inputs = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
                pull = torch.randn(1, total, HEADS, WIDTH, device=DEVICE).to(dtype)
                exact = [one.float() for one in inputs]
                made, book = (partial(one, window=window) for one in (attend, attend_by_the_book))
                yield compare(
                    name,
                    kind,
                    partial(with_gradients, made, inputs, pull),
                    partial(with_gradients, book, exact, pull.float()),
                )


def attend_by_the_book(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Attend over the whole row, with a mask of documents."""
    places = torch.arange(query.shape[2], device=DEVICE)
    document = torch.from_numpy(np.repeat(np.arange(len(LENGTHS)), LENGTHS)).to(DEVICE)
    back = places[:, None] - places
    seen = (document[:, None] == document) & (back >= 0)
    if window is not None:
        seen &= back < window
    key, value = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * WIDTH**-0.5
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(1, 2)


def bounds() -> dict[str, Any]:
    """Return the bounds of documents, as kernels take them."""
    return dict(bounds_of(tuple(LENGTHS.tolist())))


@cache
def bounds_of(lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return the same; once, since kernels are timed."""
    arguments = documents_of(np.array(lengths))
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in arguments.items()}


def by_torch(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """torch's kernel, as the plugin calls it."""
    module: Any = None
    given = {**bounds(), "scaling": WIDTH**-0.5, "sliding_window": window}
    return attend_varlen(module, query, key, value, None, **given)[0]


def by_sdpa(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """SDPA, document by document."""
    module: Any = None
    given = {**bounds(), "scaling": WIDTH**-0.5, "sliding_window": window}
    return attend_documents(module, query, key, value, None, **given)[0]


def by_package(name: str) -> Callable[..., Tensor]:
    """A package's kernel, as transformers calls it."""

    def attend(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        arguments = bounds()
        arguments.pop("documents")
        made: Tensor = _flash_attention_forward(
            *(one.transpose(1, 2) for one in (query, key, value)),
            attention_mask=None,
            query_length=query.shape[2],
            is_causal=True,
            softmax_scale=WIDTH**-0.5,
            sliding_window=window,
            attn_implementation=name,
            **arguments,
        )
        return made

    return attend


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "fa3": by_package("flash_attention_3"),
    "fa2": by_package("flash_attention_2"),
    "torch": by_torch,
    "sdpa": by_sdpa,
}


def loss() -> Iterator[Check]:
    """The loss from hidden states, with the head's gradient: plain, and with a soft cap."""
    labels = torch.randint(VOCAB, (1, POSITIONS), device=DEVICE)
    labels[torch.rand(labels.shape, device=DEVICE) < 0.4] = IGNORED
    for kernel in LOSSES:
        try:
            fused_loss(kernel)
        except RecipeError as refused:
            yield Check(f"fused_loss {kernel}", reason=str(refused))
            continue
        for kind, dtype in TYPES.items():
            for transform in (LogitTransform(), LogitTransform(0.5, 2.0)):
                name = f"fused_loss {kernel}, {str(transform) or 'no transform'}"
                hidden = torch.randn(1, POSITIONS, HIDDEN, device=DEVICE).to(dtype)
                weight = (torch.randn(VOCAB, HIDDEN, device=DEVICE) * 2 * HIDDEN**-0.5).to(dtype)
                plugin = fused_loss(kernel)

                def fused(
                    hidden: Tensor,
                    weight: Tensor,
                    plugin: Any = plugin,
                    transform: LogitTransform = transform,
                ) -> Tensor:
                    head = SimpleNamespace(weight=weight, bias=None)
                    made: Tensor = compute_losses(
                        plugin, head, transform, hidden, labels, summed=True
                    )
                    return made.sum()

                def plain(
                    hidden: Tensor, weight: Tensor, transform: LogitTransform = transform
                ) -> Tensor:
                    logits = transform.apply(hidden[0, :-1] @ weight.T)
                    return cross_entropy(
                        logits, labels[0, 1:], ignore_index=IGNORED, reduction="sum"
                    )

                one = torch.ones((), device=DEVICE)
                exact = [hidden.float(), weight.float()]
                yield compare(
                    name,
                    kind,
                    partial(with_gradients, fused, [hidden, weight], one),
                    partial(with_gradients, plain, exact, one),
                )


def fused_loss(kernel: str) -> Any:
    """Return the plugin with one kernel, if that can run here."""
    plugin = FusedLoss(kernel=kernel)  # type: ignore[arg-type]
    recipe: Any = SimpleNamespace(has=lambda plugin: False)
    plugin.check(recipe)
    return plugin


def small_model(dtype: torch.dtype) -> Any:
    """Make a small model; norms that are all ones would hide a gradient."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SMALL).to(DEVICE, dtype)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "norm" in name:
                one.add_(torch.randn_like(one) * 0.1)
    return model


def loaded(plugin: Any, model: Any) -> Any:
    """Send a model through a plugin, as a run does."""
    with tempfile.TemporaryDirectory() as folder:
        SMALL.save_pretrained(folder)
        load = SimpleNamespace(path=folder, kwargs={}, empty=False)
        loading = plugin.optimize_model(load)
        next(loading)
        try:
            loading.send(model)
        except StopIteration as ended:
            return ended.value
    raise AssertionError("a wrapper yields once")


def of_module(module: Any, x: Tensor, pull: Tensor) -> Numbers:
    """Return what a module gives, with the gradients of its input and its trained weights."""
    trained = [one for one in module.parameters() if one.requires_grad]
    x = x.clone().requires_grad_()
    made = module(x)
    # A copy: Liger's norm overwrites its input with the gradient.
    return made.detach(), *torch.autograd.grad(made, [x, *trained], pull.clone())


def liger() -> Iterator[Check]:
    """Liger's norm and MLP, in a model that the plugin patched."""
    names = {"RMSNorm": "model.layers.0.input_layernorm", "MLP": "model.layers.0.mlp"}
    try:
        Liger().check()
    except RecipeError as refused:
        yield from (Check(f"liger {name}", reason=str(refused)) for name in names)
        return
    for kind, dtype in TYPES.items():
        model = small_model(dtype)
        plain = deepcopy(model).float()
        plugin = Liger()
        model = loaded(plugin, model)
        assert {"rms_norm", "mlp", "rope"} <= {*plugin.patched}, plugin.patched
        for name, place in names.items():
            x, pull = (torch.randn(1, 512, SMALL.hidden_size, device=DEVICE) for _ in range(2))
            x, pull = x.to(dtype), pull.to(dtype)
            yield compare(
                f"liger {name}",
                kind,
                partial(of_module, model.get_submodule(place), x, pull),
                partial(of_module, plain.get_submodule(place), x.float(), pull.float()),
            )


def lora() -> Iterator[Check]:
    """A layer with an adapter: the plugin's layer against the formula."""
    for kind, dtype in TYPES.items():
        layer = loaded(Lora(), small_model(dtype)).get_submodule(
            "base_model.model.model.layers.0.mlp.down_proj"
        )
        frozen = layer.base_layer.weight.float()
        down, up = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
        torch.nn.init.normal_(up, std=0.02)
        x = torch.randn(1, 256, SMALL.intermediate_size, device=DEVICE).to(dtype)
        pull = torch.randn(1, 256, SMALL.hidden_size, device=DEVICE).to(dtype)
        scale = layer.scaling["default"]

        def formula(
            x: Tensor, a: Tensor, b: Tensor, w: Tensor = frozen, s: float = scale
        ) -> Tensor:
            return x @ w.T + s * (x @ a.T @ b.T)

        yield compare(
            "lora layer",
            kind,
            partial(of_module, layer, x, pull),
            partial(with_gradients, formula, [x.float(), down, up], pull.float()),
        )


def feeding() -> Iterator[Check]:
    """Packed rows against their single examples; and rows built and copied ahead."""
    steps, size = 20, 40
    with tempfile.TemporaryDirectory() as made:
        lengths = shared.draw_lengths(steps * size, 4.0, 1.0, 1, 512)
        tokens = shared.write_tokens(Path(made, "tokens"), lengths, 3)
        rows = np.random.default_rng(0).permutation(len(tokens)).reshape(steps, size)
        batches = [pack(tokens, row) for row in rows]
        off = sum(
            int((by_hand(tokens, row)[name] != batch[name][0]).sum())
            for row, batch in zip(rows, batches, strict=True)
            for name in ("input_ids", "labels", "position_ids")
        )
        yield Check("rows collated, numbers that differ", off, 0)
        yield ahead(tokens, rows, batches)
    if GPU:
        unpinned = sum(not batch["input_ids"].is_pinned() for batch in batches)
        yield Check("rows in pinned memory, those that are not", unpinned, 0)
    else:
        yield Check("rows in pinned memory, copied during training", reason="no GPU")


def by_hand(tokens: Tokens, examples: Any) -> dict[str, Tensor]:
    """Lay examples end to end, one token after the other."""
    ids, labels, places = list[int](), list[int](), list[int]()
    for number in examples:
        words, mask = tokens.example(int(number))
        for place, (word, trained) in enumerate(zip(words, mask, strict=True)):
            ids.append(int(word))
            labels.append(int(word) if trained and place else IGNORED)
            places.append(place)
    made = {"input_ids": ids, "labels": labels, "position_ids": places}
    return {name: torch.tensor(values) for name, values in made.items()}


def ahead(tokens: Tokens, rows: Any, batches: list[dict[str, Any]]) -> Check:
    """Feed rows through the plugin while the device works, and compare them with serial ones."""
    plugin = AsyncCollate(depth=2)
    hook = SimpleNamespace(
        feed=plugin.feed, collate=lambda tokens, examples, pad: pack(tokens, examples)
    )
    loader = BatchLoader(hook, Accelerator(cpu=not GPU), 0)

    def plan_step(step: int) -> StepPlan:
        return StepPlan(step, 0, [[rows[step - 1]]], 1, 1, 1)

    off, busy = 0, torch.randn(POSITIONS, POSITIONS, device=DEVICE)
    for one, batch in zip(
        loader.load(plan_step, tokens, range(1, len(rows) + 1)), batches, strict=True
    ):
        busy @ busy  # the next row is copied meanwhile
        [made] = one.micro_batches
        off += sum(
            int((made[name].cpu() != batch[name]).sum())
            for name in batch
            if isinstance(batch[name], Tensor)
        )
    where = "copied to the GPU during training" if GPU else "built in a thread"
    return Check(f"rows {where}, numbers that differ", off, 0)
