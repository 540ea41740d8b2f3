"""dpo: losses without a reference equal TRL's, in every layout; unused options are refused."""

import importlib
import warnings
from typing import get_args

import pytest
import torch
from conftest import (
    must_succeed,
    only_full,
    read_metrics,
    read_record,
    run_launch,
    tiny_tables,
    write_jsonl,
)
from datasets import Dataset
from dpo_steps import open_dpo
from first_step import logps_of, pairs, shaken, text_pairs
from gradients import assert_equal, gradients
from launching import config
from plugin_packages import TRL
from transformers import AutoModelForCausalLM

from plugsft import RecipeError, testing
from plugsft.base.machine import look
from plugsft.plugins.dpo import Dpo
from plugsft.plugins.dpo.losses import LOSSES, LossName, Options, options_of
from plugsft.ranks.trained_model import RunModel
from plugsft.registry.active import check
from plugsft.registry.load import resolve

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    cpo = importlib.import_module("trl.experimental.cpo")
    orpo = importlib.import_module("trl.experimental.orpo")

FREE = [name for name, loss in LOSSES.items() if not loss.reference]
METRICS = {
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
}
# Our options, and the name of the loss in TRL's CPO.
CPO = [
    ({"loss": "cpo"}, "sigmoid"),
    ({"loss": "cpo", "beta": 0.3, "label_smoothing": 0.2, "nll": 0.5}, "sigmoid"),
    ({"loss": "cpo_hinge", "beta": 0.05}, "hinge"),
    ({"loss": "cpo_ipo", "beta": 0.4}, "ipo"),
    ({"loss": "simpo"}, "simpo"),
    ({"loss": "simpo", "gamma": 0.5, "nll": 0.7, "label_smoothing": 0.1}, "simpo"),
    ({"loss": "simpo", "alpha": 0.25}, "alphapo"),
]


def assert_trains_as_trl(run, trainer_class, config):
    """Compare the loss of all rows, its gradients and metrics with those of a trainer of TRL.

    Its nll is a mean over the tokens of a micro-batch, which depends on the layout; so its
    micro-batches have one pair.
    """
    model = AutoModelForCausalLM.from_pretrained(run.folder, dtype=torch.float32)
    shaken(run.model, 0.1)
    model.load_state_dict(run.model.state_dict())
    trainer = trainer_class(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(run.rows),
        processing_class=run.tokenizer,
    )
    expected = 0.0
    for batch in trainer.get_train_dataloader():
        loss = trainer.compute_loss(model.train(), batch) / len(run.rows)
        loss.backward()
        expected += float(loss.detach())
    actual, metrics = run.losses()
    assert actual == pytest.approx(expected, rel=1e-5)
    assert_equal(gradients(run.model), gradients(model))
    stored = trainer._stored_metrics["train"]
    return metrics, {ours: sum(stored[name]) / len(run.rows) for ours, name in METRICS.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("options", "name"), CPO)
def test_cpo_and_simpo_equal_trl(tmp_path, options, name):
    run = open_dpo(tmp_path / "run", rows=text_pairs(), **options)
    used = options_of(Dpo(**options))
    config = cpo.CPOConfig(
        output_dir=str(tmp_path),
        loss_type=name,
        beta=used.beta,
        simpo_gamma=used.gamma,
        alpha=used.alpha,
        label_smoothing=used.label_smoothing,
        cpo_alpha=used.nll,
        **(TRL | {"per_device_train_batch_size": 1}),
    )
    metrics, theirs = assert_trains_as_trl(run, cpo.CPOTrainer, config)
    if not used.alpha:  # TRL reports AlphaPO's rewards
        assert {name: metrics[name] for name in METRICS} == pytest.approx(theirs, rel=1e-4)
    assert 0 < metrics["accuracy"] < 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_orpo_equals_trl(tmp_path, beta):
    """TRL's nll is also that of the prompt's tokens; a prompt of one token has none."""
    run = open_dpo(tmp_path / "run", rows=text_pairs("?"), loss="orpo", beta=beta)
    config = orpo.ORPOConfig(
        output_dir=str(tmp_path), beta=beta, **(TRL | {"per_device_train_batch_size": 1})
    )
    metrics, theirs = assert_trains_as_trl(run, orpo.ORPOTrainer, config)
    assert {name: metrics[name] for name in METRICS} == pytest.approx(theirs, rel=1e-4)
    assert 0 < metrics["accuracy"] < 1


