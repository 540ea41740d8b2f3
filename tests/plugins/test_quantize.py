"""quantize: adapters on a base in 4 bits learn what adapters on the restored base learn."""

import gc
import json
import math
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import (
    chats,
    must_succeed,
    only_full,
    read_metrics,
    read_record,
    run_plugsft,
    tiny_tables,
    write_recipe,
)
from peft import LoraConfig, PeftModel, get_peft_model
from restored_base import NF4, restored
from saved_runs import read
from small_models import IDS, save_base, shake
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    modeling_utils,
)

from plugsft import RecipeError, testing
from plugsft.base.machine import look
from plugsft.batches.defaults import BatchDefaults
from plugsft.data.defaults import DataDefaults
from plugsft.export.chat import load as load_for_chat
from plugsft.export.export import compute_logits, load_adapters
from plugsft.kit import num_weights
from plugsft.lab.forecast.meta_model import MetaModel
from plugsft.model.config import load_config
from plugsft.model.defaults import ModelDefaults
from plugsft.model.load import ModelLoad
from plugsft.plugins.quantize.base import stored_bytes
from plugsft.plugins.quantize.int8 import Int8Linear
from plugsft.registry.active import check
from plugsft.registry.load import resolve

# Of transformers: what peft still calls by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
LLAMA = LlamaConfig(
    vocab_size=90,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
GPT2 = GPT2Config(
    vocab_size=90, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
KIND, WITH_LORA = {"kind": "nf4"}, {"plugins": {"lora": {"r": 4}}}
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
INT8 = {"kind": "int8"}
KINDS = pytest.mark.parametrize("kind", [KIND, pytest.param(INT8, marks=only_full)], ids=str)


@pytest.fixture
def base(tmp_path):
    """Give `base(config)`: the folder of a small model."""
    return lambda config=LLAMA: save_base(tmp_path / "base", config)


def recipe_of(folder, quantize=(), lora=(), **tables):
    """Return a recipe and its plugins, checked; quantize = None: without the plugin."""
    raw = tiny_tables(Path(tempfile.mkdtemp()))
    raw["model"] = {"path": str(folder), **tables.pop("model", {})}
    raw |= {"plugins": {"lora": {"r": 4, **dict(lora)}}, **tables}
    if quantize is not None:
        raw["plugins"]["quantize"] = {"kind": "nf4", **dict(quantize)}
    recipe, active = resolve(raw)
    active.attach(DataDefaults(folder), BatchDefaults(), ModelDefaults())
    check(active, recipe, look())
    return recipe, active


def adapt(folder, quantize=(), dtype="float32", **lora):
    """Load a model as a run does."""
    _, active = recipe_of(folder, quantize, lora, model={"dtype": dtype})
    load = ModelLoad(str(folder), {"dtype": torch.float32})
    model = active.hooks.optimize_model(load=load)
    return model.train(), active.plugins.get("quantize")


def gradients(model, dtype=torch.float32):
    """Return the loss of IDS, and the gradient of each trained weight."""
    ids = IDS.to(model.device)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=dtype != torch.float32):
        loss = model(ids, labels=ids).loss
    loss.backward()
    trained = [it for it in model.named_parameters() if it[1].requires_grad]
    return loss.detach().cpu(), {name: weight.grad.float().cpu() for name, weight in trained}


SKIP = {"skip": ["down_proj", "layers.1.self_attn.q_proj"]}
CASES = [
    ("float32", LLAMA, {}, {}, {}),
    ("float32", LLAMA, SKIP, {}, {}),
    ("float32", LLAMA, {}, {"modules_to_save": ["lm_head"]}, {"modules_to_save": ["lm_head"]}),
    ("float32", GPT2, {}, {}, {"fan_in_fan_out": True}),
    ("bfloat16", LLAMA, SKIP, {"targets": ["q_proj", "up_proj"]}, None),
    ("bfloat16", LLAMA, {}, {"dora": True}, None),
    ("bfloat16", GPT2, {}, {}, None),
    ("float32", LLAMA, INT8 | SKIP, {}, {}),
    ("float32", GPT2, INT8, {}, {"fan_in_fan_out": True}),
    ("bfloat16", LLAMA, INT8, {"dora": True}, None),
    ("bfloat16", LLAMA, INT8 | SKIP, {}, None),
    ("bfloat16", GPT2, INT8, {}, None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1].model_type}")
def test_loss_and_gradients_are_those_of_adapters_on_the_restored_base(base, tmp_path, case):
    """Those of peft; where peft rounds otherwise, those of the plugin lora."""
    dtype, config, options, lora, theirs = case
    folder, kind = base(config), getattr(torch, dtype)
    ours, _ = adapt(folder, options, dtype=dtype, alpha=6, **lora)
    plain = restored(folder, kind, options.get("skip"), options.get("kind", "nf4"))
    if theirs is not None:
        config = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"} | theirs
        other = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **config)).train()
    else:
        for weight in plain.parameters():
            weight.data = weight.data.contiguous()  # safetensors takes no views
        plain.save_pretrained(tmp_path / "restored")
        other, _ = adapt(tmp_path / "restored", None, dtype=dtype, alpha=6, **lora)
        for module in (*ours.modules(), *other.modules()):
            module.fusible = False  # one operation for base and adapter rounds otherwise
    shake(ours, other)
    (loss, mine), (expected, yours) = gradients(ours, kind), gradients(other, kind)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert mine.keys() == yours.keys() and len(mine) > 4
    # Some processors sum the products of a transposed copy in another order.
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    for name in mine:
        assert yours[name].norm() > 0
        assert float((mine[name] - yours[name]).norm() / yours[name].norm()) < tolerance, name


