"""reward: learns as TRL's trainer, in every layout; transformers loads and scores the model."""

import json
import tomllib
import warnings

import numpy as np
import pytest
import torch
from conftest import (
    must_succeed,
    only_full,
    read_metrics,
    run_launch,
    run_plugsft,
    tiny_tables,
    write_jsonl,
    write_recipe,
)
from datasets import Dataset
from families import DECODERS, build
from first_step import ROWS, FirstStep, pairs, shaken, text_pairs
from gradients import assert_equal, gradients
from launching import config
from plugin_packages import TRL
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GraniteMoeConfig,
)

from plugsft import DataError, RecipeError, testing
from plugsft.base.machine import look
from plugsft.checkpoint.final_model import ensure_saveable
from plugsft.plugins.reward.model import make_reward_model
from plugsft.registry.active import check
from plugsft.registry.load import resolve

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import RewardConfig, RewardTrainer

PACKED = {"bfd_packing": {"capacity": 256}}
METRICS = ("accuracy", "margin", "mean_reward")
LORA = {"lora": {"r": 4, "alpha": 8}}


def open_reward(folder, rows=ROWS, plugins=None, **options):
    """Open a run of a reward model with these options, and other plugins."""
    plugins = {"reward": options, **(plugins or {})}
    micro_batch = 1 if "bfd_packing" in plugins else 3
    step = FirstStep(folder, rows, plugins, {}, {"micro_batch": micro_batch})
    step.run.notify("ready")
    return step


def trl_trainer(folder, run, model, center=0.0, peft=None):
    """Return TRL's trainer and its batch of all rows."""
    config = RewardConfig(
        output_dir=str(folder),
        center_rewards_coefficient=center or None,
        **(TRL | {"per_device_train_batch_size": len(run.rows)}),
    )
    trainer = RewardTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(run.rows),
        processing_class=run.tokenizer,
        peft_config=peft,
    )
    return trainer, next(iter(trainer.get_train_dataloader()))


