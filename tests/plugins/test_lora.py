"""lora: adapters equal to peft's, cheaper, and always saved whole."""

import json
import shutil
import tomllib
import warnings
from functools import partial

import pytest
import torch
from conftest import (
    chats,
    must_succeed,
    only_full,
    read_metrics,
    read_record,
    run_launch,
    run_plugsft,
    run_ranks,
    write_recipe,
)
from families import build, tiny_config
from launching import TRAIN, config, curve
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from small_models import IDS, adapt, loss_and_gradients, save_base, shake
from transformers import AutoModelForCausalLM, GPT2Config
from transformers import __version__ as transformers_version

from plugsft import PluginError, RecipeError
from plugsft.base.machine import look
from plugsft.export.quantized import add_adapters
from plugsft.model.load import ModelLoad
from plugsft.plugins.lora import Lora
from plugsft.registry.active import check
from plugsft.registry.load import resolve

# Of transformers: what peft still calls by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
# 5.17's AutoModel leaves them at random values.
READS_MODULES_TO_SAVE = Version(transformers_version) >= Version("5.18")


@pytest.fixture
def base(tmp_path):
    """Give `base(config, dtype, tied)`: the folder of a small model."""
    return partial(save_base, tmp_path / "base")


CASES = [
    ({}, {"target_modules": "all-linear"}),
    ({"rslora": True}, {"target_modules": "all-linear", "use_rslora": True}),
    ({"dora": True}, {"target_modules": "all-linear", "use_dora": True}),
    (
        {"targets": ["q_proj", "layers.1.mlp.up_proj", "embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "layers.1.mlp.up_proj", "embed_tokens", "lm_head"]},
    ),
    (
        {"modules_to_save": ["lm_head", "norm"]},
        # peft would train all modules whose names end in norm, layernorms too.
        {"target_modules": "all-linear", "modules_to_save": ["lm_head", "model.norm"]},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[0]) or "plain")
def test_losses_and_gradients_are_those_of_plain_peft(base, case):
    options, theirs = case
    folder = base()
    ours, _ = adapt(folder, r=4, alpha=6, **options)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    peft = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **theirs))
    shake(ours, peft)
    (loss, mine), (expected, yours) = loss_and_gradients(ours), loss_and_gradients(peft)
    assert mine.norm() > 0.1
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert float((mine - yours).norm() / yours.norm()) < 1e-5


@pytest.mark.parametrize("init", ["default", "gaussian", "orthogonal"])
def test_a_run_begins_with_the_model_as_it_is(base, init):
    folder = base()
    plain = AutoModelForCausalLM.from_pretrained(folder)
    ours, _ = adapt(folder, r=4, init=init)
    again, _ = adapt(folder, r=4, init=init)
    torch.testing.assert_close(ours(IDS).logits, plain(IDS).logits, rtol=0, atol=1e-6)
    assert loss_and_gradients(ours)[1].norm() > 0
    for parameter, other in zip(ours.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_adapters_are_the_same_where_weights_are_still_in_their_files(base):
    options = {"r": 4, "targets": ["q_proj", "embed_tokens"]}
    here, _ = adapt(base(), **options)
    there, _ = adapt(base(), empty=True, **options)
    assert any(parameter.is_meta for parameter in there.parameters())
    for (name, one), other in zip(here.named_parameters(), there.parameters(), strict=True):
        assert not one.requires_grad or torch.equal(one, other), name


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}])
def test_on_bfloat16_what_is_trained_is_float32(base, options):
    folder = base(dtype=torch.bfloat16)
    exact, _ = adapt(folder, r=4, **options)
    rough, _ = adapt(folder, torch.bfloat16, r=4, **options)
    shake(exact, rough)
    assert {parameter.dtype for parameter in rough.parameters() if parameter.requires_grad} == {
        torch.float32
    }
    (loss, expected), (about, found) = loss_and_gradients(exact), loss_and_gradients(rough)
    assert float(about) == pytest.approx(float(loss), rel=5e-3)
    assert float((found - expected).norm() / expected.norm()) < 0.05


def test_no_input_is_copied_into_float32(base):
    """peft keeps such a copy of the input of each layer for the backward pass."""
    folder = base(dtype=torch.bfloat16)
    ours, _ = adapt(folder, torch.bfloat16, r=4)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    peft = get_peft_model(plain, LoraConfig(r=4, target_modules="all-linear"))

    def copies(model):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, id):
            model(IDS)
        wide = [one for one in kept if one.dtype == torch.float32 and one.shape[-1] in (32, 48)]
        return len([one for one in wide if one.numel() >= IDS.numel() * 32])

    # Norms have some of their own.
    assert copies(peft) - copies(ours) >= 14


