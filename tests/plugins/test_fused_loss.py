"""fused_loss: the same loss and gradients without the logits of a micro-batch."""

import gc
import json
import os
import subprocess
import sys
import textwrap
import tomllib
from copy import deepcopy
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, chats, must_succeed, only_full, read_metrics, run_launch, run_ranks
from families import SMALL, TIED
from launching import config
from peft import LoraConfig, get_peft_model
from plugin_packages import activate, install
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    Qwen3Config,
)

from plugsft import RecipeError, testing
from plugsft.base.machine import look
from plugsft.model.defaults import ModelDefaults
from plugsft.model.fused_head import LogitTransform, Positions, fused_loss
from plugsft.plugins.bfd_packing.attention import attend_per_document
from plugsft.plugins.bfd_packing.documents import documents_of
from plugsft.plugins.fused_loss import FusedLoss
from plugsft.plugins.fused_loss.loss import IGNORED, head_of, logits_of
from plugsft.registry.active import check
from plugsft.registry.load import resolve

# peft 0.21 asks the model for an attribute that transformers 5.23 calls otherwise.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
VOCAB = 97
CUT = find_spec("cut_cross_entropy")
MODELS = {
    "llama": LlamaConfig(**SMALL),
    "llama, tied": LlamaConfig(**TIED),
    "qwen3": Qwen3Config(**TIED),
    "gemma3": Gemma3TextConfig(**TIED, layer_types=None),
    # Logits of these are far from a straight line.
    "gemma2": Gemma2Config(**TIED, final_logit_softcapping=1.7, attn_logit_softcapping=50.0),
    "granite": GraniteConfig(**SMALL, logits_scaling=0.3),
    "cohere2": Cohere2Config(**TIED, logit_scale=3.0),
    "phi, with a bias": PhiConfig(**SMALL),
}


def make(config, attention="eager", dtype=torch.float32):
    attend_per_document()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        deepcopy(config), attn_implementation=attention, dtype=dtype
    )
    # Larger weights, and a bias that is something: logits that differ.
    for parameter in model.parameters():
        parameter.data *= 3
    bias = model.get_output_embeddings().bias
    if bias is not None:
        torch.nn.init.normal_(bias)
    return model


