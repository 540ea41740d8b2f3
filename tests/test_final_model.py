"""The final model is read back before it is published, and every fault is found."""

import pytest
import torch
from families import build
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from plugsft import RecipeError
from plugsft.base.errors import CheckpointError
from plugsft.checkpoint.final_model import (
    ensure_saveable,
    ensure_written,
    name_in_file,
)
from plugsft.model.load import persistent_buffers
from plugsft.model.published import meta_copy
from plugsft.model.tensor_shards import TensorShard, shard_of
from plugsft.model.weight_files import WeightFiles, find_weight_files

NAMES = {
    "base_model.model.q.lora_A.default.weight": "base_model.model.q.lora_A.weight",
    "base_model.model.head.modules_to_save.default.weight": "base_model.model.head.weight",
    "model.norm.weight": "model.norm.weight",
}


@pytest.fixture
def written(tmp_path):
    """Write a folder of adapters; return it with shards of the trained weights."""
    weights = {name: torch.randn(4, 100) for name in NAMES}
    save_file(
        {NAMES[name]: one.clone() for name, one in weights.items()}, tmp_path / "model.safetensors"
    )
    # This rank holds the second half of each.
    return tmp_path, {
        NAMES[name]: TensorShard(weight.view(-1)[200:], 200, (4, 100))
        for name, weight in weights.items()
    }


def test_written_adapters_pass(written):
    folder, shards = written
    ensure_written(folder, WeightFiles(None, folder.glob("*.safetensors")), shards, None)


def test_names_in_adapter_files_lack_peft_s_own_parts():
    assert {name: name_in_file(name) for name in NAMES} == NAMES


BREAKS = {
    "is missing": lambda found: found.pop("model.norm.weight"),
    r"norm.weight has the shape \[4, 100\]; in its file \[0\]": lambda found: found.update(
        {"model.norm.weight": torch.ones(0)}
    ),
    r"lora_A.weight has the shape \[4, 100\]; in its file \[100, 4\]": lambda found: found.update(
        {"base_model.model.q.lora_A.weight": torch.ones(100, 4)}
    ),
    "head.weight has other values": lambda found: (
        found["base_model.model.head.weight"].view(-1)[230:231].zero_()
    ),
}


@pytest.mark.parametrize("says", BREAKS)
def test_a_broken_tensor_of_the_final_model_is_named(written, says):
    folder, shards = written
    found = load_file(folder / "model.safetensors")
    BREAKS[says](found)
    save_file(found, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=says) as refused:
        ensure_written(folder, WeightFiles(None, folder.glob("*.safetensors")), shards, None)
    assert "--resume" in str(refused.value)


# Files name and cut the experts of these otherwise; the last two have buffers that are saved.
FAMILIES = ["mixtral", "qwen3_moe", "minimax", "deepseek_v3"]


def parts_of(model):
    tensors = {**dict(model.named_parameters()), **persistent_buffers(model)}
    return {name: shard_of(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_of_a_model_with_experts_is_compared(tmp_path, family, dtype):
    """Each one in turn is another in the file; the one that was not written as it is, is named."""
    model = build(family)
    ensure_saveable(model)
    mine = parts_of(model)
    state = {name: one.detach().clone() for name, one in model.state_dict().items()}
    for number, name in enumerate([None, *mine]):
        broken = {
            key: (one + 1 if key == name else one).to(dtype if one.is_floating_point() else None)
            for key, one in state.items()
        }
        folder = tmp_path / str(number)
        model.save_pretrained(folder, state_dict=broken)
        weights = WeightFiles(meta_copy(model), find_weight_files(str(folder), None))
        if name is None:
            ensure_written(folder, weights, mine, dtype)
        else:
            with pytest.raises(CheckpointError, match=f"{name} has other values"):
                ensure_written(folder, weights, mine, dtype)


def test_a_model_that_could_not_be_read_back_is_refused_before_it_is_trained(tmp_path):
    """Loaded under other names by an argument that nobody passes again, and saved under those."""
    build("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    renamed = {name.replace("model.", "trunk."): one for name, one in load_file(file).items()}
    save_file(renamed, file, {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, key_mapping={r"^trunk\.": "model."})
    with pytest.raises(RecipeError, match=r"model\.\S+ and \d+ more tensors would be lost"):
        ensure_saveable(model)
