"""kto: labels are read, losses equal TRL's, and no layout changes what is learned."""

import json
import random
import re
import tomllib
import warnings

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    TEXT,
    must_succeed,
    only_full,
    read_metrics,
    run_launch,
    run_plugsft,
    run_ranks,
    tiny_tables,
    write_jsonl,
    write_recipe,
)
from datasets import Dataset
from families import tiny_config
from first_step import FirstStep, like_trl, shaken
from gradients import assert_equal, gradients
from launching import config
from peft import LoraConfig
from plugin_packages import TRL, activate, install
from transformers import AutoModelForCausalLM

from plugsft import RecipeError, testing
from plugsft.base.machine import look
from plugsft.kit import lay_out
from plugsft.loop import evaluation_losses, evaluation_metrics, forward_backward
from plugsft.plugins.kto import Kto
from plugsft.plugins.kto.objective import Mismatched, kl_of
from plugsft.ranks.trained_model import RunModel, evaluating
from plugsft.registry.active import check
from plugsft.registry.load import resolve

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import KTOConfig, KTOTrainer


def rows_of(count, seed=0, share=0.5):
    """Make rows of a prompt, an answer and a label, of various lengths."""
    rng = random.Random(seed)

    def words(most):
        return " ".join(rng.choices(TEXT.split(), k=rng.randint(2, most)))

    return [
        {
            "prompt": [{"role": "user", "content": words(8)}],
            "completion": [{"role": "assistant", "content": words(14)}],
            "label": rng.random() < share,
        }
        for _ in range(count)
    ]


ROWS = rows_of(8, seed=3)
PACKED = {"bfd_packing": {"capacity": 256}}


def open_kto(folder, rows=None, plugins=None, train=None, model=None, evaluates=False, **options):
    """Open a run of KTO with these options, and other plugins."""
    evaluation = {"eval": {"split": "train[:100%]"}} if evaluates else {}
    model, plugins = (model or {}) | like_trl(folder), {**(plugins or {}), "kto": options}
    return FirstStep(folder, rows or ROWS, plugins, model, train, **evaluation)


# Losses and gradients are those of TRL.

METRICS = {
    "kl": "kl",
    "margin": "rewards/margins",
    "reward_desirable": "rewards/chosen",
    "reward_undesirable": "rewards/rejected",
    "logp_desirable": "logps/chosen",
    "logp_undesirable": "logps/rejected",
}
LOSSES = [
    {"loss": "kto"},
    {"loss": "kto", "beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.7},
    {"loss": "apo_zero_unpaired", "beta": 0.3, "undesirable_weight": 2.0},
]


def trl_trainer(folder, run, options, model, reference=None, peft=None):
    """Return TRL's trainer, and all rows as one batch."""
    options = {"loss": "kto", **options}
    config = KTOConfig(
        output_dir=str(folder),
        loss_type=options.pop("loss"),
        **options,
        **(TRL | {"per_device_train_batch_size": len(run.rows)}),
    )
    trainer = KTOTrainer(
        model=model,
        ref_model=reference,
        args=config,
        train_dataset=Dataset.from_list(run.rows),
        processing_class=run.tokenizer,
        peft_config=peft,
    )
    return trainer, next(iter(trainer.get_train_dataloader()))


def assert_equals_trl(run, trainer, batch):
    """Compare the loss, its gradients and the metrics with TRL's."""
    expected = trainer.compute_loss(trainer.model.train(), batch)
    expected.backward()
    loss, metrics = run.losses()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_equal(gradients(run.model), gradients(trainer.model))
    logged = trainer._metrics["train"]
    expected = {ours: logged[theirs][-1] for ours, theirs in METRICS.items()}
    if trainer.loss_type != "kto":
        assert expected.pop("kl") == 0
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
    return metrics


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", LOSSES)
def test_full_fine_tuning_equals_trl(tmp_path, options):
    reference = tmp_path / "reference"
    shaken(open_kto(tmp_path / "first").model, 0.1).save_pretrained(reference)
    run = open_kto(tmp_path / "run", reference=str(reference), **options)
    model, other = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (run.folder, reference)
    )
    metrics = assert_equals_trl(run, *trl_trainer(tmp_path, run, options, model, other))
    assert abs(metrics["margin"]) > 0.005
    if options["loss"] == "kto":
        assert metrics["kl"] > 0.1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", LOSSES[1:])
