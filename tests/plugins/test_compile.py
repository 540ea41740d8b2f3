"""compile: the same losses, one program for all lengths, the same names of weights."""

import logging
import re
from copy import deepcopy

import numpy as np
import pytest
import torch
from conftest import bare_tables, chats, must_succeed, only_full, read_record, run_launch, run_ranks
from families import SMALL
from launching import TRAIN, config, curve
from safetensors.torch import load_file
from small_models import apply
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen3Config,
)

from plugsft import RecipeError
from plugsft.base.machine import look
from plugsft.model.load import ModelLoad
from plugsft.plugins.bfd_packing import attention
from plugsft.plugins.bfd_packing.attention import attend_per_document
from plugsft.plugins.bfd_packing.documents import documents_of
from plugsft.plugins.bfd_packing.layouts import PackedEpoch
from plugsft.plugins.bfd_packing.row_shape import fix_shape
from plugsft.plugins.compile import Compile, layers, programs
from plugsft.plugins.compile.layers import OpaqueLengths
from plugsft.plugins.compile.programs import LOGGER
from plugsft.plugins.flash_attention.kernels import register_kernel
from plugsft.plugins.gradient_checkpointing import GradientCheckpointing
from plugsft.plugins.lora import Lora
from plugsft.registry.active import check
from plugsft.registry.load import resolve

