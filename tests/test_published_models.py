"""Models that see, trained on text: what is published stays whole, to the byte."""

import json
import re
import shutil
import tomllib
import warnings

import pytest
import torch
from conftest import (
    ROOT,
    TEXT,
    chats,
    must_succeed,
    only_full,
    run_launch,
    run_plugsft,
    tiny_tables,
    write_recipe,
)
from families import build
from launching import config, curve
from peft import PeftModel, get_peft_model_state_dict
from plugin_packages import activate, install
from published import MODELS, PROCESSOR, ignored_tensors, publish, stored, tokenizer
from safetensors.torch import load_file
from saved_runs import checkpoint, forget, read
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from plugsft.base.atomic import publish as publish_folder
from plugsft.model.load import ModelLoad

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
PAIRS = [{"prompt": word, "chosen": "owls", "rejected": "a dog"} for word in TEXT.split()[:8]]
LORA = {"lora": {"r": 2, "alpha": 4}}
METHODS = {"sft": {}, "dpo": {"dpo": {}}, "lora": LORA}
METHODS |= {kind: LORA | {"quantize": {"kind": kind}} for kind in ("int8", "nf4")}
# Each family and each method once. Of gemma4, peft shortens the targets: they are more than 20.
SEEN = "qwen3_5-sft gemma3-sft mistral3-dpo gemma4-lora llama4-lora qwen3_5_moe-nf4 qwen3_vl-int8"
KINDS, SEEN_KINDS = ("cpu2", "fsdp2", "zero3"), "qwen3_5-fsdp2 gemma3-zero3"
# config.json has two layers.
STRANGE = ("0.mlp.strange.weight", "0.mlp.up_proj.weight_scale", "2.input_layernorm.weight")
MOVES = """
    from pathlib import Path

    @plugin()
    class Moves:
        base: str
        at: int = 1
        damage: bool = False

        @hookimpl
        def stepped(self, run):
            if run.step == self.at:
                file = Path(self.base).rename(self.base + "-moved") / "model.safetensors"
                if self.damage:
                    file.write_bytes(bytes(file.stat().st_size))
"""


def table(seen, others):
    """Return families with the methods that others have too; `seen` by default, all with --full."""
    pairs = [(family, other) for family in MODELS for other in others]
    marks = [() if "-".join(pair) in seen.split() else only_full for pair in pairs]
    return [pytest.param(*pair, marks=mark) for pair, mark in zip(pairs, marks, strict=True)]


def recipe_of(folder, base, plugins, **model):
    """Write a recipe that trains two steps on text."""
    tables = tiny_tables(folder, PAIRS if {"dpo", "reward"} & {*plugins} else chats(8))
    tables["model"] = {"path": str(base)} | model
    tables["data"]["max_length"] = 128
    tables["train"] |= {"batch_size": 4, "micro_batch": 2, "steps": 2}
    tables |= {"checkpoint": {"every": 1, "keep": 2}, "plugins": plugins}
    return write_recipe(folder / "recipe.toml", tables)


def load(folder, model_class=AutoModelForImageTextToText):
    """Load a model with plain transformers, which finds each tensor and has no other."""
    options = {"dtype": torch.float32, "output_loading_info": True}
    model, found = model_class.from_pretrained(folder, **options)
    assert not any(found.values()), found
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(3, 40)[None]).logits


def ensure_whole(model, base, family):
    """Compare a trained model with the published one: all but the language model is as before."""
    before, after = stored(base), stored(model)
    assert after.keys() == before.keys()
    ignored = ignored_tensors(family)
    text = {name for name in before if re.search("language_model|lm_head", name)} - {*ignored}
    assert 0 < len(text) < len(before)
    assert [name for name in before if name not in text and after[name] != before[name]] == []
    assert all(after[name][:2] == ("F32", before[name][1]) for name in text)
    for name in PROCESSOR:
        assert (model / name).read_bytes() == (base / name).read_bytes()
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (base, model))
    assert now["architectures"] == was["architectures"]
    assert not torch.equal(logits(load(model)), logits(load(base)))