def test_lora_equals_trl(tmp_path, options):
    run = open_kto(tmp_path / "run", plugins={"lora": {"r": 4, "alpha": 8}}, **options)
    model = AutoModelForCausalLM.from_pretrained(run.folder, dtype=torch.float32)
    peft = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    trainer, batch = trl_trainer(tmp_path, run, options, model, peft=peft)
    ours = shaken(run.model, 0.1).state_dict()
    trainer.model.load_state_dict({name: ours[name] for name in trainer.model.state_dict()})
    metrics = assert_equals_trl(run, trainer, batch)
    assert abs(metrics["margin"]) > 0.005


@pytest.mark.filterwarnings("ignore")
def test_the_weights_equal_those_of_trl_after_steps(tmp_path):
    """Each step trains all rows, in any order; the KL grows from 0."""
    options, rate = {"loss": "kto", "beta": 0.5}, 0.2
    run = open_kto(tmp_path / "run", train={"steps": 4}, **options)
    model, reference = (
        AutoModelForCausalLM.from_pretrained(run.folder, dtype=torch.float32) for _ in range(2)
    )
    trainer, rows = trl_trainer(tmp_path, run, options, model, reference)
    for batch in run.run.global_batches():
        loss = trainer.compute_loss(model.train(), rows)
        loss.backward()
        descend(model, rate)
        actual = sum(float(part) for part in forward_backward(run.run, batch))
        descend(run.model, rate)
        assert actual == pytest.approx(float(loss.detach()), rel=1e-5)
    kls = trainer._metrics["train"]["kl"]
    assert len(kls) == 4 and kls[0] == pytest.approx(0, abs=1e-5) and kls[3] > 0.01
    ours = dict(run.model.named_parameters())
    for name, weight in model.named_parameters():
        assert torch.allclose(ours[name], weight, rtol=1e-5, atol=1e-6), name


def descend(model, rate):
    """Take a step of gradient descent."""
    with torch.no_grad():
        for weight in model.parameters():
            weight -= rate * weight.grad
            weight.grad = None


# No layout changes what is learned.

KINDS = {"full": {}, "lora": {"lora": {"r": 4, "alpha": 8}}}
OPTIONS = {"undesirable_weight": 3.0}
NAMES = ("loss", "grad_norm", *METRICS)
STEPS, EVALUATIONS = 6, 3


def write(folder, kind):
    """Write a recipe whose epochs end with a step of five examples; return its path."""
    tables = tiny_tables(folder, rows_of(21, share=0.8))
    tables["train"] |= {"learning_rate": 1e-2, "epochs": 2}
    tables["eval"] = {"every": 2, "split": "train[:10]"}
    tables["plugins"] = {"kto": OPTIONS, **KINDS[kind]}
    return write_recipe(folder / "recipe.toml", tables)


def learned(run):
    """Return the metrics that depend on neither the clock nor the layout."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {*NAMES, *(f"eval_{name}" for name in NAMES)}
    assert len(lines) == STEPS + EVALUATIONS
    return [{name: line[name] for name in names & line.keys()} for line in lines]


def assert_close(actual, expected):
    for line, other in zip(actual, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=2e-5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return `plain(kind)`: the recipe, and what one process learns from it."""
    done = {}

    def make(kind):
        if kind not in done:
            folder = tmp_path_factory.mktemp(kind)
            recipe = write(folder, kind)
            must_succeed(recipe)
            lines = read_metrics(folder / "run")
            assert sum(line["kl"] > 0.01 for line in lines) >= 3
            assert lines[0]["kl"] == pytest.approx(0, abs=1e-5)
            assert lines[-1]["reward_desirable"] > 0.05
            assert any("margin" not in line for line in lines), "no step has one label only"
            assert any("margin" in line for line in lines)
            done[kind] = recipe, learned(folder / "run")
        return done[kind]

    return make


