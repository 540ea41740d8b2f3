"""plugsft export: verified copies and merged models, whole or not at all."""

import json
import re
import shutil
import warnings

import pytest
import torch
from conftest import chats, must_succeed, run_plugsft, tiny_tables, write_recipe
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from plugsft.base.atomic import damage
from plugsft.base.errors import PlugsftError
from plugsft.commands.model import export
from plugsft.export.chat import load as load_speaker
from plugsft.model.same_base import sampled_digest

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Give the outputs of two runs: one with adapters, and one without."""
    folder = tmp_path_factory.mktemp("runs")
    tables = tiny_tables(folder, chats(21))
    tables["train"] |= {"steps": 4, "learning_rate": 2e-2}
    tables["checkpoint"] = {"every": 2}
    whole = write_recipe(folder / "whole.toml", tables | {"output": str(folder / "whole")})
    options = {"r": 4, "modules_to_save": ["norm"]}
    tables |= {"output": str(folder / "adapters"), "plugins": {"lora": options}}
    for recipe in (whole, write_recipe(folder / "adapters.toml", tables)):
        must_succeed(recipe)
    return folder


@pytest.fixture
def run(runs, tmp_path):
    """Give a copy of the run with adapters."""
    return shutil.copytree(runs / "adapters", tmp_path / "run")


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(3, 40)[None]).logits


def with_adapters(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    base = config["base_model_name_or_path"]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return logits(PeftModel.from_pretrained(plain, folder))


def test_a_merged_model_answers_as_the_adapters_do_without_them(run):
    result = must_succeed("export", run, "--merge")
    assert result.stderr == ""
    share = re.search(r"merged model in float32: its logits are off by (.*) of the", result.stdout)
    assert float(share[1]) < 1e-4
    assert result.stdout.strip().endswith(f"{run / 'merged'}")
    assert damage(run / "merged") is None
    expected = with_adapters(run / "model")
    # Nothing of it needs the run any longer.
    merged = shutil.move(run / "merged", run.parent / "merged")
    shutil.rmtree(run)
    model = AutoModelForCausalLM.from_pretrained(merged)
    assert type(model).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    assert "assistant" in AutoTokenizer.from_pretrained(merged).chat_template
    must_succeed("chat", merged, "--ask", "hello", "--max-tokens", "3")


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_merging_reports_the_share_of_the_adapters_effect_that_the_written_file_lost(
    run, tmp_path, capsys, dtype
):
    """Adapters of no known run: the type is that of the base's file, unless it is given."""
    base = tmp_path / "base"
    config = json.loads((run / "model/adapter_config.json").read_text())
    plain = AutoModelForCausalLM.from_pretrained(
        config["base_model_name_or_path"], dtype=torch.bfloat16
    )
    plain.save_pretrained(base)
    adapters = tmp_path / "adapters"
    ignored = shutil.ignore_patterns("manifest.json", "base_model.json")
    shutil.copytree(run / "model", adapters, ignore=ignored)
    (adapters / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(base)})
    )
    weights = load_file(adapters / "adapter_model.safetensors")
    small = {
        name: part / 512 if "lora_A" in name else torch.ones_like(part) if part.dim() == 1 else part
        for name, part in weights.items()
    }
    save_file(small, adapters / "adapter_model.safetensors")
    export(adapters, True, tmp_path / "merged", dtype=dtype)
    out = capsys.readouterr().out
    written = dtype or "bfloat16"
    stated = re.search(rf"merged model in {written}: its logits are off by (.*) of the", out)[1]
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == written
    # Computed a second way, on other tokens.
    expected = with_adapters(adapters)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base_logits = logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    share = float((logits(merged) - expected).norm() / (base_logits - expected).norm())
    assert share / 3 < float(stated) < share * 3
    assert ("warning: rounding the merged weights to bfloat16 takes " in out) == (share > 0.05)
    assert (share > 0.05) == (dtype is None)


def test_a_merged_model_has_the_type_of_the_run_s_recipe(run, tmp_path):
    """Not that of the base's file; as the models of runs without adapters."""
    text = (run / "recipe.toml").read_text()
    assert 'dtype = "float32"' in text
    (run / "recipe.toml").write_text(text.replace('dtype = "float32"', 'dtype = "bfloat16"'))
    result = must_succeed("export", run, "--merge", "--to", tmp_path / "merged")
    assert "merged model in bfloat16: " in result.stdout
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == "bfloat16"
    words = ("--merge", "--to", tmp_path / "float32", "--dtype", "float32")
    assert "merged model in float32: " in run_plugsft("export", run, *words).stdout
    refused = run_plugsft("export", run, "--to", tmp_path / "copy", "--dtype", "bfloat16")
    assert refused.returncode == 2 and "--dtype is for merged weights" in refused.stderr