def test_orpo_trains_no_prompt(tmp_path):
    run = open_dpo(tmp_path / "run", loss="orpo", beta=0.5)
    model = AutoModelForCausalLM.from_pretrained(run.folder, dtype=torch.float32)
    log_probs, lengths = logps_of(model, run)
    means = log_probs / lengths
    odds = means - torch.log(1 - means.exp())
    expected = (-means[:, 0] - 0.5 * torch.log(torch.sigmoid(odds[:, 0] - odds[:, 1]))).mean()
    expected.backward()
    loss, metrics = run.losses()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_equal(gradients(run.model), gradients(model))
    assert metrics["nll"] == pytest.approx(-means[:, 0].mean().item(), rel=1e-5)


# In every layout.

PACKED = {"bfd_packing": {"capacity": 256}}


@pytest.mark.parametrize("loss", FREE)
def test_packed_rows_and_shared_prompts_learn_the_same(tmp_path, loss):
    plain, packed = (
        open_dpo(tmp_path / name, loss=loss, plugins=plugins)
        for name, plugins in (("plain", {}), ("packed", PACKED))
    )
    shared = open_dpo(tmp_path / "shared", loss=loss, share_prompt=True, plugins=PACKED)
    expected, metrics = plain.losses()
    for run in (packed, shared):
        assert len(run.batches) < len(plain.batches)
        actual, others = run.losses()
        assert actual == pytest.approx(expected, rel=1e-5)
        assert others == pytest.approx(metrics, rel=1e-5, abs=1e-5)
        assert_equal(gradients(run.model), gradients(plain.model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", ["simpo", *(pytest.param(name, marks=only_full) for name in FREE if name != "simpo")]
)
def test_two_ranks_learn_what_one_learns(tmp_path, loss):
    tables = {
        "data": {"source": str(write_jsonl(tmp_path / "pairs.jsonl", pairs(21)))},
        "train": {"micro_batch": 1},
        "plugins": PACKED,
    }
    testing.ranks_agree("dpo", {"loss": loss, "share_prompt": True}, tables=tables, tolerance=1e-5)


@only_full
@pytest.mark.parametrize("launcher", ["fsdp2", "zero3"])
@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_sharded_ranks_learn_what_one_process_learns(tiny, tmp_path, loss, launcher):
    train = {"batch_size": 8, "micro_batch": 1, "steps": 6, "learning_rate": 1e-3}
    plugins = {**PACKED, "dpo": {"loss": loss, "share_prompt": True}}
    recipe = tiny(rows=pairs(21), train=train, plugins=plugins)
    must_succeed(recipe, f"output={tmp_path / 'alone'}")
    run = tmp_path / launcher
    code, _, err = run_launch(*config(launcher), "-m", "plugsft", recipe, f"output={run}")
    assert code == 0, err
    names = ("loss", "grad_norm", *METRICS)
    results, expected = (
        [line[name] for line in read_metrics(each) for name in names]
        for each in (run, tmp_path / "alone")
    )
    assert results == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_length_normalized_has_the_beta_of_its_paper():
    assert options_of(Dpo(loss="length_normalized")).beta == 5.0


# No reference.


@pytest.mark.parametrize("lora", [{}, {"lora": {"r": 4}}])
def test_no_reference_is_loaded_or_computed(tmp_path, monkeypatch, lora):
    calls = []

    def load_frozen(self, reference=""):
        calls.append(reference)
        raise AssertionError("a reference was loaded")

    monkeypatch.setattr(RunModel, "load_frozen", load_frozen)
    run = open_dpo(tmp_path / "free", loss="simpo", plugins=dict(lora))
    passes = []
    run.model.register_forward_pre_hook(lambda *_: passes.append(1))
    run.losses()
    assert len(passes) == len(run.batches)
    if not lora:
        with pytest.raises(AssertionError, match="a reference was loaded"):
            open_dpo(tmp_path / "bound", loss="sigmoid")


@pytest.mark.parametrize("loss", ["orpo", pytest.param("simpo", marks=only_full)])
def test_pairs_are_learned_without_a_reference(tiny, tmp_path, loss):
    """The first loss is not known, and is not checked."""
    train = {"batch_size": 8, "micro_batch": 4, "steps": 6, "learning_rate": 1e-2}
    recipe = tiny(rows=pairs(16), train=train, plugins={"dpo": {"loss": loss}})
    must_succeed(recipe)
    lines = read_metrics(tmp_path / "run")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
    [plugin] = read_record(tmp_path / "run")["plugins"]
    assert plugin["summary"].startswith(f"{loss} loss, beta ")
    assert plugin["summary"].endswith("; reference: none")


def problems(tmp_path, dpo, **plugins):
    """Return what the check of a recipe refuses."""
    tables = tiny_tables(tmp_path) | {"plugins": {"dpo": dpo, **plugins}}
    recipe, active = resolve(tables)
    try:
        check(active.attach(), recipe, look())
    except RecipeError as refused:
        return refused.problems
    return []


def test_the_recipe_names_each_loss_of_the_table():
    assert get_args(LossName) == tuple(LOSSES)
    assert all(set(loss.defaults) <= set(Options._fields) for loss in LOSSES.values())


VALUES = {"beta": 0.1, "gamma": 0.0, "alpha": 0.0, "label_smoothing": 0.0, "nll": 0.0}


@pytest.mark.parametrize("loss", LOSSES)
def test_an_option_that_a_loss_does_not_use_is_refused(tmp_path, loss):
    """Even where it is set to what turns it off."""
    assert set(VALUES) == set(Options._fields)
    for option, value in VALUES.items():
        refusal = problems(tmp_path, {"loss": loss, option: value})
        if option in LOSSES[loss].defaults:
            assert refusal == []
        else:
            [line] = refusal
            assert f'plugins.dpo: {option} has no effect with loss = "{loss}"; remove it' in line


@pytest.mark.parametrize("option", ["beta", "gamma", "alpha", "nll"])
def test_options_are_finite(tmp_path, option):
    with pytest.raises(RecipeError, match=f"plugins.dpo.{option}: given inf; it should be"):
        problems(tmp_path, {"loss": "simpo", option: float("inf")})


@pytest.mark.parametrize("loss", FREE)
def test_a_loss_without_a_reference_refuses_one(tmp_path, loss):
    refused = f'has no effect with loss = "{loss}", which has no reference; remove it'
    [line] = problems(tmp_path, {"loss": loss, "reference": str(tmp_path)})
    assert line == f"plugins.dpo: reference {refused}"
    [line] = problems(tmp_path, {"loss": loss}, dpo_reference={})
    assert line == f"plugins.dpo: [plugins.dpo_reference] {refused}"
    assert problems(tmp_path, {"loss": loss}) == []
    assert problems(tmp_path, {}, dpo_reference={}) == []


def test_a_certain_answer_has_a_finite_gradient():
    scores = torch.tensor([[0.0, -1.0], [-1e-9, -200.0]], requires_grad=True)
    losses = LOSSES["orpo"].formula(scores, Options(beta=1.0))
    losses.sum().backward()
    assert losses.isfinite().all() and scores.grad.isfinite().all()