# Those of torch, as its compiler is imported and traces.
pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = {
    "llama": LlamaConfig(**SMALL),
    # Layers of two kinds, of one class.
    "gemma3": Gemma3TextConfig(
        **SMALL,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


@pytest.fixture(autouse=True)
def forgets():
    """Leave the compiler as it was."""
    before = {name: getattr(torch._dynamo.config, name) for name in SETTINGS}
    yield
    torch._dynamo.reset()
    torch.compiler.set_stance("default")
    logging.getLogger(LOGGER).filters.clear()
    for name, value in before.items():
        setattr(torch._dynamo.config, name, value)


SETTINGS = ("recompile_limit", "suppress_errors")


def make(name):
    torch.manual_seed(0)
    config = deepcopy(MODELS[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attend_per_document(True))
    return model.train()


def learn(model, lengths):
    """Return the loss of a packed row and all gradients."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 97, (1, sum(lengths))))
    model.zero_grad()
    logits = model(input_ids=ids, **documents_of(np.array(lengths)), use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    loss.backward()
    return loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recomputed", "backend"),
    [
        ("llama", True, "aot_eager"),
        pytest.param("llama", False, "inductor", marks=only_full),
        pytest.param("gemma3", True, "inductor", marks=only_full),
    ],
)
def test_batches_of_other_documents_take_the_same_program(name, recomputed, backend, monkeypatch):
    monkeypatch.setattr(layers, "BACKEND", backend)
    calls = count_attention(monkeypatch)
    plain, plugin = make(name), Compile()
    model = make(name)
    if recomputed:
        model = apply(model, GradientCheckpointing())
    model = apply(model, plugin)
    assert plugin.summary() == "2 layers, compiled when they are first called"
    assert [*model.state_dict()] == [*plain.state_dict()]
    programs = []
    for lengths in ([9, 5], [3, 4, 30, 2, 7], [21], [2] * 40, [11, 60, 1]):
        expected, others = learn(plain, lengths)
        calls.clear()
        loss, gradient = learn(model, lengths)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert (gradient - others).abs().max() <= 1e-5 * others.abs().max()
        # Each layer is recomputed once, by transformers or by the plugin, not by both.
        assert len(calls) == (4 if recomputed else 2)
        programs.append((plugin.programs.count, plugin.programs.repeated))
    print(f"\n{plugin.summary()}")
    # Something was compiled at the first batch, and nothing after it.
    assert programs[0][0] > 0 and {*programs} == {programs[0]}


def count_attention(monkeypatch):
    """Return a list that grows with each call of attention per document."""
    calls = []
    attend = AttentionInterface()[attend_per_document()]

    def counted(*inputs, **options):
        calls.append(1)
        return attend(*inputs, **options)

    monkeypatch.setattr(attention, "attend", counted)
    return calls


@pytest.mark.parametrize("fixed", [True, False], ids=["rows of one shape", "any rows, with lora"])
def test_torchs_kernel_for_packed_rows_is_inside_the_program(fixed, monkeypatch):
    """On tensors without memory, since the kernel needs a GPU."""
    monkeypatch.setattr(layers, "BACKEND", "eager")
    # Programs for one length suffice for rows of one shape.
    plugin = Compile(dynamic=not fixed)
    config = LlamaConfig(**SMALL) if fixed else Qwen3Config(**SMALL)
    with torch.device("meta"):
        kernel = register_kernel("torch", packed=True)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel).bfloat16()
    if not fixed:
        adapters = Lora(r=4)
        adapters.dtype = "bfloat16"
        model = apply(model, adapters, ModelLoad("base")).to("meta")
    apply(model.train(), plugin)

    def learn_row(row):
        row = {key: on_meta(value) for key, value in row.items()}
        model(**row, use_cache=False).logits.sum().backward()

    if fixed:
        learn_row(packed_row([7, 2]))  # a probe before step 1
        plugin.ready()
        generate = plugin.use_weights("generate")
        next(generate)
        learn_row(packed_row([5]))
        generate.close()
        assert plugin.programs.count == 0
    # The first of LoRA's layers needs no gradient of its input, so it has a program of its own.
    programs = 1 if fixed else 2
    for row in packed_epoch() if fixed else map(packed_row, DOCUMENTS):
        learn_row(row)
        assert (plugin.programs.count, plugin.programs.graph_breaks) == (programs, 0)


DOCUMENTS = [9, 5], [3, 4, 30, 2, 7], [21]


def packed_row(lengths):
    ids = torch.zeros(1, sum(lengths), dtype=torch.long)
    return {"input_ids": ids, **documents_of(np.array(lengths))}


def packed_epoch():
    """Yield the rows of an epoch with scope = "dataset"."""
    lengths, capacity = np.random.default_rng(0).integers(3, 30, 40), 64
    epoch = PackedEpoch(np.arange(40), lengths, 1, 2, capacity, lambda lengths: lengths)
    for [rows] in epoch:
        for examples in rows:
            documents, filled = lengths[examples], int(lengths[examples].sum())
            row = packed_row([*documents, *[capacity - filled] * (filled < capacity)])
            yield fix_shape(row, filled, epoch.shape(1))


def on_meta(value):
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@pytest.mark.slow
def test_beyond_the_limit_of_programs_layers_run_uncompiled(monkeypatch, capsys):
    monkeypatch.setattr(programs, "LIMIT", 2)
    monkeypatch.setattr(layers, "BACKEND", "eager")
    plain, plugin = make("llama"), Compile(dynamic=False)
    model = apply(make("llama"), plugin)
    plugin.ready()
    counts = []
    for length in (4, 6, 8, 10, 4):
        (loss, gradient), (expected, others) = learn(model, [length]), learn(plain, [length])
        assert loss == pytest.approx(expected, rel=1e-5)
        assert (gradient - others).abs().max() <= 1e-5 * others.abs().max()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] < counts[1] and {*counts[1:]} == {counts[1]}
    output = capsys.readouterr()
    [warning] = [line for line in output.out.splitlines() if line.startswith("warning")]
    assert "plugins.compile: a layer has 2 programs, the most allowed" in warning
    assert "actual 8" in warning and "torch._dynamo" not in output.err
    assert "actual 8" in plugin.summary()


def test_a_layer_that_cannot_be_compiled_runs_uncompiled(monkeypatch, capsys):
    def refuse(graph, inputs):
        raise RuntimeError("no compiler for this layer")

    monkeypatch.setattr(layers, "BACKEND", refuse)
    plugin = Compile()
    model = apply(make("llama"), plugin)
    assert learn(model, [9, 5])[0] == pytest.approx(learn(make("llama"), [9, 5])[0], rel=1e-5)
    assert capsys.readouterr().out.count("warning: plugins.compile: torch could not compile") == 1
    assert "no compiler for this layer" in plugin.summary()


def test_lengths_hide_from_the_compiler_and_not_from_attention():
    heads = torch.randn(1, 2, 7, 8)
    attend = AttentionInterface()[attend_per_document()]
    module = torch.nn.Identity()
    expected = attend(module, heads, heads, heads, None, documents=(3, 4))[0]
    found = attend(module, heads, heads, heads, None, documents=OpaqueLengths((3, 4)))[0]
    assert torch.equal(found, expected)


def test_a_model_without_such_layers_is_refused():
    class Old(torch.nn.Module):
        config = LlamaConfig()

    with pytest.raises(RecipeError, match="no layers that are known to compile"):
        apply(Old(), Compile())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CXX", "no-such-compiler", r"no C\+\+ compiler.*apt install g\+\+"),
        ("PATH", "/nowhere", r"no C\+\+ compiler.*CXX=\.\.\."),
        ("ACCELERATE_USE_DEEPSPEED", "true", "ZeRO-3.*fsdp2.yaml"),
    ],
)
def test_what_cannot_compile_is_refused_before_anything_is_loaded(
    tmp_path, monkeypatch, name, value, words
):
    recipe, active = resolve(bare_tables(tmp_path, {"compile": {}}))
    check(active.attach(), recipe, look())
    monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=words):
        check(active, recipe, look())


@pytest.mark.slow
@only_full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_learns_the_same_and_its_model_is_a_plain_one(tiny, tmp_path, ranks):
    """Alone with padded rows; on two ranks with packed ones, and layers computed again."""
    plugins, micro = {"compile": {}}, 2
    if ranks == 2:
        packing = {"bfd_packing": {"scope": "dataset"}, "gradient_checkpointing": {}}
        plugins, micro = {"compile": {"dynamic": False}, **packing}, 1
    held_out = {"every": 2, "split": "train[:5]"}
    train = TRAIN | {"steps": 4, "micro_batch": micro}
    recipe = tiny(rows=chats(21), train=train, eval=held_out, plugins=plugins)
    plain, run = tmp_path / "plain", tmp_path / "compiled"
    must_succeed(recipe, f"output={plain}", "--without", "compile")
    result = run_ranks(ranks, recipe, f"output={run}", timeout=550)
    assert result.returncode == 0, result.stderr
    assert curve(run) == pytest.approx(curve(plain), rel=1e-5)
    plugins = read_record(run)["plugins"]
    summary = next(plugin["summary"] for plugin in plugins if plugin["name"] == "compile")
    assert "programs compiled in" in summary and not summary.startswith("0")
    theirs, ours = (load_file(one / "model/model.safetensors") for one in (plain, run))
    assert [*ours] == [*theirs]
    _, info = AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@only_full
def test_sharded_layers_learn_the_same(tiny, tmp_path):
    """Under FSDP2, recomputed, with the fused loss, and without a graph break."""
    plugins = {"compile": {}, "gradient_checkpointing": {}, "fused_loss": {}}
    recipe = tiny(rows=chats(9), train=TRAIN | {"steps": 2, "micro_batch": 1}, plugins=plugins)
    plain, run = tmp_path / "plain", tmp_path / "run"
    must_succeed(recipe, f"output={plain}", "--without", "compile")
    words = ("-m", "plugsft", recipe, f"output={run}")
    code, out, err = run_launch(*config("fsdp2"), *words, timeout=550)
    assert code == 0, err
    assert curve(run) == pytest.approx(curve(plain), rel=1e-5)
    said = re.findall(r"2 layers, (\d) programs compiled|(graph break.*)", out)
    # torch 2.11 compiles another one for rows of another length.
    assert said and {*said} <= {("2", ""), ("3", "")}, said or out
