"""A trained model's folder is read back before it is published: what is wrong in it is found."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from plugsft import CheckpointError
from plugsft.parts import Part, part_of
from plugsft.saved import ensure_written

NAMES = {
    "base_model.model.q.lora_A.default.weight": "base_model.model.q.lora_A.weight",
    "base_model.model.head.modules_to_save.default.weight": "base_model.model.head.weight",
    "model.norm.weight": "model.norm.weight",
}


@pytest.fixture
def written(tmp_path):
    """Write tensors as a model's folder; give what was trained."""
    weights = {name: torch.randn(4, 100) for name in NAMES}
    save_file(
        {NAMES[name]: one.clone() for name, one in weights.items()}, tmp_path / "model.safetensors"
    )
    # This rank holds the second half of each.
    mine = {name: Part(one.view(-1)[200:], 200, (4, 100)) for name, one in weights.items()}
    return tmp_path, weights, mine


def test_what_was_trained_is_found_under_the_names_of_files(written):
    ensure_written(*written)


BREAKS = {
    "is missing": lambda found: found.pop("model.norm.weight"),
    r"norm.weight has the shape \[0\]": lambda found: found.update(
        {"model.norm.weight": torch.ones(0)}
    ),
    r"lora_A.weight has the shape \[100, 4\]": lambda found: found.update(
        {"base_model.model.q.lora_A.weight": torch.ones(100, 4)}
    ),
    "head.weight has other values": lambda found: (
        found["base_model.model.head.weight"].view(-1)[230:231].zero_()
    ),
}


@pytest.mark.parametrize("says", BREAKS)
def test_what_is_broken_is_named(written, says):
    folder, weights, mine = written
    found = load_file(folder / "model.safetensors")
    BREAKS[says](found)
    save_file(found, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=says) as refused:
        ensure_written(folder, weights, mine)
    assert "--resume" in str(refused.value)


def test_experts_under_other_names_are_counted(tmp_path):
    """transformers writes the joined experts of some models apart."""
    weights = {"experts": torch.randn(2, 8)}
    parts = {f"expert.{n}": weights["experts"][n].clone() for n in range(2)}
    save_file(parts, tmp_path / "model.safetensors")
    ensure_written(tmp_path, weights, {"experts": part_of(weights["experts"])})