@pytest.fixture(scope="module", params=["nf4", "int8"])
def run(tmp_path_factory, request):
    """Give the folder of a run in bfloat16, with evaluations, samples and checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    tables = tiny_tables(folder, chats(24))
    tables["model"]["scratch"] |= {"hidden": 64}
    tables["model"] |= {"dtype": "bfloat16"}
    tables["train"] |= {"steps": 4, "learning_rate": 1e-2}
    tables["checkpoint"] = {"every": 2}
    tables["eval"] = {"split": "train[:8]", "every": 2}
    tables["plugins"] = {
        "quantize": {"kind": request.param},
        "lora": {"r": 4},
        "samples": {"prompts": ["hello"], "max_tokens": 4},
    }
    result = must_succeed(write_recipe(folder / "recipe.toml", tables))
    said = f"14 of 15 linear layers in {request.param.upper()}: the base takes"
    assert said in result.stdout
    return folder / "run"


def logits(model):
    with torch.no_grad():
        ids = torch.arange(3, 40, device=model.device)[None]
        return model.eval()(input_ids=ids).logits.float().cpu()


def trained(run, dtype=torch.float32):
    """Return the logits of a run's adapters on the restored base, by transformers and peft."""
    config = json.loads((run / "model/adapter_config.json").read_text())
    record = json.loads((run / "model/quantization_config.json").read_text())
    kind = "nf4" if record["quant_method"] == "bitsandbytes" else "int8"
    plain = restored(config["base_model_name_or_path"], torch.bfloat16, kind=kind).to(dtype)
    return logits(PeftModel.from_pretrained(plain, run / "model"))


def test_the_merged_model_is_the_trained_one(run, tmp_path):
    """The weights that adapters were trained on, not those that were quantized."""
    result = must_succeed("export", run, "--merge", "--to", tmp_path / "merged")
    assert "onto the base as it was trained: restored from its quantized weights" in result.stdout
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not hasattr(merged.config, "quantization_config")
    expected, actual = trained(run), logits(merged)
    # The merged weights are rounded to bfloat16.
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-2
    config = json.loads((run / "model/adapter_config.json").read_text())
    whole = AutoModelForCausalLM.from_pretrained(
        config["base_model_name_or_path"], dtype=torch.float32
    )
    other = logits(PeftModel.from_pretrained(whole, run / "model"))
    difference = float((other - expected).abs().max() / expected.abs().max())
    record = (run / "model/quantization_config.json").read_text()
    assert difference > (3e-3 if "int8" in record else 3e-2)


