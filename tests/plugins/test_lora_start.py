"""lora: adapters that start from the base's weights, and are saved for the unchanged base."""

import json
import math
import tomllib

import pytest
import torch
from conftest import (
    chats,
    only_full,
    read_metrics,
    run_launch,
    run_plugsft,
    run_ranks,
    write_jsonl,
    write_recipe,
)
from peft import LoraConfig, PeftModel, get_peft_model
from test_dpo_reference import pairs
from test_launch import TRAIN, config, curve
from test_lora import IDS, adapt, base, gradients, shake, trained_model  # noqa: F401  # a fixture
from transformers import AutoModelForCausalLM, GPT2Config

from plugsft import PluginError
from plugsft.ranks.plugin_state import copy_state

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
METHODS = ["pissa", "olora"]


def products(model):
    """The product of the halves of each adapter."""
    layers = [layer for layer in model.modules() if getattr(layer, "lora_A", None)]
    return [
        layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        for layer in layers
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rslora", [False, True])
def test_the_base_stays_and_adapters_start_and_learn_as_peft_s(base, tmp_path, method, rslora):  # noqa: F811
    folder = base()
    plain = AutoModelForCausalLM.from_pretrained(folder)
    ours, _ = adapt(folder, r=4, alpha=6, init=method, rslora=rslora)
    theirs = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=6,
        target_modules="all-linear",
        init_lora_weights=method,
        use_rslora=rslora,
    )
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), theirs)
    for mine, yours in zip(products(ours), products(peft), strict=True):
        torch.testing.assert_close(mine, yours, rtol=0, atol=1e-5)
    loss, first = gradients(ours)
    expected = plain(IDS, labels=IDS).loss
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    assert float((first.norm() - gradients(peft)[1].norm()) / first.norm()) < 1e-4
    for name, weight in plain.state_dict().items():
        name = name.replace("_proj", "_proj.base_layer")
        assert torch.equal(weight, ours.get_base_model().state_dict()[name])
    with ours.disable_adapter():
        assert torch.equal(ours(IDS).logits, plain(IDS).logits)
    # The saved difference fits the base as it is.
    shake(ours)
    logits = ours.eval()(IDS).logits.detach()
    trained = {name: one for name, one in ours.named_parameters() if one.requires_grad}
    ours.save_pretrained(tmp_path, state_dict=trained)
    saved = PeftModel.from_pretrained(plain, tmp_path).eval()
    assert saved.peft_config["default"].r == 8
    torch.testing.assert_close(saved(IDS).logits, logits, rtol=0, atol=1e-5)
    with saved.disable_adapter():
        assert float((saved(IDS).logits - logits).abs().max()) > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_gpt2_s_layers_are_turned(base, method):  # noqa: F811
    folder = base(config=GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4))
    ours, _ = adapt(folder, r=4, init=method)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(ours.eval()(IDS).logits, plain.eval()(IDS).logits, rtol=0, atol=1e-5)
    assert all(product.norm() > 0.01 for product in products(ours))


