"""A real model learns as in a plain loop of torch, with peft's adapters too, and is read as such.

The rows are real chats; each step trains all of them, so that their order plays no part.
"""

import json
import math
from contextlib import nullcontext
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from conftest import only_full, read_metrics, run_plugsft, write_jsonl, write_recipe
from downloads import real_chats, smollm2
from peft import LoraConfig, PeftModel, get_peft_model
from plain import encode, load, token_nlls
from restored_base import restored
from torch.nn.functional import logsigmoid
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from plugsft import Capability, RecipeError
from plugsft.plugins.bfd_packing.attention import ATTENTION, attend, attend_per_document
from plugsft.plugins.bfd_packing.proof import prove_on_model

# Of transformers: what peft still calls by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
RATE = 1e-4
STEPS = 3
# Measured on a CPU: 1.2e-6, 2.6e-5 and 9e-5 at most. The order of sums differs, of padded rows and
# of rows alone, and AdamW enlarges it where gradients are near zero. A learning rate that is 1%
# higher changes the curve by 2.4e-3.
CURVE, CHANGE, LOGITS = 2e-5, 5e-4, 1e-3


@pytest.fixture(scope="session")
def real():
    """Return the folder of the model, its tokenizer, and three short chats."""
    folder = smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # The template writes a long system message where a chat has none.
    system = {"role": "system", "content": "Be brief."}
    chats = ([system, *row["messages"][:4]] for row in real_chats() if len(row["messages"]) > 3)
    short = (chat for chat in chats if len(encode(tokenizer, chat)[0]) <= 48)
    return SimpleNamespace(folder=folder, tokenizer=tokenizer, chats=[*islice(short, 3)])


def sft_loss(model, rows):
    return torch.cat([token_nlls(model, *row) for row in rows]).mean()


def train_plainly(model, loss_of, rate=RATE):
    """Train in a plain loop; return the loss and the gradients' norm of each step."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    curve = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate * (STEPS - step) / STEPS
        loss = loss_of(model)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    return curve


def train(real, folder, rows, **plugins):
    """Train with plugsft; return the run's folder, and the loss and norm of each step."""
    tables = {
        "output": str(folder / "run"),
        "model": {"path": str(real.folder)},
        "data": {"source": str(write_jsonl(folder / "rows.jsonl", rows)), "max_length": 256},
        "train": {"batch_size": len(rows), "learning_rate": RATE, "steps": STEPS, "log_every": 1},
        "plugins": plugins,
    }
    if "bfd_packing" not in plugins:
        tables["train"]["micro_batch"] = 2
    tables["checkpoint"] = {"every": 0}
    done = run_plugsft(write_recipe(folder / "recipe.toml", tables))
    assert done.returncode == 0, done.stderr
    return folder / "run", [
        (line["loss"], line["grad_norm"]) for line in read_metrics(folder / "run")
    ]


def assert_same_curve(found, expected):
    differences = [
        abs(ours / plain - 1)
        for step, plain_step in zip(found, expected, strict=True)
        for ours, plain in zip(step, plain_step, strict=True)
    ]
    assert max(differences) < CURVE, (found, expected)


def assert_same_change(start, found, expected):
    """Compare what training changed: the size of what differs over that of the change."""
    apart = change = 0.0
    for name, plain in expected.items():
        apart += (found[name] - plain).square().sum().item()
        change += (plain - start.get(name, 0)).square().sum().item()
    assert change > 0 and math.sqrt(apart / change) < CHANGE


def assert_logits_equal(found, expected, ids):
    with torch.no_grad():
        found, expected = (
            model.eval()(input_ids=torch.tensor([ids])).logits for model in (found, expected)
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS)


@pytest.fixture(scope="session")
def plain(real):
    """Return what a plain loop learns: the rows, the start, the model and the curve."""
    rows = [encode(real.tokenizer, chat) for chat in real.chats]
    model = load(real.folder)
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    curve = train_plainly(model, lambda model: sft_loss(model, rows))
    return SimpleNamespace(rows=rows, start=start, model=model, curve=curve)


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=only_full)])
def test_real_model_learns_as_in_plain_torch(real, plain, tmp_path, packed):
    plugins = {"bfd_packing": {}} if packed else {}
    run, curve = train(real, tmp_path, [{"messages": chat} for chat in real.chats], **plugins)
    assert_same_curve(curve, plain.curve)
    saved = load(run / "model")
    assert_same_change(plain.start, saved.state_dict(), plain.model.state_dict())
    assert_logits_equal(saved, plain.model, plain.rows[0][0])
    if packed:
        record = json.loads((run / "run.json").read_text())
        assert "documents proved apart (a change moves no neighbour)" in record["packed_rows"]
        assert [line["examples_per_micro_batch"] for line in read_metrics(run)] == [3] * STEPS