def test_chat_uses_the_base_that_was_trained(run):
    must_succeed("chat", run, "--ask", "hello", "--max-tokens", "3")
    model, _ = load_for_chat(run / "model")
    expected = trained(run, torch.bfloat16)
    adapters = {one.dtype for name, one in model.named_parameters() if "lora_" in name}
    assert adapters == {torch.float32}
    # Measured: 4e-3 and 6e-3 in bfloat16, on two processors. The plain base is 3e-2 off.
    assert float((logits(model) - expected).norm() / expected.norm()) < 1.2e-2


def test_checkpoints_hold_adapters_only(run):
    names = read(run / "checkpoints/step-000004")
    assert len(names) == 28 and all("lora_" in name for name in names)
    record = read_record(run)
    adapters = sum(weight.numel() for weight in names.values())
    assert record["model"]["trained_parameters"] == adapters
    [scratch] = (run / "scratch").glob("model-*")
    base = AutoModelForCausalLM.from_pretrained(scratch).num_parameters()
    assert record["model"]["parameters"] == adapters + base
    [file] = (run / "checkpoints/step-000004").glob("*.safetensors")
    # Weights and two moments, in float32.
    assert file.stat().st_size < 1.2 * 12 * adapters


def test_a_checkpoint_knows_how_its_base_was_quantized(run, tmp_path):
    step = run / "checkpoints/step-000004"
    must_succeed("export", step, "--to", tmp_path / "copy")
    for name in ("quantization_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "copy" / name).read_bytes() == (run / "model" / name).read_bytes()
    (tmp_path / "copy/manifest.json").unlink()
    (tmp_path / "copy/quantization_config.json").write_text('{"quant_method": "other"}')
    broken = run_plugsft("export", tmp_path / "copy", "--merge", "--to", tmp_path / "merged")
    assert broken.returncode == 2 and "quantization_config.json: cannot be read" in broken.stderr


def test_memory_for_the_codes_is_reserved_on_a_gpu(base, monkeypatch):
    """transformers asks for the weights of a GPU's layers before it reads them: a byte each."""
    reserved = []

    def count(*arguments):
        [size] = get_total_byte_count(*arguments).values()
        reserved.append(size)
        return {torch.device("cpu"): size}

    get_total_byte_count = modeling_utils.get_total_byte_count
    monkeypatch.setattr(modeling_utils, "is_accelerator_device", lambda _device: True)
    monkeypatch.setattr(modeling_utils, "get_total_byte_count", count)
    model, _ = adapt(base(), INT8)
    layers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    codes = sum(layer.codes.numel() for layer in layers)
    rest = AutoModelForCausalLM.from_config(LLAMA).num_parameters() - codes
    assert len(layers) == 14 and reserved == [codes + 4 * rest]


@pytest.mark.parametrize("kind", [KIND, INT8], ids=str)
def test_two_ranks_learn_what_one_learns(kind):
    testing.ranks_agree("quantize", kind, tables=WITH_LORA, tolerance=1e-5)


@KINDS
def test_it_resumes_bit_for_bit(kind):
    testing.resumes("quantize", kind, tables=WITH_LORA | {"model": {"dtype": "bfloat16"}})


def test_other_layers_in_4_bits_are_another_run(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    words = (run.parent / "recipe.toml", f"output={copy}", "--resume", "train.steps=6")
    for change, was in (
        (
            ["plugins.quantize.skip=['q_proj']"],
            "plugins.quantize.skip was not set and is ['q_proj']",
        ),
        (["--without", "quantize"], "plugins.quantize.kind was '"),
    ):
        result = run_plugsft(*words, *change)
        assert result.returncode == 2, result.stdout
        assert was in result.stderr, result.stderr


@pytest.mark.parametrize("kind", [KIND, INT8], ids=str)
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda config: config.model_type)
def test_adapters_in_float32_merge_exactly(base, tmp_path, config, kind):
    folder = base(config)
    model, _ = adapt(folder, kind if config is GPT2 else kind | SKIP)
    shake(model)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(90)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "adapters")
    model.save_pretrained(tmp_path / "adapters")
    loaded, dtype, as_trained = load_adapters(tmp_path / "adapters", False)
    assert dtype == "float32"
    expected = compute_logits(model)
    for other in (as_trained, compute_logits(loaded), compute_logits(loaded.merge_and_unload())):
        assert float((other - expected).abs().max() / expected.abs().max()) < 1e-5


