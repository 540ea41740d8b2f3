"""Memory forecasts compared with the measured memory of real runs."""

import re
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, TEXT, only_full, read_metrics, run_plugsft, tiny_tables, write_recipe
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

from plugsft.base.errors import RecipeError
from plugsft.base.for_commands import parse_size
from plugsft.batches.defaults import BatchDefaults
from plugsft.batches.plan import shuffle
from plugsft.data.defaults import DataDefaults
from plugsft.data.load_tokenizer import load_tokenizer
from plugsft.lab.forecast.forecaster import Epoch, Forecast, Forecaster, read_epoch, suggest
from plugsft.lab.forecast.meta_model import MetaModel
from plugsft.lab.forecast.run import cluster_of, notes
from plugsft.lab.forecast.strategies import (
    DDP,
    FSDP2,
    SINGLE,
    ZERO3,
    Cluster,
    Setting,
    peak_memory,
)
from plugsft.lab.trials import trials
from plugsft.lab.tune import Tuning
from plugsft.model.config import load_config
from plugsft.model.defaults import ModelDefaults
from plugsft.model.load import make_load
from plugsft.recipe.parse import anchored
from plugsft.registry import load as registry
from plugsft.tokens.store import Tokens

WORDS = TEXT.split()
KINDS = {"one": SINGLE, "cpu2": DDP, "fsdp2": FSDP2, "zero3": ZERO3}
# So large that its tensors dwarf what else a process holds, and as few tokens as can be.
SCRATCH = {"hidden": 768, "layers": 5, "heads": 8, "vocab": 400, "context": 512}
MEDIUM = SCRATCH | {"hidden": 512}
HEADY = {"hidden": 256, "layers": 2, "heads": 4, "vocab": 12_000, "context": 2048}
CHECKPOINTING, FUSED, LORA = {"gradient_checkpointing": {}}, {"fused_loss": {}}, {"lora": {"r": 8}}


def rows(count, words, bag=WORDS):
    rng = np.random.default_rng(0)
    return [{"text": " ".join(rng.choice(bag, words))} for _ in range(count)]


def many_words():
    """So many that a tokenizer finds thousands of entries."""
    rng = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return ["".join(rng.choice(letters, rng.integers(3, 9))) for _ in range(6000)]


def launcher(kind):
    file = ROOT / f"recipes/accelerate/{kind}.yaml"
    words = f"{sys.executable} -m accelerate.commands.launch --config_file {file} --num_processes 2"
    return "" if kind == "one" else words


def compared(folder, monkeypatch, kind, plugins, more):
    """Return the measured and the forecast peak memory of a rank."""
    # Freed memory goes back at once.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "262144")
    tables = tiny_tables(folder, more.pop("rows", None) or rows(24, 120))
    model = {"scratch": more.pop("scratch", SCRATCH), **more.pop("model", {})}
    tables |= {"model": model, "plugins": plugins}
    tables["data"]["max_length"] = 512
    tables["train"] |= {"batch_size": 4, "micro_batch": 2, **more}
    recipe, active = registry.load(write_recipe(folder / "recipe.toml", tables))
    ranks = 1 if kind == "one" else 2
    with trials(recipe, active, launcher(kind)) as made:
        # DDP's buckets are made anew in the second step, and whole in the third.
        trial = made.run({}, steps=3 if kind == "cpu2" else 2)
        assert not trial.error, trial.error
        tokens = Tokens(made.tokens.folder)
        order = shuffle([(len(tokens), 1.0)], recipe.train.seed, 0)
        named, _ = registry.resolve(made.tables)
        entries = len(load_tokenizer(named.model, folder))
        epoch = Epoch(tokens, np.arange(len(tokens)), order, entries, True)
        forecaster = Forecaster(made.tables, epoch, gpu=False)
        forecasts = forecaster.forecast({}, Cluster("CPU", False, 0, 1, ranks))
        [one] = [forecast for forecast in forecasts if forecast.strategy is KINDS[kind]]
        weights = forecaster.trace({}, ranks)[1].weights
        assert weights.count == trial.run["model"]["parameters"]
    measured = max(rank["host"] - rank["before"] for rank in trial.ranks)
    parts = {name: round(size / 1e6) for name, size in one.memory._asdict().items()}
    off = one.memory.total / measured - 1
    print(
        f"\n{kind:<6} {' '.join(plugins) or '-':<30} {more} measured {measured / 1e6:,.0f} MB, "
        f"forecast {one.memory.total / 1e6:,.0f} MB ({off:+.1%}) {parts}"
    )
    return measured, one.memory.total


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, plugins",
    [
        pytest.param("one", {}, marks=only_full),
        pytest.param("one", CHECKPOINTING, marks=only_full),
        pytest.param("fsdp2", {}, marks=only_full),
        pytest.param("zero3", {}, marks=only_full),
    ],
    ids=["one", "checkpointing", "fsdp2", "zero3"],
)
def test_a_forecast_is_the_measured_memory_of_ranks(tmp_path, monkeypatch, kind, plugins):
    measured, forecast = compared(tmp_path, monkeypatch, kind, plugins, {})
    assert forecast == pytest.approx(measured, rel=0.15)