@pytest.mark.parametrize("leaks", [False, True])
def test_proof_of_packing_finds_a_leak_in_a_real_model(real, monkeypatch, leaks):
    def leaky(module, query, key, value, mask, *, documents, **options):
        lengths = (documents[0], sum(documents[1:])) if module.layer_idx == 29 else documents
        return attend(module, query, key, value, mask, documents=lengths, **options)

    attend_per_document()
    if leaks:  # between the second document and the third, in the last of 30 layers
        monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION, leaky)
    model = AutoModelForCausalLM.from_pretrained(real.folder, attn_implementation=ATTENTION)
    packing = Capability("bfd_packing", "capacity", None)
    with pytest.raises(RecipeError, match="cannot be trained") if leaks else nullcontext():
        assert "a change moves no neighbour" in prove_on_model(model.float(), True, packing)


@only_full
def test_real_model_answers_word_for_word_as_greedy_transformers(real):
    question = real.chats[0][1]["content"]
    text = real.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    inputs = real.tokenizer(text, add_special_tokens=False, return_tensors="pt")
    ids = load(real.folder).generate(**inputs, max_new_tokens=24, do_sample=False)
    start = inputs["input_ids"].shape[1]
    answer = real.tokenizer.decode(ids[0, start:], skip_special_tokens=True).strip()
    done = run_plugsft("chat", real.folder, "--ask", question, "--max-tokens", "24")
    assert done.returncode == 0, done.stderr
    assert answer and done.stdout.strip() == answer


@pytest.mark.parametrize(
    "kind", [None, pytest.param("nf4", marks=only_full), pytest.param("int8", marks=only_full)]
)
def test_lora_on_a_real_model_learns_as_peft_does(real, tmp_path, kind):
    def base():
        return restored(real.folder, kind=kind) if kind else load(real.folder)

    rows = [encode(real.tokenizer, chat) for chat in real.chats]
    torch.manual_seed(0)
    # Both halves are random, so that both learn from the first step.
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    model = get_peft_model(base(), config)
    model.save_pretrained(tmp_path / "adapters")
    start = adapter_weights(model)
    plugins = {"lora": {"adapter": str(tmp_path / "adapters")}}
    if kind:
        plugins["quantize"] = {"kind": kind}
    run, curve = train(real, tmp_path, [{"messages": chat} for chat in real.chats], **plugins)
    expected = train_plainly(model, lambda model: sft_loss(model, rows))
    assert_same_curve(curve, expected)
    saved = PeftModel.from_pretrained(base(), run / "model")
    assert_same_change(start, adapter_weights(saved), adapter_weights(model))
    assert_logits_equal(saved, model, rows[0][0])
    done = run_plugsft("export", run, "--merge", "--to", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    assert_logits_equal(load(tmp_path / "merged"), model, rows[0][0])


def adapter_weights(model):
    return {name: w.detach().clone() for name, w in model.named_parameters() if "lora_" in name}


@only_full
def test_dpo_on_a_real_model_learns_as_in_plain_torch(real, tmp_path):
    asked = [chat[:2] for chat in real.chats]
    answers = [chat[2:3] for chat in real.chats]
    others = [*answers[1:], answers[0]]
    pairs = [
        [encode(real.tokenizer, prompt + answer) for answer in both]
        for prompt, *both in zip(asked, answers, others, strict=True)
    ]
    rows = [
        {"prompt": prompt, "chosen": good, "rejected": poor}
        for prompt, good, poor in zip(asked, answers, others, strict=True)
    ]
    run, curve = train(real, tmp_path, rows, dpo={"beta": 0.1})

    def margins(model):
        return torch.stack(
            [
                token_nlls(model, *poor).sum() - token_nlls(model, *good).sum()
                for good, poor in pairs
            ]
        )

    model = load(real.folder)
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        frozen = margins(model)
    expected = train_plainly(
        model, lambda model: -logsigmoid(0.1 * (margins(model) - frozen)).mean()
    )
    assert_same_curve(curve, expected)
    assert_same_change(start, load(run / "model").state_dict(), model.state_dict())
