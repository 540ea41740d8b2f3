"""lora's lr_ratio: peft's LoRA+, under every optimizer and launcher."""

import copy

import pytest
import torch
from conftest import chats, must_succeed, only_full, read_metrics, run_launch, run_plugsft
from families import tiny_config
from launching import TRAIN, config, curve
from peft import LoraConfig
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoModelForCausalLM

from plugsft import Train
from plugsft.model.defaults import ModelDefaults
from plugsft.plugins.lora.adapters import AdaptedModel
from plugsft.plugins.lora.rates import scale_second_halves
from plugsft.plugins.low_memory_adam import LowMemoryAdam
from plugsft.plugins.torch_optimizer import TorchOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
TRAINED = Train(batch_size=8, learning_rate=1e-2, weight_decay=0.1)
IDS = torch.arange(40).view(2, 20)
LORA = {"lora": {"r": 4, "lr_ratio": 16.0}}


def adapted():
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(tiny_config("llama"))
    return AdaptedModel(plain, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


def trained(model, optimizer, steps=5):
    for _ in range(steps):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def test_it_is_peft_s_lora_plus():
    ours = adapted()
    theirs = copy.deepcopy(ours)
    optimizer = ModelDefaults().optimizer(ours, TRAINED)
    scale_second_halves(optimizer, ours, 16.0)
    expected = create_loraplus_optimizer(
        theirs,
        torch.optim.AdamW,
        lr=1e-2,
        loraplus_lr_ratio=16.0,
        loraplus_weight_decay=0.1,
        betas=(0.9, 0.999),
        eps=1e-8,
        fused=True,
    )
    initial = trained(copy.deepcopy(ours), ModelDefaults().optimizer(ours, TRAINED), 0)
    mine, yours = trained(ours, optimizer), trained(theirs, expected)
    assert float((mine - initial).norm()) > 1
    assert float((mine - yours).norm() / yours.norm()) < 1e-6


@pytest.mark.parametrize(
    "plugin", [LowMemoryAdam(kind="adamw_8bit"), TorchOptimizer(name="muon")], ids=["8bit", "muon"]
)
def test_each_optimizer_updates_each_weight_once_at_its_rate(plugin):
    model = adapted()
    optimizer = plugin.optimizer(model, TRAINED)
    scale_second_halves(optimizer, model, 16.0)
    inner = getattr(optimizer, "inner", [optimizer])
    for parts in ([optimizer], inner):
        rates = {
            weight: group["lr"]
            for part in parts
            for group in part.param_groups
            for weight in group["params"]
        }
        for name, weight in model.named_parameters():
            expected = 0.16 if "lora_B" in name else 1e-2
            assert not weight.requires_grad or rates.pop(weight) == expected
        assert not rates
    assert optimizer.param_groups[0]["lr"] == 1e-2
    before = trained(model, optimizer, 0)
    assert float((trained(model, optimizer, 2) - before).abs().max()) > 0.1


@pytest.fixture
def recipe(tiny):
    return tiny(rows=chats(21), train=TRAIN | {"learning_rate": 1e-3}, plugins=LORA)


def test_the_first_rate_is_logged_and_a_run_resumes_bit_for_bit(recipe, tmp_path):
    whole, again = tmp_path / "whole", tmp_path / "again"
    must_succeed(recipe, f"output={whole}", "checkpoint.every=3")
    must_succeed(recipe, f"output={tmp_path / 'plain'}", "plugins.lora.lr_ratio=1.0")
    lines, others = read_metrics(whole), read_metrics(tmp_path / "plain")
    assert lines[0]["learning_rate"] == others[0]["learning_rate"] == 1e-3
    assert lines[0]["loss"] == others[0]["loss"] and lines[2]["loss"] < others[2]["loss"]
    checkpoint = whole / "checkpoints/step-000003"
    must_succeed(recipe, f"output={again}", "--resume-from", checkpoint)
    file = "model/adapter_model.safetensors"
    assert (again / file).read_bytes() == (whole / file).read_bytes()
    other = run_plugsft(
        recipe, f"output={again}-2", "--resume-from", checkpoint, "plugins.lora.lr_ratio=4.0"
    )
    assert other.returncode == 2
    assert "plugins.lora.lr_ratio was 16.0 and is 4.0" in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=only_full) for kind in ("fsdp2", "zero3")]
)
def test_sharded_ranks_learn_the_same(recipe, tmp_path, kind):
    alone, run = tmp_path / "alone", tmp_path / kind
    must_succeed(recipe, f"output={alone}")
    code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe, f"output={run}")
    assert code == 0, err
    assert curve(run) == pytest.approx(curve(alone), rel=1e-5)