NARROW = {"dtype": "bfloat16", "weights": "bfloat16"}
GRID = [
    *(
        (kind, plugins, {})
        for kind in ("cpu2", "fsdp2", "zero3")
        for plugins in ({}, CHECKPOINTING, LORA)
    ),
    *((kind, {}, {"batch_size": 8}) for kind in ("fsdp2", "zero3")),
    ("one", {**LORA, **CHECKPOINTING}, {"micro_batch": 4}),
    ("one", {"bfd_packing": {"capacity": 512}}, {"micro_batch": 1}),
    *((kind, {}, {"model": {"dtype": "bfloat16"}}) for kind in ("one", "fsdp2", "zero3")),
    *(
        (kind, {"low_memory_adam": {"kind": "corrected"}}, {"model": NARROW})
        for kind in ("one", "fsdp2")
    ),
    ("one", {"low_memory_adam": {"kind": "adamw_8bit"}}, {}),
    *(("one", {"torch_optimizer": {"name": name}}, {}) for name in ("sgd", "adafactor")),
    # torch's Muon multiplies in bfloat16, which takes a CPU minutes.
    ("one", {"torch_optimizer": {"name": "muon", "options": {"ns_steps": 1}}}, {"scratch": MEDIUM}),
]


@only_full
@pytest.mark.slow
@pytest.mark.parametrize("kind, plugins, more", GRID)
def test_forecasts_of_many_kinds(tmp_path, monkeypatch, kind, plugins, more):
    measured, forecast = compared(tmp_path, monkeypatch, kind, plugins, dict(more))
    assert forecast == pytest.approx(measured, rel=0.15)


@only_full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "fsdp2", "zero3"])
@pytest.mark.parametrize("plugins", [{}, FUSED], ids=["logits", "fused"])
def test_forecasts_of_large_vocabularies(tmp_path, monkeypatch, kind, plugins):
    more = {
        "rows": rows(32, 1000, many_words()),
        "scratch": HEADY,
        "micro_batch": 4,
        "batch_size": 8,
    }
    measured, forecast = compared(tmp_path, monkeypatch, kind, plugins, more)
    assert forecast == pytest.approx(measured, rel=0.15)


@only_full
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("plugins", [{}, CHECKPOINTING, FUSED, LORA])
def test_a_forecast_is_what_a_gpu_holds(tmp_path, plugins):
    tables = tiny_tables(tmp_path, rows(16, 120)) | {"plugins": plugins}
    tables["model"] = {"scratch": {**SCRATCH, "layers": 12}, "dtype": "bfloat16"}
    tables["data"]["max_length"] = 512
    path = write_recipe(tmp_path / "recipe.toml", tables)
    planned, trained = run_plugsft("plan", path), run_plugsft(path)
    assert planned.returncode == trained.returncode == 0, planned.stderr + trained.stderr
    [total] = totals_of(planned.stdout).values()
    peak = max(line["memory_gib"] for line in read_metrics(tmp_path / "run")) * 2**30
    assert total == pytest.approx(peak, rel=0.15), planned.stdout


SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
FAMILIES = [
    LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    LlamaConfig(**SIZES, num_key_value_heads=4, tie_word_embeddings=False),
    Qwen3Config(**SIZES, head_dim=32, num_key_value_heads=2, tie_word_embeddings=True),
    MixtralConfig(**SIZES, num_local_experts=4, num_key_value_heads=2),
]


