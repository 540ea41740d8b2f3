"""A model's own code runs only if the person at the keyboard allows it."""

import json
from pathlib import Path

import pytest
from conftest import run_here, tiny_tables, write_recipe
from safetensors.torch import save_file
from torch import zeros

from plugsft import RecipeError, cli
from plugsft.base.atomic import publish
from plugsft.checkpoint.same_run import FORMAT
from plugsft.model.published import read_config

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).write_text("ran")
class StrangeConfig(LlamaConfig):
    model_type = "strange"
class StrangeModel(LlamaForCausalLM):
    config_class = StrangeConfig
class StrangeTokenizer(PreTrainedTokenizerFast):
    pass
"""


def strange(folder: Path, marker: Path, adapters: Path | None = None) -> None:
    """Write a model that comes with code which leaves a marker; or adapters of it."""
    folder.mkdir(parents=True)
    (folder / "strange.py").write_text(CODE.format(marker=str(marker)))
    auto = {"AutoConfig": "strange.StrangeConfig", "AutoModelForCausalLM": "strange.StrangeModel"}
    config = {"model_type": "strange", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    config |= {"num_attention_heads": 1, "intermediate_size": 8, "auto_map": auto}
    if adapters is None:
        (folder / "config.json").write_text(json.dumps(config))
    else:
        about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None}
        about |= {"base_model_name_or_path": str(adapters), "r": 1, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(about))
    (folder / "generation_config.json").write_text(json.dumps({"auto_map": auto}))
    tokenizer = {"tokenizer_class": "StrangeTokenizer"}
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "strange.StrangeTokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for name in ("model.safetensors", "adapter_model.safetensors"):
        save_file({"a": zeros(1)}, folder / name, {"format": "pt"})


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """Give someone else's runs: with a model, with adapters, and with a checkpoint only."""
    marker, runs = tmp_path / "marker", tmp_path / "foreign"
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    base = tmp_path / "base"
    strange(base, marker)
    tables = tiny_tables(tmp_path / "mine") | {"output": str(tmp_path / "mine/run")}
    tables["model"] = {"path": str(base)}
    mine = write_recipe(tmp_path / "mine/recipe.toml", tables)
    tables["model"] = {"path": str(base), "trust_remote_code": True}
    for name in ("whole", "adapters", "stopped"):
        run = runs / name
        run.mkdir(parents=True)
        write_recipe(run / "recipe.toml", tables | {"output": str(run)})
        facts = {"format": 1, "status": "completed", "trust_remote_code": True, "plugins": []}
        facts |= {"started": "now", "machine": {}, "steps": {"done": 1, "total": 1, "per_epoch": 1}}
        (run / "run.json").write_text(json.dumps(facts))
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
        if name != "stopped":
            strange(run / "model", marker, base if name == "adapters" else None)
        with publish(run / "checkpoints/step-000001") as building:
            (building / "state.json").write_text(
                json.dumps({"format": FORMAT, "step": 1, "recipe": {}})
            )
            save_file({"model/a": zeros(1)}, building / "rank-00000-000.safetensors")
    return runs, mine, marker


def commands(runs: Path, recipe: Path, to: Path) -> dict[str, list[list[object]]]:
    """Return what to ask of each command: of a foreign run, or with a recipe of one's own."""
    folders = [runs / name for name in ("whole", "adapters", "stopped")]
    points = [*folders, runs / "whole/model", runs / "adapters/model"]
    points += [runs / "stopped/checkpoints", runs / "stopped/checkpoints/step-000001"]
    checkpoint = points[-1]
    return {
        "train": [[recipe], [recipe, "--resume-from", checkpoint], [recipe, "--resume"]],
        "fetch": [["--help"]],  # it copies rows, and opens no model
        "prepare": [[recipe]],
        "check": [[recipe]],
        "inspect": [[recipe]],
        "plugins": [[recipe]],
        "show": [[recipe], *([folder] for folder in folders)],
        "diff": [[folders[0], folders[1]]],
        "schema": [[]],
        "chat": [[point, "--ask", "hello"] for point in points],
        "export": [
            [point, "--to", to / f"{number}{merge}", *merge]
            for number, point in enumerate(points)
            for merge in ((), ("--merge",))
        ],
        "init": [[]],
        "convert": [["--help"]],  # it opens no model
        "quickstart": [["--help"]],  # it trains a new model, on its own data
        "launch": [["--help"]],  # it becomes `plugsft train`, or `accelerate launch`
        "new-plugin": [["mine", "--folder", to]],
        "bench": [[recipe, "--rounds", "1", "--steps", "1", f"output={to}/run"]],
        "tune": [[recipe, "--steps", "1"]],
        "plan": [[recipe, "--gpu", "H100"]],
        "cache": [["ls"], ["gc"]],
    }


def test_no_command_runs_the_code_of_someone_else_s_model(foreign, tmp_path, capsys, monkeypatch):
    runs, recipe, marker = foreign
    # transformers would ask whoever sits there, and take a typed "y".
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    to = tmp_path / "to"
    to.mkdir()
    asked = commands(runs, recipe, to)
    names = [c.name or c.callback.__name__.replace("_", "-") for c in cli.app.registered_commands]
    assert {*asked} == {*names, *(group.name for group in cli.app.registered_groups)}
    for name, calls in asked.items():
        for words in calls:
            run_here(name, *words)
            assert not marker.exists(), [name, *words]
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert told.count("--trust-remote-code for chat and export") > 10


@pytest.mark.parametrize("command", ["chat", "export", "check"])
def test_remote_code_runs_where_the_user_trusts_it(foreign, tmp_path, command):
    """So that the test above can fail."""
    runs, recipe, marker = foreign
    words = {
        "chat": [runs / "whole", "--ask", "hello", "--trust-remote-code"],
        "export": [runs / "stopped", "--to", tmp_path / "to", "--trust-remote-code"],
        "check": [recipe, "model.trust_remote_code=true"],
    }
    run_here(command, *words[command])
    assert marker.exists()


def test_a_kernel_of_the_hub_is_code_too(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    table = {"model_type": "llama", "attn_implementation": "somebody/kernel"}
    (folder / "config.json").write_text(json.dumps(table))
    tables = tiny_tables(tmp_path) | {"model": {"path": str(folder)}}
    assert run_here("check", write_recipe(tmp_path / "recipe.toml", tables)) == 2
    assert "config.json asks for the kernel somebody/kernel" in capsys.readouterr().err
    with pytest.raises(RecipeError, match="somebody/kernel"):  # as chat and export load it
        read_config(str(folder), {})