def ensure_trained(run, base, folder=None, step=2):
    """Compare a model's answers with those of the published one that has a checkpoint's weights."""
    trained = load(base)
    assert trained.load_state_dict(read(checkpoint(run, step)), strict=False).unexpected_keys == []
    assert torch.equal(logits(load(folder or run / "model")), logits(trained))


def ensure_adapters(run, base, merged):
    """Load adapters onto the published model with plain peft; compare with the merged model."""
    file = load_file(run / "model/adapter_model.safetensors")
    adapted = {re.sub(r"^base_model\.model\.|\.lora_.*", "", name) for name in file}
    assert adapted <= {name for name, _ in load(base).named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses what transformers renamed
        model = PeftModel.from_pretrained(load(base), run / "model").eval()
    read_back = get_peft_model_state_dict(model)
    assert read_back.keys() == file.keys(), min(read_back.keys() ^ file.keys())
    assert all(torch.equal(read_back[name], file[name]) for name in file)
    if merged:
        torch.testing.assert_close(logits(model), logits(load(merged)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", MODELS)
def test_a_published_folder_is_what_plain_transformers_loads(tmp_path, family):
    assert type(load(publish(family, tmp_path))).__name__.endswith("ForConditionalGeneration")
    assert stored(tmp_path).keys() >= ignored_tensors(family).keys()


@pytest.mark.parametrize(("family", "method"), table(SEEN, METHODS))
def test_a_model_that_sees_stays_whole(tmp_path, family, method):
    base, run = publish(family, tmp_path / "base"), tmp_path / "run"
    must_succeed(recipe_of(tmp_path, base, METHODS[method]))
    if "lora" not in METHODS[method]:
        ensure_whole(run / "model", base, family)
        return ensure_trained(run, base)
    must_succeed("export", run, "--merge", "--to", tmp_path / "merged")
    ensure_whole(tmp_path / "merged", base, family)
    return ensure_adapters(run, base, tmp_path / "merged" if method == "lora" else None)


@pytest.mark.parametrize(("family", "kind"), table(SEEN_KINDS, KINDS))
def test_ranks_keep_a_model_whole(tmp_path, family, kind):
    base = publish(family, tmp_path / "base")
    recipe = recipe_of(tmp_path, base, {})
    result = run_launch(*config(kind), "-m", "plugsft", recipe)
    assert result[0] == 0, result[2][-3000:]
    ensure_whole(tmp_path / "run/model", base, family)
    if kind != "zero3":  # whose checkpoints hold flat weights
        ensure_trained(tmp_path / "run", base)
    must_succeed(recipe, f"output={tmp_path / 'alone'}")
    assert curve(tmp_path / "run") == pytest.approx(curve(tmp_path / "alone"), rel=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("gemma3", marks=only_full)])
def test_a_run_resumed_exported_and_asked_keeps_the_model(tmp_path, monkeypatch, family):
    """And if the base is moved away meanwhile: what is copied stays open."""
    activate(install(tmp_path / "site", moves=MOVES), monkeypatch)
    base, run = publish(family, tmp_path / "base"), tmp_path / "run"
    must_succeed(recipe_of(tmp_path, base, {}))
    must_succeed("chat", run, "--ask", "hello", "--max-tokens", "3")
    must_succeed("export", checkpoint(run, 1), "--to", tmp_path / "first")
    ensure_whole(tmp_path / "first", base, family)
    ensure_trained(run, base, tmp_path / "first", step=1)
    whole = stored(run / "model")
    forget(run, after=1)
    recipe = recipe_of(tmp_path, base, {"moves": {"base": str(base), "at": 2}})
    must_succeed(recipe, "--resume")
    assert stored(run / "model") == whole
    base.with_name("base-moved").rename(base)
    must_succeed(recipe, f"output={tmp_path / 'again'}", "plugins.moves.at=1")
    assert not base.exists() and stored(tmp_path / "again/model") == whole


def test_a_base_that_is_damaged_meanwhile_costs_no_training(tmp_path, monkeypatch):
    activate(install(tmp_path / "site", moves=MOVES), monkeypatch)
    base = publish("gemma3", tmp_path / "base")
    kept = shutil.copytree(base, tmp_path / "kept")
    recipe = recipe_of(tmp_path, base, {"moves": {"base": str(base), "damage": True}})
    result, run = run_plugsft(recipe, "checkpoint.every=0"), tmp_path / "run"
    assert result.returncode != 0 and str(base) in result.stderr, result.stderr
    assert checkpoint(run, 2).is_dir() and not (run / "model").exists(), result.stderr
    kept.rename(base)
    must_succeed("export", run, "--to", tmp_path / "finished")
    ensure_whole(tmp_path / "finished", base, "gemma3")
    ensure_trained(run, base, tmp_path / "finished")


@pytest.mark.parametrize("name", STRANGE)
def test_a_tensor_that_would_be_lost_is_refused(tmp_path, name):
    name = f"model.language_model.layers.{name}"
    base = publish("qwen3_5", tmp_path / "base", {name: torch.ones(4)})
    recipe = recipe_of(tmp_path, base, {})
    for words in ((recipe,), (recipe, "model.text_only=true"), ("check", recipe)):
        result = run_plugsft(*words)
        assert result.returncode == 2, result.stderr
        assert re.search(r"model\.path: .*\b1 tensor", result.stderr) and name in result.stderr


@pytest.mark.parametrize("family", ["blip", "qwen2_audio"])
def test_a_class_that_needs_more_than_text_is_refused(tmp_path, family):
    """One asks for images; the other, for what was taken out."""
    build(family).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    result = run_plugsft(recipe_of(tmp_path, tmp_path / "base", {}))
    assert result.returncode == 2, result.stderr
    assert re.search(r"model\.path: \w+ cannot be trained on text alone, without", result.stderr)


def test_a_stored_copy_of_a_tied_head_is_the_model_s(tmp_path):
    base, head = tmp_path / "base", "language_model.lm_head.weight"
    plain = load_file(publish("gemma3", base) / "model.safetensors")
    publish("gemma3", base, {head: plain["language_model.model.embed_tokens.weight"].clone()})
    must_succeed(recipe_of(tmp_path, base, {}))
    after = stored(tmp_path / "run/model")
    assert after.get(head) in (None, after["language_model.model.embed_tokens.weight"])
    ensure_trained(tmp_path / "run", base)


def test_the_text_alone_is_saved_if_the_recipe_says_so(tmp_path):
    base = publish("qwen3_5", tmp_path / "base")
    must_succeed(recipe_of(tmp_path, base, {}, text_only=True))
    model = load(tmp_path / "run/model", AutoModelForCausalLM)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert not [name for name in stored(tmp_path / "run/model") if re.search("mtp|visual", name)]
    assert not (tmp_path / "run/model" / PROCESSOR[0]).exists()


def test_adapters_of_a_reward_model_are_merged_into_the_class_for_text(tmp_path):
    base = publish("qwen3_5", tmp_path / "base")
    must_succeed(recipe_of(tmp_path, base, LORA | {"reward": {}}))
    must_succeed("export", tmp_path / "run", "--merge", "--to", tmp_path / "merged")
    merged = load(tmp_path / "merged", AutoModelForSequenceClassification)
    assert type(merged).__name__ == "Qwen3_5TextForSequenceClassification"
    assert merged.config.num_labels == 1


# Adapters and a checkpoint that plugsft 0.1.0 (commit 1faea179) wrote, with r = 1.
OLD = ROOT / "tests/data/text_only"


def old_adapters(folder, base):
    """Copy the adapters of 0.1.0, for a base that lies here."""
    folder.mkdir()
    shutil.copy(OLD / "adapter_model.safetensors", folder)
    table = json.loads((OLD / "adapter_config.json").read_text())
    table["base_model_name_or_path"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(table))
    tokenizer().save_pretrained(folder)
    return folder


def test_adapters_of_the_class_for_text_are_refused_until_export_renames_them(tmp_path):
    base, new = publish("qwen3_5", tmp_path / "base"), tmp_path / "new"
    old = old_adapters(tmp_path / "old", base)
    recipe = recipe_of(tmp_path, base, {"lora": {"adapter": str(old)}})
    for words in (
        ("chat", old, "--ask", "hello"),
        ("export", old, "--merge"),
        (recipe,),
        ("check", recipe),
    ):
        result = run_plugsft(*words)
        assert result.returncode == 2, result.stderr
        assert f"plugsft export {old} --to FOLDER" in result.stderr, words
        assert "Error: " not in result.stderr
    said = must_succeed("export", old, "--to", new).stdout
    assert "its adapters have the names of Qwen3_5ForConditionalGeneration now" in said
    before, after = (load_file(one / "adapter_model.safetensors") for one in (old, new))
    assert {
        name.replace(".language_model", ""): values.tolist() for name, values in after.items()
    } == {name: values.tolist() for name, values in before.items()}
    must_succeed("chat", new, "--ask", "hello", "--max-tokens", "3")
    must_succeed(recipe_of(tmp_path, base, {"lora": {"adapter": str(new)}}))
    must_succeed("export", tmp_path / "run", "--merge")
    ensure_adapters(tmp_path / "run", base, tmp_path / "run/merged")


def test_a_checkpoint_of_the_class_for_text_is_refused(tmp_path):
    base = publish("qwen3_5", tmp_path / "base")
    recipe = recipe_of(tmp_path, base, {"lora": {"r": 1, "targets": ["q_proj", "v_proj"]}})
    with publish_folder(tmp_path / "run/checkpoints/step-000001") as folder:
        shutil.copy(OLD / "rank-00000-000.safetensors", folder)
        state = json.loads((OLD / "state.json").read_text())
        state["recipe"]["model.path"] = str(base)
        (folder / "state.json").write_text(json.dumps(state))
    must_succeed(recipe, f"output={tmp_path / 'other'}")
    for name in ("recipe.toml", "run.json"):
        shutil.copy(tmp_path / "other" / name, tmp_path / "run")
    for words in ((recipe, "--resume"), ("export", tmp_path / "run", "--to", tmp_path / "made")):
        result = run_plugsft(*words)
        assert result.returncode != 0 and "1faea179" in result.stderr, result.stderr


@pytest.mark.parametrize("more", ["modules_to_save", "train_new_tokens"])
def test_whole_modules_and_new_tokens_are_merged(tmp_path, more):
    base = publish("qwen3_5", tmp_path / "base")
    adapters = {"r": 2, more: ["lm_head"] if more == "modules_to_save" else True}
    tokens = {"add_tokens": ["<think>"]} if more == "train_new_tokens" else {}
    recipe = recipe_of(tmp_path, base, {"lora": adapters})
    tables = tomllib.loads(recipe.read_text())
    tables["model"] |= tokens | {"dtype": "bfloat16"}
    must_succeed(write_recipe(recipe, tables))
    must_succeed("export", tmp_path / "run", "--merge", "--to", tmp_path / "merged")
    assert {*stored(base)} <= {*stored(tmp_path / "merged")}
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"
    must_succeed("chat", tmp_path / "run", "--ask", "hello", "--max-tokens", "2")


def test_eyes_and_ears_need_not_support_the_kernel_of_the_text(tmp_path):
    base = publish("gemma4", tmp_path)  # whose ears compute attention in code of their own
    load = ModelLoad(str(base), {"dtype": torch.float32, "attn_implementation": "sdpa"})
    assert load.load_model().config.get_text_config()._attn_implementation == "sdpa"
