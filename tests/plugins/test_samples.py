"""samples: the answers are those of the checkpoint, and training does not notice them."""

import json
import shutil

import pytest
import torch
from conftest import (
    ANSWERS,
    must_succeed,
    only_full,
    read_metrics,
    read_record,
    run_launch,
    tables_by_heart,
    tiny_tables,
    write_recipe,
)
from launching import config
from safetensors.torch import load_file

from plugsft import RecipeError
from plugsft.base.machine import look
from plugsft.export.chat import EMPTY
from plugsft.output.report import render
from plugsft.output.run_record import RunRecord
from plugsft.plugins.samples import read_prompts
from plugsft.registry.active import check
from plugsft.registry.load import resolve

WORDS = [word for question in ANSWERS for word in ("--ask", question)]
STEPS = 60


def tables_of(folder, **plugins):
    """Return the tables of a run that learns its answers by heart, with samples."""
    tables = tables_by_heart(folder, STEPS)
    tables["train"]["micro_batch"] = 2
    tables["checkpoint"] = {"every": 20}
    tables["plugins"] = {"samples": {"prompts": [*ANSWERS], "every": 20}, **plugins}
    if "bfd_packing" in plugins:
        del tables["train"]["micro_batch"]
    return tables


def lines_of(run):
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def answers_at(run, step):
    return [line["answer"] for line in lines_of(run) if line["step"] == step]


def losses_of(run):
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(run)]


def chat(model):
    """Return the answers of `plugsft chat`."""
    done = must_succeed("chat", model, "--max-tokens", 64, *WORDS)
    return done.stdout


def assert_answers(run, step, model):
    """Compare the samples of a step with the answers of a model folder."""
    expected = "".join(f"{answer}\n" for answer in answers_at(run, step))
    assert chat(model) == expected


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Train with samples; return the run's folder."""
    folder = tmp_path_factory.mktemp("samples")
    must_succeed(write_recipe(folder / "recipe.toml", tables_of(folder)))
    return folder / "run"


def test_samples_are_what_chat_answers_with_the_checkpoint(ran, tmp_path):
    assert [(line["step"], line["prompt"]) for line in lines_of(ran)] == [
        (step, question) for step in (20, 40, STEPS) for question in ANSWERS
    ]
    exported = tmp_path / "exported"
    must_succeed("export", ran / "checkpoints/step-000020", "--to", exported)
    assert_answers(ran, 20, exported)
    assert_answers(ran, STEPS, ran / "model")
    assert answers_at(ran, STEPS) == [*ANSWERS.values()] != answers_at(ran, 20)
    [record] = read_record(ran)["plugins"]
    assert record["summary"] == f"4 prompts answered, the last time after step {STEPS}"
    page = (ran / "report.html").read_text()
    assert "<h3>And what is green, if I may ask?</h3>" in page
    assert f"<dt>step {STEPS}</dt><dd>The sky,\nand the sea.</dd>" in page


def test_prompts_get_the_system_prompt_of_the_rows(tmp_path):
    tables = tables_of(tmp_path)
    tables["data"]["system"] = "Be brief."
    must_succeed(write_recipe(tmp_path / "recipe.toml", tables), "train.steps=20")
    words = (tmp_path / "run", "--system", "Be brief.", "--max-tokens", 64, *WORDS)
    answers = "".join(f"{answer}\n" for answer in answers_at(tmp_path / "run", 20))
    assert must_succeed("chat", *words).stdout.replace(EMPTY, "") == answers
    assert chat(tmp_path / "run").replace(EMPTY, "") != answers


def test_training_is_the_same_bit_for_bit_and_a_resume_repeats_the_samples(ran, tmp_path):
    recipe = ran.parent / "recipe.toml"
    plain = tmp_path / "plain"
    must_succeed(recipe, "--without", "samples", f"output={plain}")
    assert losses_of(plain) == losses_of(ran) and not (plain / "samples.jsonl").exists()
    models = [load_file(run / "model/model.safetensors") for run in (ran, plain)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    run = shutil.copytree(ran, tmp_path / "run")
    for name in ("checkpoints/step-000060", "checkpoints/step-000040", "model"):
        shutil.rmtree(run / name)
    done = must_succeed(recipe, "--resume", f"output={run}")
    assert "going on after step 20" in done.stdout
    assert lines_of(run) == lines_of(ran)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["cpu2", *(pytest.param(kind, marks=only_full) for kind in ("fsdp2", "zero3"))]
)
def test_two_ranks_give_the_same_samples_once(ran, tmp_path, kind):
    run, recipe = tmp_path / "run", ran.parent / "recipe.toml"
    code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe, f"output={run}")
    assert code == 0, err
    assert lines_of(run) == lines_of(ran)
    losses = [loss for loss, _ in losses_of(run)]
    assert losses == pytest.approx([loss for loss, _ in losses_of(ran)], rel=1e-2)


COMPANIONS = {
    "packed": {"bfd_packing": {}, "gradient_checkpointing": {}, "fused_loss": {}},
    "adapters": {"lora": {"r": 4, "dropout": 0.1}, "bfd_packing": {}, "fused_loss": {}},
}