@pytest.mark.parametrize("name", ["adapters", "whole"])
def test_a_copy_is_the_model(runs, tmp_path, capsys, name):
    export(runs / name, False, tmp_path / "there/copy")
    assert "model, copied and verified" in capsys.readouterr().out
    there, model = tmp_path / "there/copy", runs / name / "model"
    assert damage(there) is None
    names = {path.name for path in there.iterdir()}
    # The card is new: the run's own folder has none.
    assert names == {"README.md", *(path.name for path in model.iterdir())} and len(names) > 5
    for path in model.iterdir():
        same = (there / path.name).read_bytes() == path.read_bytes()
        assert same or path.name == "manifest.json"


def test_a_copy_that_differs_from_the_model_is_refused(run, tmp_path, monkeypatch):
    """As a disk that loses a bit makes it."""
    copy = shutil.copytree

    def loses_a_bit(source, target, **options):
        copy(source, target, **options)
        data = bytearray((target / "adapter_model.safetensors").read_bytes())
        data[-1] ^= 1
        (target / "adapter_model.safetensors").write_bytes(data)

    monkeypatch.setattr(shutil, "copytree", loses_a_bit)
    with pytest.raises(PlugsftError, match=r"adapter_model\.safetensors: the copy differs"):
        export(run, False, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_merge_that_is_wrong_leaves_nothing(run):
    """As peft's are, where head and embeddings are one weight that has adapters."""
    config = json.loads((run / "model/adapter_config.json").read_text())
    plain = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(
            plain, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["lm_head"])
        )
        torch.nn.init.normal_(plain.get_output_embeddings().lora_B["default"].weight)
        adapted.save_pretrained(run.parent / "tied")
        with pytest.raises(
            PlugsftError, match=r"merging has changed the logits by .* and 1e-04 is"
        ):
            export(run.parent / "tied", True, None)
    assert not (run.parent / "tied/merged").exists()


def test_a_disk_that_fills_up_leaves_nothing(run, small_disk):
    result = run_plugsft("export", run, "--to", small_disk / "copy")
    if result.returncode == 0:  # the model fits: fill the rest
        shutil.rmtree(small_disk / "copy")
        (small_disk / "ballast").write_bytes(bytes(2**20 - 40_000))
        result = run_plugsft("export", run, "--to", small_disk / "copy")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "the disk is full" in result.stderr
    assert [path.name for path in small_disk.iterdir() if "copy" in path.name] == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{run}"], "--to: missing"),
        (["{none}", "--merge"], "no such folder"),
        (["{run}/run.json", "--merge"], "is a file"),
        (["{run}", "--to", "{run}/checkpoints"], "exists already"),
        (
            ["{run}", "--to", "{run}/model/inside"],
            "or a model's own folder; name another with --to",
        ),
        (["{run}/checkpoints/step-000004", "--merge"], "is inside a checkpoint's or a model's own"),
        (["{whole}", "--merge"], "is a whole model without adapters; remove --merge"),
        (["{run}/scratch", "--to", "{none}"], "holds no model"),
    ],
)
def test_export_refuses_what_it_cannot_export(runs, run, tmp_path, words, says):
    places = {"run": run, "whole": runs / "whole", "none": tmp_path / "none"}
    arguments = [word.format(**places) for word in words]
    to = arguments[arguments.index("--to") + 1] if "--to" in arguments else None
    with pytest.raises(PlugsftError, match=says):
        export(type(run)(arguments[0]), "--merge" in arguments, to and type(run)(to))
    assert not (tmp_path / "none").exists()