PACK = ("plugins.bfd_packing.capacity=256", "train.micro_batch=1")
LAYOUTS = {
    "micro-batches": ("train.micro_batch=3", "plugins.async_collate={}"),
    "packed": (*PACK, "plugins.fused_loss.chunk=7", "plugins.async_collate={}"),
    "recomputed": (*PACK, "plugins.gradient_checkpointing.every=1"),
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("full", "micro-batches"),
        ("full", "packed"),
        pytest.param("lora", "packed", marks=only_full),
        pytest.param("lora", "recomputed", marks=only_full),
    ],
)
def test_every_layout_learns_the_same(tmp_path, plain, kind, layout):
    recipe, expected = plain(kind)
    must_succeed(recipe, f"output={tmp_path / 'run'}", *LAYOUTS[layout])
    assert_close(learned(tmp_path / "run"), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_learn_what_one_learns(tmp_path, plain, kind):
    """The last step of an epoch has one micro-batch; the other rank computes an empty one."""
    recipe, expected = plain(kind)
    result = run_ranks(2, recipe, f"output={tmp_path / 'run'}", "train.micro_batch=5")
    assert result.returncode == 0, result.stderr
    assert_close(learned(tmp_path / "run"), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "launcher", "layout"),
    [
        ("full", "zero3", "packed"),
        pytest.param("full", "fsdp2", "recomputed", marks=only_full),
        pytest.param("lora", "fsdp2", "packed", marks=only_full),
        pytest.param("lora", "zero3", "recomputed", marks=only_full),
    ],
)
def test_sharded_ranks_learn_what_one_process_learns(tmp_path, plain, kind, launcher, layout):
    recipe, expected = plain(kind)
    words = ("-m", "plugsft", recipe, f"output={tmp_path / 'run'}", *LAYOUTS[layout])
    code, _, err = run_launch(*config(launcher), *words)
    assert code == 0, err
    assert_close(learned(tmp_path / "run"), expected)


def test_two_ranks_have_the_same_weights(tmp_path):
    data = {"source": str(write_jsonl(tmp_path / "rows.jsonl", rows_of(20)))}
    testing.ranks_agree("kto", tables={"data": data, "plugins": PACKED}, tolerance=1e-5)


def test_a_resumed_run_learns_what_an_uninterrupted_one_learns(tmp_path):
    data = {"source": str(write_jsonl(tmp_path / "rows.jsonl", rows_of(24, share=0.8)))}
    testing.resumes("kto", tables={"data": data, "train": {"learning_rate": 1e-2}})


# Mismatched texts.


def in_words(run, tokens, number):
    """Return the untrained and the trained text of an example."""
    ids, mask = tokens.example(number)
    return tuple(run.tokenizer.decode(ids[mask == trained]) for trained in (False, True))


def test_each_prompt_gets_the_answer_of_the_example_before_it(tmp_path):
    """In the order of the data, whatever the order in the step; an example counts once."""
    run = open_kto(tmp_path)
    tokens = run.run.tokens
    texts = [in_words(run, tokens, number) for number in range(len(tokens))]
    mismatched = Mismatched(tokens, np.array([5, 2, 7, 2]), 256)
    pairs = [(2, 7), (5, 2), (7, 5)]
    for number, (prompt, answer) in enumerate(pairs):
        assert in_words(run, mismatched, number) == (texts[prompt][0], texts[answer][1])
    assert mismatched.targets.tolist() == tokens.targets[[7, 2, 5]].tolist()
    whole = mismatched.lengths
    longest = int(whole.max()) - 2
    cut = Mismatched(tokens, np.array([2, 5, 7]), longest)
    assert cut.lengths.tolist() == np.minimum(whole, longest).tolist()
    assert (mismatched.targets - cut.targets).tolist() == (whole - cut.lengths).tolist()


def test_a_lone_example_has_no_kl():
    """Its own answer would be the mismatched one."""
    assert kl_of(Kto(), None, np.array([3, 3])) == 0


def test_an_answer_of_several_turns_begins_at_its_first_trained_token(tmp_path):
    def turn(role, content):
        return {"role": role, "content": content}

    chats = [
        [turn("user", "who?"), turn("assistant", "owls"), turn("user", "all?"), answer]
        for answer in (turn("assistant", "ramen"), turn("assistant", "cafés"))
    ]
    chats[1] = chats[1][-2:]
    run = open_kto(tmp_path, [{"messages": chat, "label": True} for chat in chats])
    mismatched = Mismatched(run.run.tokens, np.arange(2), 256)
    first, second = (in_words(run, mismatched, number) for number in range(2))
    assert first[1] == "cafés<|im_end|>\n" and second[1] == "owls<|im_end|>\nramen<|im_end|>\n"
    assert "who?" in first[0] and "all?" not in first[0] and second[0].count("all?") == 2