def test_evaluations_leave_the_weights_as_they_are(base):
    """bitsandbytes would repack them on a CPU with bfloat16."""
    model, _ = adapt(base(), dtype="bfloat16")
    before = gradients(model, torch.bfloat16)[0]
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    with torch.no_grad():
        model.eval()(IDS.to(model.device))
    for name, weight in model.named_parameters():
        assert torch.equal(weight, weights[name]), name
    assert torch.equal(gradients(model.train(), torch.bfloat16)[0], before)


@pytest.mark.parametrize(
    "kind, share",
    [pytest.param(KIND, 0.3, id="nf4"), pytest.param(INT8, 0.52, id="int8", marks=only_full)],
)
def test_the_base_takes_a_share_of_its_size_in_bfloat16(base, kind, share):
    """Measured: the memory of all tensors that loading leaves."""
    wide = LlamaConfig(**LLAMA.to_dict() | {"hidden_size": 512, "intermediate_size": 1536})
    folder = base(wide)
    sizes = []
    for options in (kind, None):
        before = storages()
        model, plugin = adapt(folder, options, dtype="bfloat16")
        adapters = sum(it.nbytes for it in model.parameters() if it.requires_grad)
        sizes.append(sum(size for key, size in storages().items() if key not in before) - adapters)
        if plugin:
            said = re.search(r"takes ([\d.]+) MiB in place of ([\d.]+) MiB", plugin.summary())
        del model
    assert sizes[0] <= share * sizes[1]
    assert [float(size) * 2**20 for size in said.groups()] == pytest.approx(sizes, rel=0.02)


def storages():
    """Return the bytes of all memory that tensors use."""
    gc.collect()
    # Other tests of this process may have left tensors without memory.
    without = FakeTensor, FunctionalTensor
    tensors = [
        it
        for it in gc.get_objects()
        if issubclass(type(it), torch.Tensor) and not isinstance(it, without)
    ]
    return {it.untyped_storage().data_ptr(): it.untyped_storage().nbytes() for it in tensors}


@pytest.mark.parametrize("kind", [KIND, INT8], ids=str)
def test_plan_knows_the_size_of_the_base(base, kind):
    wide = LlamaConfig(**LLAMA.to_dict() | {"hidden_size": 512, "intermediate_size": 1536})
    recipe, active = recipe_of(base(wide), kind, model={"dtype": "bfloat16"})
    weights = MetaModel(recipe, active, load_config(recipe.model)).weights()
    model, _ = adapt(recipe.model.path, kind, dtype="bfloat16")
    parameters = [*model.parameters()]
    assert weights.count == sum(map(num_weights, parameters))
    assert weights.bytes == pytest.approx(sum(map(stored_bytes, parameters)), rel=0.02)
    trained = sum(weight.nbytes for weight in parameters if weight.requires_grad)
    assert weights.trained_bytes == trained


def test_experts_are_named(base, capsys):
    sizes = LLAMA.to_dict() | {"num_local_experts": 4}
    for key in ("model_type", "architectures", "rope_parameters"):
        sizes.pop(key, None)
    _, plugin = adapt(base(MixtralConfig(**sizes)), dtype="bfloat16")
    said = re.search(
        r"8 of 9 .*; experts \((\d+)% of the weights\) stay in bfloat16$", plugin.summary()
    )
    assert said and int(said[1]) > 60
    assert "they are not linear layers" in capsys.readouterr().out


