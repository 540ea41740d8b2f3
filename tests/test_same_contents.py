"""What decides what is learned may not change between a run and its resume; the rest may."""

import json
import shutil
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import (
    FULL,
    must_succeed,
    run_plugsft,
    run_ranks,
    tiny_tables,
    write_jsonl,
    write_recipe,
)
from plugin_packages import activate, install
from safetensors.torch import load_file, save_file

from plugsft.data.chat import CHATML

WEIGHTS, TOKENS = "the weights in the model's files changed", "the tokens of the training data"
LOUD = """
    @plugin(affects_results=[])
    class Loud:
        times: float = 1.0

        @hookimpl(wrapper=True)
        def step(self):
            loss = yield
            return loss * self.times * 1
"""
REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
    times = 1
"""


def number(index):
    """Write numbers that all have the same number of tokens."""
    return f"{34 + 7 * index % 53}"


def row(index, of="b"):
    """Write a chat of always the same number of tokens."""
    asked = {"role": "user", "content": f"a {number(index)}"}
    return {"messages": [asked, {"role": "assistant", "content": f"{of} {number(index + 1)}"}]}


def pair(index, chosen="b", rejected="c"):
    chat, other = row(index, chosen)["messages"], row(index, rejected)["messages"]
    return {"prompt": chat[:1], "chosen": chat[1:], "rejected": other[1:]}


PAIRS = [pair(index) for index in range(16)]
KINDS = {
    "SFT": {"eval": {"source": "eval.jsonl", "every": 1}, "checkpoint": {"keep_best": "eval_loss"}},
    "LoRA": {"plugins": {"lora": {"r": 2}}},
    "DPO": {"plugins": {"dpo": {}}},
    "DPO, reference": {"plugins": {"dpo": {"reference": "reference"}}},
    "DPO, stored": {"plugins": {"dpo": {"reference": "reference"}, "dpo_reference": {}}},
    "plugin": {"plugins": {"loud": {}}},
    "code": {"model": {"trust_remote_code": True}},
}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Give `started(kind)`: the folder of a run of this kind, with a checkpoint of step 1."""
    monkeypatch = pytest.MonkeyPatch()
    home, made = tmp_path_factory.mktemp("kinds"), {}
    monkeypatch.setenv("HF_MODULES_CACHE", str(home / "modules"))
    activate(install(home / "site", loud=LOUD), monkeypatch)
    rows = [row(index) for index in range(16)]
    must_succeed(write_recipe(home / "base.toml", tiny_tables(home, rows)), "train.steps=1")

    def start(kind):
        folder = home / kind.replace(", ", "-")
        if kind not in made:
            tables = tiny_tables(folder, PAIRS if "DPO" in kind else rows)
            write_jsonl(folder / "eval.jsonl", [row(index, "d") for index in range(4)])
            template = folder / "template.jinja"
            template.write_text("Q7" + CHATML.read_text())
            for name in ("base", "reference"):
                shutil.copytree(home / "run/model", folder / name)
                (folder / name / "manifest.json").unlink()
            if kind == "code":
                (folder / "base/own.py").write_text(REMOTE)
                auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
                edit("base/config.json", model_type="own", auto_map=auto)(folder)
            model = {"path": str(folder / "base"), "chat_template": str(template)}
            tables["train"] |= {"steps": 2, "batch_size": 4}
            del tables["train"]["micro_batch"]
            tables["checkpoint"] = {"every": 1, "keep": 9}
            for name, table in KINDS[kind].items():
                tables[name] = tables.get(name, {}) | table
            tables["model"] = model | KINDS[kind].get("model", {})
            if "eval" in tables:
                tables["eval"]["source"] = str(folder / "eval.jsonl")
            if "reference" in tables.get("plugins", {}).get("dpo", {}):
                tables["plugins"]["dpo"] = {"reference": str(folder / "reference")}
            must_succeed(write_recipe(folder / "recipe.toml", tables))
            shutil.copytree(folder, home / "kept" / kind)
            made[kind] = home / "kept" / kind
        return folder, made[kind]

    yield start
    monkeypatch.undo()