def test_overwrite_replaces_an_export_and_nothing_else(run, tmp_path):
    place = tmp_path / "copy"
    export(run, False, place)
    (run / "model/extra.txt").write_text("new")
    with pytest.raises(PlugsftError, match="or add --overwrite, which replaces"):
        export(run, False, place)
    export(run, False, place, overwrite=True)
    assert (place / "extra.txt").read_text() == "new" and damage(place) is None
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/mine.txt").write_text("mine")
    (place / "README.md").write_text("mine")
    for target in (run / "model", run / "checkpoints/step-000004", tmp_path / "mine", place):
        with pytest.raises(PlugsftError, match="belongs to a run, or has files that no export"):
            export(run, False, target, overwrite=True)
    with pytest.raises(PlugsftError, match="--overwrite is for folders"):
        export(run, False, type(run)("hub:me/mine"), overwrite=True)
    assert (place / "README.md").read_text() == (tmp_path / "mine/mine.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["whole", "adapters"])
def test_a_checkpoint_gives_the_model_that_its_run_would_have(runs, tmp_path, name):
    """Of a run that was stopped, its newest; or one that is named."""
    run = shutil.copytree(runs / name, tmp_path / "moved")
    expected = read(run / "model")
    shutil.rmtree(run / "model")
    source = run if name == "whole" else run / "checkpoints"
    result = must_succeed("export", source, "--to", tmp_path / "copy")
    assert f"model of step-000004: {tmp_path / 'copy'}" in result.stdout
    torch.testing.assert_close(read(tmp_path / "copy"), expected, rtol=0, atol=1e-6)
    assert damage(tmp_path / "copy") is None
    early = run / "checkpoints/step-000002"
    must_succeed("export", early, "--to", tmp_path / "early")
    assert not torch.allclose(read(tmp_path / "early"), expected, atol=1e-3)
    if name == "adapters":
        must_succeed("export", run, "--merge")
        torch.testing.assert_close(read(run / "merged"), expected, rtol=0, atol=1e-5)
        assert not list(run.glob(".export-*"))
    file = run / "checkpoints/step-000004/rank-00000-000.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"abcd")
    broken = run_plugsft("export", run, "--to", tmp_path / "none")
    assert broken.returncode == 2 and "the checkpoint is damaged" in broken.stderr
    assert not (tmp_path / "none").exists()


def read(folder):
    if (folder / "adapter_config.json").is_file():
        return with_adapters(folder)
    return logits(AutoModelForCausalLM.from_pretrained(folder))


def test_a_run_without_a_model_or_checkpoint_says_how_it_gets_one(run, tmp_path):
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints")
    result = run_plugsft("export", run, "--to", tmp_path / "copy")
    assert result.returncode == 2
    assert "has no model yet" in result.stderr and "continue with: plugsft" in result.stderr


def test_a_model_that_is_damaged_is_not_handed_on(run, tmp_path):
    weights = run / "model/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"else")
    for merge in (True, False):
        with pytest.raises(
            PlugsftError, match=r"is damaged: adapter_model.safetensors is not what"
        ):
            export(run, merge, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_adapters_whose_base_is_gone_or_of_another_kind(run, tmp_path):
    base = json.loads((run / "model/adapter_config.json").read_text())["base_model_name_or_path"]
    shutil.rmtree(run / "scratch", ignore_errors=True)
    plain = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(
        plain, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    ).save_pretrained(tmp_path / "prompt")
    with pytest.raises(PlugsftError, match=r"of the kind .*PROMPT_TUNING.* cannot be merged"):
        export(tmp_path / "prompt", True, None)
    path = run / "model/adapter_config.json"
    config = json.loads(path.read_text())
    (run / "model/manifest.json").unlink()
    path.write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(PlugsftError, match=r"adapters are for is gone: .*gone; move it back"):
        export(run, True, None)


def test_adapters_are_not_put_onto_a_base_that_has_changed_since(run, tmp_path):
    path = run / "model/adapter_config.json"
    config = json.loads(path.read_text())
    base = shutil.copytree(config["base_model_name_or_path"], tmp_path / "base")
    (run / "model/manifest.json").unlink()
    path.write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    assert load_speaker(run / "model"), "it may lie elsewhere"
    for folder in (base, next(run.glob("scratch/model-*"))):
        tensors = load_file(folder / "model.safetensors")
        other = {name: one + 1 for name, one in tensors.items()}
        save_file(other, folder / "model.safetensors", {"format": "pt"})
    changed = f"was trained on another model than {base} is now: the weights in the model's files"
    with pytest.raises(PlugsftError, match=changed):
        export(run, True, None)
    with pytest.raises(PlugsftError, match=changed):
        load_speaker(run / "model")
    shutil.rmtree(run / "model")  # now of the checkpoint
    for merge, target in ((True, None), (False, tmp_path / "whole")):
        with pytest.raises(PlugsftError, match=r"changed since this run.*put the old files"):
            export(run, merge, target)


def test_a_change_far_into_a_large_file_of_weights_is_seen(tmp_path):
    tensors = {"weight": torch.zeros(1_000_000)}
    save_file(tensors, tmp_path / "model.safetensors")
    before = sampled_digest(str(tmp_path), None)
    tensors["weight"][900_000:] = 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert sampled_digest(str(tmp_path), None) != before


def test_adapters_are_no_model_to_train_on(run, tmp_path):
    tables = tiny_tables(tmp_path / "next")
    tables["model"] = {"path": str(run / "model")}
    result = run_plugsft("check", write_recipe(tmp_path / "next.toml", tables))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "holds adapters, and no whole model" in result.stderr
    assert f"plugsft export {run / 'model'} --merge" in result.stderr
