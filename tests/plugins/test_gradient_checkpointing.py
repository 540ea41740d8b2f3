"""gradient_checkpointing: bit-equal gradients in a fraction of the memory."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from conftest import chats, must_succeed, only_full, read_metrics, run_ranks
from launching import TRAIN, curve, learns_what_one_does_without
from peft import LoraConfig, get_peft_model
from small_models import SIX_LAYERS, apply
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from plugsft import RecipeError, testing
from plugsft.plugins.bfd_packing.attention import attend_per_document
from plugsft.plugins.bfd_packing.documents import documents_of
from plugsft.plugins.gradient_checkpointing import GradientCheckpointing

MODELS = {"llama": LlamaConfig(**SIX_LAYERS), "qwen3": Qwen3Config(**SIX_LAYERS)}


def pair(name, lora=False, every=1):
    """Return a model with dropout, and the same one that computes layers again."""
    attention = attend_per_document()
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(deepcopy(MODELS[name]), attn_implementation=attention)
    if lora:
        plain = get_peft_model(plain, LoraConfig(target_modules="all-linear", lora_dropout=0.1))
    return plain.train(), apply(deepcopy(plain).train(), GradientCheckpointing(every=every))


def learn(model):
    """Return the gradients of a packed row, and the bytes kept for the backward pass."""
    lengths = np.array([40, 7, 64, 17])
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 97, (1, int(lengths.sum()))))
    own, kept = {parameter.data_ptr() for parameter in model.parameters()}, {}

    def keep(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(input_ids=ids, **documents_of(lengths), use_cache=False).logits
    memory = sum(kept.values())
    torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}, memory


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_with_dropout_are_the_same_bit_for_bit_in_half_the_memory(name, lora):
    plain, again = pair(name, lora)
    (expected, all_of_it), (found, little) = learn(plain), learn(again)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient is not None and torch.equal(found[key], gradient), key
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    assert 0 < little < all_of_it / 2
    print(f"\n{name}: {little:,} of {all_of_it:,} bytes kept")


def test_fewer_recomputed_layers_save_less_memory():
    memories = [learn(pair("llama", every=every)[1])[1] for every in (1, 2, 3, 6)]
    assert memories == sorted(memories) and len({*memories}) == 4


def test_nothing_is_computed_again_in_evaluation():
    plain, again = (model.eval() for model in pair("llama"))
    calls = []
    for layer in again.model.layers:
        layer._gradient_checkpointing_func = lambda *_: calls.append(1)
    assert learn(again)[1] == learn(plain)[1] and not calls


def test_a_model_without_such_layers_is_refused():
    class Old(torch.nn.Module):
        config = LlamaConfig()

    with pytest.raises(RecipeError, match="no layers that can be recomputed"):
        apply(Old(), GradientCheckpointing())


@pytest.mark.parametrize("packed", [{}, {"bfd_packing": {}}], ids=["padded", "packed"])
def test_a_run_learns_the_same(packed):
    tables = {"plugins": packed}
    testing.keeps_gradients("gradient_checkpointing", tables=tables, tolerance=1e-6)


def test_the_summary_counts_layers():
    said = testing.summary("gradient_checkpointing", {"every": 2})
    assert said == "1 of 2 layers recomputed in the backward pass"


def test_two_ranks_learn_what_one_does_without(tiny, tmp_path):
    recipe = tiny(rows=chats(21), train=TRAIN, plugins={"gradient_checkpointing": {}})
    must_succeed(recipe, f"output={tmp_path / 'alone'}", "--without", "gradient_checkpointing")
    ranks = run_ranks(2, recipe, f"output={tmp_path / 'ranks'}")
    assert ranks.returncode == 0, ranks.stderr
    assert "plugin gradient_checkpointing: 2 of 2 layers" in ranks.stdout
    assert curve(tmp_path / "ranks") == pytest.approx(curve(tmp_path / "alone"), rel=1e-5)


@only_full  # test_lora.py runs them with everything else
@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
def test_sharded_ranks_learn_what_one_does_without(tiny, tmp_path, name):
    on = {"gradient_checkpointing": {}, "bfd_packing": {}}
    recipe = tiny(rows=chats(21), train=TRAIN | {"micro_batch": 1, "steps": 5}, plugins=on)
    run, out = learns_what_one_does_without("gradient_checkpointing", name, recipe, tmp_path)
    assert "plugin gradient_checkpointing: 2 of 2 layers" in out
    assert len(read_metrics(run)) == 5