def test_gpt2_s_layers_are_of_another_kind(base):
    folder = base(config=GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4))
    ours, plugin = adapt(folder, r=4)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(
            plain,
            LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, target_modules="all-linear"),
        )
    ours.eval(), peft.eval()
    shake(ours, peft)
    torch.testing.assert_close(ours(IDS).logits, peft(IDS).logits, rtol=1e-4, atol=1e-5)
    assert "8 modules with adapters of rank 4 (c_attn, c_fc, c_proj)" in plugin.summary()


@pytest.mark.parametrize(
    ("tied", "options"),
    [
        (False, {}),
        (False, {"dora": True}),
        (False, {"targets": ["q_proj", "embed_tokens", "lm_head"]}),
        (True, {"modules_to_save": ["lm_head"]}),
        (True, {"modules_to_save": ["embed_tokens", "norm"]}),
    ],
)
def test_every_reader_finds_all_that_is_saved(base, tmp_path, monkeypatch, tied, options):
    base(tied=tied)
    monkeypatch.chdir(tmp_path)
    ours, _ = adapt("base", r=4, **options)
    shake(ours)
    ours.eval()
    expected = ours(IDS).logits.detach()
    # Given are, as in a run, the trained parameters, each once.
    trained = {
        name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad
    }
    (tmp_path / "adapters").mkdir()
    ours.save_pretrained(tmp_path / "adapters", state_dict=trained)
    monkeypatch.chdir("/")
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert float((plain(IDS).logits.detach() - expected).abs().max()) > 0.1
    peft = PeftModel.from_pretrained(plain, tmp_path / "adapters").eval()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    readers = [peft, add_adapters(whole, tmp_path / "adapters").get_base_model().eval()]
    if READS_MODULES_TO_SAVE or "modules_to_save" not in options:
        readers.append(AutoModelForCausalLM.from_pretrained(tmp_path / "adapters").eval())
    for reader in readers:
        torch.testing.assert_close(reader(IDS).logits, expected, rtol=0, atol=1e-6)


# Mamba's linear layers that its code does not call, as the summary names them.
MAMBA = {
    **dict.fromkeys(("mamba", "falcon_mamba"), "dt_proj, out_proj, x_proj"),
    **dict.fromkeys(("mamba2", "falcon_h1", "nemotron_h", "bamba"), "out_proj"),
    "jamba": "dt_proj",
}


@pytest.mark.parametrize(("family", "names"), MAMBA.items())
def test_all_linear_leaves_out_what_mamba_s_code_does_not_call(tmp_path, family, names):
    plain = build(family)
    plain.config.use_cache = False
    plain.save_pretrained(tmp_path / "base")
    ours, plugin = adapt(tmp_path / "base", r=2)
    assert f"; {names} left out: Mamba's code reads their weights" in plugin.summary()
    loss_and_gradients(ours)  # all that is trained has a gradient
    shake(ours)
    expected = ours.eval()(IDS).logits.detach()
    assert float((plain.eval()(IDS).logits - expected).detach().abs().max()) > 1e-3
    (tmp_path / "adapters").mkdir()
    ours.save_pretrained(tmp_path / "adapters")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "adapters").eval()
    peft = PeftModel.from_pretrained(plain, tmp_path / "adapters").eval()
    for reader in (read, peft, peft.merge_and_unload()):
        torch.testing.assert_close(reader(IDS).logits, expected, rtol=0, atol=1e-5)


def test_a_layer_that_peft_cannot_adapt_is_refused_by_its_name(base):
    folder = base(config=tiny_config("mamba2"))
    with pytest.raises(RecipeError, match=r"'out_proj' is incompatible .*; name other modules"):
        adapt(folder, targets=["in_proj", "out_proj"], r=2)


def test_a_name_on_the_hub_and_its_revision_are_kept(base):
    folder = base()
    plugin, load = Lora(), ModelLoad("some/model", {"revision": "abc"})
    wrapper = plugin.optimize_model(load)
    next(wrapper)
    with pytest.raises(StopIteration) as ended:
        wrapper.send(AutoModelForCausalLM.from_pretrained(folder))
    config = ended.value.value.peft_config["default"]
    assert (config.base_model_name_or_path, config.revision) == ("some/model", "abc")


