"""lora goes on from trained adapters, and their model is the reference."""

import json
import shutil
import tomllib
from functools import partial

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
    tiny_tables,
    write_recipe,
)
from first_step import pairs
from launching import config, curve
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from small_models import IDS, adapt, loss_and_gradients, save_base, shake
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from plugsft import RecipeError
from plugsft.base.machine import look
from plugsft.plugins.lora import Lora
from plugsft.plugins.lora.continued import settings_of
from plugsft.plugins.lora.targets import choose_modules
from plugsft.registry.active import check
from plugsft.registry.load import resolve

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
TRAIN = {"batch_size": 8, "micro_batch": 2, "steps": 5, "learning_rate": 3e-3}


@pytest.fixture
def base(tmp_path):
    """Give `base(config, dtype, tied)`: the folder of a small model."""
    return partial(save_base, tmp_path / "base")


def of_peft(folder, target, **options):
    """Save adapters as plain peft does."""
    plain = AutoModelForCausalLM.from_pretrained(folder)
    options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"} | options
    peft = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **options))
    shake(peft)
    peft.save_pretrained(target)
    return target


def go_on(folder, adapters, dtype=torch.float32, empty=False, **options):
    return adapt(folder, dtype, empty, adapter=str(adapters), **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 1}},
        {"target_modules": r".*layers\.1\..*(q|up)_proj"},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_training_goes_on_as_plain_peft_s_would(base, tmp_path, options):
    folder = base()
    adapters = of_peft(folder, tmp_path / "peft", **options)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    peft = PeftModel.from_pretrained(plain, adapters, is_trainable=True)
    ours, plugin = go_on(folder, adapters)
    choose_modules(settings_of(plugin)[0], AutoModelForCausalLM.from_pretrained(folder))
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for model in (ours, peft)
    ]
    for _ in range(3):
        (loss, mine), (expected, yours) = loss_and_gradients(ours), loss_and_gradients(peft)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        assert float((mine - yours).norm() / yours.norm()) < 1e-5
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert "modules with adapters of rank 4" in plugin.summary()
    (tmp_path / "again").mkdir()
    ours.save_pretrained(tmp_path / "again")
    read = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "again"
    )
    torch.testing.assert_close(read.eval()(IDS).logits, ours.eval()(IDS).logits, rtol=0, atol=1e-6)


def test_adapters_are_loaded_where_the_base_is_still_in_its_files(base, tmp_path):
    folder = base()
    adapters = of_peft(folder, tmp_path / "peft")
    here, _ = go_on(folder, adapters)
    there, _ = go_on(folder, adapters, empty=True)
    assert any(parameter.is_meta for parameter in there.parameters())
    for (name, one), other in zip(here.named_parameters(), there.parameters(), strict=True):
        assert not one.requires_grad or torch.equal(one, other), name


def edit(folder, **changed):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


@pytest.mark.parametrize(
    ("options", "changed", "message"),
    [
        ({"r": 8}, {}, "r: the recipe has 8, and the adapters in .* have 4; remove r"),
        ({"alpha": 5}, {}, "alpha: the recipe has 5, and the adapters in .* have 6"),
        ({"dora": True}, {}, "dora: the recipe has True, and .* have False"),
        ({"targets": ["q_proj"]}, {}, "targets: the recipe has .'q_proj'., and"),
        ({"init": "gaussian"}, {}, '"gaussian" has no effect on trained adapters; remove it'),
        ({}, {"r": None}, "adapter_config.json is damaged: r Input should be a valid integer"),
        ({}, {"r": 0}, "adapter_config.json is damaged: r Input should be greater than"),
        ({}, {"target_modules": 5}, "adapter_config.json is damaged: target_modules"),
        ({}, {"target_modules": "*("}, "target_modules is no pattern: nothing to repeat"),
        ({}, {"bias": "all"}, "bias = 'all', which is not supported; merge them first"),
        ({}, {"trainable_token_indices": [3]}, "trainable_token_indices = .3., which is not"),
        ({}, {"peft_type": "IA3"}, "holds adapters of the kind IA3, not LORA"),
        ({}, {"init_lora_weights": "pissa"}, "which changed the base model"),
    ],
)
def test_other_settings_are_refused(tiny, base, tmp_path, options, changed, message):
    adapters = of_peft(base(), tmp_path / "peft")
    edit(adapters, **changed)
    tables = tomllib.loads(tiny(plugins={"lora": {"adapter": str(adapters)} | options}).read_text())
    tables["model"] = {"path": str(tmp_path / "base")}
    recipe, active = resolve(tables)
    with pytest.raises(RecipeError, match=message):
        check(active.attach(), recipe, look())


