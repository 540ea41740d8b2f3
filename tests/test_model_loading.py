"""Loading a model: its tensors are those of the files, on one process and sharded."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import bare_tables, must_succeed, run_plugsft, tiny_tables, write_recipe
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import rename_source_key

from plugsft import RecipeError
from plugsft.base.machine import look
from plugsft.model import weight_files
from plugsft.model.load import ModelLoad, make_load
from plugsft.model.tensor_shards import TensorShard
from plugsft.model.weight_files import WeightFiles
from plugsft.recipe.tables import Model
from plugsft.registry.load import resolve
from plugsft.start.checks import Case, ensure

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}

FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def loaded(folder):
    load = ModelLoad(str(folder), {"dtype": torch.float32}, empty=True)
    return load.load_model(), load


def test_weights_are_left_in_their_files(folder):
    model, load = loaded(folder)
    assert load.files.shapes and all(parameter.is_meta for parameter in model.parameters())


def test_each_name_in_the_files_is_renamed_once(folder, monkeypatch):
    names = []

    def count(name, *rest):
        names.append(name)
        return rename_source_key(name, *rest)

    monkeypatch.setattr(weight_files, "rename_source_key", count)
    loaded(folder)
    assert names == [*dict.fromkeys(names)] and {*names} == {*load_file(folder / FILE)}


def test_a_whole_model_is_loaded_straight_to_the_gpu(folder, tmp_path):
    def kwargs(*options):
        return make_load(Model(path=str(folder)), tmp_path, *options).kwargs

    gpu = torch.device("cuda", 1)
    assert kwargs(False, gpu)["device_map"] == {"": gpu}
    for options in [(True, gpu), (False, torch.device("cpu")), ()]:
        assert "device_map" not in kwargs(*options), "sharded models are read by rows"
    device = torch.device("meta")  # in place of a GPU
    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": device})
    assert {parameter.device for parameter in model.parameters()} == {device}
    models = [
        model,
        ModelLoad(str(folder), {"dtype": torch.float32}).load_model(),
        ModelLoad(str(folder), {"dtype": torch.float32, "device_map": {"": "cpu"}}).load_model(),
    ]
    for number, model in enumerate(models):
        assert not hasattr(model, "hf_device_map")
        for module in model.modules():
            assert not (hasattr(module, "_hf_hook") or module._forward_pre_hooks)
        if number:
            model.save_pretrained(tmp_path / str(number))
    files = [(tmp_path / f"{number}/model.safetensors").read_bytes() for number in (1, 2)]
    assert files[0] == files[1]


def test_a_tensor_that_has_another_shape_in_its_file_is_not_read_by_rows(folder):
    """Read as it stands, it would be filled with the beginning of the other."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = torch.ones(20)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(RecipeError, match="model"):
        loaded(folder)


def test_buffers_are_read_from_the_files(folder, monkeypatch):
    """Otherwise they would keep what the config gives them."""
    made = LlamaForCausalLM.__init__

    def init(self, config):
        made(self, config)
        self.register_buffer("scale", torch.ones(3))

    monkeypatch.setattr(LlamaForCausalLM, "__init__", init)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.scale.fill_(7.0)
    model.save_pretrained(folder)
    model, load = loaded(folder)
    assert load.files.shapes and float(model.scale.max()) == 7.0


def test_a_range_of_numbers_is_read_from_the_rows_that_hold_it(folder):
    """ZeRO-3 cuts rows in the middle; a tensor of no dimensions has one number."""
    file = folder / "model.safetensors"
    weight = load_file(file)["model.embed_tokens.weight"].flatten()
    save_file({"a": torch.tensor(5.0), "b": weight.view(40, 16)}, folder / "more.safetensors")
    files = WeightFiles(None, [folder / "more.safetensors"])
    assert files.numbers("a", 0, 1).tolist() == [5.0]
    for start, stop in ((0, 640), (3, 5), (15, 17), (31, 640), (639, 640)):
        assert torch.equal(files.numbers("b", start, stop), weight[start:stop])
    shard = TensorShard(torch.zeros(0), 700, (40, 16))
    files.fill("b", shard)  # a rank beyond the end of the tensor


EXPERTS = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=2),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=2, moe_intermediate_size=8),
}


@pytest.mark.parametrize("family", EXPERTS)
def test_a_model_that_is_loaded_whole_has_nothing_left_in_its_files(tmp_path, family):
    """The ids of the model that was made first, and freed, come back as those of the second."""
    AutoModelForCausalLM.from_config(EXPERTS[family]).save_pretrained(tmp_path)
    for _ in range(12):
        model, load = loaded(tmp_path)
        names = load.names_in_files(model)
        assert bool(load.files.shapes) == bool(names)
        assert all(name == stored for name, stored in names.items())


@pytest.mark.parametrize("empty", [False, True])
def test_a_soft_cap_of_attention_is_computed(tmp_path, empty):
    """SDPA of transformers 5.17 drops it."""
    config = Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=0.05)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = ModelLoad(str(tmp_path), {"dtype": torch.float32}, empty).load_model()
    chosen = model.get_correct_attn_implementation(None)
    assert [model.model.layers[0].self_attn.config._attn_implementation, chosen] == ["eager"] * 2
    assert "_supports_sdpa" not in vars(type(model)), "others of its class may have no soft cap"