def test_empty_or_missing_adapters_are_never_written(base, tmp_path):
    ours, _ = adapt(base(), r=4)
    whole = dict(ours.state_dict())
    name = next(name for name in whole if "lora_B" in name)
    for broken in ({name: torch.empty(0)}, {name: whole[name][:4]}):
        with pytest.raises(PluginError, match="1 of 28 weights of adapters could not be saved"):
            ours.save_pretrained(tmp_path, state_dict=whole | broken)
    del whole[name]
    with pytest.raises(PluginError, match="1 of 28 weights"):
        ours.save_pretrained(tmp_path, state_dict=whole)
    assert not (tmp_path / "adapter_model.safetensors").exists()


REFUSED = [
    ({"targets": ["q_prj"]}, "no module is named 'q_prj'; did you mean 'q_proj'?"),
    ({"targets": ["q_proj", "zzz"]}, "no module is named 'zzz'; linear layers: q_proj, k_proj,"),
    ({"targets": ["self_attn"]}, "self_attn is a LlamaAttention, which cannot have an adapter"),
    ({"targets": ["lm_head"]}, "share one weight in this model"),
    ({"targets": ["embed_tokens"]}, "share one weight in this model"),
    (
        {"modules_to_save": ["nrm"]},
        "modules_to_save: no module is named 'nrm'; did you mean 'norm'",
    ),
    ({"targets": ["q_proj"], "modules_to_save": ["q_proj"]}, "is also one of targets"),
    ({"modules_to_save": ["mlp"]}, "layers.0.mlp has submodules; name the submodules"),
    ({"init": "orthogonal", "r": 3}, "needs an even r; it is 3"),
    ({"r": 100_000}, "r: given 100000, and no target has more than 4096 dimensions"),
]


