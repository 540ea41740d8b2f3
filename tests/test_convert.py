"""plugsft convert: every key that configurations use is converted, or named with its reason."""

import json
import math
import random
import re
import tomllib

import pytest
import yaml
from conftest import ROOT, chats, run_here, write_jsonl

from plugsft.base.errors import RecipeError
from plugsft.commands.converting.conversion import UNKNOWN, Conversion, Line
from plugsft.commands.converting.convert_file import TOOLS, convert_file, ensure_valid, recipe_text
from plugsft.commands.converting.trl import choose_trainer
from plugsft.registry.load import load

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
    try:
        made = converted(tool, with_key(tool, key, value), folder, key in DPO_KEYS)
        made.lines.setdefault("train.learning_rate", Line(1e-4, ""))
        ensure_valid(made, recipe_text(made, folder / "c.toml"))
    except RecipeError as error:
        return str(error)
    return next((why for left, why in made.left.items() if same(left, key)), "")


DPO_KEYS = ("beta", "loss_type", "max_prompt_length")


def converted(tool, settings, folder, dpo: bool | None = False):
    """Convert settings, as those of `trl dpo` or not, or of the trainer of their keys (None)."""
    made = Conversion(
        TOOLS[tool].name, folder / "c.yaml", settings, trainer="dpo" if dpo else "sft"
    )
    if tool == "trl" and dpo is None:
        choose_trainer(made, "")
    TOOLS[tool].apply(made)
    return made


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
    unknown = {key for (key, _), why in reasons.items() if UNKNOWN in why}
    assert unknown <= {"test_value"}
    known = [why for (key, _), why in reasons.items() if key not in unknown]
    assert all(re.search("use[ `]|see |set |allowed: ", why) for why in known), known


@pytest.mark.parametrize("tool", USES)
def test_no_known_key_is_called_unknown_beside_others(tool, folder):
    known = {key for key, (uses, _) in USES[tool].items() if uses >= 5 and "." not in key}
    known -= {"processor_type", "stage", "finetuning_type", "rl", "loss_type"}
    draw = random.Random(0)
    for _ in range(100):
        settings = dict(BASES[tool])
        for key in sorted(known - settings.keys()):
            values = [json.loads(text) for text in USES[tool][key][1]]
            if "[]" not in key and draw.random() < 0.3:
                settings[key] = draw.choice(values or [LISTS.get(key, "name")])
        try:
            left = converted(tool, settings, folder).left
        except RecipeError:
            continue
        assert not [key for key, why in left.items() if why == UNKNOWN], settings


VALUES = [True, "a\x00", -1, 0.5, float("inf"), ["a"], [None], {"a": 1}]


@pytest.mark.parametrize("tool", USES)
def test_any_value_of_any_key_converts_or_is_refused_by_name(tool, folder, capsys):
    keys = {*USES[tool], *TOOLS[tool].unlike, *TOOLS[tool].same}
    for key in sorted(keys):
        for value in VALUES:
            try:
                settings = with_key(tool, key, value)
            except (AttributeError, TypeError):
                continue  # the key cannot stand below this value
            try:
                text = recipe_text(converted(tool, settings, folder), folder / "c.toml")
            except RecipeError as error:
                assert str(error).startswith(str(folder / "c.yaml")), error
            else:
                tomllib.loads(text)
                assert not re.search("^ +#", text, re.M)  # no comment without its line


SFT = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "dataset_name": "chats.jsonl",
    "max_length": 512,
    "learning_rate": "2e-5",
    "hub_token": "hf_secret",
}


def test_a_configuration_of_trl_converts_and_its_recipe_is_read_by_all_commands(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": []}] * 50)
    more = {"beta": 0.3, "per_device_train_batch_size": 4, "bf16": False, "use_peft": True}
    more |= {"lora_modules_to_save": ["lm_head"], "warmup_steps": 0.1}
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(SFT | more))
    words = ("--gpus", 2, "--trainer", "dpo", "--to", "to/dpo.toml")
    assert run_here("convert", "trl.yaml", *words) == 0
    told = capsys.readouterr().out
    assert "hf_secret" not in told + (tmp_path / "to/dpo.toml").read_text()
    assert "not converted: hub_token = ...: a recipe holds no secrets" in told
    assert "  plugsft launch to/dpo.toml --ranks 2\n" in told
    made, _ = load(tmp_path / "to/dpo.toml")
    assert (made.train.batch_size, made.train.epochs, made.train.learning_rate) == (8, 3, 2e-5)
    assert made.train.warmup == 0.1
    assert (made.plugins["dpo"]["beta"], made.plugins["lora"]["dropout"]) == (0.3, 0.0)
    assert made.plugins["lora"]["modules_to_save"] == ["lm_head"]
    text = (tmp_path / "to/dpo.toml").read_text()
    assert text.startswith("#:schema ./recipe.schema.json\n")
    assert (tmp_path / "to/recipe.schema.json").exists()
    assert run_here("convert", "trl.yaml", "--to", "to/dpo.toml") == 2
    assert "exists already; move it away, or set --to" in capsys.readouterr().err


