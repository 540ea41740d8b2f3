"""torch_optimizer trains with the optimizers of torch, and refuses settings they do not have."""

import pytest
import torch
from families import tiny_config
from transformers import AutoModelForCausalLM

from plugsft import RecipeError, Train, testing
from plugsft.plugins.torch_optimizer import TorchOptimizer
from plugsft.plugins.torch_optimizer.make import CLASSES, ensure_options, make_optimizer

NAMES = sorted({*CLASSES} - {"adamw", "lbfgs", "optimizer", "sparseadam"})
"""All of torch but the core's own, one that calls the model itself, and one of sparse gradients."""


def settings(**changed):
    return Train(**{"batch_size": 8, "learning_rate": 1e-3} | changed)


def tiny_model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config("llama"))


def steps_of(model, optimizer, count=3):
    """Update a model with random gradients; return its weights."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for weight in model.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def assert_same(first, second):
    assert all(torch.equal(first[name], second[name]) for name in first | second)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_the_optimizer_of_torch(name):
    TorchOptimizer(name=name).check(type("R", (), {"train": settings()}))
    if name == "muon":
        return
    ours, twin = tiny_model(), tiny_model()
    plain = CLASSES[name](twin.parameters(), lr=1e-3)
    made = make_optimizer(name, {}, ours, settings())
    assert_same(steps_of(ours, made), steps_of(twin, plain))


def test_the_updates_of_muon_are_as_many_times_those_of_torch_as_its_help_says():
    config, updates = tiny_config("llama"), []
    config.hidden_size = config.intermediate_size = 576
    for options in ({}, {"adjust_lr_fn": "original"}):
        model = AutoModelForCausalLM.from_config(config)
        weight = model.model.layers[0].mlp.up_proj.weight
        before, weight.grad = weight.detach().clone(), torch.eye(576)
        make_optimizer("muon", options, model, settings()).step()
        updates.append(float((weight.detach() - before).norm()))
    assert updates[0] / updates[1] == pytest.approx(4.8, rel=1e-3)
    assert "updates of a 576 x 576 matrix are 4.8 times" in TorchOptimizer.__doc__


def test_muon_updates_the_matrices_of_the_layers_and_adamw_the_rest():
    ours, twin = tiny_model(), tiny_model()
    train = settings(weight_decay=0.1, beta1=0.8, beta2=0.95, eps=1e-6)
    weights = dict(twin.named_parameters())
    matrices = [weights.pop(name) for name in [*weights] if ".layers." in name and "proj" in name]
    norms = [weights.pop(name) for name in [*weights] if "norm" in name]
    assert len(matrices) == 14 and {*weights} <= {"model.embed_tokens.weight", "lm_head.weight"}
    muon = torch.optim.Muon(
        matrices, lr=1e-3, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": [*weights.values()]}, {"params": norms, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, 1e-3, (0.8, 0.95), 1e-6, 0.1, fused=True)
    both = type("Both", (), {"step": lambda self: (muon.step(), adamw.step())})()
    made = make_optimizer("muon", {"momentum": 0.9}, ours, train)
    assert_same(steps_of(ours, made), steps_of(twin, both))


def test_options_and_weight_decay_reach_the_optimizer():
    made = make_optimizer("sgd", {"momentum": 0.9, "weight_decay": 0.2}, tiny_model(), settings())
    assert [group["weight_decay"] for group in made.param_groups] == [0.2, 0.0]
    assert {group["momentum"] for group in made.param_groups} == {0.9}
    train = settings(weight_decay=0.1, beta1=0.7, eps=1e-5)
    made = make_optimizer("radam", {}, tiny_model(), train)
    first = made.param_groups[0]
    assert first["betas"] == (0.7, 0.999) and first["eps"] == 1e-5
    assert first["decoupled_weight_decay"] and first["weight_decay"] == 0.1
    made = make_optimizer("adafactor", {"eps": [None, 1e-2]}, tiny_model(), settings())
    assert made.param_groups[0]["eps"] == (None, 1e-2)


@pytest.mark.parametrize(
    "name, options, changed, message",
    [
        ("sgd", {"momentun": 0.9}, {}, "sgd has no such option; it has: dampening, "),
        ("sgd", {"lr": 1.0}, {}, "options.lr: set train.learning_rate instead"),
        ("nadam", {"betas": [0.1, 0.2]}, {}, "set train.beta1 and train.beta2 instead"),
        ("sgd", {}, {"beta1": 0.5}, "train.beta1: sgd does not use it; remove it"),
        ("adafactor", {}, {"eps": 1e-3}, "adafactor has several; set options = {eps = [...]}"),
        ("sgd", {}, {"weight_decay": 0.1}, "has only the L2 penalty: set options = {weight_decay"),
        ("rprop", {}, {"weight_decay": 0.1}, "rprop has no weight decay; remove this"),
        ("muon", {"weight_decay": 0.1}, {"weight_decay": 0.1}, "is set too; remove one"),
        ("adam", {"capturable": True}, {}, "options.capturable: it is for CUDA graphs; remove"),
        ("sgd", {"maximize": True}, {}, "options.maximize: it would raise the loss; remove it"),
        ("sgd", {"nesterov": True}, {}, "sgd of torch refuses them: Nesterov momentum requires"),
        ("sgd", {"momentum": "x"}, {}, "options: sgd of torch refuses them: "),
        ("sgd", {"momentum": 0.5, "dampening": "x"}, {}, "options: sgd of torch refuses them: "),
        ("rprop", {"etas": [2, 1]}, {}, "rprop of torch refuses them: Invalid eta values"),
        ("muon", {"adjust_lr_fn": "x"}, {}, "options: muon of torch refuses them: "),
    ],
)
def test_settings_without_effect_are_refused(name, options, changed, message):
    with pytest.raises(RecipeError) as caught:
        ensure_options(name, options, settings(**changed))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name, options", [("muon", {}), ("adafactor", {}), ("sgd", {"momentum": 0.9})]
)
def test_a_run_resumes_bit_for_bit(name, options):
    testing.resumes("torch_optimizer", {"name": name, "options": options})


def test_two_ranks_learn_what_one_does():
    testing.ranks_agree("torch_optimizer", {"name": "muon"}, tolerance=1e-3)
