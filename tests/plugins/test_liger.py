"""liger: kernels in this model only, with the same loss and gradients."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import ROOT, chats, must_succeed, only_full, run_plugsft, tiny_tables, write_recipe
from families import SMALL
from launching import config, curve, finish, launch
from small_models import apply
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, Qwen3Config

from plugsft import PluginError, RecipeError
from plugsft.base.machine import look
from plugsft.plugins.liger import Liger
from plugsft.plugins.liger.patch import apply_patch, modeling_modules
from plugsft.registry.active import check
from plugsft.registry.load import resolve

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def loaded(tmp_path, config, **options):
    """Load a model through the plugin, as a run does."""
    model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    plugin = Liger(**options)
    return plugin, apply(model, plugin)


def kernels_of(model):
    return {
        type(part).__name__
        for part in model.modules()
        if "forward" in vars(part) and "liger" in vars(part)["forward"].__func__.__module__
    }


def test_each_kernel_is_counted_and_named(tmp_path):
    plugin, model = loaded(tmp_path, LlamaConfig(**SMALL))
    assert plugin.patched == {"rms_norm": 5, "mlp": 2, "rope": 2}
    assert kernels_of(model) == {"LlamaRMSNorm", "LlamaMLP"}
    assert plugin.summary().endswith("modules: 2 mlp, 5 rms_norm, 2 rope")


@pytest.mark.parametrize("name", ["rms_norm", "mlp", "rope"])
def test_a_kernel_that_is_switched_off_is_not_there(tmp_path, name):
    plugin, _ = loaded(tmp_path, LlamaConfig(**SMALL), **{name: False})
    assert set(plugin.patched) == {"rms_norm", "mlp", "rope"} - {name}
    plugin, _ = loaded(
        tmp_path, LlamaConfig(**SMALL), **{name: True}, **dict.fromkeys(plugin.patched, False)
    )
    assert set(plugin.patched) == {name}


def test_the_next_model_of_the_family_is_clean(tmp_path):
    config = Qwen3Config(**SMALL)
    before = {module: dict(vars(module)) for module in modeling_modules()}
    first = AutoModelForCausalLM.from_config(config)
    _, model = loaded(tmp_path, config)
    assert kernels_of(model)
    after = AutoModelForCausalLM.from_config(config)
    for other in (first, after):
        assert not any("forward" in vars(part) for part in other.modules())
        assert not any("Liger" in type(part).__name__ for part in other.modules())
    for module, values in before.items():
        assert vars(module).items() >= values.items(), module
    ids = torch.arange(6)[None]
    after.load_state_dict(first.state_dict())
    assert torch.equal(after(ids).logits, first(ids).logits)


def test_the_loss_is_left_alone(tmp_path):
    _, model = loaded(tmp_path, LlamaConfig(**SMALL))
    assert "forward" not in vars(model)
    assert torch.nn.functional.cross_entropy.__module__ == "torch.nn.functional"


def test_a_family_without_kernels_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    made = MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, state_size=4)
    made.save_pretrained(tmp_path / "mamba")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tables = tiny_tables(tmp_path) | {"model": {"path": str(tmp_path / "mamba")}}
    recipe = write_recipe(tmp_path / "recipe.toml", tables | {"plugins": {"liger": {}}})
    assert re.search("'mamba'; remove it. Liger has kernels for: .*llama.*qwen3", refuse(recipe))


def test_a_switch_that_a_family_lacks_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"liger.layer_norm: .*'llama'.* rms_norm, mlp, rope"):
        loaded(tmp_path, LlamaConfig(**SMALL), layer_norm=True)


def test_an_mlp_with_another_function_is_refused(tmp_path):
    config = LlamaConfig(**SMALL, hidden_act="gelu")
    with pytest.raises(RecipeError, match=r"swiglu kernel has another activation.*set mlp = false"):
        loaded(tmp_path, config)
    plugin, _ = loaded(tmp_path, config, mlp=False)
    assert "mlp" not in plugin.patched


def test_a_kernel_that_finds_no_place_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "plugsft.plugins.liger.patch.count_modules", lambda model, functions: {"mlp": 2}
    )
    with pytest.raises(PluginError, match=r"no module of this model .* can use rope; remove rope"):
        loaded(tmp_path, LlamaConfig(**SMALL), rope=True)
    monkeypatch.setattr("plugsft.plugins.liger.patch.count_modules", lambda model, functions: {})
    with pytest.raises(PluginError, match=r"no module of this model .* can use its kernels"):
        loaded(tmp_path, LlamaConfig(**SMALL))


def test_a_patch_of_all_models_is_an_error(monkeypatch):
    def patch(model=None):
        made = ModuleType("transformers.models.made")
        made.Thing = type("Thing", (), {"__module__": "liger_kernel.made"})
        monkeypatch.setitem(sys.modules, made.__name__, made)

    monkeypatch.delitem(sys.modules, "transformers.models.made", raising=False)
    with pytest.raises(PluginError, match=r"made.Thing for all models of this process"):
        apply_patch(torch.nn.Linear(2, 2), patch, [])


def refuse(path):
    recipe, active = resolve(tomllib.loads(Path(path).read_text()))
    active.attach()
    with pytest.raises(RecipeError) as refused:
        check(active, recipe, look())
    return str(refused.value)


@NO_GPU
def test_a_machine_that_cannot_run_it_is_refused(tiny, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "need a GPU, and there is none; remove" in refuse(tiny(plugins={"liger": {}}))
    result = run_plugsft(tiny(plugins={"liger": {}}))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    off = dict.fromkeys(["rms_norm", "layer_norm", "mlp", "rope"], False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "every kernel is switched off" in refuse(tiny(plugins={"liger": off}))


def test_lora_is_refused_whatever_is_installed(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(RecipeError, match=r"cannot be used with 'lora': .* full fine-tuning"):
        resolve(tomllib.loads(tiny(plugins={"liger": {}, "lora": {}}).read_text()))


# In Triton's interpreter.

PARITY = """
import triton_interpreter, json, torch
from copy import deepcopy
from transformers import AutoModelForCausalLM
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, Olmo2Config, Qwen3Config
from plugsft.plugins.liger import Liger