AXOLOTL = "base_model: m\ndatasets: [{path: d}]\nlearning_rate: 1e-4"
ALIASES = "a0: &a0 [x]\n" + "\n".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ("rl: grpo\nbase_model: m\ndatasets: [{path: d}]\nlearning_rate: 1e-4", [], "use axolotl"),
        ("processor_type: AutoProcessor\nbase_model: m\ndatasets: [{path: d}]", [], "on images"),
        ("stage: ppo\nfinetuning_type: lora\ndataset: d", [], "stage = 'ppo': plugsft trains on"),
        ("model_name_or_path: m\ndataset_name: d\nnum_generations: 4", [], "use TRL for this run"),
        ("model_name_or_path: m\ndataset_name: d\nload_in_4bit: true", [], "use adapters"),
        ("model_name_or_path: m\ndataset_name: d\nmax_length: a lot", [], "max_length = 'a lot'"),
        ("model_name_or_path: m\nuse_peft: true", [], "set dataset_name"),
        ("base_model: m\nadapter: lora", [], "set datasets"),
        ("a: 1\nb: 2", [], "name its tool with --from axolotl|llamafactory|trl"),
        ("a: 1", ["--from", "axolotle"], "did you mean 'axolotl'?"),
        ("model_name_or_path: m\ndataset_name: d", ["--trainer", "ppo"], "is not known"),
        ("[1, 2]", [], "has no settings"),
        ("a: [", [], "cannot be read as YAML or JSON"),
        ("a: 1\nb: {c: 1}\na: 2", [], "a is written twice, again at line 3; remove one"),
        ("a:\n  b: 1\n  b: 1", [], "b is written twice, again at line 3; remove one"),
        ("model: {path: m}\ntrain: {batch_size: 1}", [], "is a recipe of plugsft already"),
        ("", ["--to", "out.yaml"], "a recipe's name ends with .toml"),
        (f"{AXOLOTL}\nadam_beta1: -1", [], "train.beta1: given -1.0; it should be"),
        (f"{AXOLOTL}\nadam_beta1: -1", [], "(adam_beta1: -1)"),
        (f"{AXOLOTL}\nmax_steps: .inf", [], "max_steps = inf: it should be a finite number"),
        (f"{AXOLOTL}\noutput_dir: [null]", [], "output_dir = [None]: it should be a valid string"),
        (
            f"{AXOLOTL}\nwandb_project: [x]",
            [],
            "wandb_project = ['x']: it should be a valid",
        ),
        ('{"base_model": "\\ud800", "datasets": [{"path": "d"}]}', [], "surrogates not allowed"),
        (ALIASES, [], "more than 100,000 values"),
        ("a: &a [*a]", [], "recursion depth"),
        (f"{AXOLOTL}\n2024-01-01: x", [], "cannot be read as YAML or JSON: keys must be str"),
        (f"{AXOLOTL}\nwarmup_ratio: 1.5", [], "warmup_ratio = 1.5: it should be a share: at least"),
        ("model_name_or_path: m\ndataset_name: d\nwarmup_ratio: 1e308", [], "should be a share"),
        (f"{AXOLOTL}\nbf16: 1.5", [], "bf16 = 1.5: it should be a valid boolean"),
    ],
)
def test_mistakes_are_named_with_their_cure(tmp_path, monkeypatch, capsys, text, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(text)
    assert run_here("convert", "c.yaml", *words) == 2
    error = capsys.readouterr().err
    assert says in " ".join(error.split()) and "Traceback" not in error
    assert not (tmp_path / "c.toml").exists()


@pytest.mark.parametrize("name", ["train.py", "train.sh", "train.ipynb"])
def test_a_program_is_not_read(tmp_path, capsys, name):
    (tmp_path / name).write_text("SFTConfig(max_length=1024)")
    assert run_here("convert", tmp_path / name) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "runs no program; write a file of the other tool's arguments" in error


AXOLOTL_EVAL = {"test_datasets": [{"path": "e", "split": "dev"}], "evals_per_epoch": 1}
LLAMA_DPO = {"stage": "dpo", "pref_loss": "simpo", "pref_ftx": 0.2}
ROWS = {"eval_strategy": "steps", "eval_steps": 5}


def with_options(name, **options):
    return {"lr_scheduler_type": name, "lr_scheduler_kwargs": options}


BEST_F1 = {"load_best_model_at_end": True, "metric_for_best_model": "f1"}


@pytest.mark.parametrize(
    ("tool", "settings", "lines"),
    [
        ("axolotl", AXOLOTL_EVAL, {"eval.source": "e", "eval.split": "dev", "eval.every": "epoch"}),
        ("axolotl", AXOLOTL_EVAL | {"eval_steps": 20}, {"eval.every": 20}),
        (
            "axolotl",
            AXOLOTL_EVAL | {"load_best_model_at_end": True, "early_stopping_patience": 4},
            {"checkpoint.keep_best": "eval_loss", "plugins.early_stopping.patience": 4},
        ),
        (
            "axolotl",
            {"datasets": [{"path": "me/rows", "name": "en"}]},
            {"data.source": "me/rows:en"},
        ),
        ("axolotl", {"saves_per_epoch": 1}, {"checkpoint.every": "epoch"}),
        ("axolotl", {"rl": "dpo", "rl_beta": 0.3}, {"plugins.dpo.beta": 0.3}),
        ("axolotl", {"rl": "simpo"}, {"plugins.dpo.gamma": 0.5, "plugins.dpo.nll": 1.0}),
        (
            "llamafactory",
            {"eval_dataset": "alpaca_en_demo", "eval_strategy": "epoch"},
            {"eval.split": "train", "eval.every": "epoch"},
        ),
        ("llamafactory", LLAMA_DPO, {"plugins.dpo.nll": 0.2, "plugins.dpo.gamma": 0.5}),
        ("llamafactory", {"enable_liger_kernel": True}, {"plugins.fused_loss": {}}),
        ("llamafactory", {"neat_packing": True}, {"plugins.bfd_packing.scope": "dataset"}),
        (
            "trl",
            {**ROWS, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"},
            {"eval.every": 5, "checkpoint.keep_best": "eval_loss"},
        ),
        ("trl", {**ROWS, "eval_on_start": True}, {"eval.at_start": True}),
        ("trl", {"dataset_config": "en"}, {"data.source": "d:en"}),
        ("trl", {"use_cpu": True}, {"device": "cpu"}),
        ("trl", {"desirable_weight": 0.5}, {"plugins.kto.desirable_weight": 0.5}),
        ("trl", {"loss_type": "dft", "packing": True}, {"plugins.dpo.loss": None}),
        ("trl", {"packing": True}, {"plugins.bfd_packing.scope": "dataset"}),
        (
            "trl",
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
            {"plugins.dpo.loss": "sigmoid", "plugins.dpo.nll": 0.3},
        ),
        (
            "axolotl",
            {"lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.1},
            {"train.schedule": "cosine", "train.final_rate": 0.1},
        ),
        (
            "axolotl",
            {"lr_scheduler": "constant", "warmup_ratio": 0.1},
            {"train.schedule": "constant", "train.warmup": 0.0},
        ),
        (
            "trl",
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
            {"train.schedule": "constant", "train.warmup": 3},
        ),
        (
            "trl",
            with_options("constant_with_warmup", num_cycles=2),  # transformers passes it no options
            {"train.schedule": "constant"},
        ),
        (
            "trl",
            with_options("cosine_with_min_lr", min_lr=1e-6) | {"learning_rate": 1e-5},
            {"train.schedule": "cosine", "train.final_rate": 1e-6 / 1e-5},
        ),
        (
            "trl",
            with_options("cosine_with_min_lr", min_lr_rate=0.1),
            {"train.schedule": "cosine", "train.final_rate": 0.1},
        ),
        (
            "trl",
            with_options("warmup_stable_decay", num_decay_steps=9, decay_type="linear"),
            {"train.schedule": "wsd", "train.decay": 9, "train.final_rate": None},
        ),
        *(
            (
                "trl",
                with_options(name, **options),
                {"plugins.hf_schedule.name": name, "train.schedule": None}
                | {f"plugins.hf_schedule.options.{key}": options[key] for key in options},
            )
            for name, options in (
                ("warmup_stable_decay", {"num_decay_steps": 9}),
                ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 1.5}),
                ("cosine_with_restarts", {"num_cycles": 2}),
                ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
                ("polynomial", {"power": 2.0}),
                ("inverse_sqrt", {}),
            )
        ),
    ],
)
def test_keys_that_plugsft_has_under_another_name(folder, tool, settings, lines):
    made = converted(tool, BASES[tool] | settings, folder, None)
    assert {key: made.value(key) for key in lines} == lines
    assert made.left.keys() <= ({"loss_type"} if settings.get("loss_type") == "dft" else set())


@pytest.mark.parametrize(
    ("tool", "settings", "named"),
    [
        ("axolotl", {"val_set_size": 2.5, "evals_per_epoch": 2}, ["evals_per_epoch"]),
        ("axolotl", AXOLOTL_EVAL | BEST_F1, ["metric_for_best_model"]),
        ("llamafactory", {"val_size": 2.5, "eval_steps": 9}, ["val_size", "eval_steps"]),
        ("llamafactory", {"interleave_probs": "0.3,0.7"}, ["interleave_probs"]),
        ("llamafactory", {"enable_thinking": False}, ["enable_thinking"]),
        ("axolotl", {"lr_scheduler": "rex"}, ["lr_scheduler"]),
        ("trl", {"lr_scheduler_type": "reduce_lr_on_plateau"}, ["lr_scheduler_type"]),
        ("trl", {"average_tokens_across_devices": False}, ["average_tokens_across_devices"]),
        ("trl", {"train_sampling_strategy": "sequential"}, ["train_sampling_strategy"]),
    ],
)
def test_what_is_not_converted_is_named_with_all_that_stands_on_it(folder, tool, settings, named):
    left = converted(tool, BASES[tool] | settings, folder, None).left
    assert {*named} <= left.keys()
    assert UNKNOWN not in left.values()


def test_a_file_has_no_split_for_evaluations(folder, capsys):
    write_jsonl(folder / "rows.jsonl", chats(3))
    path = folder / "sft.yaml"
    settings = {"dataset_name": str(folder / "rows.jsonl"), "eval_strategy": "steps"}
    path.write_text(json.dumps(settings | {"model_name_or_path": "m", "eos_token": "<end>"}))
    convert_file(path, folder / "run.toml", "trl", "sft", 1)
    said = capsys.readouterr().out
    assert "not converted: eval_strategy = steps: a mixture or a file has no split" in said
    assert "not converted: eos_token = <end>: the tokenizer's own is used" in said
    assert "[eval]" not in (folder / "run.toml").read_text()


def test_a_part_of_a_row_is_not_held_out(folder):
    made = converted("axolotl", BASES["axolotl"] | {"val_set_size": 2.5}, folder)
    assert "no split can be written" in made.left["val_set_size"]
    assert "eval.split" not in made.lines


def test_adapters_of_a_recipe_stand_in_one_table(folder):
    made = converted("llamafactory", BASES["llamafactory"], folder)
    options = [line.split()[0] for line in recipe_text(made, folder).splitlines() if line]
    assert options[(start := options.index("[plugins.lora]")) : start + 5] == [
        *("[plugins.lora]", "r", "alpha", "dropout", "targets")
    ]


@pytest.mark.parametrize(("times", "every"), [(0.5, 20), (1.5, 7), (2, 5)])
def test_axolotls_saves_per_epoch_may_be_a_fraction(folder, times, every):
    settings = BASES["axolotl"] | {"num_epochs": 1, "max_steps": 10, "saves_per_epoch": times}
    made = converted("axolotl", settings, folder)
    assert made.lines["checkpoint.every"].value == every


def test_a_part_of_an_epoch_is_rounded_up_as_the_trainer_does(folder):
    data = write_jsonl(folder / "rows.jsonl", [{"messages": []}] * 7)
    settings = BASES["axolotl"] | {"datasets": [{"path": str(data)}], "num_epochs": 1.3}
    made = converted("axolotl", settings | {"micro_batch_size": 2}, folder)
    assert made.lines["train.steps"].value == math.ceil(1.3 * 4)


def test_no_value_becomes_a_line_of_its_own_and_secrets_stay_out(tmp_path, monkeypatch, capsys):
    """A comment with a line break would begin a line of the recipe."""
    monkeypatch.chdir(tmp_path)
    settings = {
        "model_name_or_path": "m",
        "stage": "sft",
        "cutoff_len": 8,
        "learning_rate": 1e-4,
        "dataset": "d",
        "dataset_dir": "x\ntrust = 1",
        "a\nb = 2": "c\x00\u202e",
        "HF_TOKEN": "S1",
        "env": {"any": "S2"},
        "api_keys": ["S3"],
        "text": "hf_S4abcdefgh",
        "run_name": "hf_S5abcdefgh",
        "report_to": "wandb",
    }
    (tmp_path / "c.json").write_text(json.dumps(settings))
    assert run_here("convert", "c.json") == 0
    text, told = (tmp_path / "c.toml").read_text(), capsys.readouterr().out
    assert {"trust", "b"}.isdisjoint(tomllib.loads(text)["data"]) and "\u202e" not in text
    comments = "".join(line.partition("#")[2] for line in text.splitlines())
    assert not re.search(r"S[1-5]", comments + told)


def test_keys_below_a_known_one_are_named_and_deepspeed_stages_are_read(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    said = {}
    for name, value in [
        ("two", {"zero_optimization": {"stage": 2}}),
        ("z0", "examples/deepspeed/ds_z0_config.json"),
        ("three", "deepspeed_configs/zero3_bf16.json"),
        ("table", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}),
    ]:
        settings = yaml.safe_load(AXOLOTL) | {"deepspeed": value, "frobnicate_all": False}
        settings |= {"bf16": False, "tf32": True, "saves_per_epoch": 0.001}
        settings["datasets"] = [{"path": "d", "frobnicate": 3, "roles": {"user": ["human"]}}]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
        assert run_here("convert", f"{name}.yaml") == 0
        said[name] = capsys.readouterr().out
    for text in said.values():
        assert "not converted: datasets[0].frobnicate = 3: not known" in text
        assert "not converted: tf32 = true: products are exact" in text
        assert "not converted: frobnicate_all = false: not known" in text
        assert "roles" not in text and "1 example, for 1 GPU" in text
    assert {name for name, text in said.items() if "zero3" in text} == {"three", "table"}
    for name in ("two", "z0"):
        assert "not converted: deepspeed = " in said[name] and "the model whole (ddp)" in said[name]
    line = "--strategy zero3      # deepspeed: deepspeed_configs/zero3_bf16.json"
    assert line in (tmp_path / "three.toml").read_text()
    assert "not converted: deepspeed = {...}: optimizer states stay" in said["table"]


def test_merged_keys_are_no_repeated_keys(tmp_path):
    text = "model_name_or_path: m\ndataset_name: d\nbase: &b {k: 1}\n"
    text += "x: {deep: &a {<<: *b, k: 2}}\nlr_scheduler_kwargs: {<<: *a}\nlearning_rate: 1e-5"
    (tmp_path / "c.yaml").write_text(text)
    assert run_here("convert", tmp_path / "c.yaml", "--from", "trl") == 0


def test_data_sets_that_name_their_columns_otherwise_keep_their_own(tmp_path):
    one, two = ({"path": f"{n}.jsonl", "field_messages": n} for n in ("dialogue", "talk"))
    settings = {"base_model": "me/model", "datasets": [one, two]}
    sources = converted("axolotl", settings, tmp_path).value("data.sources")
    assert [source["columns"] for source in sources] == [
        {"messages": "dialogue"},
        {"messages": "talk"},
    ]
    alike = {"base_model": "me/model", "datasets": [one, {**two, "field_messages": "dialogue"}]}
    made = converted("axolotl", alike, tmp_path)
    assert made.value("data.columns") == {"messages": "dialogue"}
    assert not any("columns" in source for source in made.value("data.sources"))
    (tmp_path / "data").mkdir()
    info = {
        name: {"formatting": "sharegpt", "columns": {"messages": name}, "file_name": f"{name}.json"}
        for name in ("dialogue", "talk")
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    settings = {"model_name_or_path": "me/model", "dataset": "dialogue,talk", "stage": "sft"}
    settings |= {"dataset_dir": str(tmp_path / "data"), "template": "qwen"}
    sources = converted("llamafactory", settings, tmp_path).value("data.sources")
    assert [source["columns"]["messages"] for source in sources] == ["dialogue", "talk"]
