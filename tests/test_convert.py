"""plugsft convert: every key that configurations use is converted, or named with its reason."""

import json

import pytest
from conftest import ROOT

from plugsft.base.errors import RecipeError
from plugsft.commands.converting.conversion import UNKNOWN, Conversion, apply
from plugsft.commands.converting.convert_file import RULES
from plugsft.commands.converting.read_settings import TOOLS

USES = json.loads((ROOT / "tests/data/key_uses.json").read_text("utf8"))
"""Tool -> key -> [its uses in 340 published configurations, {value: uses}]."""
BASES = {
    "axolotl": {"base_model": "m", "datasets": [{"path": "d"}], "num_epochs": 4},
    "llamafactory": {"model_name_or_path": "m", "dataset": "identity"},
    "trl": {"model_name_or_path": "m", "dataset_name": "d"},
}
LORA = {"adapter": "lora", "use_peft": True, "finetuning_type": "lora"}
DPO = {"rl": "dpo", "stage": "dpo", "loss_type": "sigmoid"}
TOGETHER = {
    "lora_": LORA,
    "load_in_": LORA,
    "quantization_": LORA,
    "peft_": LORA,
    "pissa": LORA,
    "rl_beta": DPO,
    "orpo_alpha": {"rl": "orpo"},
    "kto_": {"rl": "kto"},
    "pref_": DPO,
    "evals_per_epoch": {"val_set_size": 0.05},
    "eval_s": {"val_set_size": 0.05},
}
"""Beginning of a key -> the settings that it stands with."""
LISTS = {
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    "lora_target_modules": ["q_proj", "v_proj"],
    "lora_modules_to_save": ["lm_head"],
    "unfrozen_parameters": ["lm_head.*"],
    "lora_target_parameters": ["mlp.experts.gate_up_proj"],
    "report_to": ["wandb"],
    "fsdp": ["full_shard"],
    "eot_tokens": ["<|eot|>"],
    "dataset_splits": ["train", "test"],
    "chat_template": "{{ messages }}",
    "datasets[].roles.user": ["human"],
    "datasets[].roles.system": ["system"],
    "datasets[].roles.assistant": ["gpt"],
    "dataset_mixture.datasets[].columns": ["messages"],
    "tokens": ["<a>"],
}
"""Examples of values that are no numbers or names."""


def with_key(tool, key, value):
    """Return a small configuration with one more key."""
    settings = json.loads(json.dumps(BASES[tool]))
    for start, others in TOGETHER.items():
        if key.startswith(start):
            known = {name: other for name, other in others.items() if name in USES[tool]}
            settings = {**known, **settings}
    if key.startswith("dataset_mixture."):
        settings.pop("dataset_name", None)
        settings["dataset_mixture"] = {"datasets": [{"id": "d"}]}
        settings["eval_strategy"] = "steps"
    if key.startswith("pretraining_dataset"):
        settings["pretraining_dataset"] = [{"path": settings.pop("datasets")[0]["path"]}]
    table = settings
    *above, last = key.split(".")
    if key.startswith("dataset_mixer."):
        above, last = ["dataset_mixer"], key.partition(".")[2]
    for part in above:
        if part.endswith("[]"):
            table = table.setdefault(part[:-2], [{}])[0]
        else:
            table = table.setdefault(part, {})
    table[last] = value
    return settings


def outcome(tool, key, value, folder):
    """Return the reason why a key is not converted; "" if it is."""
    conversion = Conversion(TOOLS[tool], folder / "c.yaml", with_key(tool, key, value))
    if tool == "trl":
        conversion.trainer = "dpo" if key in ("beta", "loss_type", "max_prompt_length") else "sft"
    try:
        apply(RULES[tool](conversion), conversion)
    except RecipeError as error:
        return str(error)
    return next((why for left, why in conversion.left.items() if same(left, key)), "")


def same(left, key):
    return left.replace("[0]", "[]") == key


def shares(tool, folder):
    """Return the share of uses that are converted, and key -> reason of the others."""
    total = converted = 0
    reasons = {}
    for key, (uses, values) in USES[tool].items():
        total += uses
        named = 0
        for text, count in values.items():
            why = outcome(tool, key, json.loads(text), folder)
            if why:
                named += count
                reasons[key, text] = why
        rest = uses - sum(values.values())
        if rest and values:
            # Values that were not counted: converted only if all that were counted are.
            named += rest * (named > 0)
        elif rest:
            why = outcome(tool, key, LISTS.get(key, "name"), folder)
            named += rest * bool(why)
            if why:
                reasons[key, ""] = why
        converted += uses - named
    return converted / total, reasons


@pytest.fixture
def folder(tmp_path):
    """Return a folder with LLaMA-Factory's table of data sets."""
    (tmp_path / "data").mkdir()
    names = ("identity", "alpaca_en_demo", "dpo_en_demo")
    entries = {name: {"file_name": f"{name}.json"} for name in names}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(entries))
    return tmp_path


@pytest.mark.parametrize("tool", USES)
def test_most_key_uses_are_converted_and_all_others_named(tool, folder):
    share, reasons = shares(tool, folder)
    assert share >= 0.8, share
    assert not [key for key, why in reasons.items() if UNKNOWN in why]
    assert all("use " in why or "use`" in why or "see " in why for why in reasons.values()), reasons