@pytest.mark.parametrize(("options", "says"), REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_loaded(tiny, options, says):
    recipe, active = resolve(tomllib.loads(tiny(plugins={"lora": options}).read_text()))
    with pytest.raises(RecipeError, match=r"plugins\.lora") as refused:
        check(active.attach(), recipe, look())
    [line] = refused.value.problems
    assert says in line


@pytest.mark.parametrize(
    ("tied", "options"),
    [
        (False, {"targets": ["lm_head"]}),
        (False, {"modules_to_save": ["lm_head"]}),
        (True, {"modules_to_save": ["embed_tokens"]}),
    ],
)
def test_a_head_that_is_trained_is_not_read_raw(tiny, base, tied, options):
    tables = tomllib.loads(tiny(plugins={"lora": options}).read_text())
    tables["model"] = {"path": str(base(tied=tied))}
    recipe, active = resolve(tables)
    check(active.attach(), recipe, look())
    tables["plugins"]["fused_loss"] = {}
    recipe, active = resolve(tables)
    with pytest.raises(RecipeError, match=r"\[plugins.fused_loss\] reads its frozen weight"):
        check(active.attach(), recipe, look())


# Real runs.

OPTIONS = {"r": 4, "alpha": 8, "dropout": 0.1}
RATE = {"learning_rate": 1e-2, "steps": 6}


@pytest.fixture
def recipe(tiny):
    return tiny(
        rows=chats(21),
        train=TRAIN | RATE,
        plugins={"lora": OPTIONS},
        eval={"every": 3, "split": "train[:5]"},
    )


def trained_model(run):
    """Load what a run left with plain peft; return its logits, and those of its base."""
    path = json.loads((run / "model/adapter_config.json").read_text())["base_model_name_or_path"]
    plain = AutoModelForCausalLM.from_pretrained(path)
    bare = plain(IDS).logits.detach()
    return PeftModel.from_pretrained(plain, run / "model").eval()(IDS).logits.detach(), bare


def test_a_run_s_adapters_answer_and_it_goes_on_as_if_it_had_not_been_stopped(recipe, tmp_path):
    whole, again = tmp_path / "whole", tmp_path / "again"
    result = must_succeed(recipe, f"output={whole}", "checkpoint.every=1", "checkpoint.keep=9")
    assert "plugin lora: 14 modules with adapters of rank 4" in result.stdout
    record = read_record(whole)
    assert record["model"]["trained_parameters"] == 5888
    found, bare = trained_model(whole)
    assert float((found - bare).abs().max()) > 0.1
    answer = must_succeed("chat", whole, "--ask", "hello", "--max-tokens", "3")
    assert answer.stderr == ""
    from_third = whole / "checkpoints/step-000003"
    must_succeed(recipe, f"output={again}", "--resume-from", from_third)
    rest = read_metrics(whole)[3:]
    assert [line["loss"] for line in read_metrics(again)] == [line["loss"] for line in rest]
    file = "model/adapter_model.safetensors"
    assert (again / file).read_bytes() == (whole / file).read_bytes()
    # With other options the same numbers would be other adapters.
    words = (recipe, f"output={tmp_path / 'other'}", "--resume-from", from_third)
    other = run_plugsft(*words, "plugins.lora.alpha=16", "plugins.lora.rslora=true")
    assert other.returncode == 2
    assert "plugins.lora.alpha was 8 and is 16" in other.stderr
    assert "plugins.lora.rslora was not set and is True" in other.stderr


@pytest.mark.parametrize("made", [True, False], ids=["scratch", "path"])
def test_adapters_go_on_upon_the_weights_that_they_began_with_only(recipe, tmp_path, made):
    run, base = tmp_path / "run", tmp_path / "base/model"
    if not made:
        words = (f"output={base.parent}", "train.steps=1", "--without=lora")
        must_succeed(recipe, *words)
        tables = tomllib.loads(recipe.read_text()) | {"model": {"path": str(base)}}
        write_recipe(recipe, tables)
    words = ("checkpoint.every=2", "checkpoint.keep=9")
    must_succeed(recipe, *words)
    trained = (run / "model/adapter_model.safetensors").read_bytes()
    for later in (run / "model", run / "checkpoints/step-000004", run / "checkpoints/step-000006"):
        shutil.rmtree(later)
    [file] = [*run.glob("scratch/model-*/model.safetensors")] or [base / "model.safetensors"]
    weights = load_file(file)
    save_file({name: 2 * values for name, values in weights.items()}, file, {"format": "pt"})
    result = run_plugsft(recipe, *words, "--resume")
    if not made:
        assert result.returncode == 2
        assert "the weights in the model's files changed" in result.stderr
        assert "plugsft export" not in result.stderr, "it needs the old files too"
        save_file(weights, file, {"format": "pt"})
        result = run_plugsft(recipe, *words, "--resume")
    # Weights from a seed are made again where their file is damaged.
    assert result.returncode == 0, result.stderr
    assert (run / "model/adapter_model.safetensors").read_bytes() == trained


def test_dropout_is_used_and_the_base_stays_as_it_is(recipe, tmp_path):
    lines = []
    for dropout in (0.0, 0.5):
        run = tmp_path / str(dropout)
        must_succeed(recipe, f"output={run}", f"plugins.lora.dropout={dropout}")
        lines.append([line["loss"] for line in read_metrics(run)])
    # The first loss is that of the model alone.
    assert lines[0][0] == lines[1][0] and lines[0][1:] != lines[1][1:]


def test_packed_and_on_two_ranks_the_same_is_learned(recipe, tmp_path):
    zero = "plugins.lora.dropout=0.0"
    must_succeed(recipe, f"output={tmp_path / 'plain'}", zero)
    packed = ("plugins.bfd_packing.capacity=96", "train.micro_batch=1")
    result = run_ranks(2, recipe, f"output={tmp_path / 'packed'}", zero, *packed)
    assert result.returncode == 0, result.stderr
    assert "packing checked: no document sees another" in result.stdout
    assert curve(tmp_path / "packed") == pytest.approx(curve(tmp_path / "plain"), rel=1e-5)


def test_layers_that_are_computed_again_learn_the_same(recipe, tmp_path):
    must_succeed(recipe, f"output={tmp_path / 'plain'}")
    words = (f"output={tmp_path / 'again'}", "plugins.gradient_checkpointing={}")
    must_succeed(recipe, *words)
    # With dropout, too.
    assert curve(tmp_path / "again") == pytest.approx(curve(tmp_path / "plain"), rel=1e-6)


ALL = ("bfd_packing.capacity=256", "fused_loss.chunk=7", "gradient_checkpointing.every=1")
"""Of which none changes what is learned."""


@only_full
@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
@pytest.mark.parametrize(
    "more, beside",
    [
        ({}, ALL),
        pytest.param({"modules_to_save": ["lm_head", "norm"], "dora": True}, (), marks=only_full),
    ],
)
def test_sharded_ranks_learn_and_save_what_one_process_does(recipe, tmp_path, kind, more, beside):
    tables = tomllib.loads(recipe.read_text())
    tables["plugins"] = {"lora": OPTIONS | {"dropout": 0.0} | more}
    tables["train"] |= {"steps": 20, "micro_batch": 1}
    recipe = write_recipe(recipe, tables)
    alone, run = tmp_path / "alone", tmp_path / kind
    must_succeed(recipe, f"output={alone}")
    words = (f"output={run}", *(f"plugins.{one}" for one in beside))
    code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe, *words)
    assert code == 0, err
    assert curve(run) == pytest.approx(curve(alone), rel=1e-5)
    (found, bare), (expected, _) = trained_model(run), trained_model(alone)
    assert float((expected - bare).abs().max()) > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
