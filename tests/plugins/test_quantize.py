"""quantize: adapters on a base in 4 bits learn what adapters on the restored base learn."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import chats, run_plugsft, tiny_tables, write_recipe
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, LlamaConfig

from plugsft.base.machine import look
from plugsft.batches.defaults import BatchDefaults
from plugsft.data.defaults import DataDefaults
from plugsft.model.defaults import ModelDefaults
from plugsft.model.load import Load
from plugsft.registry.active import check, resolve

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
IDS = torch.randint(90, (2, 24), generator=torch.Generator().manual_seed(1))
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.fixture
def base(tmp_path):
    """Give `base(config)`: the folder of a small model."""

    def make(config=LLAMA, dtype=torch.float32):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return make


def recipe_of(folder, quantize=(), lora=(), **tables):
    """Return a recipe and its plugins, checked; quantize = None: without the plugin."""
    raw = tiny_tables(Path(tempfile.mkdtemp()))
    raw["model"] = {"path": str(folder), **tables.pop("model", {})}
    raw |= {"plugins": {"lora": {"r": 4, **dict(lora)}}, **tables}
    if quantize is not None:
        raw["plugins"]["quantize"] = dict(quantize)
    recipe, active = resolve(raw)
    active.attach(DataDefaults(folder), BatchDefaults(), ModelDefaults())
    check(active, recipe, look())
    return recipe, active


def adapt(folder, quantize=(), empty=False, dtype="float32", **lora):
    """Load a model as a run does."""
    _, active = recipe_of(folder, quantize, lora, model={"dtype": dtype})
    load = Load(str(folder), {"dtype": torch.float32}, empty)
    model = active.hooks.optimize_model(load=load)
    return model.train(), active.plugins.get("quantize")


def restored(folder, dtype=torch.float32, skip=None):
    """Return the base whose weights are rounded to NF4, by transformers alone."""
    config = BitsAndBytesConfig(
        **NF4, bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=skip and ["lm_head", *skip]
    )
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)
    return model.dequantize(dtype=dtype)


def shake(*models):
    """Move what is trained, in all models alike, so that adapters say something."""
    named = [dict(model.named_parameters()) for model in models]
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in named[0].items():
            if weight.requires_grad:
                new = weight + torch.randn(weight.shape) * 0.05
                for others in named:
                    others[name].copy_(new)


def gradients(model, dtype=torch.float32):
    """Return the loss of IDS, and the gradient of each trained weight."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    trained = [it for it in model.named_parameters() if it[1].requires_grad]
    return loss.detach(), {name: weight.grad.float() for name, weight in trained}


CASES = [
    ({}, {}, {}),
    ({"skip": ["down_proj", "layers.1.self_attn.q_proj"]}, {}, {}),
    ({}, {"dora": True}, {"use_dora": True}),
    ({}, {"modules_to_save": ["lm_head"]}, {"modules_to_save": ["lm_head"]}),
    ({}, {"targets": ["q_proj", "up_proj"]}, {"target_modules": ["q_proj", "up_proj"]}),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([*case[0], *case[1]]) or "plain")
def test_loss_and_gradients_are_those_of_adapters_on_the_restored_base(base, tmp_path, case, dtype):
    """Those of peft; in bfloat16, where peft rounds otherwise, those of the plugin lora."""
    options, lora, theirs = case
    folder, kind = base(), getattr(torch, dtype)
    ours, _ = adapt(folder, options, dtype=dtype, alpha=6, **lora)
    plain = restored(folder, kind, options.get("skip"))
    if dtype == "float32":
        config = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"} | theirs
        other = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **config)).train()
    else:
        plain.save_pretrained(tmp_path / "restored")
        other, _ = adapt(tmp_path / "restored", None, dtype=dtype, alpha=6, **lora)
    shake(ours, other)
    (loss, mine), (expected, yours) = gradients(ours, kind), gradients(other, kind)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert mine.keys() == yours.keys() and len(mine) > 4
    for name in mine:
        assert yours[name].norm() > 0
        assert float((mine[name] - yours[name]).norm() / yours[name].norm()) < 1e-5, name


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Give the folder of a run in bfloat16, with evaluations, samples and checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    tables = tiny_tables(folder, chats(24))
    tables["model"]["scratch"] |= {"hidden": 64}
    tables["model"] |= {"dtype": "bfloat16"}
    tables["train"] |= {"steps": 4, "learning_rate": 1e-2}
    tables["checkpoint"] = {"every": 2}
    tables["eval"] = {"source": tables["data"]["source"], "every": 2}
    tables["plugins"] = {
        "quantize": {},
        "lora": {"r": 4},
        "samples": {"prompts": ["hello"], "max_tokens": 4},
    }
    result = run_plugsft(write_recipe(folder / "recipe.toml", tables))
    assert result.returncode == 0, result.stderr
    assert "14 of 15 linear layers in NF4: the base takes" in result.stdout
    return folder / "run"


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None]).logits.float()


def trained(run, dtype=torch.float32):
    """Return the logits of a run's adapters on the restored base, by transformers and peft."""
    config = json.loads((run / "model/adapter_config.json").read_text())
    plain = restored(config["base_model_name_or_path"], torch.bfloat16).to(dtype)
    return logits(PeftModel.from_pretrained(plain, run / "model"))


def test_the_merged_model_is_the_trained_one(run, tmp_path):
    """The weights that adapters were trained on, not those that were quantized."""
    result = run_plugsft("export", run, "--merge", "--to", tmp_path / "merged")
    assert result.returncode == 0, result.stderr
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
    assert float((other - expected).abs().max() / expected.abs().max()) > 3e-2
