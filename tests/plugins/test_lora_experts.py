"""lora: each expert of a fused weight gets an adapter of its own."""

import json
import tomllib

import pytest
import torch
from conftest import must_succeed, only_full, run_launch
from families import tiny_config
from launching import config, curve
from moe import FAMILIES, recipe_of, save_model, save_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from small_models import IDS, adapt, shake
from transformers import AutoModelForCausalLM

from plugsft import RecipeError
from plugsft.base.errors import PlugsftError
from plugsft.base.machine import look
from plugsft.export.export import load_adapters
from plugsft.registry.active import check
from plugsft.registry.load import resolve

# Of transformers: what peft still calls by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
WEIGHTS = ["experts.gate_up_proj", "experts.down_proj"]


def whole(case):
    """Mark a case that only the full tests run."""
    return pytest.param(case, marks=only_full)


def gradients(model):
    """Return the loss of IDS, and the gradients of all trained weights."""
    loss = model(IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.item(), {
        name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_plain_peft(tmp_path, family):
    folder = save_model(tmp_path, family)
    ours, _ = adapt(folder, r=3, alpha=6, experts=True)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    base = plain(IDS, use_cache=False).logits.detach()
    torch.testing.assert_close(ours(IDS, use_cache=False).logits, base, rtol=0, atol=1e-5)
    chosen = ours.peft_config["default"]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=3,
        lora_alpha=6,
        target_modules=[*chosen.target_modules],
        target_parameters=[*chosen.target_parameters],
    )
    peft = get_peft_model(plain, config)
    peft.load_state_dict(ours.state_dict())
    shake(ours, peft)
    (loss, found), (expected_loss, expected) = gradients(ours), gradients(peft)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert found.keys() == expected.keys()
    for name in found:
        difference = (found[name] - expected[name]).norm() / expected[name].norm()
        assert float(difference) < 1e-5, (name, difference)


def test_no_sum_of_weights_and_adapters_is_kept_for_the_backward_pass(tmp_path):
    """peft keeps such sums."""
    folder = save_model(tmp_path, "qwen3_moe")
    ours, _ = adapt(folder, r=3, targets=WEIGHTS)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=[], target_parameters=WEIGHTS)

    def whole_weights(model):
        stored = {weight.data_ptr() for weight in model.parameters()}
        saved = {}

        def note(tensor):
            if tensor.dim() == 3 and len(tensor) == 4 and min(tensor.shape[1:]) >= 16:
                saved[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(IDS, use_cache=False)
        return len({*saved} - stored)

    assert whole_weights(ours) == 0 < whole_weights(get_peft_model(plain, config))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_reader_finds_all_adapters(tmp_path, family):
    folder = save_model(tmp_path / "base", family)
    ours, _ = adapt(folder, r=3, alpha=6, experts=True)
    shake(ours)
    ours.eval()
    expected = ours(IDS, use_cache=False).logits.detach()
    (tmp_path / "adapters").mkdir()
    ours.save_pretrained(tmp_path / "adapters")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert float((plain(IDS).logits.detach() - expected).abs().max()) > 0.1
    peft = PeftModel.from_pretrained(plain, tmp_path / "adapters").eval()
    torch.testing.assert_close(peft(IDS).logits, expected, rtol=0, atol=1e-5)
    merged = peft.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(again(IDS).logits, expected, rtol=0, atol=1e-5)
    auto = AutoModelForCausalLM.from_pretrained(tmp_path / "adapters").eval()
    continued, _ = adapt(folder, adapter=str(tmp_path / "adapters"))
    for reader in (auto, continued.eval()):
        torch.testing.assert_close(reader(IDS).logits, expected, rtol=0, atol=1e-5)


def test_on_a_bfloat16_base_adapters_are_float32(tmp_path):
    folder = save_model(tmp_path, "gpt_oss")
    exact, _ = adapt(folder, r=3, experts=True)
    rough, _ = adapt(folder, torch.bfloat16, r=3, experts=True)
    shake(exact, rough)
    dtypes = {weight.dtype for weight in rough.parameters() if weight.requires_grad}
    assert dtypes == {torch.float32}
    loss, expected = gradients(exact)
    rough_loss, found = gradients(rough)
    assert rough_loss == pytest.approx(loss, rel=5e-3)
    # Rounding lets a few tokens choose other experts.
    joined = [torch.cat([*map(torch.flatten, it.values())]) for it in (found, expected)]
    assert float((joined[0] - joined[1]).norm() / joined[1].norm()) < 0.2


REFUSED = [
    ("qwen3_moe", {"experts": True, "dropout": 0.1}, "without dropout; remove dropout"),
    ("qwen3_moe", {"targets": WEIGHTS, "dora": True}, "without dora; remove dora"),
    ("qwen3_moe", {"experts": True, "init": "orthogonal"}, "without init; remove init"),
    ("deepseek_v3", {"dropout": 0.1}, "mlp.gate_proj.weight as a parameter, without dropout"),
    ("llama4_text", {"experts": True}, "a Llama4TextExperts, whose experts cannot have adapters"),
    ("llama", {"experts": True}, "this model has no fused expert weights"),
    ("qwen3_moe", {"targets": ["experts.gate_proj"]}, "no module is named 'experts.gate_proj'"),
]


@pytest.mark.parametrize(("family", "options", "says"), REFUSED)
def test_refused_before_anything_is_loaded(tmp_path, family, options, says):
    tiny_config(family).save_pretrained(tmp_path / "model")
    recipe = recipe_of(tmp_path, tmp_path / "model", None, plugins={"lora": options})
    loaded, active = resolve(tomllib.loads(recipe.read_text()))
    with pytest.raises(RecipeError, match=r"plugins\.lora") as refused:
        check(active.attach(), loaded, look())
    assert says in str(refused.value)


def test_a_merge_that_would_lose_adapters_is_refused(tmp_path):
    """peft writes them, renames them when it reads them, and only warns that they are missing."""
    folder = save_model(tmp_path / "base", "laguna")
    plain = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), LoraConfig(target_modules=["gate_proj"])
    )
    plain.save_pretrained(tmp_path / "adapters")
    with pytest.raises(PlugsftError, match="Found missing adapter keys"):
        load_adapters(tmp_path / "adapters", False)