@only_full
@pytest.mark.parametrize("plugins", [{}, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize("config", FAMILIES, ids=lambda one: one.model_type)
def test_weights_are_counted_as_the_real_model_has_them(tmp_path, config, plugins):
    """Tied heads, grouped keys, experts, adapters; and the gradients of a traced step."""
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(tmp_path / "base")
    tables = tiny_tables(tmp_path) | {"plugins": plugins}
    tables["model"] = {"path": str(tmp_path / "base"), "dtype": "bfloat16"}
    recipe, active = registry.load(write_recipe(tmp_path / "recipe.toml", tables))
    active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults())
    meta = MetaModel(recipe, active, load_config(recipe.model))
    weights = meta.weights()
    real = active.hooks.optimize_model(load=make_load(recipe.model, tmp_path))
    sizes = [
        (parameter.numel(), parameter.nbytes, parameter.requires_grad)
        for parameter in real.parameters()
    ]
    assert weights.count == sum(size for size, _, _ in sizes)
    assert weights.bytes == sum(size for _, size, _ in sizes)
    assert weights.trained_bytes == sum(size for _, size, trained in sizes if trained)
    assert weights.trained_count == sum(size for size, _, trained in sizes if trained)
    parts = [*weights.layers, weights.embeddings, weights.tail]
    assert sum(part.bytes for part in parts) == weights.bytes and len(weights.layers) == 3
    batch = {name: torch.zeros(2, 40, dtype=torch.int64) for name in ("input_ids", "labels")}
    trace = meta.trace(batch, "cuda", flash=False)
    assert trace.gradients[-1] == weights.trained_bytes
    assert (trace.activations[:, -1] <= 1e6).all()


def test_experts_are_traced_in_float32_as_in_bfloat16(tmp_path):
    peaks = []
    for dtypes in ({"dtype": "float32"}, {"dtype": "bfloat16", "weights": "bfloat16"}):
        tables = tiny_tables(tmp_path) | {"model": {"path": str(tmp_path)} | dtypes}
        recipe, active = registry.load(write_recipe(tmp_path / "recipe.toml", tables))
        active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults())
        meta = MetaModel(recipe, active, FAMILIES[-1])
        batch = {name: torch.zeros(2, 40, dtype=torch.int64) for name in ("input_ids", "labels")}
        trace = meta.trace(batch, "cpu", flash=False)
        assert trace.gradients[-1] == meta.weights().trained_bytes
        peaks.append(trace.activations[0].max())
    assert 1.5 < peaks[0] / peaks[1] < 2.1  # what normalizes is in float32 anyway


@pytest.fixture
def recipe(tmp_path):
    tables = tiny_tables(tmp_path, rows(64, 100))
    tables["model"] = {"scratch": {**SCRATCH, "hidden": 256, "vocab": 400}}
    tables["train"] |= {"batch_size": 16, "micro_batch": 8}
    return write_recipe(tmp_path / "recipe.toml", tables)


def totals_of(shown):
    """Return strategy -> bytes of a rank, without the reserved ones."""
    table = re.search(r"^  .*\n(weights.*\n(?:.*\n){5})reserved.*\ntotal.*", shown, re.M)
    rows = [re.findall(r"[\d.,]+ [KMG]?i?B", row) for row in table[1].splitlines()]
    sums = [
        sum(parse_size(size.replace(",", "")) for size in part) for part in zip(*rows, strict=True)
    ]
    return dict(zip(re.split("  +", table[0].partition("\n")[0].strip()), sums, strict=True))


def test_every_strategy_has_its_line_and_the_choice_its_launch(recipe, tmp_path):
    result = run_plugsft("plan", recipe, "--gpus", "2x8", "--gpu", "H100")
    assert result.returncode == 0, result.stderr
    totals = totals_of(result.stdout)
    assert [*totals] == ["DDP", "FSDP2", "ZeRO-3"] and totals["FSDP2"] < totals["DDP"]
    said = "GPUs: 2 machines with 8 H100 each, 74.5 GiB each (80 GB on the data sheet)"
    assert said in result.stdout
    # The table fits a terminal, and explains its rows.
    table = result.stdout.partition(said)[2].partition("choose:")[0].strip("\n").splitlines()
    assert max(map(len, table)) <= 80 and table[-1].split() == ["fits"] * 3
    assert any(line.startswith("loss head") and "logits" in line for line in table)
    assert "14 of 16 ranks never get an example; raise train.batch_size" in result.stdout
    line = f"plugsft launch {recipe} --strategy ddp --ranks 8 --nodes 2 --node N --host HOST"
    assert f"choose: DDP, {line}\nrun it on each machine: N is its number, 0 to 1" in result.stdout
    more = run_plugsft("plan", recipe, "--gpus=64x8", "--gpu=H100", "train.batch_size=512")
    assert re.search(r"ranks never get an example; the data has \d\d examples", more.stdout)
    assert not (tmp_path / "run").exists()


