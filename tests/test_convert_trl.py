"""plugsft convert: configurations of TRL, whose runs equal those of their recipes."""

import contextlib
import dataclasses
import json
import warnings
from pathlib import Path

import pytest
import yaml
from conftest import chats, only_full, read_metrics, tiny_tables, write_jsonl

from plugsft import cli
from plugsft.base.errors import RecipeError
from plugsft.batches.defaults import BatchDefaults
from plugsft.commands.converting.conversion import UNKNOWN, Conversion
from plugsft.commands.converting.convert_file import TOOLS, convert_file
from plugsft.data.defaults import DataDefaults
from plugsft.data.prepare import prepare
from plugsft.model.defaults import ModelDefaults
from plugsft.registry.load import load, resolve
from plugsft.run import save_scratch_model
from plugsft.tokens.store import Tokens

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import (
        DatasetMixtureConfig,
        DPOConfig,
        DPOTrainer,
        ModelConfig,
        ScriptArguments,
        SFTConfig,
        SFTTrainer,
        TrlParser,
        get_dataset,
        get_peft_config,
        get_quantization_config,
    )

pytestmark = pytest.mark.filterwarnings("ignore")  # trl's own

TRAINERS = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer)}
CHATS = chats(12, seed=5)
PROMPTS = [
    {"prompt": row["messages"][0]["content"], "completion": f" {row['messages'][1]['content']}"}
    for row in CHATS
]
PAIRS = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": " five 5"} for row in PROMPTS
]
BASE = {
    "bf16": False,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 6,
    "learning_rate": 2e-3,
    "logging_steps": 1,
    "num_train_epochs": 6,
    "gradient_checkpointing": False,
    "save_strategy": "no",
}
"""A step has all 12 rows, so that the losses do not depend on their order."""
MIN_LR = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
CONFIGURATIONS = {
    "full, assistant mask, cosine with a minimum": (
        CHATS,
        {"assistant_only_loss": True, "warmup_steps": 2, "weight_decay": 0.1, **MIN_LR},
    ),
    "full, every token, defaults": (CHATS, {"warmup_steps": 0.25, "max_length": 64}),
    "full, packed": (CHATS, {"packing": True, "max_length": 96, "lr_scheduler_type": "cosine"}),
    "LoRA, completion only, constant": (
        PROMPTS,
        {**LORA, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
    ),
    "QLoRA, all linear layers": (
        CHATS,
        {
            **LORA,
            "lora_target_modules": "all-linear",
            "load_in_4bit": True,
            "assistant_only_loss": True,
            "use_rslora": True,
            "optim": "adamw_bnb_8bit",
        },
    ),
    "DPO": (PAIRS, {"beta": 0.2, "loss_type": "sigmoid", "learning_rate": 5e-4}),
    "DPO, LoRA": (PAIRS, {**LORA, "lora_dropout": 0.2, "beta": 0.1}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model's folder, with a tokenizer and a chat template."""
    tables = tiny_tables(tmp_path_factory.mktemp("model"), CHATS)
    tables["model"]["scratch"]["context"] = 1024
    recipe, active = resolve(tables)
    active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults())
    data = prepare(recipe, active)
    folder = save_scratch_model(recipe, data)
    data.tokenizer.save_pretrained(folder)
    return folder


def write_configuration(folder: Path, model: Path, rows: list, settings: dict) -> Path:
    (folder / "rows").mkdir()
    write_jsonl(folder / "rows/train.jsonl", rows)
    settings = {
        "model_name_or_path": str(model),
        "datasets": [{"path": "json", "data_files": str(folder / "rows/train.jsonl")}],
        "output_dir": str(folder / "run"),
        **BASE,
        **settings,
    }
    path = folder / "trl.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def run_trl(path: Path, trainer: str):
    """Train as `trl sft --config` and `trl dpo --config` do; return the trainer."""
    config, kind = TRAINERS[trainer]
    parser = TrlParser((ScriptArguments, config, ModelConfig, DatasetMixtureConfig))
    _, args, model, data = parser.parse_args_and_config(
        ["--config", str(path), "--use_cpu", "--report_to", "none"]
    )
    args.output_dir, args.disable_tqdm = str(path.parent / "trl"), True
    args.model_init_kwargs = {"dtype": model.dtype}
    made = kind(
        model=model.model_name_or_path,
        args=args,
        train_dataset=get_dataset(data)["train"],
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
    )
    made.train()
    return made


@pytest.fixture
def runs(tmp_path, model, monkeypatch):
    """Return a function that converts a configuration, and trains with both tools."""

    def run(name):
        rows, settings = CONFIGURATIONS[name]
        path = write_configuration(tmp_path, model, rows, settings)
        recipe = tmp_path / "recipe.toml"
        conversion = convert_file(path, recipe, "", "", 1)
        assert conversion.left == {}
        theirs = run_trl(path, "dpo" if rows is PAIRS else "sft")
        with contextlib.suppress(SystemExit):
            cli.main([str(recipe), "device=cpu"])
        return recipe, read_metrics(tmp_path / "run"), theirs

    return run


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_key_of_trl_is_known(tmp_path, trainer):
    classes = (TRAINERS[trainer][0], ModelConfig, ScriptArguments, DatasetMixtureConfig)
    fields = {field.name: field for kind in classes for field in dataclasses.fields(kind)}
    given = {"model_name_or_path": "m", "dataset_name": "d"}
    assert len(fields) > 150
    for name, field in fields.items():
        if name in (*given, "datasets") or not field.init:
            continue
        for value in (True, False, "abc", 3):
            made = Conversion("TRL", tmp_path, given | {name: value}, trainer=trainer)
            with contextlib.suppress(RecipeError):
                TOOLS["trl"].apply(made)
            assert UNKNOWN not in made.left.values(), (name, value)


def trained_tokens(folder: Path):
    """Return each row's ids with its mask, sorted."""
    tokens = Tokens(next((folder / "run/tokens").iterdir()))
    rows = [tokens.example(row) for row in range(len(tokens))]
    return sorted((ids.tolist(), mask.tolist()) for ids, mask in rows)


@only_full
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_run_of_the_recipe_equals_the_run_of_trl(runs, tmp_path, name):
    recipe, ours, theirs = runs(name)
    steps = [entry for entry in theirs.state.log_history if "loss" in entry]
    assert len(ours) == len(steps) == theirs.state.max_steps
    made, _ = load(recipe)
    settings = CONFIGURATIONS[name][1]
    if not settings.get("packing"):
        assert made.train.batch_size == 12
    rates = [entry["learning_rate"] for entry in ours]
    assert rates == pytest.approx([entry["learning_rate"] for entry in steps], rel=1e-9, abs=1e-15)
    compared = 1 if "use_peft" in settings else len(steps)  # adapters start at random
    losses = [entry["loss"] for entry in ours][:compared]
    expected = [entry["loss"] for entry in steps][:compared]
    assert losses == pytest.approx(expected, rel=2e-4)
    if "packing" not in settings and "chosen" not in CONFIGURATIONS[name][0][0]:
        labels = [
            (row["input_ids"], [label != -100 for label in row["labels"]])
            for row in theirs.train_dataset
        ]
        assert [without_first(row) for row in trained_tokens(tmp_path)] == sorted(
            map(without_first, labels)
        )
    if "use_peft" in settings:
        config = json.loads((tmp_path / "run/model/adapter_config.json").read_text())
        peft = theirs.model.peft_config["default"]
        assert adapted(tmp_path / "run/model") == adapted_by(theirs.model)
        assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (
            peft.r,
            peft.lora_alpha,
            peft.use_rslora,
        )


def without_first(row):
    """Drop the mask of the first token, which has no token before it."""
    ids, mask = row
    return ids, [False, *mask[1:]]


def adapted(folder: Path):
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return {name.rpartition(".lora_")[0] for name in file.keys()}  # noqa: SIM118


def adapted_by(model):
    return {
        name.partition(".lora_")[0].replace("base_model.model.base_model.model", "base_model.model")
        for name, weight in model.named_parameters()
        if ".lora_" in name and weight.requires_grad
    }