@pytest.mark.parametrize("method", METHODS)
def test_in_bfloat16_the_first_loss_is_the_base_s_too(base, method):  # noqa: F811
    folder = base(dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ours, _ = adapt(folder, torch.bfloat16, r=4, init=method)
    loss, expected = (float(model(IDS, labels=IDS).loss.detach()) for model in (ours, plain))
    assert loss == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_s_copies_are_restored(base):  # noqa: F811
    ours, plugin = adapt(base(), r=4, init="pissa")
    plugin.model = ours
    saved = copy_state(plugin.state_dict(), torch.clone)
    copies = [layer.initial_A for layer in ours.modules() if getattr(layer, "initial", "")]
    expected = [copy.clone() for copy in copies]
    for copy in copies:
        copy += 1
    plugin.load_state_dict(saved)
    assert copies and all(map(torch.equal, copies, expected))
    with pytest.raises(PluginError, match="adapters with other settings"):
        plugin.load_state_dict(saved | {"initial": {}})


@pytest.fixture
def recipe(tiny):
    plugins = {"lora": {"r": 4, "alpha": 8, "init": "pissa"}}
    return tiny(rows=chats(21), train=TRAIN | {"steps": 6}, plugins=plugins)


@pytest.mark.parametrize("method", ["pissa", pytest.param("olora", marks=only_full)])
def test_a_run_resumes_bit_for_bit_and_its_model_fits_the_base(recipe, tmp_path, method):
    whole, again, plain = tmp_path / "whole", tmp_path / "again", tmp_path / "plain"
    init = f'plugins.lora.init="{method}"'
    result = run_plugsft(recipe, f"output={whole}", init, "checkpoint.every=3")
    assert result.returncode == 0, result.stderr
    result = run_plugsft(recipe, f"output={plain}", 'plugins.lora.init="default"', "train.steps=1")
    assert result.returncode == 0, result.stderr
    loss = read_metrics(whole)[0]["loss"]
    assert loss == pytest.approx(read_metrics(plain)[0]["loss"], rel=1e-6)
    result = run_plugsft(
        recipe, init, f"output={again}", "--resume-from", whole / "checkpoints/step-000003"
    )
    assert result.returncode == 0, result.stderr
    file = "model/adapter_model.safetensors"
    assert (again / file).read_bytes() == (whole / file).read_bytes()
    result = run_plugsft("export", whole, "--merge")
    assert result.returncode == 0, result.stderr
    merged = AutoModelForCausalLM.from_pretrained(whole / "merged")
    expected, bare = trained_model(whole)
    assert float((expected - bare).abs().max()) > 0.05
    torch.testing.assert_close(merged(IDS).logits.detach(), expected, rtol=0, atol=1e-5)
    # What a checkpoint gives is what the run gave.
    exported = tmp_path / "exported"
    checkpoint = whole / "checkpoints/step-000006"
    result = run_plugsft("export", checkpoint, "--to", exported)
    assert result.returncode == 0, result.stderr
    assert (exported / file.removeprefix("model/")).read_bytes() == (whole / file).read_bytes()


def test_a_base_in_4_bits_and_the_reference_of_dpo_stay_as_they_are(tiny, tmp_path):
    tables = tomllib.loads(tiny(rows=pairs(16), train=TRAIN | {"steps": 3}).read_text())
    tables["plugins"] = {"dpo": {"beta": 0.5}, "lora": {"r": 4, "init": "pissa"}}
    recipe = write_recipe(tmp_path / "dpo.toml", tables)
    runs = tmp_path / "one", tmp_path / "two", tmp_path / "bits", tmp_path / "plain"
    result = run_plugsft(recipe, f"output={runs[0]}")
    assert result.returncode == 0, result.stderr
    assert read_metrics(runs[0])[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    # DDP must not copy what a second forward pass of the step reads.
    result = run_ranks(2, recipe, f"output={runs[1]}")
    assert result.returncode == 0, result.stderr
    assert curve(runs[1]) == pytest.approx(curve(runs[0]), rel=1e-4)
    tables["plugins"] = {"lora": {"r": 4}, "quantize": {"kind": "nf4"}}
    tables["data"]["source"] = str(write_jsonl(tmp_path / "chats.jsonl", chats(21)))
    recipe = write_recipe(tmp_path / "bits.toml", tables)
    for run, init in zip(runs[2:], ("pissa", "default"), strict=True):
        result = run_plugsft(recipe, f"output={run}", f'plugins.lora.init="{init}"')
        assert result.returncode == 0, result.stderr
    losses = [[line["loss"] for line in read_metrics(run)] for run in runs[2:]]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
    assert losses[0][2] != pytest.approx(losses[1][2], rel=1e-5)


@only_full
@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_sharded_ranks_learn_and_save_the_same(recipe, tmp_path, kind):
    alone, run = tmp_path / "alone", tmp_path / kind
    result = run_plugsft(recipe, f"output={alone}")
    assert result.returncode == 0, result.stderr
    code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe, f"output={run}")
    assert code == 0, err
    assert curve(run) == pytest.approx(curve(alone), rel=1e-5)
    (found, _), (expected, _) = trained_model(run), trained_model(alone)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert json.loads((run / "model/adapter_config.json").read_text())["r"] == 8
