"""Check every kernel against float32, before gpu.py measures anything.

The inputs have the kernel's dtype; the reference computes in float32 from the same inputs. An error
is the largest difference, relative to the largest number of the reference. A kernel that cannot run
on this machine is reported with the reason.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gpu_rows import DEVICE, GPU, IGNORED, Check, check_rows
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from plugsft import RecipeError
from plugsft.kit import target_places
from plugsft.model.fused_head import LogitTransform
from plugsft.plugins.bfd_packing.attention import attend as attend_documents
from plugsft.plugins.bfd_packing.documents import documents_of
from plugsft.plugins.flash_attention.kernels import Conditions, find_obstacle, lowest_capability
from plugsft.plugins.flash_attention.varlen import attend as attend_varlen
from plugsft.plugins.fused_loss import FusedLoss
from plugsft.plugins.fused_loss.loss import HeadLoss
from plugsft.plugins.liger import Liger
from plugsft.plugins.liger.patch import can_run_triton
from plugsft.plugins.lora import Lora

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
"""bfloat16 rounds a number by 1/256 at most; a sum adds up several such errors."""
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


def compare(
    name: str, kind: str, make: Callable[[], Numbers], reference: Callable[[], Numbers]
) -> Check:
    """Compare a kernel's output and gradients with the reference's; return the largest error."""
    name, expected = f"{name}, {kind}", reference()
    try:
        actual = make()
    except Exception as error:  # the other kernels are still checked
        return Check(f"{name} ({type(error).__name__}: {error})", float("inf"), TOLERANCES[kind])
    errors = []
    for tensor, other in zip(actual, expected, strict=True):
        assert tensor.shape == other.shape, f"{name}: {tensor.shape} in place of {other.shape}"
        errors.append(float((tensor.float() - other).abs().max() / other.abs().max()))
    # Unlike max(), np.max returns NaN if any error is NaN.
    return Check(name, float(np.max(errors)), TOLERANCES[kind])


def run_with_gradients(
    compute: Callable[..., Tensor], inputs: Numbers, grad_output: Tensor
) -> Numbers:
    """Return a result, and the gradients of the inputs."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    result = compute(*leaves)
    return result.detach(), *torch.autograd.grad(result, leaves, grad_output.to(result.dtype))