@pytest.mark.parametrize(
    ("padded", "most", "texts"),
    [(False, 20, [[20], [12], [9, 7], [7, 3, 1]]), (True, 24, [[20], [12, 9], [7, 7, 3], [1]])],
)
def test_micro_batches_hold_each_text_once(padded, most, texts):
    lengths = np.array([3, 9, 20, 1, 7, 7, 12])
    micro_batches = lay_out(lengths, most, padded)
    assert [lengths[part].tolist() for part in micro_batches] == texts
    assert sorted(np.concatenate(micro_batches).tolist()) == [*range(7)]
    assert [len(part) for part in lay_out(lengths, 1, padded)] == [1] * 7


def test_a_weight_multiplies_the_loss_of_a_row(tmp_path):
    """A row of weight 2 counts as two rows, and one of weight 0 does not count."""
    first, reference = open_kto(tmp_path / "first"), tmp_path / "reference"
    first.tokenizer.save_pretrained(first.folder)
    shaken(first.model, 0.1).save_pretrained(reference)
    weights = [1, 2, 0, 1, 1, 2, 1, 1]
    weighted = [{**row, "weight": weight} for row, weight in zip(ROWS, weights, strict=True)]
    copies = [row for row, weight in zip(ROWS, weights, strict=True) for _ in range(weight)]
    shared = {"model": {"path": str(first.folder)}, "reference": str(reference)}
    options = {"loss": "apo_zero_unpaired", **shared}
    runs = (
        open_kto(tmp_path / "one", weighted, **options),
        open_kto(tmp_path / "two", copies, **options),
    )
    (loss, metrics), (expected, others) = (run.losses() for run in runs)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert metrics == pytest.approx(others, rel=1e-4)
    assert_equal(*(gradients(run.model) for run in runs))
    # The KL is not weighted, but no prompt gets the answer of a row of weight 0.
    _, metrics = open_kto(tmp_path / "three", weighted, **shared).losses()
    counted = [row for row in weighted if row["weight"]]
    _, others = open_kto(tmp_path / "four", counted, **shared).losses()
    assert metrics["kl"] == pytest.approx(others["kl"], rel=1e-4) and metrics["kl"] > 0.1


# Labels.


@pytest.mark.parametrize(
    ("label", "says"),
    [
        (1, "line 1: 'label' is 1, and should be true or false for [plugins.kto]"),
        ("true", "line 1: 'label' is 'true', and should be true or false for [plugins.kto]"),
        (0.5, "line 1: 'label' is 0.5, and should be true or false for [plugins.kto]"),
        (None, "no 'label' that is true or false for [plugins.kto]: the row has completion, label"),
    ],
)
def test_a_label_that_is_not_true_or_false_is_refused(tiny, label, says):
    result = run_plugsft(tiny(rows=[ROWS[0] | {"label": label}, *ROWS], plugins={"kto": {}}))
    assert result.returncode == 2 and says in result.stderr, result.stderr


def test_pairs_and_rows_with_labels_name_each_other_s_plugin(tiny):
    pair = [{"prompt": "who? ", "chosen": "owls", "rejected": "elks"}]
    for rows, own, other in ((pair, "kto", "[plugins.dpo]"), (ROWS, "dpo", "[plugins.kto]")):
        result = run_plugsft(tiny(rows=rows, plugins={own: {}}))
        [line] = result.stderr.splitlines()
        assert result.returncode == 2 and other in line and "plain fine-tuning" not in line


def test_a_text_without_a_prompt_is_refused(tiny):
    rows = [{"text": "owls", "label": True}]
    result = run_plugsft(tiny(rows=rows, plugins={"kto": {}}))
    assert result.returncode == 2 and "no prompt before the answer" in result.stderr


