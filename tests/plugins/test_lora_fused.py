"""lora: a layer and its adapter as one operation compute the same with fewer launches."""

from functools import partial

import bitsandbytes
import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_models import IDS, apply
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2Config, Qwen3Config

from plugsft.model.load import ModelLoad
from plugsft.plugins.lora import Lora
from plugsft.plugins.lora.layers import FastLinear

# Of transformers: what peft still calls by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
SIZES = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def base_model(kind=Qwen2Config, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SIZES, **options), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def adapt(model, **options):
    """Add adapters as a run does, and move them away from zero."""
    plugin = Lora(r=4, alpha=6, **options)
    plugin.dtype = str(model.dtype).removeprefix("torch.")
    return move(apply(model, plugin, ModelLoad("base")))


def move(model):
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in trained(model):
            weight.add_(torch.randn(weight.shape) * 0.05)
    return model


def trained(model):
    return [weight for weight in model.parameters() if weight.requires_grad]


def unfused(model):
    """Compute with autograd's own operations, as before."""
    for layer in model.modules():
        if isinstance(layer, FastLinear):
            layer.fusible = False
    return model


def gradients(model):
    """Return the gradients of two micro-batches."""
    model.zero_grad()
    for ids in IDS.split(1):
        model(ids, labels=ids).loss.backward()
    return torch.cat([weight.grad.flatten() for weight in trained(model)])


def difference(values, expected):
    return float((values - expected).norm() / expected.norm())


class Launches(TorchDispatchMode):
    """Counts the operations that compute something."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **kwargs or {})


def count_launches(dtype):
    """Return the operations of a Qwen3 layer, forward and backward, in a later micro-batch.

    Without data, operations are a GPU's. Two sums stand for attention's kernel.
    """
    interface = AttentionInterface()
    interface.register("sum", lambda layer, q, k, v, mask, **_: ((q + k + v).transpose(1, 2), None))
    with torch.device("meta"):
        model = base_model(Qwen3Config, dtype, attn_implementation="sum", head_dim=8)
    layer = adapt(model.to_empty(device="cpu")).to("meta").base_model.model.model.layers[0]
    angles = (torch.empty(1, 24, 8, dtype=dtype, device="meta"),) * 2
    source = torch.empty(1, 24, 32, dtype=dtype, device="meta", requires_grad=True)
    for _ in range(2):
        source.grad = None
        with Launches() as forward:
            output = layer(source, position_embeddings=angles, attention_mask=None)
        with Launches() as backward:
            output.backward(torch.empty_like(output))
    return forward.count, backward.count


def test_a_layer_takes_fewer_launches():
    # Without data, torch 2.11 has no products of bfloat16 that are summed in float32.
    old = torch.__version__.startswith("2.11.")
    forward, backward = count_launches(torch.float32 if old else torch.bfloat16)
    assert forward <= 75 and backward <= 125, (forward, backward)


def test_gradients_are_those_of_plain_peft_and_of_single_operations():
    model = adapt(base_model())
    fused = gradients(model)
    assert difference(fused, gradients(unfused(adapt(base_model())))) < 1e-6
    config = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    peft = get_peft_model(base_model(), config)
    with torch.no_grad():
        for theirs, ours in zip(trained(peft), trained(model), strict=True):
            theirs.copy_(ours)
    assert difference(fused, gradients(peft)) < 1e-6


def test_in_bfloat16_gradients_are_no_farther_from_float32_s():
    exact = gradients(adapt(base_model(dtype=torch.bfloat16).float()))
    rough = [adapt(base_model(dtype=torch.bfloat16)) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        fused, single = gradients(rough[0]), gradients(unfused(rough[1]))
    assert fused.dtype == torch.float32
    assert 1e-4 < difference(fused, exact) < 1.1 * difference(single, exact)


@pytest.mark.parametrize(
    "make",
    [AdamW, partial(AdamW, fused=True), bitsandbytes.optim.AdamW8bit],
    ids=["plain", "fused", "8bit"],
)
def test_adapters_are_cast_once_for_a_step(make):
    """Only the first of these optimizers changes the version of a weight."""
    model = adapt(base_model(dtype=torch.bfloat16))
    optimizer = make(trained(model), lr=0.1)
    layer = next(it for it in model.modules() if isinstance(it, FastLinear))
    gradients(model)
    casts = layer.casts._casts
    gradients(model)
    assert layer.casts._casts is casts
    optimizer.step()
    stepped = gradients(model)
    assert layer.casts._casts is not casts
    assert difference(stepped, gradients(unfused(model))) < 0.02
    for fusible in (True, False):
        for other in model.modules():
            if isinstance(other, FastLinear):
                other.fusible = fusible
        with torch.no_grad():
            trained(model)[0].mul_(2)  # as a checkpoint does
        changed = gradients(model)
        assert difference(changed, stepped) > 0.02


def test_evaluations_see_weights_that_are_swapped():
    """FSDP2 gathers them into the same memory, and does not change its version."""
    model = adapt(base_model(dtype=torch.bfloat16))
    gradients(model)
    with torch.no_grad():
        before = model(IDS).logits
        for weight in trained(model):
            with torch.autograd._unsafe_preserve_version_counter(weight):
                weight.mul_(2)
        assert not torch.equal(model(IDS).logits, before)
    with torch.inference_mode():
        model(IDS)
    gradients(model)


def keep_products(_, operation, *arguments, **options):
    """Keep the results of products; a backward pass computes all else again."""
    keep = operation is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
def test_recomputed_layers_have_the_same_gradients(selective):
    expected = gradients(adapt(base_model()))
    model = adapt(base_model())
    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    chosen = {"context_fn": contexts} if selective else {}
    for module in model.modules():
        if isinstance(module, FastLinear):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False, **chosen)
    assert torch.equal(gradients(model), expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_a_compiled_layer_is_one_program_with_the_same_gradients():
    layer = next(it for it in adapt(base_model()).modules() if isinstance(it, FastLinear))
    program = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    rows = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(0))
    results = []
    for compute in (layer, program):
        layer.zero_grad()
        for row in rows:
            compute(row).square().sum().backward()
        results.append(torch.cat([weight.grad.flatten() for weight in trained(layer)]))
    assert difference(results[1], results[0]) < 1e-6


def test_hooks_on_adapter_halves_and_gradients_are_called():
    """ZeRO-3 gathers weights by the hooks of modules."""
    model = adapt(base_model())
    expected = gradients(model)
    layer = next(it for it in model.modules() if isinstance(it, FastLinear))
    seen, calls = [], []
    half, weight = layer.lora_A["default"], layer.lora_B["default"].weight
    hook = half.register_forward_hook(lambda *_: calls.append(1))
    assert difference(gradients(model), expected) < 1e-6
    hook.remove()
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    gradients(model)
    assert len(calls) == len(seen) == 2
    torch.testing.assert_close(seen[0] + seen[1], weight.grad)
