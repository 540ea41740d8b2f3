"""Third parties' plugins that change training: noise on embeddings, schedule-free AdamW."""

import shutil
from pathlib import Path

import pytest
import torch
from author import install
from conftest import only_full, read_metrics, run_launch, run_plugsft, run_ranks
from datasets import load_from_disk
from launching import config
from saved_runs import (
    assert_close,
    assert_equal,
    checkpoint,
    evaluations,
    forget,
    model_of,
    read,
    resume,
    train,
    write,
)
from schedulefree import AdamWScheduleFree
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.integrations.neftune import neftune_post_forward_hook

STEPS = 5
CHECKPOINTS = {"every": 1, "keep": STEPS}
EVAL = {"split": "train[:5]", "every": 2}
NOISY = {
    "train": {"batch_size": 8, "micro_batch": 2, "steps": STEPS, "learning_rate": 3e-3},
    "checkpoint": CHECKPOINTS,
    "eval": EVAL,
    "plugins": {"neftune": {"alpha": 5.0}},
}
# Each step trains on all examples, so a plain loop needs no plan. A large eps keeps rounding small.
FREE = {
    "train": {
        "batch_size": 24,
        "micro_batch": 8,
        "steps": STEPS,
        "learning_rate": 3e-3,
        "schedule": "constant",
        "weight_decay": 0.1,
        "eps": 1e-3,
        "max_grad_norm": 0.0,
    },
    "checkpoint": CHECKPOINTS,
    "eval": EVAL,
    "plugins": {"schedule_free": {"warmup_steps": 2}},
}


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory):
    """Install the package with pip; every process that a test starts looks there."""
    folder = tmp_path_factory.mktemp("pip") / "site"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(install(Path(__file__).parent / "third_party", target=folder))
        yield


def test_the_noise_is_that_of_transformers():
    from plugsft_neftune import Neftune

    embedding = torch.nn.Embedding(9, 16)
    embedding.neftune_noise_alpha = 5.0
    outputs = embedding(torch.arange(8).view(2, 4))
    torch.manual_seed(1)
    expected = neftune_post_forward_hook(embedding, (), outputs)
    torch.manual_seed(1)
    noisy = Neftune(alpha=5.0).add_noise(embedding, (), outputs)
    torch.testing.assert_close(noisy, expected)
    assert not torch.equal(noisy, outputs)


def test_noise_is_added_in_training_only(tmp_path):
    still = {**NOISY, "train": {**NOISY["train"], "learning_rate": 0.0}}
    noisy = train(tmp_path, "noisy", **still)
    plain = train(tmp_path, "plain", **{**still, "plugins": {}})
    assert evaluations(noisy) == evaluations(plain)
    losses = [[line["loss"] for line in read_metrics(run)] for run in (noisy, plain)]
    assert all(abs(a - b) > 1e-5 for a, b in zip(*losses, strict=True))


def test_two_ranks_resume_with_the_same_noise_bit_for_bit(tmp_path):
    recipe, run = write(tmp_path, **NOISY), tmp_path / "recipe"
    result = run_ranks(2, recipe)
    assert result.returncode == 0, result.stderr
    resumed = shutil.copytree(run, tmp_path / "resumed")
    forget(resumed, after=2)
    result = run_ranks(2, recipe, f"output={resumed}", "--resume")
    assert result.returncode == 0, result.stderr
    assert_equal(read(checkpoint(resumed, STEPS)), read(checkpoint(run, STEPS)))
    refused = run_plugsft(recipe, f"output={resumed}", "--resume", "--without", "neftune")
    assert refused.returncode == 2 and "plugins.neftune.alpha was 5.0" in refused.stderr


@pytest.fixture(scope="module")
def free(tmp_path_factory):
    """A run with schedule-free AdamW in one process, without a stop."""
    return train(tmp_path_factory.mktemp("free"), **FREE)


def plain_loop(run):
    """Train as the package's README says; yield the weights of each step, then the average."""
    [folder] = (run / "scratch").glob("model-*")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    folders = (folder for folder in (run / "tokens").iterdir() if folder.is_dir())
    rows = max((load_from_disk(str(folder)) for folder in folders), key=len)  # not those of [eval]
    table, settings = FREE["train"], FREE["plugins"]["schedule_free"]
    optimizer = AdamWScheduleFree(
        model.parameters(),
        lr=table["learning_rate"],
        eps=table["eps"],
        weight_decay=table["weight_decay"],
        **settings,
    )
    optimizer.train()
    for _ in range(STEPS):
        targets = 0
        for row in rows:
            ids, mask = torch.tensor([row["input_ids"]]), torch.tensor(row["loss_mask"])
            logits, labels = model(ids).logits[0, :-1], ids[0, 1:].where(mask[1:], -100)
            cross_entropy(logits, labels, reduction="sum").backward()
            targets += int(mask[1:].sum())
        for weight in model.parameters():
            weight.grad /= targets
        optimizer.step()
        optimizer.zero_grad()
        yield {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer.eval()
    yield {name: weight.detach() for name, weight in model.named_parameters()}


def test_schedule_free_training_is_that_of_a_plain_loop(free):
    *trained, average = plain_loop(free)
    assert_close(model_of(free), average, atol=1e-6)
    # Checkpoints hold the weights that are trained, not the average.
    for step, weights in enumerate(trained, start=1):
        assert_close(read(checkpoint(free, step)), weights, atol=1e-6)
    moved = [(average[name] - trained[-1][name]).abs().max() for name in average]
    assert max(moved) > 1e-4


def test_schedule_free_training_resumes_bit_for_bit(free, tmp_path):
    run = shutil.copytree(free, tmp_path / "run")
    resume(run, free.with_suffix(".toml"), after=2)
    assert_equal(model_of(run), model_of(free))
    assert_equal(read(checkpoint(run, STEPS)), read(checkpoint(free, STEPS)))
    assert evaluations(run) == evaluations(free)


def test_evaluations_leave_schedule_free_training_as_it_is(free, tmp_path):
    tables = {name: table for name, table in FREE.items() if name != "eval"}
    run = train(tmp_path, **tables)
    assert_equal(read(checkpoint(run, STEPS)), read(checkpoint(free, STEPS)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu2", pytest.param("fsdp2", marks=only_full)])
def test_two_ranks_train_schedule_free_alike(free, tmp_path, kind):
    run, recipe = tmp_path / "run", free.with_suffix(".toml")
    code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe, f"output={run}")
    assert code == 0, err
    assert_close(model_of(run), model_of(free), atol=1e-6)
    assert evaluations(run) == pytest.approx(evaluations(free), rel=1e-5)


@pytest.mark.slow
def test_schedule_free_refuses_zero3_before_step_1(free, tmp_path):
    """There, eval() of the optimizer would do nothing, and model/ would not be the average."""
    run, recipe = tmp_path / "run", free.with_suffix(".toml")
    code, out, err = run_launch(*config("zero3"), "-m", "plugsft", recipe, f"output={run}")
    assert code == 2 and "step 1" not in out
    assert "AdamWScheduleFree is not known to update each number on its own" in err
    assert "Launch with DDP or FSDP2 (recipes/accelerate/)" in err


def test_a_schedule_is_refused(tmp_path):
    tables = {**FREE, "train": {**FREE["train"], "schedule": "linear"}}
    result = run_plugsft(write(tmp_path, **tables))
    assert result.returncode == 2
    assert 'plugins.schedule_free: it replaces the schedule: set train.schedule = "constant"' in (
        result.stderr
    )