def test_rows_with_labels_name_the_plugin(tiny):
    result = run_plugsft("check", tiny(rows=ROWS))
    assert result.returncode == 2
    assert (
        "'label' tells good answers from bad ones, and no active plugin reads it" in result.stderr
    )
    assert 'add [plugins.kto] to learn from it, or set data.ignore = ["label"]' in result.stderr


BALANCES = [
    (0.2, {}, "desirable ones weigh 0.25 times as much", "set desirable_weight = 4"),
    (0.8, {}, "desirable ones weigh 4 times as much", "set undesirable_weight = 3"),
    (0.8, {"undesirable_weight": 3.0}, None, None),
    (0.5, {}, None, None),
    (1.0, {}, "10 desirable and 0 undesirable answers", "add rows of the other label"),
]


@pytest.mark.parametrize(("share", "options", "says", "cure"), BALANCES)
def test_labels_far_from_balanced_give_a_warning_and_the_cure(tiny, share, options, says, cure):
    """The answers have another column for their label."""
    rows = [
        {name: value for name, value in row.items() if name != "label"} | {"good": n < 10 * share}
        for n, row in enumerate(rows_of(10))
    ]
    data = {"columns": {"label": "good"}}
    result = must_succeed("prepare", tiny(rows=rows, data=data, plugins={"kto": options}))
    warnings = [line for line in result.stdout.splitlines() if "warning: plugins.kto" in line]
    if says is None:
        assert warnings == []
    else:
        [line] = warnings
        assert says in line and cure in line


def test_each_source_of_answers_counts_with_its_weight(tiny, tmp_path):
    """Prepared tokens train, too, where the evaluation has another number of sources."""
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", rows_of(8, n, share=n)) for n in (0, 1)]
    sources = [{"source": str(path), "weight": n + 2} for n, path in enumerate(paths)]
    tables = tomllib.loads(tiny(plugins={"kto": {}}).read_text(encoding="utf8"))
    tables["data"] = {"sources": sources, "max_length": 256}
    tables["eval"] = {"source": str(paths[0]), "split": "train[:4]"}
    recipe = write_recipe(tmp_path / "recipe.toml", tables)
    result = must_succeed("prepare", recipe)
    assert "8 desirable and 8 undesirable answers: desirable ones weigh 1.5 times" in result.stdout
    tokenizer, tokens = (
        re.search(f"^{name}: (/.*)$", result.stdout, re.M)[1] for name in ("tokenizer", "tokens")
    )
    words = [f'data.tokens="{tokens}"', f'model.tokenizer="{tokenizer}"', "train.steps=1"]
    must_succeed(recipe, *words, f"output={tmp_path / 'again'}")


# The recipe, and what is refused.

REFUSED = [
    ({"data": {"train_on": "all"}}, 'data.train_on = "all" has no effect: only answers'),
    ({"train": {"batch_size": 1, "micro_batch": 1}}, "the KL of a step needs answers of other"),
    ({"plugins": {"bfd_packing": {"overlong": "split"}}}, "would part an answer from its prompt"),
    ({"plugins": {"fused_loss": {"kernel": "liger"}}}, "but [plugins.kto] weighs each answer"),
    ({"plugins": {"dpo_reference": {}}}, "KTO scores other texts in each epoch"),
    ({"plugins": {"dpo": {}}}, "plugins.kto: answers 'step', and so does 'dpo'"),
    ({"plugins": {"kto": {"beta": float("inf")}}}, "plugins.kto.beta: given inf; it should be"),
]


@pytest.mark.parametrize(("tables", "says"), REFUSED)
def test_what_would_have_no_effect_is_refused(tmp_path, tables, says):
    tables = {**tables, "plugins": {"kto": {}} | tables.get("plugins", {})}
    merged = tiny_tables(tmp_path, ROWS)
    for name, table in tables.items():
        merged[name] = merged.get(name, {}) | table
    if "bfd_packing" in merged["plugins"]:
        merged["train"]["micro_batch"] = 1
    with pytest.raises(RecipeError) as refused:
        recipe, active = resolve(merged)
        check(active.attach(), recipe, look())
    assert any(says in problem for problem in refused.value.problems), refused.value.problems