def test_layers_that_peft_adapts_as_parameters_are_refused(base):
    """Those of a model whose experts peft renames, in its dense layers; skip leaves them out."""
    sizes = LLAMA.to_dict() | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    sizes |= {"topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    sizes["num_key_value_heads"] = 4
    for key in ("model_type", "architectures", "rope_parameters", "head_dim"):
        sizes.pop(key, None)
    heads = dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 16)
    folder = base(DeepseekV3Config(**sizes, **heads, q_lora_rank=16, kv_lora_rank=16))
    with pytest.raises(RecipeError, match=r"gate_proj is quantized, .*skip of \[plugins.quantize"):
        adapt(folder)
    model, plugin = adapt(folder, {"skip": ["gate_proj", "up_proj", "down_proj"]})
    assert "10 of 17 linear layers" in plugin.summary()
    assert gradients(model)[0] > 0


@pytest.mark.parametrize(
    "quantize, lora, says",
    [
        (
            {"skip": ["down_prj"]},
            {},
            "no linear layer is named 'down_prj'; did you mean 'down_proj'?",
        ),
        ({"skip": ["self_attn", "mlp"]}, {}, "no linear layer is named 'self_attn'"),
        (
            {"skip": [f"layers.{n}.mlp.up_proj" for n in (0, 1)] + NAMES},
            {},
            "no linear layer is left to quantize",
        ),
        ({}, {"modules_to_save": ["down_proj"]}, "down_proj is quantized"),
        ({}, None, "quantized weights cannot be trained; add [plugins.lora]"),
    ],
)
def test_what_cannot_be_quantized_is_refused(base, quantize, lora, says):
    """A module that is trained whole, layers that are not there, and no adapters at all."""
    with pytest.raises(RecipeError, match=re.escape(says)):
        adapt(base(), quantize, **(lora or {})) if lora is not None else recipe_of(
            base(), quantize, plugins={"quantize": KIND}
        )


def test_a_quantized_model_is_not_quantized_again(base, tmp_path):
    config = BitsAndBytesConfig(**NF4)
    model = AutoModelForCausalLM.from_pretrained(base(), quantization_config=config)
    model.save_pretrained(tmp_path / "small")
    with pytest.raises(RecipeError, match=r"is quantized already; set model.path to the model it"):
        recipe_of(tmp_path / "small")


def test_sharded_models_and_a_missing_package_are_refused(base, monkeypatch):
    with monkeypatch.context() as launched, pytest.raises(RecipeError, match="cannot shard quant"):
        launched.setenv("ACCELERATE_USE_FSDP", "true")
        recipe_of(base())
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(RecipeError, match=r"bitsandbytes is not .*'plugsft\[quantize\]'"):
        recipe_of(base())


@KINDS
def test_the_reference_of_preferences_is_the_quantized_base(tmp_path, monkeypatch, kind):
    """Its first loss is log 2; stored references of other weights are not reused."""
    monkeypatch.setenv("PLUGSFT_CACHE", str(tmp_path / "cache"))
    rows = [
        {"prompt": f"say {word}", "chosen": word, "rejected": f"not {word}"}
        for word in ["fox", "dog", "owl", "hen", "cat", "cow", "pig", "ram"]
    ]
    tables = tiny_tables(tmp_path, rows)
    tables["train"] |= {"batch_size": 4, "steps": 2}
    tables["plugins"] = {"lora": {"r": 4}, "dpo": {}, "arrow_cache": {}, "quantize": kind}
    recipe = write_recipe(tmp_path / "recipe.toml", tables)
    stored = ("plugins.dpo_reference={}",)
    says = {
        "plain": (("--without", "quantize", *stored), "8 of 8 pairs computed"),
        "stored": (stored, "8 of 8 pairs computed"),
        "again": (stored, "8 pairs known"),
        "each": ((), "steps: 2"),
    }
    losses = {}
    for name, (words, said) in says.items():
        result = must_succeed(recipe, f"output={tmp_path / name}", *words)
        assert said in result.stdout, name
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / name) if "loss" in line]
    for name in ("stored", "again", "each"):
        assert losses[name] == pytest.approx(losses["stored"], rel=1e-6)
        assert losses[name][0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses["plain"][1] != pytest.approx(losses["each"][1], rel=1e-6)
