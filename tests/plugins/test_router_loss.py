"""router_loss: exact for each example, in every layout."""

import json
import tomllib

import numpy as np
import pytest
import torch
from conftest import chats, must_succeed, only_full, read_metrics, run_launch
from families import tiny_config
from launching import config, curve
from moe import FAMILIES, recipe_of, save_model, save_tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from plugsft import RecipeError, testing
from plugsft.base.machine import look
from plugsft.plugins.bfd_packing.attention import attend_per_document
from plugsft.plugins.bfd_packing.documents import documents_of
from plugsft.plugins.router_loss.routers import Balance, find_routers
from plugsft.registry.active import check
from plugsft.registry.load import resolve

LENGTHS = (7, 12, 5)
METRICS = ("router_loss", "busiest_expert")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def whole(case):
    """Mark a case that only the full tests run."""
    return pytest.param(case, marks=only_full)


def load(folder, family):
    return AutoModelForCausalLM.from_pretrained(save_model(folder, family)).eval()


def record(model, balance, batch, shares):
    """Return the router loss of a batch."""
    with balance.recording():
        model(**batch, use_cache=False)
    return balance.sum_losses(batch | {"_router_shares": torch.tensor(shares)})


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_of_each_router_it_is_that_of_transformers(tmp_path, family):
    """Value and gradients of one example without padding; transformers adds up all layers first."""
    ids = torch.randint(90, (1, 24), generator=torch.Generator().manual_seed(1))
    model = load(tmp_path, family)
    routers = find_routers(model)
    loss = record(model, Balance(routers), {"input_ids": ids, "attention_mask": ids * 0 + 1}, [1.0])
    logits = []
    hooks = [
        router.module.register_forward_hook(lambda *call: logits.append(call[-1][0]))
        for router in routers
    ]
    model(ids, use_cache=False)
    losses = [load_balancing_loss_func((layer,), 4, 2) for layer in logits]
    assert len(losses) == len(hooks) == 2
    expected = sum(losses) / 2
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    weights = [router.module.weight for router in routers]
    for found, wanted in zip(
        torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), strict=True
    ):
        assert float(wanted.norm()) > 1e-3
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2"])
def test_sigmoids_count_as_deepseek_counts_them(tmp_path, family):
    ids = torch.randint(90, (1, 24), generator=torch.Generator().manual_seed(1))
    model = load(tmp_path, family)
    routers = find_routers(model)[:1]
    [router] = routers
    assert router.sigmoid and router.top_k == 2
    loss = record(model, Balance(routers), {"input_ids": ids, "attention_mask": ids * 0 + 1}, [1.0])
    outputs = []
    router.module.register_forward_hook(lambda *call: outputs.append(call[-1]))
    model(ids, use_cache=False)
    logits, _, chosen = outputs[0]
    expected = 0.0
    for expert in range(4):
        share = (chosen == expert).sum() / 24
        scores = logits.sigmoid()
        expected += 4 * share * (scores[:, expert] / scores.sum(1)).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_padded_packed_and_separate_examples_are_the_same(tmp_path):
    model, random = load(tmp_path, "qwen3_moe"), torch.Generator().manual_seed(1)
    balance = Balance(find_routers(model))
    texts = [torch.randint(90, (length,), generator=random) for length in LENGTHS]
    alone = [
        record(model, balance, {"input_ids": text[None], "attention_mask": text[None] * 0 + 1}, [1])
        for text in texts
    ]
    assert len({round(loss.item(), 4) for loss in alone}) == 3
    balance.take_sums()
    shares = [1.0, 3.0, 5.0]
    expected = sum(share * loss for share, loss in zip(shares, alone, strict=True))
    # The last row, and the last document, are padding.
    ids = torch.nn.utils.rnn.pad_sequence([*texts, torch.zeros(2, dtype=int)], batch_first=True)
    mask = torch.arange(12) < torch.tensor([*LENGTHS, 1])[:, None]
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    torch.testing.assert_close(record(model, balance, batch, shares), expected, rtol=1e-5, atol=0)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=attend_per_document()
    )
    packed = Balance(find_routers(model))
    row = torch.cat([*texts, torch.zeros(3, dtype=int)])[None]
    batch = {"input_ids": row} | documents_of(np.array([*LENGTHS, 3]))
    torch.testing.assert_close(record(model, packed, batch, shares), expected, rtol=1e-5, atol=0)
    sums, others = balance.take_sums(), packed.take_sums()
    assert sums.keys() == others.keys() == {*METRICS}
    for name in METRICS:
        assert sums[name].item() == pytest.approx(others[name].item(), rel=1e-5)


REFUSED = [
    ("llama", {}, "transformers knows no routers in a model of type 'llama'"),
    ("llama4_text", {}, "a Llama4Router does not give logits, weights and chosen experts"),
    ("qwen3_moe", {"compile": {}}, "remove [plugins.compile]"),
    ("qwen3_moe", {"dpo": {"share_prompt": True}, "bfd_packing": {}}, "remove share_prompt"),
]


@pytest.mark.parametrize(("family", "plugins", "says"), REFUSED)
def test_what_cannot_be_balanced_is_refused(tmp_path, family, plugins, says):
    tiny_config(family).save_pretrained(tmp_path / "model")
    tables = {"plugins": {"router_loss": {}} | plugins}
    recipe = recipe_of(tmp_path, tmp_path / "model", None, **tables)
    loaded, active = resolve(tomllib.loads(recipe.read_text()))
    with pytest.raises(RecipeError, match=r"plugins\.router_loss") as refused:
        check(active.attach(), loaded, look())
    assert says in str(refused.value)