def test_an_evaluation_s_metrics_are_means_over_the_answers_of_a_label(tmp_path):
    """It has two steps: of eight examples and of three."""
    labels = [True] * 4 + [False] * 7
    rows = [row | {"label": label} for row, label in zip(rows_of(11), labels, strict=True)]
    run = open_kto(tmp_path, rows, train={"batch_size": 8}, evaluates=True)
    tokens = run.run.evaluation_tokens
    with torch.no_grad(), evaluating(run.run.module):
        metrics = evaluation_metrics(run.run, evaluation_losses(run.run))
    log_probs = [-float(run.run.model.score(tokens, np.array([n])).sum()) for n in range(11)]
    assert metrics["eval_logp_desirable"] == pytest.approx(np.mean(log_probs[:4]), rel=1e-5)
    assert metrics["eval_logp_undesirable"] == pytest.approx(np.mean(log_probs[4:]), rel=1e-5)


def test_the_router_loss_is_that_of_the_answers(tmp_path):
    """Not of the mismatched texts, which the first micro-batch computes, too."""
    first, folder = open_kto(tmp_path / "first"), tmp_path / "experts"
    experts = tiny_config("qwen3_moe")
    experts.vocab_size, experts.max_position_embeddings = 400, 256
    AutoModelForCausalLM.from_config(experts).save_pretrained(folder)
    first.tokenizer.save_pretrained(folder)
    plugins, model = {"router_loss": {"weight": 0.5}}, {"path": str(folder)}
    runs = [
        open_kto(tmp_path / str(size), None, plugins, {"micro_batch": size}, model)
        for size in (8, 3)
    ]
    (loss, metrics), (expected, others) = (run.losses() for run in runs)
    assert loss == pytest.approx(expected, rel=1e-5) and metrics["router_loss"] > 0.1
    assert metrics == pytest.approx(others, rel=1e-5, abs=1e-5)
    assert_equal(*(gradients(run.model) for run in runs))


def test_the_model_s_dropout_is_off(tmp_path):
    first = open_kto(tmp_path / "first")
    first.tokenizer.save_pretrained(first.folder)
    first.model.config.attention_dropout = 0.5
    first.model.save_pretrained(tmp_path / "dropping")
    first.tokenizer.save_pretrained(tmp_path / "dropping")
    run = open_kto(tmp_path / "run", model={"path": str(tmp_path / "dropping")})
    _, metrics = run.losses()
    assert metrics["reward_desirable"] == pytest.approx(0, abs=1e-6)


def test_the_reference_is_loaded_once_for_training_and_evaluation(tmp_path, monkeypatch):
    load, calls = RunModel.load_frozen, []

    def load_frozen(self, *path):
        calls.append(path)
        return load(self, *path)

    monkeypatch.setattr(RunModel, "load_frozen", load_frozen)
    open_kto(tmp_path, evaluates=True)
    assert len(calls) == 1


NOISY = """
    import torch

    @plugin(after=["kto"])
    class Noisy:
        "A model that is random."

        @hookimpl(wrapper=True)
        def optimize_model(self):
            model = yield
            embed = model.get_input_embeddings()
            embed.register_forward_hook(lambda _, inputs, hidden: hidden + torch.randn(1) * 0.1)
            return model
"""


def test_a_random_model_is_noticed_at_step_1(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", noisy=NOISY), monkeypatch)
    result = run_plugsft(tiny(rows=ROWS, plugins={"kto": {}, "noisy": {}}))
    assert result.returncode == 2, result.stderr
    assert "plugins.kto: log-probabilities differ by" in result.stderr


def test_the_recipe_trains(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", rows_of(16))
    tables = tomllib.loads((ROOT / "recipes/kto.toml").read_text(encoding="utf8"))
    tables |= {"output": str(tmp_path / "run"), "model": tiny_tables(tmp_path)["model"]}
    tables["data"] |= {"source": str(rows), "max_length": 128}
    tables["train"] |= {"batch_size": 8}
    tables["plugins"]["arrow_cache"] = {"folder": str(tmp_path / "cache")}
    recipe = write_recipe(tmp_path / "recipe.toml", tables)
    result = must_succeed(recipe)
    assert "kto loss, beta 0.1; reference: a frozen copy; " in result.stdout
    assert len(read_metrics(tmp_path / "run")) == 2