def test_what_holds_no_adapters_or_other_ones_is_refused(base, tmp_path):
    folder = base()
    with pytest.raises(RecipeError, match=r"it holds a whole model: name it in model\.path"):
        go_on(folder, folder)
    with pytest.raises(RecipeError, match="holds no adapters"):
        go_on(folder, tmp_path / "none")
    adapters = of_peft(folder, tmp_path / "peft", r=2)
    edit(adapters, r=4)
    with pytest.raises(RecipeError, match=r"does not fit the model in model\.path"):
        go_on(folder, adapters)
    edit(adapters, r=2, modules_to_save=["lm_head"])
    with pytest.raises(RecipeError, match=r"it lacks base_model.model.lm_head"):
        go_on(folder, adapters)
    edit(adapters, modules_to_save=None, target_modules=["q_proj"])
    with pytest.raises(RecipeError, match=r"lora_A.weight is not one of its adapters"):
        go_on(folder, adapters)
    file = of_peft(folder, tmp_path / "broken") / "adapter_model.safetensors"
    save_file({name: weight / 0 for name, weight in load_file(file).items()}, file)
    with pytest.raises(RecipeError, match=r"lora_A.weight has values that are not finite"):
        go_on(folder, file.parent)
    file.rename(file.with_suffix(".bin"))
    with pytest.raises(RecipeError, match=r"a pickle \(adapter_model.bin\) is not read"):
        settings_of(Lora(adapter=str(file.parent)))
    (adapters / "adapter_config.json").write_text("[1]")
    with pytest.raises(RecipeError, match=r"adapter_config.json is damaged: Input should be"):
        go_on(folder, adapters)


def test_a_base_that_was_quantized_otherwise_is_reported(base, tmp_path, capsys):
    folder = base()
    adapters = of_peft(folder, tmp_path / "peft")
    go_on(folder, adapters)
    assert "quantized" not in capsys.readouterr().out
    record = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4").to_dict()
    (adapters / "quantization_config.json").write_text(json.dumps(record))
    go_on(folder, adapters)
    said = (
        "peft was quantized (nf4, all linear layers but nothing), and this run's is not quantized"
    )
    assert said in capsys.readouterr().out
    record = {"quant_method": "plugsft_int8", "left_out": ["lm_head"]}
    (adapters / "quantization_config.json").write_text(json.dumps(record))
    go_on(folder, adapters)
    assert "plugsft_int8, all linear layers but lm_head" in capsys.readouterr().out


# Real runs.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small base with its tokenizer, and a run that trained adapters on it."""
    folder = tmp_path_factory.mktemp("trained")
    tables = tiny_tables(folder, chats(21)) | {"output": str(folder / "base")}
    tables["train"] |= TRAIN | {"steps": 1}
    must_succeed(write_recipe(folder / "base.toml", tables))
    tables |= {"output": str(folder / "sft"), "model": {"path": str(folder / "base/model")}}
    tables |= {"plugins": {"lora": {"r": 4, "alpha": 8}}, "train": tables["train"] | TRAIN}
    must_succeed(write_recipe(folder / "sft.toml", tables))
    must_succeed("export", folder / "sft", "--merge", "--to", folder / "merged")
    return folder


def recipe_of(trained, folder, rows=None, **plugins):
    tables = tiny_tables(folder, rows or chats(21))
    tables["model"] = {"path": str(trained / "base/model")}
    tables["train"] |= TRAIN
    tables["plugins"] = {"lora": {"adapter": str(trained / "sft/model")}, **plugins}
    return write_recipe(folder / "recipe.toml", tables)


def test_a_run_goes_on_resumes_and_ranks_agree(trained, tmp_path):
    recipe = recipe_of(trained, tmp_path)
    whole, again = tmp_path / "whole", tmp_path / "again"
    said = must_succeed(recipe, f"output={whole}", "checkpoint.every=2").stdout
    assert "modules with adapters of rank 4" in said and "warning: plugins.lora" not in said
    merged = json.dumps(str(trained / "merged"))
    alone = write_recipe(
        tmp_path / "alone.toml", tomllib.loads(recipe.read_text()) | {"plugins": {}}
    )
    must_succeed(alone, f"output={tmp_path / 'merged'}", f"model.path={merged}", "train.steps=1")
    first = read_metrics(whole)[0]["loss"]
    assert first == pytest.approx(read_metrics(tmp_path / "merged")[0]["loss"], rel=1e-6)
    must_succeed(recipe, f"output={again}", "--resume-from", whole / "checkpoints/step-000002")
    file = "model/adapter_model.safetensors"
    assert (again / file).read_bytes() == (whole / file).read_bytes()
    assert json.loads((again / "model/adapter_config.json").read_text())["lora_alpha"] == 8
    result = run_ranks(2, recipe, f"output={tmp_path / 'two'}")
    assert result.returncode == 0, result.stderr
    assert curve(tmp_path / "two") == pytest.approx(curve(whole), rel=1e-5)
    # Of another base, the run says so; of other weights, it ends.
    other = [recipe, f"output={tmp_path / 'other'}", "train.steps=1"]
    moved = json.dumps(str(shutil.copytree(trained / "base/model", tmp_path / "moved")))
    said = must_succeed(*other, f"model.path={moved}").stdout
    assert f"was trained on {trained / 'base/model'} (revision main), and model.path" in said
    for words in ((*other, "--overwrite"), ("check", *other)):
        result = run_plugsft(*words, f"model.path={merged}")
        assert result.returncode == 2, result.stderr
        assert f"was trained on another model than {trained / 'merged'} is now" in result.stderr