def check_attention(kernel: str) -> Iterator[Check]:
    """Check attention on packed rows with grouped queries, with and without a sliding window."""
    total, attend = int(LENGTHS.sum()), ATTENTIONS[kernel]
    shapes = [(1, heads, total, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    for kind, dtype in TYPES.items():
        if reason := obstacle_of(kernel, half=kind == "bfloat16"):
            yield Check(f"attention {kernel}, {kind}", reason=reason)
            continue
        for window in (None, WINDOW):
            name = f"attention {kernel}, {'no window' if window is None else 'window'}"
            inputs = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
            grad_output = torch.randn(1, total, HEADS, WIDTH, device=DEVICE).to(dtype)
            exact = [tensor.float() for tensor in inputs]
            fused, masked = (partial(f, window=window) for f in (attend, attend_with_mask))
            yield compare(
                name,
                kind,
                partial(run_with_gradients, fused, inputs, grad_output),
                partial(run_with_gradients, masked, exact, grad_output.float()),
            )


def obstacle_of(kernel: str, half: bool = True) -> str:
    """Return why an attention kernel cannot run on packed rows here, or ""."""
    built = torch.backends.cuda.is_flash_attention_available()
    obstacle = find_obstacle(kernel, Conditions(lowest_capability(), half, True, built))
    return obstacle.reason if obstacle else ""


def attend_with_mask(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Attend over the whole row, with a mask per document."""
    positions = torch.arange(query.shape[2], device=DEVICE)
    document = torch.from_numpy(np.repeat(np.arange(len(LENGTHS)), LENGTHS)).to(DEVICE)
    distance = positions[:, None] - positions
    visible = (document[:, None] == document) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    key, value = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value))
    scores: Tensor = query @ key.transpose(2, 3) * WIDTH**-0.5
    return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value).transpose(1, 2)


def document_bounds() -> dict[str, Any]:
    """Return the document bounds, as kernels take them."""
    return dict(cached_bounds(tuple(LENGTHS.tolist())))


@cache
def cached_bounds(lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return the bounds, from a cache: kernels are timed."""
    arguments = documents_of(np.array(lengths))
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in arguments.items()}


def attend_with_torch(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Call torch's kernel as the plugin does."""
    module: Any = None
    options = {**document_bounds(), "scaling": WIDTH**-0.5, "sliding_window": window}
    output: Tensor = attend_varlen(module, query, key, value, None, **options)[0]
    return output


def attend_with_sdpa(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Call SDPA document by document."""
    module: Any = None
    options = {**document_bounds(), "scaling": WIDTH**-0.5, "sliding_window": window}
    output: Tensor = attend_documents(module, query, key, value, None, **options)[0]
    return output


def package_attention(name: str) -> Callable[..., Tensor]:
    """Return a package's kernel, called as transformers calls it."""

    def attend(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        arguments = document_bounds()
        arguments.pop("documents")
        output: Tensor = _flash_attention_forward(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attention_mask=None,
            query_length=query.shape[2],
            is_causal=True,
            softmax_scale=WIDTH**-0.5,
            sliding_window=window,
            attn_implementation=name,
            **arguments,
        )
        return output

    return attend


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "fa4": package_attention("flash_attention_4"),
    "fa3": package_attention("flash_attention_3"),
    "fa2": package_attention("flash_attention_2"),
    "torch": attend_with_torch,
    "sdpa": attend_with_sdpa,
}


def check_loss(kernel: str) -> Iterator[Check]:
    """Check the loss and the head's gradient: without a logit transform, and with a soft cap."""
    labels = torch.randint(VOCAB, (1, POSITIONS), device=DEVICE)
    labels[torch.rand(labels.shape, device=DEVICE) < 0.4] = IGNORED
    try:
        loss = make_fused_loss(kernel)
    except RecipeError as refused:
        yield Check(f"fused_loss {kernel}", reason=str(refused))
        return
    for kind, dtype in TYPES.items():
        for transform in (LogitTransform(), LogitTransform(0.5, 2.0)):
            hidden = torch.randn(1, POSITIONS, HIDDEN, device=DEVICE).to(dtype)
            weight = (torch.randn(VOCAB, HIDDEN, device=DEVICE) * 2 * HIDDEN**-0.5).to(dtype)
            fused = partial(fused_loss, loss=loss, transform=transform, labels=labels)
            plain = partial(plain_loss, transform=transform, labels=labels)
            unit = torch.ones((), device=DEVICE)
            yield compare(
                f"fused_loss {kernel}, {str(transform) or 'no transform'}",
                kind,
                partial(run_with_gradients, fused, [hidden, weight], unit),
                partial(run_with_gradients, plain, [hidden.float(), weight.float()], unit),
            )


def fused_loss(
    hidden: Tensor, weight: Tensor, loss: HeadLoss, transform: LogitTransform, labels: Tensor
) -> Tensor:
    """Return the loss of a kernel of the plugin."""
    head = SimpleNamespace(weight=weight, bias=None)
    rows = target_places({"labels": labels})
    nll: Tensor = loss.compute(head, transform, hidden, labels, True, rows)
    return nll.sum()


def plain_loss(hidden: Tensor, weight: Tensor, transform: LogitTransform, labels: Tensor) -> Tensor:
    """Return the loss from all logits."""
    logits = transform.apply(hidden[0, :-1] @ weight.T)
    return cross_entropy(logits, labels[0, 1:], ignore_index=IGNORED, reduction="sum")


def make_fused_loss(kernel: str) -> HeadLoss:
    """Return the loss of the plugin with this kernel; raise RecipeError if it cannot run."""
    plugin = FusedLoss(kernel=kernel)
    recipe: Any = SimpleNamespace(provides=lambda capability: None)
    plugin.check(recipe)
    return HeadLoss(plugin.package, plugin.chunk)


def small_model(dtype: torch.dtype) -> Any:
    """Return a small model with random norms: norms of ones would hide a gradient."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SMALL)  # type: ignore[no-untyped-call]  # untyped upstream
    model = model.to(DEVICE, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def load_through_plugin(plugin: Any, model: Any) -> Any:
    """Load a model through a plugin, as a run does."""
    with tempfile.TemporaryDirectory() as folder:
        SMALL.save_pretrained(folder)
        load = SimpleNamespace(path=folder, kwargs={}, empty=False, new_tokens=())
        loading = (
            plugin.optimize_model(load) if isinstance(plugin, Lora) else plugin.optimize_model()
        )
        next(loading)
        try:
            loading.send(model)
        except StopIteration as ended:
            return ended.value
    raise AssertionError("a wrapper yields once")


def run_module(module: Any, hidden: Tensor, grad_output: Tensor) -> Numbers:
    """Return a module's output, with the gradients of its input and trained weights."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    hidden = hidden.clone().requires_grad_()
    output = module(hidden)
    # A copy: Liger's norm overwrites its input with the gradient.
    return output.detach(), *torch.autograd.grad(output, [hidden, *parameters], grad_output.clone())


def check_liger() -> Iterator[Check]:
    """Check Liger's norm and MLP in a model that the plugin patched."""
    names = {"RMSNorm": "model.layers.0.input_layernorm", "MLP": "model.layers.0.mlp"}
    if not can_run_triton():
        yield from (Check(f"liger {name}", reason="its kernels need a GPU") for name in names)
        return
    for kind, dtype in TYPES.items():
        model = small_model(dtype)
        plain = deepcopy(model).float()
        plugin = Liger()
        model = load_through_plugin(plugin, model)
        assert {"rms_norm", "mlp", "rope"} <= {*plugin.patched}, plugin.patched
        for name, module_name in names.items():
            x, grad_output = (
                torch.randn(1, 512, SMALL.hidden_size, device=DEVICE) for _ in range(2)
            )
            x, grad_output = x.to(dtype), grad_output.to(dtype)
            yield compare(
                f"liger {name}",
                kind,
                partial(run_module, model.get_submodule(module_name), x, grad_output),
                partial(
                    run_module, plain.get_submodule(module_name), x.float(), grad_output.float()
                ),
            )


def check_lora() -> Iterator[Check]:
    """Check the plugin's LoRA layer against the formula."""
    for kind, dtype in TYPES.items():
        layer = load_through_plugin(Lora(), small_model(dtype)).get_submodule(
            "base_model.model.model.layers.0.mlp.down_proj"
        )
        frozen = layer.base_layer.weight.float()
        down, up = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
        torch.nn.init.normal_(up, std=0.02)
        x = torch.randn(1, 256, SMALL.intermediate_size, device=DEVICE).to(dtype)
        grad_output = torch.randn(1, 256, SMALL.hidden_size, device=DEVICE).to(dtype)
        scale = layer.scaling["default"]

        def formula(
            x: Tensor, a: Tensor, b: Tensor, w: Tensor = frozen, s: float = scale
        ) -> Tensor:
            return x @ w.T + s * (x @ a.T @ b.T)

        yield compare(
            "lora layer",
            kind,
            partial(run_module, layer, x, grad_output),
            partial(run_with_gradients, formula, [x.float(), down, up], grad_output.float()),
        )


CHECKS: dict[str, Callable[[], Iterator[Check]]] = {
    **{f"attention {kernel}": partial(check_attention, kernel) for kernel in ATTENTIONS},
    **{f"loss {kernel}": partial(check_loss, kernel) for kernel in LOSSES},
    "liger": check_liger,
    "lora": check_lora,
    "rows": check_rows,
}