def padded(rows=3, length=19, share=0.6):
    torch.manual_seed(1)
    ids = torch.randint(VOCAB, (rows, length))
    attention = torch.arange(length) < torch.tensor([length, length // 2, 3])[:rows, None]
    labels = ids.where(attention & (torch.rand(ids.shape) < share), IGNORED)
    return {"input_ids": ids, "attention_mask": attention.long(), "labels": labels}


def packed(lengths=(13, 1, 22, 2)):
    torch.manual_seed(2)
    ids = torch.randint(VOCAB, (1, sum(lengths)))
    labels = ids.where(torch.rand(ids.shape) < 0.6, IGNORED)
    labels[0, np.cumsum((0, *lengths[:-1]))] = IGNORED
    return {"input_ids": ids, "labels": labels, **documents_of(np.array(lengths))}


def stepped(plugin, model, batch, total=7):
    """Return the loss and every gradient."""
    model.zero_grad()
    loss = plugin.token_nll(model=model, batch=batch, summed=True) / total
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {name: gradient.clone() for name, gradient in found.items()}


def fused(model, **options):
    plugin = FusedLoss(**options)
    next(plugin.add_columns(SimpleNamespace(module=model)))
    return plugin


def weighed(plugin, model, batch):
    """Return the gradients of losses that count differently, and the losses."""
    model.zero_grad()
    losses = plugin.token_nll(model=model, batch=batch, summed=False)
    (losses * torch.linspace(-1, 2, len(losses))).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses.detach(), {name: gradient.clone() for name, gradient in found.items()}


def assert_equal(model, batch, plugin, tolerance=1e-5):
    theirs, expected = stepped(ModelDefaults(), model, batch)
    ours, found = stepped(plugin, model, batch)
    assert float(ours) == pytest.approx(float(theirs), rel=tolerance, abs=1e-9)
    assert set(found) == set(expected)
    with torch.no_grad():
        likeliest = logits_of(model, batch).argmax(2)
    hits = (likeliest[:, :-1] == batch["labels"][:, 1:]).sum()
    counted = {} if plugin.package else {"mean_token_accuracy": hits}
    assert plugin.loss.take_hits() == counted
    for name, gradient in found.items():
        size = expected[name].abs().max()
        assert (gradient - expected[name]).abs().max() <= tolerance * size + 1e-9, name


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_are_the_plain_ones(name):
    model = make(MODELS[name])
    plugin = fused(model, chunk=7)
    assert model.training and "proved on 16 tokens" in plugin.summary()
    assert_equal(model, padded(), plugin)
    assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("frozen", [False, True])
def test_each_position_may_count_differently(name, frozen):
    model, batch = make(MODELS[name]), padded()
    plugin = fused(model, chunk=7)
    for parameter in model.get_output_embeddings().parameters():
        parameter.requires_grad_(not frozen)
    (theirs, expected), (ours, found) = (
        weighed(one, model, batch) for one in (ModelDefaults(), plugin)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert set(found) == set(expected)
    for key, gradient in found.items():
        assert (gradient - expected[key]).abs().max() <= 1e-5 * expected[key].abs().max(), key


@pytest.mark.parametrize("name", ["llama, tied", "qwen3", "gemma2", "gemma3"])
def test_of_packed_rows_too(name):
    model = make(MODELS[name], attend_per_document())
    assert_equal(model, packed(), fused(model, chunk=7))


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_whatever_the_parts(chunk):
    model = make(MODELS["gemma2"])
    assert_equal(model, padded(), fused(model, chunk=chunk))


@pytest.mark.parametrize("trained", [0, 1])
def test_with_nothing_to_learn_and_with_one_token(trained):
    model = make(MODELS["llama, tied"])
    batch = padded(share=0)
    batch["labels"][1, 4] = 5 if trained else IGNORED
    # Its first token is foretold by nothing, and no target.
    batch["labels"][0, 0] = 3
    assert_equal(model, batch, fused(model))


def test_the_transform_of_logits_is_read_from_the_model():
    models = {name: make(config) for name, config in MODELS.items()}
    found = {name: [*fused(model).loss.transforms.values()] for name, model in models.items()}
    found = {name: transform for name, [transform] in found.items()}
    assert found["gemma2"] == LogitTransform(cap=1.7)
    assert found["cohere2"] == LogitTransform(slope=3.0)
    assert found["granite"].slope == pytest.approx(1 / 0.3, rel=1e-6)
    assert found["llama"] == found["gemma3"] == found["phi, with a bias"] == LogitTransform()
    capped = LogitTransform(0.25, 30.0)
    assert LogitTransform.fit(capped.apply(torch.tensor(LogitTransform.PROBES))) == capped


def lora(model, **options):
    config = LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    return get_peft_model(model, config)


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gemma2", "phi, with a bias"])
def test_a_frozen_head_gets_no_gradient_at_all(name):
    model = lora(make(MODELS[name]), target_modules=["q_proj", "v_proj"])
    plugin = fused(model, chunk=7)
    assert_equal(model, padded(), plugin)
    widest = Widest()
    with widest:
        stepped(plugin, model, padded())
    # Nor is there a place for one.
    shape = model.get_output_embeddings().weight.shape
    assert tuple(shape) not in widest.made


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_adapters_on_the_head_are_refused(options):
    model = lora(make(MODELS["llama"]), **options)
    with pytest.raises(RecipeError, match="the loss would read only the weight inside"):
        fused(model)


class Widest(TorchDispatchMode):
    """Notes the shapes of all that is made, and what waits for a device."""

    def __init__(self):
        super().__init__()
        self.made, self.called = set(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.called.append(function.overloadpacket.__name__)
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, torch.Tensor) and not function.is_view:
                self.made.add(tuple(one.shape))
        return made


def test_another_model_s_head_is_read_for_itself():
    """Such as a reference's: its cap may be another."""
    model, reference = make(MODELS["gemma2"]), make(MODELS["granite"])
    plugin, batch = fused(model, chunk=7), padded()
    stepped(plugin, model, batch)
    plugin.loss.take_hits()
    with torch.no_grad():
        ours = plugin.token_nll(reference, batch, summed=False)
        theirs = ModelDefaults().token_nll(reference, batch, summed=False)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not plugin.loss.take_hits()
    assert [one.cap for one in plugin.loss.transforms.values()] == [1.7, None]
    assert_equal(model, batch, plugin)


def test_no_logits_of_all_positions_ever_exist():
    model, batch = make(MODELS["gemma2"]), padded()
    trained = int((batch["labels"][:, 1:] != IGNORED).sum())
    plugin, seen, plain = fused(model, chunk=4), Widest(), Widest()
    with seen:
        stepped(plugin, model, batch)
    with plain:
        stepped(ModelDefaults(), model, batch)

    def rows(shapes):
        wide = {shape for shape in shapes if len(shape) > 1 and shape[-1] == VOCAB}
        return max(int(np.prod(shape[:-1])) for shape in wide)

    assert rows(plain.made) >= batch["input_ids"].numel() - 3
    assert rows(seen.made) == 4 < trained
    # One wait for the device in a micro-batch, and none in a part.
    waits = [name for name in seen.called if name in ("nonzero", "_local_scalar_dense", "item")]
    assert waits == ["nonzero"]


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi, with a bias"])
def test_bfloat16_is_as_near_to_float32_as_the_plain_loss_is(name):
    exact, rounded = make(MODELS[name]), make(MODELS[name], dtype=torch.bfloat16)
    exact.load_state_dict({key: value.float() for key, value in rounded.state_dict().items()})
    batch = padded()
    true_loss, true = stepped(ModelDefaults(), exact, batch)

    def off(plugin):
        loss, found = stepped(plugin, rounded, batch)
        assert all(gradient.dtype == torch.bfloat16 for gradient in found.values())
        errors = [float((found[key].float() - true[key]).norm() / true[key].norm()) for key in true]
        return abs(float(loss / true_loss) - 1), float(np.mean(errors))

    (loss, gradient), (plain_loss, plain_gradient) = (
        off(one) for one in (fused(rounded, chunk=5), ModelDefaults())
    )
    assert gradient <= 1.1 * plain_gradient and loss <= plain_loss + 1e-3


def test_the_heads_gradient_is_summed_up_in_float32():
    torch.manual_seed(0)
    hidden, targets = torch.rand(400, 8).bfloat16(), torch.randint(20, (400,))
    weight = torch.randn(20, 8).bfloat16().requires_grad_()
    exact = weight.detach().double().requires_grad_()
    fused_loss(
        Positions(hidden, weight, None, targets, LogitTransform(), 1, torch.bfloat16), summed=True
    ).backward()
    logits = hidden.double() @ exact.T
    torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
    assert (weight.grad - exact.grad).abs().max() <= 0.006 * exact.grad.abs().max()


def test_autocast_computes_in_its_type():
    model, batch = make(MODELS["llama"]), padded()
    plugin = fused(model, chunk=5)
    true_loss, true = stepped(ModelDefaults(), model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss, found = stepped(plugin, model, batch)
    assert found["lm_head.weight"].dtype == torch.float32 and not plugin.loss.exact
    assert float(loss) == pytest.approx(float(true_loss), rel=1e-2)
    off = (found["lm_head.weight"] - true["lm_head.weight"]).norm() / true["lm_head.weight"].norm()
    assert 1e-6 < off < 0.02


def test_without_gradients_nothing_is_computed_for_them():
    model, batch = make(MODELS["gemma2"]), padded()
    plugin, widest = fused(model, chunk=4), Widest()
    with torch.no_grad():
        with widest:
            loss = plugin.token_nll(model, batch, summed=True)
        plain = ModelDefaults().token_nll(model, batch, summed=True)
    assert float(loss) == pytest.approx(float(plain), rel=1e-5)
    assert tuple(model.get_output_embeddings().weight.shape) not in widest.made


def test_a_freed_model_is_not_mistaken_for_the_next_one_at_its_address():
    plugin = fused(make(MODELS["llama"]))
    for number in range(8):
        config = Gemma2Config(**TIED, final_logit_softcapping=0.5 + number)
        model, batch = make(config), padded()
        with torch.no_grad():
            loss = plugin.token_nll(model, batch, summed=True)
            plain = ModelDefaults().token_nll(model, batch, summed=True)
        assert float(loss) == pytest.approx(float(plain), rel=1e-5), number
        del model
        gc.collect()
        assert len(plugin.loss.transforms) <= 1, (
            "what is known about a freed model can be taken for another's"
        )


class Bent(LlamaForCausalLM):
    """Does to its logits what no one foresees."""

    bend = staticmethod(lambda logits: logits)

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = self.bend(output.logits)
        return output


@pytest.mark.parametrize(
    "bend",
    [
        lambda logits: logits + 0.5,
        lambda logits: logits.clamp(-5, 5),
        lambda logits: -logits,
        lambda logits: logits[..., :5],
        lambda logits: logits * torch.linspace(0.5, 1, logits.shape[-1]),
    ],
)
def test_an_unknown_transform_of_logits_is_refused(bend, monkeypatch):
    monkeypatch.setattr(Bent, "bend", staticmethod(bend))
    model = Bent(deepcopy(MODELS["llama"]))
    with pytest.raises(RecipeError, match="unsupported transform of its logits"):
        fused(model)
    assert model.training and "forward" not in vars(head_of(model))


def test_a_head_that_does_not_get_every_token_is_refused(monkeypatch):
    model = make(MODELS["llama"])
    monkeypatch.setattr(
        type(model.model), "forward", halved(type(model.model).forward), raising=True
    )
    with pytest.raises(RecipeError, match="one hidden state for each token"):
        fused(model)


def halved(forward):
    def shorter(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state[:, :-1]
        return output

    return shorter


def test_a_loss_that_is_another_is_refused():
    model = make(MODELS["llama"])
    # The head's own forward is what its weight is not.
    model.lm_head.register_forward_hook(
        lambda _module, inputs, output: output * 2 if output.shape[-1] == VOCAB else output
    )
    with pytest.raises(RecipeError, match="but the plain loss is"):
        fused(model)


# Recipes.


def refuse(tiny, **tables):
    recipe, active = resolve(tomllib.loads(tiny(**tables).read_text()))
    active.attach()
    with pytest.raises(RecipeError) as refused:
        check(active, recipe, look())
    return str(refused.value)


def options(**given):
    return {"plugins": {"fused_loss": given}}


def test_a_kernel_that_cannot_run_is_refused_before_anything_is_loaded(tiny, tmp_path, monkeypatch):
    assert "cut_cross_entropy is not installed: pip install" in refuse(
        tiny, **options(kernel="cut_cross_entropy")
    )
    write_cut_cross_entropy(tmp_path / "pypi", CUT_OF_PYPI, monkeypatch)
    refusal = refuse(tiny, **options(kernel="cut_cross_entropy"))
    assert "this release of cut_cross_entropy sums gradients in bfloat16" in refusal
    assert 'pip install "cut-cross-entropy @ git+https://' in refusal
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.cuda, "is_available", lambda: True)
        assert "sums gradients in bfloat16" in chosen_kernel(tiny)
    write_cut_cross_entropy(tmp_path / "git", CUT_OF_GIT, monkeypatch)
    if not torch.cuda.is_available():
        assert "needs a GPU" in refuse(tiny, **options(kernel="cut_cross_entropy"))
        assert chosen_kernel(tiny) == "torch kernel (cut_cross_entropy needs a GPU)"


CUT_OF_PYPI = """linear_cross_entropy(
    e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False,
    filter_eps="high", impl="cce",
)"""
"""The signature in release 25.1.1."""
CUT_OF_GIT = """linear_cross_entropy(
    e, c, targets, bias=None, ignore_index=-100, softcap=None, reduction="mean", shift=0,
    return_lse=False, filter_eps="auto", accum_e_fp32=False, accum_c_fp32=False,
    filter_e_grad=True, filter_c_grad=True, impl="cce", vocab_parallel_options=None,
)"""
"""The signature in commit d42911f of github.com/apple/ml-cross-entropy."""


def write_cut_cross_entropy(folder, signature, monkeypatch):
    """Write the package with a signature; it computes by torch, in the dtype of its gradients."""
    folder.mkdir()
    code = f"""
        import torch

        def {textwrap.indent(signature, " " * 8).strip()}:
            dtype = torch.float32 if accum_e_fp32 and accum_c_fp32 else torch.bfloat16
            logits = torch.nn.functional.linear(e.to(dtype), c.to(dtype), bias)
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            return torch.nn.functional.cross_entropy(logits, targets, reduction=reduction)
    """
    (folder / "cut_cross_entropy.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)  # and forget it after the test
    del sys.modules["cut_cross_entropy"]


def chosen_kernel(tiny):
    """Return the kernel that `auto` chooses."""
    recipe, active = resolve(tomllib.loads(tiny(**options()).read_text()))
    active.attach()
    check(active, recipe, look())
    [plugin] = [plugin for plugin in active.plugins.values() if isinstance(plugin, FusedLoss)]
    return plugin.chosen


@pytest.mark.parametrize("name", ["gemma2", "phi, with a bias"])
def test_cut_cross_entropy_sums_gradients_in_float32_and_takes_a_bias(name, tmp_path, monkeypatch):
    write_cut_cross_entropy(tmp_path / "git", CUT_OF_GIT, monkeypatch)
    model = make(MODELS[name])
    plugin = FusedLoss()
    plugin.package = "cut_cross_entropy"
    next(plugin.add_columns(SimpleNamespace(module=model)))
    assert_equal(model, padded(), plugin)


def test_auto_says_why_it_is_torch(tiny):
    said = testing.summary("fused_loss")
    assert said.startswith("torch kernel (cut_cross_entropy needs a GPU)")
    assert "proved on 16 tokens" in said


def test_it_keeps_gradients():
    testing.keeps_gradients("fused_loss", {"chunk": 5})
    packed = {"plugins": {"fused_loss": {}, "bfd_packing": {}}, "train": {"micro_batch": 1}}
    testing.keeps_gradients("fused_loss", tables=packed)


TRAIN = {"batch_size": 8, "micro_batch": 2, "steps": 5, "learning_rate": 1e-3, "max_grad_norm": 0.5}


def curve(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        line[name] for line in lines for name in ("loss", "grad_norm", "eval_loss") if name in line
    ]


def test_ranks_learn_what_one_plain_process_learns(tiny, tmp_path):
    recipe = tiny(rows=chats(21), train=TRAIN, eval={"every": 5, "split": "train[:5]"})
    must_succeed(recipe, f"output={tmp_path / 'plain'}")
    run = tmp_path / "two"
    result = run_ranks(2, recipe, f"output={run}", "plugins.fused_loss.chunk=9")
    assert result.returncode == 0, result.stderr
    assert len(read_metrics(run)) == 5 and len(curve(run)) == 11
    assert curve(run) == pytest.approx(curve(tmp_path / "plain"), rel=1e-5)


LOOKS = """
    from torch.distributed.tensor import DTensor

    @plugin(after=["fused_loss"])
    class Looks:
        @hookimpl(wrapper=True)
        def add_columns(self, model):
            tokens = yield
            model = model.module
            whole = [name for name, one in model.named_parameters() if not isinstance(one, DTensor)]
            if hasattr(model, "reshard") and whole:
                raise PluginError(f"{whole} are whole")
            return tokens
"""


@only_full
@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
def test_ranks_that_share_the_weights_learn_the_same(tiny, tmp_path, name, monkeypatch):
    activate(install(tmp_path / "site", looks=LOOKS), monkeypatch)
    recipe = tiny(rows=chats(21), train=TRAIN, eval={"every": 5, "split": "train[:5]"})
    must_succeed(recipe, f"output={tmp_path / 'plain'}")
    run = tmp_path / name
    words = (
        "-m",
        "plugsft",
        recipe,
        f"output={run}",
        "plugins.fused_loss.chunk=9",
        "plugins.looks={}",
    )
    code, out, err = run_launch(*config(name), *words)
    assert code == 0, err
    assert "Warning" not in out + err
    assert len(curve(run)) == 11
    assert curve(run) == pytest.approx(curve(tmp_path / "plain"), rel=1e-5)


INTERPRETED = """
import sys
import triton_interpreter, itertools, torch
from functools import partial
from plugsft.model.fused_head import LogitTransform, Positions, fused_loss
from plugsft.plugins.fused_loss.loss import call_package

torch.manual_seed(0)
# Where the vocabulary is no multiple of 128, cut_cross_entropy's soft cap adds entries to it.
hidden, weight, bias = torch.randn(9, 16), torch.randn(128, 16), torch.randn(128)
targets = torch.randint(128, (9,))
transforms = (LogitTransform(), LogitTransform(0.5, 3.0))
for transform, frozen in itertools.product(transforms, (False, True)):
    found = []
    ours = lambda *given: fused_loss(Positions(*given[:-1], 4, torch.float32), given[-1])
    for kernel in (partial(call_package, sys.argv[1]), ours):
        given = [one.clone().requires_grad_() for one in (hidden, weight, bias)]
        for one in given[1:] if frozen else []:
            one.requires_grad_(False)
        loss = kernel(*given, targets, transform, True)
        loss.backward()
        found.append([loss, *(one.grad for one in given if one.requires_grad)])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
print("equal")
"""


@only_full
@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [
        "liger",
        pytest.param("cut_cross_entropy", marks=pytest.mark.skipif(not CUT, reason="no package")),
    ],
)
def test_kernels_of_other_packages_give_the_same(kernel):
    env = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-c", INTERPRETED, kernel]
    result = subprocess.run(
        words, env={**os.environ, **env, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert result.stdout.strip().endswith("equal"), result.stderr
