"""fp8: products of rounded values, as torchao computes them, in place of linear layers'."""

import re
import tomllib

import pytest
import torch
from conftest import (
    chats,
    must_succeed,
    only_full,
    read_metrics,
    run_launch,
    run_plugsft,
    run_ranks,
    write_recipe,
)
from launching import TRAIN, config, curve
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor
from torch.nn import Linear
from transformers import AutoModelForCausalLM, LlamaConfig

from plugsft import RecipeError
from plugsft.base.machine import look
from plugsft.plugins.fp8 import Fp8
from plugsft.plugins.fp8.convert import convert_layers, float8_layer
from plugsft.registry.active import check
from plugsft.registry.load import resolve

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPTIONS = {"emulate": True, "keep": 0, "min_size": 16}


def rounded(values, kind, dim=None):
    """Round to float8 with a scale for all values, or for each vector along `dim`."""
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = torch.finfo(kind).max / largest.double()
    if dim is not None:
        scale = 2 ** scale.log2().floor()
    return ((values * scale.float()).to(kind).double() / scale).float()


def expected(layer, x, gradient, scaling):
    """Return output and gradients of a layer whose operands are rounded."""
    weight, bias = layer.weight.detach(), layer.bias.detach()
    if scaling == "tensorwise":
        x, weight, gradient = rounded(x, E4M3), rounded(weight, E4M3), rounded(gradient, E5M2)
        return x @ weight.T + bias, gradient @ weight, gradient.T @ x
    return (
        rounded(x, E4M3, 1) @ rounded(weight, E4M3, 1).T + bias,
        rounded(gradient, E4M3, 1) @ rounded(weight, E4M3, 0),
        rounded(gradient, E4M3, 0).T @ rounded(x, E4M3, 0),
    )


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_a_layer_multiplies_rounded_values(scaling):
    torch.manual_seed(0)
    layer = Linear(48, 32)
    # 21 rows are no multiple of 16.
    x, gradient = torch.randn(21, 48) * torch.rand(21, 1) * 3, torch.randn(21, 32) / 50
    wanted = expected(layer, x, gradient, scaling)
    converted = float8_layer(layer, scaling, emulate=True)
    inputs = x.clone().requires_grad_()
    output = converted(inputs)
    output.backward(gradient)
    results = (output.detach(), inputs.grad, layer.weight.grad)
    for value, right in zip(results, wanted, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-6)
    exact = torch.nn.functional.linear(x, layer.weight, layer.bias).detach()
    assert 0.005 < float((output.detach() - exact).norm() / exact.norm()) < 0.05
    assert torch.equal(layer.bias.grad, gradient.sum(0))


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_a_layer_multiplies_in_float8_unless_it_is_emulated(scaling):
    """A GPU refuses rows whose count is no multiple of 16, unless they are padded."""
    layer = float8_layer(Linear(48, 32).eval(), scaling, emulate=False)
    assert not layer.config.emulate and layer.config.pad_inner_dim and not layer.training


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_a_compiled_layer_is_one_program_for_all_lengths(scaling):
    torch.manual_seed(0)
    layer = float8_layer(Linear(48, 32), scaling, emulate=True)
    programs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=programs, fullgraph=True, dynamic=True)
    for length in (21, 40, 57):
        x, gradients = torch.randn(length, 48), []
        for compute in (layer, compiled):
            layer.zero_grad()
            output = compute(x)
            output.square().sum().backward()
            gradients.append(layer.weight.grad.clone())
        torch.testing.assert_close(output, layer(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    assert programs.frame_count == 1


@pytest.mark.parametrize("scaling, kept", [("rowwise", True), ("tensorwise", False)])
def test_compiled_rowwise_layers_keep_the_casts_of_uncompiled_ones(scaling, kept):
    with inductor.patch(emulate_precision_casts=False):
        convert_layers(Fp8(scaling=scaling, min_size=16, emulate=True), model_of())
        assert inductor.emulate_precision_casts is kept


def model_of(layers=4, **sizes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128} | sizes
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    settings = LlamaConfig(vocab_size=90, num_hidden_layers=layers, **heads, **sizes)
    return AutoModelForCausalLM.from_config(settings)


def test_inner_layers_that_are_large_enough_are_converted():
    model = model_of(intermediate_size=120)
    before = model.state_dict()
    result = convert_layers(Fp8(min_size=64, emulate=True), model)
    assert result == (
        "4 of 29 linear layers multiply in float8 (rowwise, emulated); not converted: "
        "14 in the first and last layer, 4 with fewer than 64 inputs or outputs, "
        "6 whose size is no multiple of 16, 1 outside the layers (head)"
    )
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    converted = [name for name, kind in kinds.items() if kind == "Float8Linear"]
    assert converted == [
        f"model.layers.{number}.self_attn.{half}_proj" for number in (1, 2) for half in "qo"
    ]
    assert model.lm_head.__class__ is Linear
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


# Refusals.


def refused(tiny, options=OPTIONS, **tables):
    plugins = {"fp8": options} | tables.pop("plugins", {})
    recipe, active = resolve(tomllib.loads(tiny(plugins=plugins, **tables).read_text()))
    with pytest.raises(RecipeError) as error:
        check(active.attach(), recipe, look())
    return "\n".join(error.value.problems)


@pytest.mark.parametrize(
    ("options", "plugins", "says"),
    [
        ({}, {}, "float8 needs a GPU, and there is none; set emulate = true"),
        (OPTIONS, {"lora": {}}, r"would round the frozen weights of \[plugins.lora\] again"),
        (
            OPTIONS | {"scaling": "tensorwise"},
            {"bfd_packing": {}},
            'documents are not apart; set scaling = "rowwise", or remove .plugins.bfd_packing',
        ),
        (OPTIONS, {"dpo": {}}, r"the reference of \[plugins.dpo\] would multiply in float32"),
    ],
)
def test_what_cannot_be_is_refused(tiny, options, plugins, says):
    assert re.search(says, refused(tiny, options, plugins=plugins))


def test_a_model_without_a_layer_to_convert_is_refused(tiny, tmp_path):
    model_of().save_pretrained(tmp_path / "base")
    options = {"emulate": True, "keep": 2, "min_size": 64}
    tables = tomllib.loads(tiny(plugins={"fp8": options}).read_text())
    recipe, active = resolve(tables | {"model": {"path": str(tmp_path / "base")}})
    with pytest.raises(RecipeError) as error:
        check(active.attach(), recipe, look())
    [message] = error.value.problems
    assert "no layer would multiply in float8: 0 of 29 linear layers" in message
    assert "lower min_size or keep, or remove [plugins.fp8]" in message


def test_gpus_without_float8_and_other_dtypes_are_refused(tiny, monkeypatch):
    """A GPU is named, so three questions to torch are answered for it."""
    options = {"keep": 0, "min_size": 16}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    message = refused(tiny, options, device="auto")
    assert "compute capability 8.9 (Ada, Hopper) or later, and NVIDIA A100 has 8.0" in message
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert 'set model.dtype = "bfloat16"' in refused(tiny, options, device="auto")


def test_zero3_is_refused(tiny, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert "launch with recipes/accelerate/fsdp2.yaml" in refused(tiny)


# Real runs.


@pytest.fixture
def recipe(tiny):
    return tiny(rows=chats(21), train=TRAIN, plugins={"fp8": OPTIONS})


ALL = (
    "plugins.bfd_packing.capacity=256",
    "plugins.fused_loss.chunk=7",
    "plugins.gradient_checkpointing.every=1",
)


def test_a_run_learns_as_without_it_resumes_and_saves_plain_weights(recipe, tmp_path):
    run, again, exact = tmp_path / "run", tmp_path / "again", tmp_path / "exact"
    result = must_succeed(recipe, f"output={run}", "checkpoint.every=1", "checkpoint.keep=9")
    assert "14 of 15 linear layers multiply in float8 (rowwise, emulated)" in result.stdout
    assert result.stderr == ""
    tables = tomllib.loads(recipe.read_text())
    del tables["plugins"]
    must_succeed(write_recipe(tmp_path / "exact.toml", tables), f"output={exact}")
    assert curve(run) == pytest.approx(curve(exact), rel=0.01)
    assert curve(run) != pytest.approx(curve(exact), rel=1e-6)
    saved, plain = (load_file(folder / "model/model.safetensors") for folder in (run, exact))
    assert {name: (t.dtype, t.shape) for name, t in saved.items()} == {
        name: (t.dtype, t.shape) for name, t in plain.items()
    }
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert {type(module).__name__ for module in model.modules() if isinstance(module, Linear)} == {
        "Linear"
    }
    words = ("--resume-from", run / "checkpoints/step-000003")
    must_succeed(recipe, f"output={again}", *words)
    assert [line["loss"] for line in read_metrics(again)] == [
        line["loss"] for line in read_metrics(run)[3:]
    ]
    other = run_plugsft(
        recipe, f"output={tmp_path / 'other'}", *words, "plugins.fp8.scaling=tensorwise"
    )
    assert other.returncode == 2
    assert "plugins.fp8.scaling was not set and is" in other.stderr


def test_packed_recomputed_and_on_two_ranks_the_same_is_learned(recipe, tmp_path):
    must_succeed(recipe, f"output={tmp_path / 'plain'}")
    words = (recipe, f"output={tmp_path / 'all'}", *ALL, "train.micro_batch=1")
    result = run_ranks(2, *words)
    assert result.returncode == 0, result.stderr
    assert "packing checked: no document sees another" in result.stdout
    assert curve(tmp_path / "all") == pytest.approx(curve(tmp_path / "plain"), rel=1e-3)


@pytest.mark.slow
@only_full
def test_sharded_ranks_learn_the_same(recipe, tmp_path):
    must_succeed(recipe, f"output={tmp_path / 'plain'}")
    words = (f"output={tmp_path / 'fsdp2'}", *ALL, "train.micro_batch=1")
    code, _, err = run_launch(*config("fsdp2"), "-m", "plugsft", recipe, *words)
    assert code == 0, err
    assert curve(tmp_path / "fsdp2") == pytest.approx(curve(tmp_path / "plain"), rel=1e-3)
