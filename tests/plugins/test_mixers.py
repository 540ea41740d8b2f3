"""Models with states and convolutions on packed rows: each document is computed as it is alone."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from conftest import (
    FULL,
    chats,
    must_succeed,
    only_full,
    run_launch,
    run_plugsft,
    tiny_tables,
    write_recipe,
)
from families import SINKS, build
from hypothesis import given
from hypothesis import strategies as st
from launching import config, curve
from published import tokenizer
from saved_runs import forget, read
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import GradientCheckpointingLayer

from plugsft.plugins.bfd_packing.attention import attend_per_document
from plugsft.plugins.bfd_packing.documents import documents_of
from plugsft.plugins.bfd_packing.mixers import (
    APART,
    FILLED,
    FIXED,
    batches_of,
    compute_apart,
    like_lengths,
)
from plugsft.plugins.bfd_packing.packer import Longest
from plugsft.plugins.bfd_packing.proof import probe_layers

# Of each kind: gated delta nets, convolutions, states beside attention, lightning attention.
CORE = ("qwen3_5_text", "lfm2", "falcon_h1", "minimax")
MIXING = (
    *(*CORE, "qwen3_next", "qwen3_5_moe_text", "olmo_hybrid", "lfm2_moe", "lfm3", "bamba"),
    *("nemotron_h", "kimi_linear", "granitemoehybrid", "recurrent_gemma", "bailing_hybrid"),
)
SEEING = ("qwen3_5", "qwen3_5_moe", "lfm2_vl", "lfm3_vl", "nemotron_h_omni", "minicpmv4_6")
PACKED = ("train.micro_batch=1", "plugins.bfd_packing.capacity=512")
LENGTHS = [19, 13, 4, 40, 1, 2, 17]
ROW = torch.randint(2, 300, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
CHECKPOINTS = {"": None, "reentrant": True, "not reentrant": False}


def some(families, core=CORE):
    return [pytest.param(one, marks=() if one in core else only_full) for one in families]


def load(family, kind=""):
    """Build a model for packed rows, whose layers are computed again in the backward pass."""
    model = build(family)
    for weight in model.parameters():
        weight.data *= 1.5  # leaks that small weights hide
    found = probe_layers(model, Longest(64, 64))
    assert not found.problem, found
    assert {type(module) for module in model.modules()} & {*APART}
    model.set_attn_implementation(attend_per_document())
    for layer in model.modules():
        if kind and isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = True
            run = partial(checkpoint, use_reentrant=CHECKPOINTS[kind])
            layer._gradient_checkpointing_func = run
    return model.train()


def alone(model, row=ROW, lengths=LENGTHS):
    """Compute each document by transformers' own attention."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    parts = [plain(input_ids=part, use_cache=False).logits for part in row.split(lengths, 1)]
    return torch.cat(parts, 1), plain


def packed(model, row=ROW, lengths=LENGTHS):
    return model(input_ids=row, **documents_of(np.array(lengths)), use_cache=False).logits


def ensure_close(one, other, allowed=1e-5):
    assert (one - other).abs().max() <= allowed * other.abs().max()


def gradients(model, logits, row=ROW):
    """Return the gradient of each weight."""
    cross_entropy(logits[0], row[0], reduction="sum").backward()
    return {name: it.grad for name, it in model.named_parameters() if it.grad is not None}


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("family", some(MIXING))
def test_logits_and_gradients_are_those_of_the_documents_alone(family, kind):
    model = load(family, kind)
    logits, plain = alone(model)
    expected, mine = gradients(plain, logits), packed(model)
    ensure_close(mine, logits)
    found = gradients(model, mine)
    assert found.keys() == expected.keys()
    most = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * most, name


@pytest.mark.parametrize("family", some(MIXING))
def test_a_copy_computes_with_its_own_weights(family):
    model = load(family).eval()
    with torch.no_grad():
        before = packed(model)
        twin = copy.deepcopy(model)
        for weight in model.parameters():
            weight.zero_()
        assert torch.equal(packed(twin), before) and not packed(model).any()