def test_frozen_experts_are_reported_with_the_line_that_adapts_them(tmp_path, capsys):
    _, plugin = adapt(save_model(tmp_path, "qwen3_moe"), r=3)
    text = "4 expert weights are frozen; experts = true in [plugins.lora] adapts them"
    assert text in plugin.summary() and f"warning: plugin lora: {text}" in capsys.readouterr().out
    folder = save_model(tmp_path, "qwen3_moe")
    _, plugin = adapt(folder, r=3, targets=["q_proj", "layers.1.mlp.experts.down_proj"])
    assert "1 expert weights, rank 3 per expert (down_proj)" in plugin.summary()
    assert "3 expert weights are frozen" in plugin.summary()
    _, plugin = adapt(folder, r=3, experts=True)
    assert "frozen" not in plugin.summary()


# Real runs.

OPTIONS = {"r": 3, "alpha": 6, "experts": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def logits(run):
    """Return the logits of a run's model, read by plain peft."""
    path = json.loads((run / "model/adapter_config.json").read_text())["base_model_name_or_path"]
    plain = AutoModelForCausalLM.from_pretrained(path)
    return PeftModel.from_pretrained(plain, run / "model").eval()(IDS).logits.detach()


@only_full
@pytest.mark.parametrize("kind", ["cpu2", "fsdp2", "zero3"])
@pytest.mark.parametrize("family", ["qwen3_moe", *map(whole, FAMILIES[1:])])
def test_ranks_learn_what_one_process_learns(tmp_path, tokenizer, family, kind):
    model = save_model(tmp_path / "model", family)
    recipe = recipe_of(tmp_path, model, tokenizer, plugins={"lora": OPTIONS})
    alone, run = tmp_path / "alone", tmp_path / kind
    done = must_succeed(recipe, f"output={alone}")
    assert "expert weights, rank 3 per expert" in done.stdout
    others = ("plugins.fused_loss={}", "plugins.gradient_checkpointing={}")
    code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe, f"output={run}", *others)
    assert code == 0, err
    assert curve(run) == pytest.approx(curve(alone), rel=1e-5)
    torch.testing.assert_close(logits(run), logits(alone), rtol=0, atol=1e-5)


def test_a_run_resumes_bit_for_bit_and_merges(tmp_path, tokenizer):
    model = save_model(tmp_path / "model", "deepseek_v3")
    recipe = recipe_of(
        tmp_path,
        model,
        tokenizer,
        train={"learning_rate": 1e-2},
        checkpoint={"every": 3},
        plugins={"lora": OPTIONS},
    )
    whole, again = tmp_path / "whole", tmp_path / "again"
    must_succeed(recipe, f"output={whole}")
    must_succeed(recipe, f"output={again}", "--resume-from", whole / "checkpoints/step-000003")
    file = "model/adapter_model.safetensors"
    assert (again / file).read_bytes() == (whole / file).read_bytes()
    must_succeed("export", whole, "--merge")
    merged = AutoModelForCausalLM.from_pretrained(whole / "merged")
    torch.testing.assert_close(merged(IDS).logits, logits(whole), rtol=0, atol=1e-5)
    before = AutoModelForCausalLM.from_pretrained(model)
    names = [name for name, _ in before.named_parameters() if "experts" in name]
    assert len(names) == 5, "two fused weights, and three of shared experts"
    for name in names:
        change = merged.get_parameter(name) - before.get_parameter(name)
        assert float(change.detach().abs().max()) > 1e-4, name


def test_adapters_that_peft_would_lose_are_refused(tmp_path):
    """peft 0.21.2 writes two dots into the names of this model's shared experts."""
    folder = save_model(tmp_path, "laguna")
    says = "would lose the adapters of model.layers.1.mlp.shared_experts.gate_proj and 2 more"
    with pytest.raises(RecipeError, match=says):
        adapt(folder, r=3)
    ours, _ = adapt(folder, r=3, targets=["q_proj"], experts=True)
    shake(ours)
    (tmp_path / "adapters").mkdir()
    ours.save_pretrained(tmp_path / "adapters")
    peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapters"
    )
    expected = ours.eval()(IDS, use_cache=False).logits
    torch.testing.assert_close(
        peft.eval()(IDS, use_cache=False).logits, expected, atol=1e-5, rtol=0
    )