small = json.loads(SMALL)
configs = {
    "llama": LlamaConfig(**small),
    "qwen3": Qwen3Config(**small),
    "gemma2": Gemma2Config(**small),
    "gemma3_text": Gemma3TextConfig(**small, layer_types=None),
}
found = {}
for name, config in configs.items():
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    plugin, patched = Liger(), deepcopy(plain)
    loading = plugin.optimize_model()
    next(loading)
    try:
        loading.send(patched)
    except StopIteration:
        pass
    ids = torch.randint(61, (2, 9))
    losses = []
    for model in (plain, patched):
        logits = model(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
    theirs = dict(plain.named_parameters())
    off = max(
        float((p.grad - theirs[key].grad).abs().max() / theirs[key].grad.abs().max())
        for key, p in patched.named_parameters()
    )
    found[name] = {"losses": losses, "off": off, "patched": plugin.patched}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_the_model_without_it():
    script = PARITY.replace("SMALL", repr(json.dumps(SMALL)))
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert {name: one["patched"] for name, one in found.items()} == {
        "llama": {"rms_norm": 5, "mlp": 2, "rope": 2},
        "qwen3": {"rms_norm": 9, "mlp": 2, "rope": 2},
        "gemma2": {"rms_norm": 9, "mlp": 2, "rope": 2},
        "gemma3_text": {"rms_norm": 13, "mlp": 2, "rope": 2},
    }
    for name, one in found.items():
        assert one["losses"][1] == pytest.approx(one["losses"][0], rel=1e-6), name
        assert 0 < one["off"] <= 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
@only_full
def test_ranks_that_share_the_weights_learn_what_one_plain_process_learns(tiny, tmp_path, name):
    train = {"batch_size": 2, "micro_batch": 1, "steps": 2, "max_grad_norm": 0.5}
    recipe = tiny(rows=chats(4), train=train)
    must_succeed(recipe, f"output={tmp_path / 'plain'}")
    script = tmp_path / "run.py"
    script.write_text(
        "import triton_interpreter, sys\nfrom plugsft.cli import main\nmain(sys.argv[1:])\n"
    )
    run = tmp_path / name
    words = (script, recipe, f"output={run}", "plugins.liger.rms_norm=true")
    env = {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    # Triton's interpreter is chosen before Triton is imported: no fork will do.
    code, out, err = finish(launch(*config(name), *words, env=env))
    assert code == 0, err
    assert "modules: 2 mlp, 5 rms_norm, 2 rope" in out
    assert curve(run) == pytest.approx(curve(tmp_path / "plain"), rel=1e-5)