# Real runs.


def read_lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers(run):
    return curve(run) + [line[name] for line in read_metrics(run) for name in METRICS]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", whole("zero3"), whole("cpu2")])
@pytest.mark.parametrize("family", ["qwen3_moe", *map(whole, FAMILIES[1:])])
def test_every_layout_learns_the_same(tmp_path, tokenizer, family, kind):
    model = save_model(tmp_path / "model", family)
    plugins = {"router_loss": {"weight": 1.0}}
    tables = {"train": {"learning_rate": 1e-2}, "eval": {"every": 3, "split": "train[:8]"}}
    recipe = recipe_of(tmp_path, model, tokenizer, plugins=plugins, **tables)
    alone, run = tmp_path / "alone", tmp_path / kind
    must_succeed(recipe, f"output={alone}")
    losses = [line["router_loss"] for line in read_metrics(alone)]
    assert losses[-1] - 2 < 0.75 * (losses[0] - 2), "the routers learn to balance"
    others = ["plugins.fused_loss={}", "plugins.gradient_checkpointing={}"]
    if family != "gpt_oss":  # it cannot be packed
        others += ["plugins.bfd_packing.capacity=128", "train.micro_batch=1"]
    code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe, f"output={run}", *others)
    assert code == 0, err
    assert numbers(run) == pytest.approx(numbers(alone), rel=1e-5)


def test_the_loss_has_it_and_evaluations_do_not(tmp_path, tokenizer):
    """Without learning, only the sum differs; adapters are balanced too."""
    model = save_model(tmp_path / "model", "mixtral")
    recipe = recipe_of(
        tmp_path,
        model,
        tokenizer,
        train={"learning_rate": 0.0, "steps": 2},
        eval={"every": 1, "split": "train[:5]"},
        plugins={"lora": {"r": 2}, "router_loss": {"weight": 0.5}},
    )
    done = must_succeed(recipe)
    assert "2 routers; the loss of even use is 2" in done.stdout
    must_succeed(recipe, "--without", "router_loss", f"output={tmp_path / 'plain'}")
    metrics = [read_lines(folder) for folder in (tmp_path / "run", tmp_path / "plain")]
    for line, other in zip(*metrics, strict=True):
        if "eval_loss" in line:
            assert line["eval_loss"] == other["eval_loss"] and line["eval_router_loss"] > 1.9
        else:
            wanted = other["loss"] + 0.5 * line["router_loss"]
            assert line["loss"] == pytest.approx(wanted, rel=1e-6)


def test_the_laws_hold(tmp_path, tokenizer):
    path = save_model(tmp_path / "model", "qwen3_moe")
    model = {"scratch": None, "path": str(path), "tokenizer": str(tokenizer)}
    tables = {"model": model, "data": {"max_length": 128}}
    testing.keeps_gradients("router_loss", {"weight": 1e-9}, tables=tables)
    testing.ranks_agree("router_loss", {"weight": 1.0}, tables=tables, tolerance=1e-5)
    testing.resumes("router_loss", {"weight": 1.0}, tables=tables)


def test_pairs_are_balanced_as_often_as_they_are_trained(tmp_path, tokenizer):
    """DPO calls the model twice: the second time as its reference."""
    rows = [
        {"prompt": f"what is {number}", "chosen": "a big cat " * (number + 1), "rejected": "none"}
        for number in range(8)
    ]
    model = save_model(tmp_path / "model", "qwen3_moe")
    tables = {
        "train": {"learning_rate": 0.0, "steps": 1},
        "plugins": {"dpo": {}, "lora": {"r": 2}, "router_loss": {"weight": 1.0}},
    }
    found = []
    for micro_batch in (8, 1):
        recipe = recipe_of(tmp_path, model, tokenizer, rows=rows, **tables)
        run = tmp_path / f"run-{micro_batch}"
        must_succeed(recipe, f"output={run}", f"train.micro_batch={micro_batch}")
        found.append(numbers(run))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    loss, grad_norm, router_loss, _ = found[0]
    assert 1.5 < router_loss < 4, "a mean over pairs"
    assert loss == pytest.approx(np.log(2) + router_loss, rel=1e-6)
    must_succeed(recipe, "--without", "router_loss", f"output={tmp_path / 'plain'}")
    assert curve(tmp_path / "plain")[1] != pytest.approx(grad_norm, rel=1e-2), "its gradient counts"


@only_full
def test_a_row_of_weight_three_counts_as_three_rows(tmp_path, tokenizer):
    model, rows = save_model(tmp_path / "model", "qwen3_moe"), chats(8)
    weighted = [row | {"weight": 1 + 2 * (number == 0)} for number, row in enumerate(rows)]
    found = []
    for name, given in (("weighted", weighted), ("repeated", [rows[0]] * 2 + rows)):
        recipe = recipe_of(
            tmp_path,
            model,
            tokenizer,
            rows=given,
            train={"batch_size": len(given), "steps": 1},
            plugins={"router_loss": {"weight": 1.0}},
        )
        must_succeed(recipe, f"output={tmp_path / name}")
        found.append(numbers(tmp_path / name))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