@pytest.mark.parametrize("kind", [*CHECKPOINTS][1:])
@pytest.mark.parametrize("family", some(MIXING))
def test_models_and_rows_take_turns_before_their_backward_pass(family, kind):
    """As a policy and its reference do; checkpoints compute each with its own documents."""
    model, other = load(family, kind), load(family, kind).eval()
    rows = {0: LENGTHS, 1: LENGTHS[::-1], 2: [50, 46]}
    expected = {}
    for number, lengths in rows.items():
        model.zero_grad()
        grads = gradients(model, packed(model, lengths=lengths))
        expected[number] = {name: grad.clone() for name, grad in grads.items()}
    model.zero_grad()
    outputs = []
    for lengths in rows.values():
        outputs.append(packed(model, lengths=lengths))
        with torch.no_grad():
            packed(other, lengths=[90, 6])
    losses = [cross_entropy(logits[0], ROW[0], reduction="sum") for logits in outputs]
    sum(losses).backward()
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            ensure_close(weight.grad, sum(grads[name] for grads in expected.values()), 1e-4)


def test_a_class_that_cannot_compute_documents_alone_stays_as_it_was():
    """ZAYA's attention begins with a convolution."""
    model = build("zaya")
    kinds = {type(module) for module in model.modules()}
    forwards = {kind: kind.forward for kind in kinds}
    assert "leaks across documents" in probe_layers(model, Longest(64, 64)).problem
    assert not kinds & {*APART} and {kind: kind.forward for kind in kinds} == forwards


def test_a_row_without_documents_is_computed_whole():
    """As transformers generates."""
    model = load("lfm2").eval()
    model.set_attn_implementation("sdpa")
    whole = model.generate(ROW[:, :9], max_new_tokens=5, do_sample=False)
    slow = model.generate(ROW[:, :9], max_new_tokens=5, do_sample=False, use_cache=False)
    assert torch.equal(whole, slow)


# The batches of a row.


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40))
def test_less_than_a_third_of_each_batch_is_padding(lengths):
    lengths = np.array(lengths)
    groups = like_lengths(lengths, FILLED)
    assert sorted(one for group in groups for one in group) == [*range(len(lengths))]
    for group in groups:
        assert 3 * lengths[group].sum() >= 2 * len(group) * lengths[group].max()


@pytest.mark.parametrize("fixed", [0, FIXED])
@given(documents=st.lists(st.tuples(st.integers(1, 99), st.booleans()), min_size=1, max_size=12))
def test_each_document_begins_with_what_it_sees_of_the_one_before(documents, fixed):
    """And a row comes back as it was, in its own order."""
    lengths = [length for length, _ in documents]
    seen = [0] * len(lengths)
    for number in range(1, len(lengths)):
        if documents[number][1] and not seen[number - 1]:
            seen[number] = min(3, lengths[number - 1])
    row = torch.arange(sum(lengths))
    sources, _ = batches_of(tuple(lengths), tuple(seen), fixed, row.device)
    starts = np.cumsum(lengths) - lengths
    assert len(sources) == fixed or not fixed
    assert sum(source.numel() for source in sources) <= 4 * (sum(lengths) + sum(seen)) + fixed
    expected = set()
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        before = row[starts[number - 1] :][: seen[number]] if seen[number] else row[:0]
        expected.add((*before.tolist(), *range(start, start + length)))
    whole = [tuple(one.tolist()) for source in sources for one in source]
    for document in expected:
        assert any(one[: len(document)] == document for one in whole)
    values = row[None, :, None]
    options = {"seen": tuple(seen)}
    same = compute_apart(lambda it: (it, "state"), (values,), options, tuple(lengths), fixed)
    assert torch.equal(same[0], values) and same[1] == "state"


# Real runs.


@pytest.fixture
def recipe_of(tmp_path):
    """Write a tiny model of a family, and a recipe that trains it."""

    def write(family, steps=3, rows=None, **plugins):
        folder = tmp_path / family
        model = build(family)
        torch.manual_seed(0)
        for weight in model.parameters():
            weight.data.add_(torch.randn_like(weight), alpha=0.01)
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        tables = tiny_tables(tmp_path, rows or chats(16))
        tables["model"], tables["data"]["max_length"] = {"path": str(folder)}, 128
        tables["train"] |= {"batch_size": 8, "micro_batch": 4, "steps": steps}
        return write_recipe(tmp_path / f"{family}.toml", tables | {"plugins": plugins})

    return write


PAIRS = [
    {"prompt": row["messages"][:1], "chosen": row["messages"][1:2], "rejected": other}
    for row in chats(16)
    for other in [[{"role": "assistant", "content": "owls sing at night"}]]
]


