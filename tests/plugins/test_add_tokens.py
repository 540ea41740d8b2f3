"""model.add_tokens: embeddings grow by means, and lora trains the new rows alone."""

import json
import shutil
import tomllib

import pytest
import torch
from conftest import (
    chats,
    must_succeed,
    only_full,
    read_metrics,
    run_launch,
    run_plugsft,
    tiny_tables,
    write_jsonl,
    write_recipe,
)
from launching import config, curve
from small_models import adapt
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
)

from plugsft import RecipeError
from plugsft.data.load_tokenizer import load_tokenizer
from plugsft.model.load import ModelLoad, grow_embeddings
from plugsft.recipe.tables import Model
from plugsft.registry.load import resolve

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
NEW = ["<think>", "</think>"]
TRAIN = {"batch_size": 8, "micro_batch": 2, "steps": 4, "learning_rate": 3e-3}
WEIGHTS = "model/adapter_model.safetensors"


def rows_with_thoughts(count):
    rows = chats(count)
    for row in rows:
        row["messages"][-1]["content"] = f"<think>{row['messages'][0]['content']}</think> ramen"
    return rows


def model_of(tied=False, **sizes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48} | sizes
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(
        LlamaConfig(**sizes, **layers, tie_word_embeddings=tied)
    )


@pytest.mark.parametrize("tied", [False, True])
def test_new_rows_are_the_means_of_the_others(tied):
    model = model_of(tied)
    old = [
        model.get_input_embeddings().weight.clone(),
        model.get_output_embeddings().weight.clone(),
    ]
    grow_embeddings(model, 90)  # it has these rows
    assert model.config.vocab_size == 90
    grow_embeddings(model, 93)
    new = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    assert (new[0] is new[1]) == tied
    for before, after in zip(old, new, strict=True):
        assert torch.equal(after[:90], before)
        torch.testing.assert_close(after[90:], before.mean(0).expand(3, -1))
    assert model.config.vocab_size == 93
    assert model(torch.tensor([[92, 1]])).logits.shape == (1, 2, 93)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [(["<a>", "<b>", "<a>"], "'<a>' is named twice; remove one"), ([""], "at least 1 character")],
)
def test_tokens_that_are_none_are_refused(tiny, tokens, message):
    tables = tomllib.loads(tiny().read_text())
    tables["model"]["add_tokens"] = tokens
    with pytest.raises(RecipeError, match=message):
        resolve(tables)


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, marks=only_full, id="tied"), pytest.param(False, id="untied")],
)
def start(request, tmp_path_factory):
    """A base with a tokenizer and no spare rows; a recipe that adds two tokens."""
    folder = tmp_path_factory.mktemp("start")
    tables = tiny_tables(folder, rows_with_thoughts(21)) | {"output": str(folder / "base")}
    tables["train"] |= TRAIN | {"steps": 1}
    must_succeed(write_recipe(folder / "base.toml", tables))
    base = folder / "base/model"
    if not request.param:
        plain = AutoModelForCausalLM.from_pretrained(base)
        untied = model_of(**{name: getattr(plain.config, name) for name in ("vocab_size",)})
        untied.generation_config = plain.generation_config
        untied.config.eos_token_id = plain.config.eos_token_id
        untied.save_pretrained(base)
    tables["model"] = {"path": str(base), "add_tokens": NEW}
    tables["train"] |= TRAIN
    return write_recipe(folder / "recipe.toml", tables)


def load(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder), tokenizer


def answer(model, tokenizer):
    ids = tokenizer("<think>", return_tensors="pt", add_special_tokens=False)
    assert ids.input_ids.shape == (1, 1)
    return model.generate(**ids, max_new_tokens=3, do_sample=False)