@only_full
@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_sharded_ranks_go_on_alike(trained, tmp_path, kind):
    recipe = recipe_of(trained, tmp_path, pairs(16), dpo={"beta": 0.5})
    must_succeed(recipe, f"output={tmp_path / 'alone'}")
    code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe, f"output={tmp_path / kind}")
    assert code == 0, err
    assert curve(tmp_path / kind) == pytest.approx(curve(tmp_path / "alone"), rel=1e-5)


def test_the_reference_of_dpo_is_the_model_before_training(trained, tmp_path):
    recipe = recipe_of(trained, tmp_path, pairs(16), dpo={"beta": 0.5})
    merged = json.dumps(str(trained / "merged"))
    said = must_succeed(recipe, f"output={tmp_path / 'own'}", "checkpoint.every=2").stdout
    assert "reference: the model with the adapters before training" in said
    must_succeed(recipe, f"output={tmp_path / 'loaded'}", f"plugins.dpo.reference={merged}")
    own = curve(tmp_path / "own")
    assert own == pytest.approx(curve(tmp_path / "loaded"), rel=1e-4)
    # Precomputed, they are not taken for those of the base.
    stored = "plugins.dpo_reference={}"
    tables = tomllib.loads(recipe.read_text())
    tables["plugins"]["lora"] = {"r": 4}
    bare = write_recipe(tmp_path / "bare.toml", tables)
    must_succeed(
        bare, f"output={tmp_path / 'bare'}", stored, "plugins.arrow_cache={}", "train.steps=1"
    )
    said = must_succeed(
        recipe, f"output={tmp_path / 'stored'}", stored, "plugins.arrow_cache={}"
    ).stdout
    assert "16 of 16 pairs computed" in said
    assert curve(tmp_path / "stored") == pytest.approx(own, rel=1e-4)
    checkpoint = tmp_path / "own/checkpoints/step-000002"
    must_succeed(recipe, f"output={tmp_path / 'again'}", "--resume-from", checkpoint)
    file = "model/adapter_model.safetensors"
    assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "own" / file).read_bytes()
    result = run_ranks(2, recipe, f"output={tmp_path / 'two'}")
    assert result.returncode == 0, result.stderr
    assert curve(tmp_path / "two") == pytest.approx(own, rel=1e-4)


def test_what_cannot_be_done_is_refused_in_one_line(trained, tmp_path):
    adapters = of_peft(trained / "base/model", tmp_path / "peft", use_dora=True)
    recipe = recipe_of(trained, tmp_path, pairs(8), dpo={})
    named = f"plugins.lora.adapter={json.dumps(str(adapters))}"
    result = run_plugsft(recipe, named)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "linear layers without dora" in result.stderr
    assert f"plugsft export {adapters} --merge" in result.stderr
    # As a model they are refused, with the name of the option.
    result = run_plugsft(recipe, f"model.path={json.dumps(str(adapters))}")
    assert result.returncode == 2
    assert "or go on from them: set model.path to their base" in result.stderr
    # Adapters that have changed since the checkpoint are not taken for those of the run.
    adapters = of_peft(trained / "base/model", adapters, use_dora=False)
    run = tmp_path / "first"
    must_succeed(recipe, named, f"output={run}", "checkpoint.every=2", "train.steps=4")
    edit(adapters, lora_alpha=7)
    result = run_plugsft(
        recipe, named, "--resume-from", run / "checkpoints/step-000002", "train.steps=4"
    )
    assert result.returncode == 2
    assert "adapters with other settings" in result.stderr
    # A reward model has a head that a language model's adapters do not have.
    tables = tomllib.loads(recipe.read_text())
    tables["plugins"] = {"lora": {"adapter": str(trained / "sft/model")}, "reward": {}}
    result = run_plugsft(write_recipe(tmp_path / "reward.toml", tables))
    assert result.returncode == 2 and "trains a head of its own" in result.stderr
