"""Mixtures of experts: every layout learns the same, idle experts included."""

import pytest
import torch
from conftest import only_full, read_metrics, run_launch, run_plugsft
from launching import config, curve
from moe import FAMILIES, recipe_of, save_model, save_tokenizer
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def whole(case):
    """Mark a case that only the full tests run."""
    return pytest.param(case, marks=only_full)


def weights(run):
    return AutoModelForCausalLM.from_pretrained(run / "model").state_dict()


def ensure_alike(recipe, folder, kind):
    """Train in one process and on two ranks; compare metrics and weights."""
    alone, run = folder / "alone", folder / kind
    done = run_plugsft(recipe, f"output={alone}")
    assert done.returncode == 0, done.stderr
    code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe, f"output={run}")
    assert code == 0, err
    assert curve(run) == pytest.approx(curve(alone), rel=1e-5)
    expected, found = weights(alone), weights(run)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@only_full
@pytest.mark.parametrize("kind", ["cpu2", "fsdp2", "zero3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_learn_what_one_process_learns(tmp_path, tokenizer, family, kind):
    model = save_model(tmp_path / "model", family)
    evaluation = {"every": 3, "split": "train[:5]"}
    ensure_alike(recipe_of(tmp_path, model, tokenizer, eval=evaluation), tmp_path, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [whole("cpu2"), whole("fsdp2"), "zero3"])
def test_idle_experts_of_a_rank_change_nothing(tmp_path, tokenizer, kind):
    """The tokens of a rank choose fewer than 256 experts: it has one example a step."""
    model = save_model(tmp_path / "model", "qwen3_moe", num_experts=256, moe_intermediate_size=8)
    recipe = recipe_of(tmp_path, model, tokenizer, train={"batch_size": 2, "micro_batch": 1})
    ensure_alike(recipe, tmp_path, kind)
    assert max(line["tokens"] for line in read_metrics(tmp_path / "alone")) < 256 / 2