def test_where_nothing_fits_a_line_that_fits_is_named_and_true(recipe):
    words = ("plan", recipe, "--gpu", "A100", "--memory")
    little = run_plugsft(*words, "1750MB")
    assert little.returncode == 0, little.stderr
    assert "nothing fits in 1.6 GiB. Changes, and the total with each:" in little.stdout
    lines = little.stdout.splitlines()
    lower = next(line.strip() for line in lines if line.startswith("  train.micro_batch = 4"))
    change, _, came = lower.partition(": ")
    assert "fits" in came, little.stdout
    again = run_plugsft(*words, "1750MB", change.replace(" ", ""))
    assert f"choose: one process, plugsft {recipe} train.micro_batch=4\n" in again.stdout
    assert came.split(" with ")[0] in again.stdout, "the line is true"
    assert any("[plugins.gradient_checkpointing]" in line and "fits" in line for line in lines)
    assert any("--gpus 1x2" in line for line in lines)


@pytest.mark.parametrize(
    "words, says",
    [
        (["--gpus", "0x8"], "--gpus: '0x8'; write it as 8 or, machines x GPUs, as 4x8"),
        (["--gpus", "many"], "--gpus: 'many'"),
        (["--memory", "80"], "--memory: '80' has no unit; write it as 80GiB"),
        (
            ["--gpu", "A100", "--memory", "1MB"],
            "--memory: 976.6 KiB is no more than the 1.4 GiB that driver, NCCL and gaps take",
        ),
        (["--memory", "lots"], "--memory: given 'lots'"),
        (["--gpu", "H1000"], "--gpu: unknown 'H1000'; did you mean 'H100'?"),
        (
            ["--gpu", "H100", "data.max_length=2", "data.too_long=drop"],
            "none of the first 64 rows can be used; plugsft check names the reasons",
        ),
    ],
)
def test_wrong_words_are_refused_with_the_cure(recipe, words, says):
    result = run_plugsft("plan", recipe, *words)
    assert result.returncode == 2 and says in result.stderr and "Traceback" not in result.stderr


@only_full
def test_thousands_of_gpus_can_be_planned(recipe):
    result = run_plugsft("plan", recipe, "--gpus", "512x8", "--gpu", "H100", "--memory", "80GB")
    assert result.returncode == 0 and "512 machines with 8 H100" in result.stdout, result.stderr


def test_memory_alone_means_a_gpu_and_both_units_are_read():
    def cluster(memory=None, gpu=None, here=False):
        return cluster_of((1, 1), memory, gpu, here)

    if not torch.cuda.is_available():
        assert str(cluster(memory="24GB")) == "GPUs: 1 GPU, 22.4 GiB"
        assert str(cluster(memory="24GiB")) == "GPUs: 1 GPU, 24.0 GiB"
        assert str(cluster(memory="24GiB", here=True)) == "CPU: 1 rank on this machine, 24.0 GiB"
        assert str(cluster()).startswith("CPU: 1 rank on this machine, ")
    assert str(cluster(gpu="h100", memory="40GiB")) == "GPUs: 1 H100, 40.0 GiB"
    assert str(cluster(gpu="h100")) == "GPUs: 1 H100, 74.5 GiB (80 GB on the data sheet)"


def test_a_model_that_cannot_be_traced_is_refused(tmp_path, recipe):
    config = BloomConfig(hidden_size=64, n_layer=2, n_head=2)
    scratch, active = registry.load(recipe)
    active.attach(DataDefaults(scratch.folder), BatchDefaults(), ModelDefaults())
    meta = MetaModel(scratch, active, config)

    def broken(*_, **__):
        raise ValueError("no such shapes")

    meta.model.transformer.forward = broken
    batch = {name: torch.zeros(1, 8, dtype=torch.int64) for name in ("input_ids", "labels")}
    with pytest.raises(RecipeError, match=r"of type 'bloom' .*no such shapes.*train.steps"):
        meta.trace(batch, "cpu", flash=False)