@pytest.mark.parametrize("name", COMPANIONS)
def test_other_plugins_do_not_change_the_samples_nor_samples_their_training(tmp_path, name):
    """Dropout goes on as before where each step draws samples at random."""
    tables = tables_of(tmp_path, **COMPANIONS[name])
    tables["train"]["steps"] = 12
    tables["data"]["max_length"] = 64
    recipe = write_recipe(tmp_path / "recipe.toml", tables)
    kinds = {"greedy": [], "plain": ["--without", "samples"]}
    if name == "adapters":
        kinds["random"] = ["plugins.samples.every=1", "plugins.samples.temperature=1.0"]
    for kind, words in kinds.items():
        must_succeed(recipe, f"output={tmp_path / kind}", *words)
        assert losses_of(tmp_path / kind) == losses_of(tmp_path / "greedy")
    greedy = tmp_path / "greedy"
    model = greedy / "model"
    if name == "adapters":
        assert answers_at(tmp_path / "random", 12) != answers_at(greedy, 12)
        model = tmp_path / "merged"
        must_succeed("export", greedy, "--merge", "--to", model)
    assert any(answers_at(greedy, 12))
    assert_answers(greedy, 12, model)


def test_samples_of_bfloat16_come_with_evaluations_and_repeat_after_a_resume(tmp_path):
    tables = tables_of(tmp_path, bfd_packing={}, gradient_checkpointing={})
    tables["model"]["dtype"] = "bfloat16"
    tables["train"]["steps"] = 6
    tables["eval"] = {"split": "train[:2]", "every": 2, "at_start": True}
    tables["plugins"]["samples"] = {"prompts": ["Who?"], "temperature": 1.0, "every": 3}
    recipe, run = write_recipe(tmp_path / "recipe.toml", tables), tmp_path / "run"
    must_succeed(recipe, "checkpoint.every=3")
    assert [line["step"] for line in lines_of(run)] == [0, 2, 3, 4, 6], "once in each step"
    first = lines_of(run)
    for name in ("checkpoints/step-000006", "model"):
        shutil.rmtree(run / name)
    must_succeed(recipe, "--resume", "checkpoint.every=3")
    assert lines_of(run) == first
    # A new run in its place removes the samples, with the plugin or without it.
    must_succeed(recipe, "--overwrite", "--without", "samples", "train.steps=1")
    assert not (run / "samples.jsonl").exists()


def test_prompts_are_lines_or_rows(tmp_path):
    (tmp_path / "prompts.txt").write_text("Who?\n\n  What is red? \n")
    assert read_prompts(tmp_path / "prompts.txt") == ["Who?", "What is red?"]
    user, answer = ({"role": role, "content": role} for role in ("user", "assistant"))
    rows = [{"prompt": "Who?"}, {"messages": [user, answer, user, answer]}, {"prompt": [user]}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_prompts(path) == ["Who?", [user, answer, user], [user]]
    for wrong, problem in (
        ("{", "is no JSON"),
        ('{"text": "x"}', 'needs "prompt"'),
        ('{"messages": [{"role": "user"}]}', 'needs "prompt"'),
        ('{"messages": []}', "has no message before the answer"),
    ):
        path.write_text(f'{{"prompt": "Who?"}}\n{wrong}\n')
        with pytest.raises(RecipeError, match=f"file: {path}, line 2: {problem}"):
            read_prompts(path)
    with pytest.raises(RecipeError, match=r"none\.txt cannot be read: no such file"):
        read_prompts(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"prompts": ["Who?"]}, "the run has no evaluations to answer after; set every, in steps"),
        ({"every": 2}, "no prompts; set prompts ="),
        ({"every": 2, "prompts": [" "]}, "prompts: an empty prompt has no answer; remove it"),
    ],
)
def test_a_run_that_would_answer_nothing_is_refused(tmp_path, options, problem):
    recipe, active = resolve(tiny_tables(tmp_path) | {"plugins": {"samples": options}})
    with pytest.raises(RecipeError) as refusal:
        check(active.attach(), recipe, look())
    assert f"plugins.samples: {problem}" in str(refusal.value)


def test_the_report_shows_escaped_answers_of_few_steps():
    lines = [
        {"step": step, "prompt": f"<b>{n}", "answer": f"<i>{step}" + "x" * 1000}
        for n in range(20)
        for step in range(1, 101)
    ]
    run = RunRecord(status="completed")
    whole = render(run, [*lines, {"step": 1, "prompt": [], "answer": 3}])
    page = whole.partition("<h2>Samples</h2>")[2].partition("<h2>Setup</h2>")[0]
    assert "<h3>&lt;b&gt;0</h3>" in page and "<b>" not in page and "<i>" not in page
    assert page.count("<h3>") == 10 and page.count("<dt>") == 120 and len(page) < 80_000
    assert "<dt>step 1</dt>" in page and "<dt>step 100</dt><dd>&lt;i&gt;100x" in page
    assert "samples.jsonl has all prompts and steps" in page
    assert "Samples" not in render(run)