def test_all_weights_are_trained_saved_and_resumed(start, tmp_path):
    run, again = tmp_path / "run", tmp_path / "again"
    must_succeed(start, f"output={run}", "checkpoint.every=2")
    model, tokenizer = load(run / "model")
    ids = tokenizer.convert_tokens_to_ids(NEW)
    base = AutoModelForCausalLM.from_pretrained(start.parent / "base/model")
    old = base.config.vocab_size
    assert ids == [old, old + 1] and model.config.vocab_size == old + 2
    assert len(answer(model, tokenizer)[0]) > 1
    must_succeed(start, f"output={again}", "--resume-from", run / "checkpoints/step-000002")
    weights = "model/model.safetensors"
    assert (again / weights).read_bytes() == (run / weights).read_bytes()
    exported = tmp_path / "exported"
    must_succeed("export", run / "checkpoints/step-000004", "--to", exported)
    assert (exported / "model.safetensors").read_bytes() == (run / weights).read_bytes()
    # The tokens are others than without, and a checkpoint belongs to its tokens.
    without = tmp_path / "without"
    must_succeed(start, f"output={without}", "model.add_tokens=[]", "train.steps=1")
    counts = [read_metrics(folder)[0]["tokens"] for folder in (run, without)]
    assert counts[0] < counts[1]
    checkpoint = run / "checkpoints/step-000002"
    result = run_plugsft(
        start, f"output={again}-2", "--resume-from", checkpoint, 'model.add_tokens=["<x>"]'
    )
    assert result.returncode == 2 and "model.add_tokens" in result.stderr
    # Going on from this model, they are there already.
    said = must_succeed(
        start, f"output={tmp_path / 'on'}", f"model.path={json.dumps(str(run / 'model'))}"
    ).stdout
    assert "model.add_tokens: the tokenizer has these already: </think>, <think>" in said
    assert load(tmp_path / "on/model")[0].config.vocab_size == old + 2


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("<|im_start|>assistant", "the tokenizer reads it as ['<|im_start|>', 'assistant']"),
        ("Ġa", "writes ' a'; choose another text"),  # the vocabulary's name of " a"
        ("é", "choose another text"),  # its name of a byte
    ],
)
def test_texts_that_cannot_be_tokens_are_refused(start, token, says):
    """transformers adds them, but no text would ever have them, or other texts would."""
    with pytest.raises(RecipeError, match=r"model\.add_tokens: .* cannot be a token") as refused:
        load_tokenizer(Model(path=str(start.parent / "base/model"), add_tokens=[token]), start)
    assert says in str(refused.value)


@pytest.mark.parametrize("trained", [True, False])
def test_adapters_and_their_new_rows_survive_the_merge(start, tmp_path, trained):
    run = tmp_path / "run"
    words = ("plugins.lora.r=4", f"plugins.lora.train_new_tokens={str(trained).lower()}")
    said = must_succeed(start, f"output={run}", *words, "checkpoint.every=2").stdout
    assert ("rows of 2 new tokens trained" in said) == trained
    warning = "warning: plugin lora: rows of 2 new tokens are frozen; train_new_tokens = true"
    assert (warning in said) != trained
    must_succeed("export", run, "--merge")
    merged, tokenizer = load(run / "merged")
    base = AutoModelForCausalLM.from_pretrained(start.parent / "base/model")
    old = base.config.vocab_size
    for get in ("get_input_embeddings", "get_output_embeddings"):
        rows, before = (getattr(model, get)().weight.detach() for model in (merged, base))
        assert torch.equal(rows[:old], before)
        moved = float((rows[old:] - before.mean(0)).abs().max())
        assert (moved > 1e-3) == trained and len(rows) == old + 2
    assert len(answer(merged, tokenizer)[0]) > 1
    said = [
        must_succeed("chat", folder, "--ask", "<think>", "--max-tokens", "5").stdout
        for folder in (run, run / "merged")
    ]
    assert said[0] == said[1]
    again, checkpoint = tmp_path / "again", run / "checkpoints/step-000002"
    must_succeed(start, f"output={again}", *words, "--resume-from", checkpoint)
    assert (again / WEIGHTS).read_bytes() == (run / WEIGHTS).read_bytes()