@only_full
def test_stored_and_recomputed_activations_are_counted_separately(recipe, tmp_path):
    """What a GPU holds falls with each; what is moved to the host is not subtracted."""
    loaded, active = registry.load(recipe)
    active.attach(DataDefaults(loaded.folder), BatchDefaults())
    forecaster = Forecaster(anchored(loaded), read_epoch(loaded, active, tmp_path), gpu=True)
    checkpointing, offload = "plugins.gradient_checkpointing", {"plugins.activation_offload": {}}
    variants = {
        "stored": {},
        "ops": {checkpointing: {"selective": "ops"}},
        "attention": {checkpointing: {"selective": "attention"}},
        "recomputed": {checkpointing: {}},
        "offloaded": offload,
    }
    traces = {
        name: forecaster.trace({"model.scratch.layers": 12, **changes}, 1)[1].traces[False]
        for name, changes in variants.items()
    }
    peaks = {name: int(trace.activations.sum(0).max()) for name, trace in traces.items()}
    print(f"\n{peaks}")
    assert peaks["stored"] > peaks["ops"] > peaks["attention"] > peaks["recomputed"]
    assert peaks["offloaded"] == peaks["stored"]
    forecasts = forecaster.forecast(offload, Cluster("H100", True, 80e9, 1, 1))
    resolved, _ = registry.resolve(anchored(loaded) | {"plugins": {"activation_offload": {}}})
    assert "note: memory that [plugins.activation_offload] saves is not subtracted" in notes(
        resolved, forecasts
    )


def test_ranks_that_are_tried_later_are_forecast_as_if_they_were_asked_for(recipe, tmp_path):
    """A forecast for one GPU has no weights cast to bfloat16; those for more have."""
    loaded, active = registry.load(recipe, ["model.dtype=bfloat16"])
    active.attach(DataDefaults(loaded.folder), BatchDefaults())
    epoch, two = read_epoch(loaded, active, tmp_path), Cluster("H100", True, 80e9, 1, 2)
    later, asked = (Forecaster(anchored(loaded), epoch, gpu=True) for _ in range(2))
    later.forecast({}, Cluster("H100", True, 80e9, 1, 1))
    assert later.forecast({}, two) == asked.forecast({}, two)


@only_full
def test_pairs_are_packed_into_twice_the_length_as_a_run_packs_them(tmp_path):
    pairs = [{"prompt": "say", "chosen": one["text"], "rejected": "no"} for one in rows(40, 30)]
    tables = tiny_tables(tmp_path, pairs)
    tables["data"]["max_length"] = 200
    tables["train"]["micro_batch"] = 1
    tables["plugins"] = {"dpo": {}, "bfd_packing": {"scope": "dataset"}}
    recipe, active = registry.load(write_recipe(tmp_path / "recipe.toml", tables))
    active.attach(DataDefaults(recipe.folder), BatchDefaults())
    forecaster = Forecaster(anchored(recipe), read_epoch(recipe, active, tmp_path), gpu=True)
    _, traced = forecaster.trace({}, 1)
    size = traced.workload.batch["input_ids"].numel()
    assert size == 400 == Tuning(changed_to_step(recipe), 0, 1).own
    lines = [words for words, _ in suggest(forecaster, recipe, Cluster("H100", True, 0, 1, 1))]
    sizes = [int(size) for line in lines for size in re.findall(r"capacity = (\d+)", line)]
    assert sizes and all(size in (200, 100, 50, 25) for size in sizes), "halves of 400"


def changed_to_step(recipe):
    """tune refuses to change the capacity of rows that decide what a step is."""
    plugins = {**recipe.plugins, "bfd_packing": {"scope": "step"}}
    return recipe.model_copy(update={"plugins": plugins})


@only_full
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_activations_are_shown_under_fsdp2_or_named_as_freed(tmp_path, tied):
    """A large head's gradient is reduced while the layers' activations are there, or at the end."""
    sizes = SIZES | {"vocab_size": 30_000, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tables = tiny_tables(tmp_path)
    tables["model"] = {"path": str(tmp_path / "base"), "dtype": "bfloat16"}
    recipe, active = registry.load(write_recipe(tmp_path / "recipe.toml", tables))
    active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults())
    batch = {name: torch.zeros(8, 100, dtype=torch.int64) for name in ("input_ids", "labels")}
    meta = MetaModel(recipe, active, config, casts_weights=True)
    trace, weights = (
        meta.trace(batch, "cuda", flash=False),
        MetaModel(recipe, active, config).weights(),
    )
    memory = peak_memory(FSDP2, weights, trace, Setting(8, 1, gpu=True, compute_bytes=2))
    shown = memory.activations + memory.loss_head
    assert weights.trained_bytes == 4 * weights.trained_count
    assert memory.weights + memory.optimizer == pytest.approx(12 * weights.count / 8)
    if tied:
        forecast = Forecast(FSDP2, memory, True)
        lines = notes(recipe, [forecast])
        assert (shown < 1e6) == any("under FSDP2 memory peaks at the end" in line for line in lines)
    else:
        assert shown > 0.2 * trace.activations.sum(0).max()