@pytest.fixture
def resumed(started, tmp_path):
    """Give `resumed(kind, change, *words)`: change something, resume from step 1; its result."""
    done = []

    def resume(kind, change, *words, run=run_plugsft, **options):
        folder, kept = started(kind)
        done.append((folder, kept))
        change(folder)
        words = [word.replace("FOLDER", str(folder)) for word in words]
        checkpoint = folder / "run/checkpoints/step-000001"
        options = (folder / "recipe.toml", f"output={tmp_path / 'resumed'}", *words), options
        return run(*options[0], "--resume-from", checkpoint, **options[1])

    yield resume
    for folder, kept in done:
        shutil.copytree(kept, folder, dirs_exist_ok=True)


def edit(name, **changes):
    """Change keys of a JSON file."""

    def change(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def scale(name, part, by=2.0):
    """Multiply some weights of a model."""

    def change(folder):
        path = folder / name / "model.safetensors"
        tensors = load_file(path)
        found = [each for each in tensors if part in each]
        assert found
        save_file(tensors | {each: tensors[each] * by for each in found}, path, {"format": "pt"})

    return change


def rows_are(rows, name="data.jsonl"):
    return lambda folder: write_jsonl(folder / name, rows)


def replace(name, old, new):
    """Change words of a text file."""

    def change(folder):
        path = folder / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


def exchange_ids(folder):
    """Let two words of the vocabulary exchange their ids."""
    path = folder / "base/tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))


def louder(folder):
    """Change the code of the plugin."""
    [path] = (folder.parent / "site").rglob("*loud*.py")
    path.write_text(path.read_text().replace("* 1", "* 3"))


def nothing(folder):
    """Change nothing in the files."""


ROWS = [row(index) for index in range(16)]
CONFIG = "base/config.json"
REFUSED = {
    "other words": ("SFT", rows_are([row(0, "e"), *ROWS[1:]]), TOKENS),
    "another order": ("SFT", rows_are(ROWS[::-1]), TOKENS),
    "the template": ("SFT", replace("template.jinja", "Q7", "Q8"), "the chat template changed"),
    "ids of words": ("SFT", exchange_ids, "the tokenizer changed"),
    "end of text": ("SFT", edit("base/tokenizer_config.json", eos_token="<|pad|>"), "tokenizer"),
    "the norm's epsilon": ("SFT", edit(CONFIG, rms_norm_eps=1.0), "config.json: rms_norm_eps was"),
    "positions": (
        "SFT",
        edit(CONFIG, rope_parameters={"rope_type": "default", "rope_theta": 5.0}),
        "config.json: rope_parameters.rope_theta was 10000.0 and is 5.0",
    ),
    "dropout": ("SFT", edit(CONFIG, attention_dropout=0.5), "attention_dropout was 0.0 and is 0.5"),
    "Python files": ("code", replace("base/own.py", "times = 1", "times = 3"), "Python files"),
    "one weight": ("SFT", scale("base", "layers.1.mlp.up_proj"), WEIGHTS),
    "one layer under adapters": ("LoRA", scale("base", "layers.1.mlp"), WEIGHTS),
    "the last norm under adapters": ("LoRA", scale("base", "model.norm"), WEIGHTS),
    "answers exchanged": ("DPO", rows_are([pair(n, "c", "b") for n in range(16)]), TOKENS),
    "other pairs": ("DPO", rows_are([pair(n + 1) for n in range(16)]), TOKENS),
    "stored: other pairs": ("DPO, stored", rows_are([pair(n + 1) for n in range(16)]), TOKENS),
    "the first model": ("DPO", scale("base", "model.norm"), WEIGHTS),
    "the reference": (
        "DPO, reference",
        scale("reference", ""),
        "the weights of the reference changed",
    ),
    "a layer of the reference": (
        "DPO, reference",
        scale("reference", "layers.0.mlp"),
        "the weights of the reference changed",
    ),
    "stored: the reference": (
        "DPO, stored",
        scale("reference", "model.norm"),
        "the weights of the reference changed",
    ),
    "the reference's settings": (
        "DPO, reference",
        edit("reference/config.json", rms_norm_eps=1.0),
        "the reference's config.json: rms_norm_eps was",
    ),
}
WARNED = {
    "generation": (
        "SFT",
        edit("base/generation_config.json", temperature=0.5),
        "generation_config",
    ),
    "rows of [eval]": (
        "SFT",
        rows_are([row(index, "f") for index in range(4)], "eval.jsonl"),
        "other rows of [eval]",
    ),
    "a plugin's code": ("plugin", louder, "the code of plugin loud"),
}


def only_some(table, *names):
    """Let a few of a table run always, and all of them with --full."""
    return [name for name in table if FULL or name in names]


@pytest.mark.parametrize(
    "name", only_some(REFUSED, "other words", "the norm's epsilon", "stored: the reference")
)
def test_what_decides_what_is_learned_is_refused_by_name(resumed, name):
    kind, change, message = REFUSED[name]
    result = resumed(kind, change)
    assert result.returncode == 2, result.stdout + result.stderr
    assert message in result.stderr and "Traceback" not in result.stderr, result.stderr


def test_another_type_of_numbers_is_refused(resumed):
    result = resumed("SFT", nothing, env={"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert result.returncode == 2, result.stdout


@pytest.mark.parametrize("name", only_some(WARNED, "a plugin's code"))
def test_what_may_change_is_named(resumed, name, tmp_path):
    kind, change, message = WARNED[name]
    result = resumed(kind, change)
    assert result.returncode == 0, result.stderr
    warnings = [line for line in result.stdout.splitlines() if line.startswith("warning: ")]
    assert any(message in line for line in warnings), result.stdout


def another_format(folder):
    """Write the rows as parquet."""
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")


def formatted(folder):
    """Write config.json in another order, by another version of transformers."""
    path = folder / CONFIG
    config = json.loads(path.read_text()) | {"transformers_version": "9.9"}
    path.write_text(json.dumps(config, sort_keys=True, indent=7))


HARMLESS = {
    "moved rows": (
        "SFT",
        lambda folder: (folder / "data.jsonl").rename(folder / "moved.jsonl"),
        ["data.source=FOLDER/moved.jsonl"],
    ),
    "another format": ("SFT", another_format, ["data.source=FOLDER/data.parquet"]),
    "fast tokenizer": ("SFT", nothing, ["plugins.fast_tokenizer={}"]),
    "workers": ("SFT", nothing, ["plugins.multiprocess_tokenize.workers=2"]),
    "micro-batches": ("SFT", nothing, ["train.micro_batch=2"]),
    "packing": ("SFT", nothing, ["plugins.bfd_packing.capacity=256"]),
    "config.json, formatted": ("SFT", formatted, []),
    "without stored references": ("DPO, stored", nothing, ["--without", "dpo_reference"]),
}


@pytest.mark.parametrize("name", only_some(HARMLESS, "another format", "config.json, formatted"))
def test_what_changes_no_result_passes_unseen(resumed, name):
    kind, change, words = HARMLESS[name]
    result = resumed(kind, change, *words)
    assert result.returncode == 0, result.stderr
    assert "changed" not in result.stdout and "differ" not in result.stdout, result.stdout


@pytest.mark.skipif(not FULL, reason="only tools/test --full runs it")
def test_other_ranks_pass_unseen(resumed):
    result = resumed("SFT", nothing, run=partial(run_ranks, 2))
    assert result.returncode == 0 and "changed" not in result.stdout, result.stderr