def test_a_base_with_fewer_rows_than_its_tokenizer_has_tokens_merges_as_it_is(start, tmp_path):
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(start.parent / "base/model", base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<|one more|>"])
    tokenizer.pad_token = "<|one more|>"
    tokenizer.save_pretrained(base)
    words = (f"model.path={base}", "model.add_tokens=[]", "plugins.lora.r=4")
    must_succeed(start, f"output={run}", *words, 'plugins.lora.modules_to_save=["lm_head"]')
    must_succeed("export", run, "--merge")
    merged, made = load(run / "merged")
    assert merged.config.vocab_size == len(made) - 1 == len(tokenizer) - 1
    must_succeed("chat", run, "--ask", "ramen", "--ask", "Who likes soup?", "--max-tokens", "2")


def test_a_reward_model_trains_the_new_rows_of_its_embeddings(start, tmp_path):
    """Its head has no rows of tokens; the merged model has the new rows."""
    pair = {"prompt": "say", "chosen": "<think>a</think>", "rejected": "b"}
    data = f"data.source={json.dumps(str(write_jsonl(tmp_path / 'pairs.jsonl', [pair] * 8)))}"
    run, words = tmp_path / "run", ("plugins.lora.train_new_tokens=true", "plugins.reward={}")
    assert (
        "rows of 2 new tokens trained" in must_succeed(start, f"output={run}", data, *words).stdout
    )
    must_succeed("export", run, "--merge")
    merged = AutoModelForSequenceClassification.from_pretrained(run / "merged")
    base = AutoModelForCausalLM.from_pretrained(start.parent / "base/model")
    rows, before = (m.get_input_embeddings().weight.detach() for m in (merged, base))
    assert torch.equal(rows[: len(before)], before) and len(rows) == len(before) + 2
    assert float((rows[len(before) :] - before.mean(0)).abs().max()) > 1e-3


@only_full
@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_sharded_ranks_learn_the_same_or_refuse(start, tmp_path, kind):
    words = (start, "plugins.lora.r=4", "plugins.lora.train_new_tokens=true")
    code, _, err = run_launch(*config(kind), "-m", "plugsft", *words, f"output={tmp_path / kind}")
    tied = AutoConfig.from_pretrained(start.parent / "base/model").tie_word_embeddings
    if kind == "zero3" or tied:
        shards = "model.add_tokens: the embeddings have" if kind == "zero3" else "ranks shard them"
        assert code == 2 and shards in err
        assert "launch with DDP" in err and "Traceback" not in err
    if kind == "zero3":
        return
    if tied:  # all weights can be trained
        words = (start,)
        code, _, err = run_launch(
            *config(kind), "-m", "plugsft", *words, f"output={tmp_path / kind}"
        )
    assert code == 0, err
    must_succeed(*words, f"output={tmp_path / 'alone'}")
    assert curve(tmp_path / kind) == pytest.approx(curve(tmp_path / "alone"), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_rows_of_new_tokens_are_trained_in_float32(tmp_path, dtype):
    model_of().to(dtype).save_pretrained(tmp_path)
    load = ModelLoad(str(tmp_path), {"dtype": dtype}, new_tokens=[7, 90])
    model, _ = adapt(tmp_path, dtype, load=load, r=4, train_new_tokens=True)
    rows = [one for name, one in model.named_parameters() if "delta" in name]
    assert [(one.dtype, one.shape) for one in rows] == [(torch.float32, (2, 32))] * 2
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    assert all("lora_" in name or "delta" in name for name in names)
    with pytest.raises(RecipeError, match="lm_head is in targets or modules_to_save"):
        adapt(tmp_path, load=load, train_new_tokens=True, modules_to_save=["lm_head"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("model.add_tokens=[]",),
            "plugins.lora: train_new_tokens: the recipe has no model.add_tokens; remove it",
        ),
        (("plugins.fused_loss={}",), "[plugins.fused_loss] reads the frozen weight of the head"),
        (("plugins.lora.adapter=some/where",), "have no rows of new tokens; merge them first"),
    ],
)
def test_what_cannot_train_new_rows_is_refused(start, words, message):
    result = run_plugsft("check", start, "plugins.lora.train_new_tokens=true", *words)
    assert result.returncode == 2
    assert message in result.stderr