@pytest.mark.parametrize("family", some((*MIXING, *SEEING, *SINKS), ("lfm2",)))
def test_packed_runs_learn_what_padded_ones_do_and_resume_to_the_bit(recipe_of, tmp_path, family):
    recipe = recipe_of(family, 20 if FULL else 5)
    padded, run = tmp_path / "padded", tmp_path / "packed"
    must_succeed(recipe, f"output={padded}")
    words = (recipe, *PACKED, "checkpoint.every=3", "checkpoint.keep=9")
    must_succeed(*words, f"output={run}")
    assert curve(run) == pytest.approx(curve(padded), rel=1e-5)
    whole, plain = read(run), read(padded)
    for name in whole:
        torch.testing.assert_close(whole[name], plain[name], rtol=1e-5, atol=1e-5)
    forget(run, after=3)
    must_succeed(*words, f"output={run}", "--resume")
    again = read(run)
    assert all(torch.equal(again[name], whole[name]) for name in whole)


SHARED = (*PACKED, "plugins.dpo.share_prompt=true")
LAYOUTS = {
    "recomputed": ({"gradient_checkpointing": {}}, PACKED),
    "fused": ({"fused_loss": {}}, PACKED),
    "lora": ({"lora": {"r": 2, "alpha": 4}}, PACKED),
    "dpo": ({"dpo": {}}, PACKED),
    "dpo, shared prompts": ({"dpo": {}}, SHARED),
    "compiled": ({"compile": {}}, PACKED),
}


@pytest.mark.parametrize("layout", some(LAYOUTS, {*LAYOUTS} - {"compiled"}))
@pytest.mark.parametrize("family", some(MIXING[:6], ("lfm2",)))
def test_with_other_plugins_it_learns_what_padded_rows_do(recipe_of, tmp_path, family, layout):
    plugins, words = LAYOUTS[layout]
    recipe = recipe_of(family, rows=PAIRS if "dpo" in plugins else None, **plugins)
    # Its compiler would unroll the loops over padded rows.
    without = ("--without", "compile") if "compile" in plugins else ()
    must_succeed(recipe, *without, f"output={tmp_path / 'padded'}")
    must_succeed(recipe, *words, f"output={tmp_path / 'packed'}")
    assert curve(tmp_path / "packed") == pytest.approx(curve(tmp_path / "padded"), rel=1e-5)


@pytest.mark.parametrize("family", ["recurrent_gemma", "stablelm"])
def test_a_reference_of_another_family_is_proved_too(recipe_of, tmp_path, family):
    """Nothing of the policy's family says how the reference computes packed rows."""
    reference = recipe_of(family).with_suffix("")
    recipe = recipe_of("llama", rows=PAIRS, dpo={})
    words = (recipe, f"plugins.dpo.reference={reference}")
    must_succeed(*words, f"output={tmp_path / 'padded'}")
    packed = run_plugsft(*words, *PACKED, f"output={tmp_path / 'packed'}")
    if family == "stablelm":
        assert packed.returncode == 2
        assert f"{reference}: this model cannot be trained on packed rows" in packed.stderr
    else:
        assert curve(tmp_path / "packed") == pytest.approx(curve(tmp_path / "padded"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu2", "fsdp2", "zero3"])
@pytest.mark.parametrize("family", some(MIXING[:6], ("qwen3_5_text",)))
def test_ranks_learn_what_padded_rows_on_one_do(recipe_of, tmp_path, family, kind):
    recipe = recipe_of(family)
    must_succeed(recipe, f"output={tmp_path / 'padded'}")
    words = (*config(kind), "-m", "plugsft", recipe, *PACKED, f"output={tmp_path / 'ranks'}")
    code, out, err = run_launch(*words)
    assert code == 0, err[-3000:]
    assert "no document sees another; each is computed alone by " in out
    assert curve(tmp_path / "ranks") == pytest.approx(curve(tmp_path / "padded"), rel=1e-5)


@only_full
def test_tune_says_what_else_may_be_faster(recipe_of):
    result = must_succeed("tune", recipe_of("lfm2"), *PACKED, "--steps", 3, timeout=900)
    assert "Lfm2ShortConv computes each document of a row alone: without a kernel" in result.stdout
    assert "[plugins.length_group] in place of [plugins.bfd_packing] may be faster" in result.stdout