CASES = [
    (ROWS, {}),
    (ROWS, {"center": 0.05}),
    ([row | {"margin": number / 4} for number, row in enumerate(ROWS)], {"center": 0.01}),
    (text_pairs(), {}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rows", "options"), CASES)
def test_loss_gradients_and_metrics_equal_trl(tmp_path, rows, options):
    run = open_reward(tmp_path / "run", rows, **options)
    shaken(run.model, 0.1)
    model = AutoModelForSequenceClassification.from_pretrained(
        run.folder, dtype=torch.float32, num_labels=1
    )
    model.load_state_dict(run.model.state_dict())
    trainer, batch = trl_trainer(tmp_path, run, model, **options)
    loss, metrics = run.losses()
    expected = trainer.compute_loss(model.train(), batch)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_equal(gradients(run.model), gradients(model))
    logged = {name: trainer._metrics["train"][name][-1] for name in METRICS}
    assert metrics == pytest.approx(logged, rel=1e-5, abs=1e-5)
    assert abs(metrics["margin"]) > 0.005 and 0 < metrics["accuracy"] < 1


@pytest.mark.parametrize("options", [{}, {"center": 0.05}])
def test_packed_rows_learn_the_same(tmp_path, options):
    plain, packed = (
        open_reward(tmp_path / name, plugins=plugins, **options)
        for name, plugins in (("plain", {}), ("packed", PACKED))
    )
    for run in (plain, packed):
        shaken(run.model, 0.1)
    assert len(packed.batches) < len(plain.batches)
    (loss, metrics), (expected, others) = packed.losses(), plain.losses()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert metrics == pytest.approx(others, rel=1e-5, abs=1e-5)
    assert_equal(gradients(packed.model), gradients(plain.model))


def test_weights_count_pairs(tmp_path):
    rows = pairs(4, seed=3)
    weights = (2, 1, 0.5, 0)
    weighted = [row | {"weight": weight} for row, weight in zip(rows, weights, strict=True)]
    plain, run = open_reward(tmp_path / "plain", rows), open_reward(tmp_path / "weighted", weighted)
    for each in (plain, run):
        shaken(each.model, 0.1)
    reward = plain.run.active.plugins["reward"]
    losses = torch.cat([reward.losses(plain.model, batch, None)[0] for batch in plain.batches])
    numbers = torch.from_numpy(np.concatenate(plain.plan.layout[0]))
    expected = (losses * torch.tensor(weights)[numbers]).sum() / sum(weights)
    assert run.losses()[0] == pytest.approx(float(expected.detach()), rel=1e-5)


# Real runs.

TRAIN = {"batch_size": 8, "micro_batch": 2, "steps": 6, "learning_rate": 1e-3}
EVAL = {"every": 3, "split": "train[:5]"}


def measured(run):
    """Return all results of training and evaluation."""
    names = [
        name for metric in ("loss", "grad_norm", *METRICS) for name in (metric, f"eval_{metric}")
    ]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in names if name in line]


def scores(folder, rows, load=AutoModelForSequenceClassification.from_pretrained):
    """Return the scores of the answers of rows: by plain transformers, padded, in one batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False)
        for row in rows
        for side in ("chosen", "rejected")
        if side in row
    ]
    model = load(folder).eval()
    with torch.no_grad():
        padding, special = len(texts) > 1, {"add_special_tokens": False}
        batch = tokenizer(texts, padding=padding, return_tensors="pt", **special)
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits.view(-1, min(2, len(texts)))


def assert_evaluated(run, rows, found):
    """Compare scores of transformers with the run's last evaluation."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    *_, last = (line for line in lines if "eval_loss" in line)
    gaps = found[:, 0] - found[:, 1]
    assert last["eval_loss"] == pytest.approx(
        float(-torch.nn.functional.logsigmoid(gaps).mean()), abs=1e-5
    )
    assert last["eval_margin"] == pytest.approx(float(gaps.mean()), abs=1e-5)
    assert last["eval_mean_reward"] == pytest.approx(float(found.mean()), abs=1e-5)
    assert last["eval_accuracy"] == pytest.approx(float((gaps > 0).float().mean()), abs=1e-6)


def clear_pairs(count):
    """Make pairs whose answers end with one of two words."""
    rows = pairs(count, seed=3)
    for row in rows:
        for side, word in (("chosen", " fox"), ("rejected", " ramen")):
            row[side][0]["content"] += word
    return rows


def test_transformers_loads_and_scores_the_model(tiny, tmp_path):
    rows = clear_pairs(16)
    train = TRAIN | {"steps": 12, "learning_rate": 1e-2}
    recipe = tiny(
        rows=rows, train=train, checkpoint={"every": 6}, eval=EVAL, plugins={"reward": {}}
    )
    must_succeed(recipe)
    run = tmp_path / "run"
    lines = read_metrics(run)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
    found = scores(run / "model", rows[:5])
    assert_evaluated(run, rows, found)
    config = json.loads((run / "model/config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    # A copy, and the model of a checkpoint, score the same.
    for words in (
        [run, "--to", tmp_path / "copy"],
        [run / "checkpoints/step-000012", "--to", tmp_path / "last"],
    ):
        must_succeed("export", *words)
        assert torch.equal(scores(words[-1], rows[:5]), found)
    answer = run_plugsft("chat", run, "--ask", "hello")
    assert answer.returncode == 2 and "is a reward model: it scores answers" in answer.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "plugins"),
    [
        ("fsdp2", PACKED),
        pytest.param("zero3", LORA, marks=only_full),
        pytest.param("cpu2", PACKED, marks=only_full),
        pytest.param("cpu2", LORA, marks=only_full),
        pytest.param("fsdp2", LORA, marks=only_full),
        pytest.param("zero3", PACKED, marks=only_full),
    ],
)
def test_ranks_learn_what_one_process_learns(tiny, tmp_path, launcher, plugins):
    recipe = tiny(
        rows=pairs(21),
        train=TRAIN | {"micro_batch": 1},
        eval=EVAL,
        plugins={"reward": {}, **plugins},
    )
    must_succeed(recipe, f"output={tmp_path / 'alone'}")
    run = tmp_path / launcher
    code, _, err = run_launch(*config(launcher), "-m", "plugsft", recipe, f"output={run}")
    assert code == 0, err
    assert measured(run) == pytest.approx(measured(tmp_path / "alone"), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("base", [{}, {"quantize": {"kind": "nf4"}}], ids=["whole", "quantized"])
def test_a_merged_adapter_scores_as_the_run_did(tiny, tmp_path, base):
    rows = clear_pairs(16)
    train = TRAIN | {"learning_rate": 1e-2}
    run = tmp_path / "run"
    recipe = tiny(rows=rows, train=train, eval=EVAL, plugins={"reward": {}, **LORA, **base})
    result = must_succeed(recipe)
    assert "score trained whole" in result.stdout
    assert json.loads((run / "model/adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    must_succeed("export", run, "--merge", "--to", tmp_path / "merged")
    assert_evaluated(run, rows[:5], scores(tmp_path / "merged", rows[:5]))
    answer = run_plugsft("chat", run, "--ask", "hello")
    assert answer.returncode == 2 and "is a reward model: it scores answers" in answer.stderr


@only_full
def test_a_resumed_run_ends_bit_equal(tmp_path):
    tables = {"data": {"source": str(write_jsonl(tmp_path / "pairs.jsonl", pairs(16)))}}
    testing.resumes("reward", {"center": 0.01}, tables=tables)


ALWAYS = ("gemma3", "mixtral", "opt")


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[] if family in ALWAYS else only_full) for family in DECODERS],
)
def test_transformers_scores_each_family_alike(tmp_path, family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(0))
        inputs = {"attention_mask": torch.ones_like(ids), "use_cache": False}
        try:
            causal = build(family, text_only=True).eval()
            causal(ids, **inputs)
        except Exception as error:  # the family's own code does not take so small a model
            assert family not in ALWAYS
            pytest.skip(str(error))
        try:
            model = make_reward_model(causal, 0).eval()
        except RecipeError as error:
            assert family not in ALWAYS and "transformers has no class" in str(error)
            pytest.skip(str(error))
        ensure_saveable(model)
        model.config.get_text_config().pad_token_id = 0
        model.save_pretrained(tmp_path)
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
        with torch.no_grad():
            ours, theirs = (each(ids, **inputs).logits for each in (model, plain))
    assert (ours[:, -1] - theirs).abs().max() <= 1e-5 * ours.abs().max()


def test_the_head_begins_alike_in_each_dtype():
    heads = [
        make_reward_model(build("llama").to(dtype), seed).score.weight
        for dtype, seed in ((torch.float32, 1), (torch.bfloat16, 1), (torch.float32, 2))
    ]
    assert [head.dtype for head in heads] == [torch.float32, torch.bfloat16, torch.float32]
    assert torch.equal(heads[0], heads[1].float()) and not torch.equal(heads[0], heads[2])
    assert 0.01 < float(heads[0].detach().std()) < 0.03


# What it refuses.


def refusal(tmp_path, tables, **plugins):
    """Return what the check of a recipe refuses."""
    plugins = {"reward": {}} | plugins
    with pytest.raises(RecipeError) as refused:
        recipe, active = resolve(tiny_tables(tmp_path) | {"plugins": plugins} | tables)
        check(active.attach(), recipe, look())
    return str(refused.value)


def save_model(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"model": {"path": str(folder)}}


@pytest.mark.parametrize(
    ("plugins", "says"),
    [
        ({"fused_loss": {}}, "plugins.reward: answers 'token_nll', and so does 'fused_loss'"),
        (
            {"samples": {"prompts": ["who?"], "every": 1}},
            "a reward model cannot generate answers; remove [plugins.samples]",
        ),
        ({"dpo": {}}, "plugins.reward: answers 'render', and so does 'dpo'"),
        ({"reward": {"center": float("inf")}}, "plugins.reward.center: given inf; it should be"),
        ({"dpo_reference": {}}, "plugins.dpo_reference: requires 'dpo'"),
    ],
)
def test_plugins_that_need_a_language_model_are_refused(tmp_path, plugins, says):
    assert says in refusal(tmp_path, {}, **plugins)


def test_training_on_prompts_is_refused(tmp_path):
    data = tiny_tables(tmp_path)["data"] | {"train_on": "all"}
    assert 'data.train_on = "all" has no effect' in refusal(tmp_path, {"data": data})


def test_a_reward_model_and_a_family_without_a_class_are_refused_as_bases(tmp_path):
    run = open_reward(tmp_path / "run")
    trained = save_model(tmp_path / "trained", run.model, run.tokenizer)
    assert "is a LlamaForSequenceClassification, whose head would be" in refusal(tmp_path, trained)
    granite = GraniteMoeConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    granite.save_pretrained(tmp_path / "granite")
    tables = {"model": {"path": str(tmp_path / "granite")}}
    assert "of type 'granitemoe' cannot become a reward model" in refusal(tmp_path, tables)


def test_probabilities_of_tokens_are_refused(tmp_path):
    run = open_reward(tmp_path / "run")
    for use in (
        lambda: run.run.model.score(run.run.tokens, np.arange(2)),
        lambda: run.run.model.generate(["who?"]),
    ):
        with pytest.raises(RecipeError, match="it has no probabilities of tokens, and cannot gen"):
            use()


@pytest.mark.parametrize("margin", ["wide", True, float("inf"), float("nan"), 1e39, -(10**400)])
def test_a_margin_is_a_number(tmp_path, margin):
    rows = [*pairs(4), pairs(1, seed=5)[0] | {"margin": margin}]
    with pytest.raises(
        DataError, match=r"line 5: 'margin' is .{,20}, and should be .* \[plugins.rew"
    ):
        open_reward(tmp_path, rows)


def test_without_a_pad_token_answers_are_scored_one_by_one(tmp_path, tiny):
    run = open_reward(tmp_path / "first")
    tokenizer = run.tokenizer
    tokenizer.pad_token = None
    tables = save_model(tmp_path / "base", language_model(run), tokenizer)
    recipe = tiny(rows=ROWS, train=TRAIN, eval=EVAL, plugins={"reward": {}})
    recipe = write_recipe(recipe, tomllib.loads(recipe.read_text()) | tables)
    result = must_succeed(recipe)
    assert "no pad token, so transformers scores one answer at a time" in result.stdout
    folder = tmp_path / "run/model"
    with pytest.raises(ValueError, match="pad"):
        scores(folder, ROWS[:2])
    found = [
        scores(folder, [{"prompt": row["prompt"], side: row[side]}])
        for row in ROWS[:5]
        for side in ("chosen", "rejected")
    ]
    assert_evaluated(tmp_path / "run", ROWS[:5], torch.cat(found).view(-1, 2))


def language_model(run):
    return AutoModelForCausalLM.from_pretrained(run.folder, pad_token_id=None)


def test_a_pad_token_that_ends_answers_is_refused(tmp_path):
    run = open_reward(tmp_path / "run")
    tokenizer = run.tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    tables = save_model(
        tmp_path / "base", AutoModelForCausalLM.from_pretrained(run.folder), tokenizer
    )
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        tiny_tables(tmp_path, text_pairs()) | {"plugins": {"reward": {}}} | tables,
    )
    result = run_plugsft(recipe)
    assert result.returncode == 2
    assert "answers end with <|im_end|>, which also pads rows" in result.stderr


def test_a_family_with_dropout_and_other_names_learns(tmp_path, tiny):
    """GPT-2 has its own class, with other names of layers."""
    tokenizer = open_reward(tmp_path / "first").tokenizer
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.3)
    sizes = {"vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 2, "n_head": 4}
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(**sizes, **rates))
    tables = save_model(tmp_path / "gpt2", gpt2, tokenizer)
    rows = clear_pairs(16)
    recipe = tiny(rows=rows, train=TRAIN, eval=EVAL, plugins={"reward": {}, **PACKED})
    recipe = write_recipe(recipe, tomllib.loads(recipe.read_text()) | tables)
    plain = tmp_path / "plain"
    for words in (["train.micro_batch=1"], ["--without", "bfd_packing", f"output={plain}"]):
        must_succeed(recipe, *words)
    assert_evaluated(plain, rows[:5], scores(tmp_path / "run/model", rows[:5]))
    # Dropout would differ.
    assert measured(plain) == pytest.approx(measured(tmp_path / "run"), rel=1e-4, abs=1e-5)