def test_a_pickle_is_refused_with_the_command_that_converts_it(tiny, tmp_path):
    """The command is run as it stands; the recipe is then ready."""
    must_succeed(tiny(train={"steps": 1}), f"output={tmp_path / 'base'}")
    base = tmp_path / "base/model"
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    tables = tiny_tables(tmp_path) | {"model": {"path": str(base)}}
    recipe = write_recipe(tmp_path / "pickled.toml", tables)
    export = ("export", base, "--to", tmp_path / "copy")
    for words in (("check", recipe), (recipe,), ("chat", base, "--ask", "who?"), export):
        result = run_plugsft(*words, cwd=tmp_path)
        assert result.returncode == 2, result.stdout
        assert "a pickle (pytorch_model.bin)" in result.stderr
    command = result.stderr.partition("convert it with: ")[2].partition(" and set model.path")[0]
    command = command.replace("\n", " ").replace("python -c", f"{sys.executable} -c")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, capture_output=True)
    must_succeed("check", recipe, "model.path=model-safetensors", cwd=tmp_path)


def test_a_gguf_file_is_refused_with_the_page_that_makes_a_folder_of_it(tiny, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    tables = tiny_tables(tmp_path) | {"model": {"path": str(tmp_path / "model.gguf")}}
    result = run_plugsft("check", write_recipe(tmp_path / "recipe.toml", tables))
    assert result.returncode == 2
    assert "is for llama.cpp; docs/start.md says how to make a folder of it" in result.stderr


@pytest.mark.parametrize("size, says", [(None, "holds no weights"), (100, "cannot be read")])
def test_a_model_without_whole_weights_is_refused_by_check(tiny, tmp_path, size, says):
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(EXPERTS["mixtral"]).save_pretrained(model)
    weights = model / "model.safetensors"
    if size is None:
        weights.unlink()
    else:
        os.truncate(weights, size)
    tables = tiny_tables(tmp_path) | {"model": {"path": str(model)}}
    result = run_plugsft("check", write_recipe(tmp_path / "broken.toml", tables))
    assert result.returncode == 2 and says in result.stderr, result.stderr


def without_a_tensor(tensors):
    del tensors["model.layers.0.mlp.up_proj.weight"]


def with_another_shape(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(24, 8)


HARMS = [
    (without_a_tensor, "lack 1 of the model's tensors (model.layers.0.mlp.up_proj.weight first)"),
    (with_another_shape, "hold model.layers.0.mlp.up_proj.weight with the shape [24, 8], and its"),
]


def weights_check(folder, tables):
    """Make the check of a model's weights; return the problem."""
    recipe, active = resolve(tables | {"model": {"path": str(folder)}})
    try:
        ensure(Case(recipe, active, look()), "model", "weights")
    except RecipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("harm", "says"), HARMS)
def test_tensors_that_do_not_fit_are_refused_by_check(folder, tmp_path, harm, says):
    tables = bare_tables(tmp_path, {}) | {"data": {"source": "chats.jsonl", "max_length": 64}}
    assert not weights_check(folder, tables)
    tensors = load_file(folder / FILE)
    harm(tensors)
    save_file(tensors, folder / FILE, {"format": "pt"})
    assert says in weights_check(folder, tables)


def test_a_shard_that_is_missing_is_named_by_check(tmp_path):
    folder = tmp_path / "base"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder, max_shard_size="3KB")
    tables = bare_tables(tmp_path, {}) | {"data": {"source": "chats.jsonl", "max_length": 64}}
    assert not weights_check(folder, tables)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    says = f"model.safetensors.index.json: cannot be used: it names {shard.name}, which is missing"
    assert says in weights_check(folder, tables)


def test_a_model_that_cannot_be_built_is_refused_by_check(folder, tmp_path):
    tables = bare_tables(tmp_path, {}) | {"data": {"source": "chats.jsonl", "max_length": 64}}
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"silu"', '"zzz"'))
    says = f"from '{folder}': KeyError: 'zzz', which config.json lacks, or asks for and"
    assert says in weights_check(folder, tables)
    (folder / "config.json").write_text("{}")
    assert weights_check(folder, tables).count("config.json") == 1, "said once"


@pytest.mark.parametrize("empty", [False, True])
def test_a_tensor_that_the_files_lack_is_not_made_up(folder, empty):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(RecipeError, match=r"lack 1 of the model's tensors \(model.layers.0.mlp.up"):
        ModelLoad(str(folder), {"dtype": torch.float32}, empty=empty).load_model()


def test_nan_in_a_file_is_loaded_as_nan(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    model = ModelLoad(str(folder), {"dtype": torch.float32}).load_model()
    assert model.model.layers[0].mlp.up_proj.weight[0, 0].isnan()


def test_a_pickle_is_never_loaded(folder):
    """Also where nobody has checked: by another name, or through a plugin."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for empty in (False, True):
        with pytest.raises(RecipeError, match=r"safetensors"):
            ModelLoad(str(folder), {"dtype": torch.float32}, empty=empty).load_model()
