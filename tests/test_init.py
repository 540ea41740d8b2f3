"""plugsft init: recipes whose commands work where they are written, and completion in the shell."""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib

import jsonschema
import pytest
from conftest import (
    FULL,
    ROOT,
    chats,
    must_succeed,
    only_full,
    run_here,
    run_plugsft,
    tiny_tables,
    write_recipe,
)
from pages import parse_command

from plugsft.api import PlugsftError
from plugsft.commands.overview import schema_text
from plugsft.commands.starting_files import SCHEMA, commands_of, files_of, print_kinds, write
from plugsft.registry.load import load

LAUNCH = {
    path.relative_to(ROOT).as_posix()
    for folder in ("accelerate", "launch")
    for path in (ROOT / "recipes" / folder).iterdir()
}
GENERAL = ["sft", "lora", "qlora", "dpo", "kto", "reward", "tools"]


def written(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf8")
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_every_recipe_is_written_with_the_files_that_it_names(tmp_path, monkeypatch, capsys):
    print_kinds()
    listed = capsys.readouterr().out.splitlines()[:-2]
    names = [path.stem for path in sorted((ROOT / "recipes").glob("*.toml"))]
    assert [line.split()[0] for line in listed] == [*names, "launch"]
    assert all(len(line) <= 112 and line.endswith(".") for line in listed)
    schema = schema_text()
    validate = jsonschema.validators.validator_for(json.loads(schema))(json.loads(schema)).validate
    for kind in names:
        place = tmp_path / kind
        (place / SCHEMA).parent.mkdir(parents=True)
        (place / SCHEMA).write_text(schema)  # it is the same for all, and takes a while
        write(kind, place)
        files = written(place)
        text = files[f"recipes/{kind}.toml"]
        bundled = (ROOT / f"recipes/{kind}.toml").read_text(encoding="utf8")
        assert text == f"#:schema ./recipe.schema.json\n{bundled}"
        validate(tomllib.loads(text))
        monkeypatch.chdir(place)
        load(place / f"recipes/{kind}.toml", [], [])
        commands = commands_of(text)
        for command in commands:
            words = shlex.split(command)
            assert {word for word in words if word.startswith("recipes/")} <= {*files}, command
            parse_command(words[words.index("plugsft") + 1 :])
        needs = re.findall("# Needs: (.*)", text)
        told = capsys.readouterr().out.partition("Next:\n")[2].splitlines()
        assert told == [f"  {line}" for line in (f"cd {place}", *needs, *commands[:3])]


def test_model_and_data_are_those_of_the_user(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text("{}")
    assert run_here("init", "lora", "--model", "me/mine", "--data", "chats.jsonl") == 0
    made = tomllib.loads((tmp_path / "recipes/lora.toml").read_text())
    places = (made["model"]["path"], made["data"]["source"], made["eval"]["source"])
    chats = str(tmp_path / "chats.jsonl")  # the commands may run in another folder
    assert places == ("me/mine", chats, chats)
    (tmp_path / "other").mkdir()
    assert run_here("init", "sft", "--data", "chats.jsonl", "--to", "other") == 0
    made = tomllib.loads((tmp_path / "other/recipes/sft.toml").read_text())
    assert made["data"]["source"] == chats
    assert made["model"]["path"] == "Qwen/Qwen3-0.6B"
    for words in (["quickstart", "--model", "m"], ["launch", "--model", "m"]):
        assert run_here("init", *words) == 2
        assert "m: this recipe has no key path; leave it out" in capsys.readouterr().err
        assert not (tmp_path / "recipes/quickstart.toml").exists()


def test_no_file_is_overwritten(tmp_path):
    def init(*words):
        return run_plugsft("init", *words, cwd=tmp_path)

    assert init("launch").returncode == 0
    assert {*written(tmp_path)} == LAUNCH
    gpu8 = tmp_path / "recipes/accelerate/gpu8.yaml"
    gpu8.write_text("num_processes: 2\n")
    assert init("sft").returncode == 0
    before = written(tmp_path)
    assert before["recipes/accelerate/gpu8.yaml"] == "num_processes: 2\n"
    for words, says in (
        (["sft"], "recipes/sft.toml exists already; move it away, or set --to"),
        (["lor"], "'lor': no recipe of this name comes with plugsft; did you mean 'lora'?"),
        (["nothing"], "; choose one of dpo, kto, lora"),
        (
            ["lora", "--to", "recipes/sft.toml"],
            "recipes/sft.toml/recipes: a folder of its path is a file; set --to",
        ),
    ):
        done = init(*words)
        assert done.returncode == 2 and says in done.stderr
        assert done.stderr.count("\n") == 1
    assert written(tmp_path) == before


def test_a_terminal_without_utf8_shows_codes(tmp_path):
    words = [sys.executable, "-m", "plugsft", "init", "launch", "--to", str(tmp_path / "Größe")]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and r"Gr\xf6\xdfe" in done.stdout, done.stderr


def test_a_disk_that_fills_up_leaves_no_recipe_and_no_empty_file(tmp_path):
    files = files_of("sft")
    largest = max(files, key=lambda path: len(files[path]))
    place = tmp_path / "place"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    action = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(files[largest]) // 2, before[1]))
    try:
        with pytest.raises(PlugsftError, match="set --to"):
            write("sft", place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, action)
    assert all(written(place).values()) and "recipes/sft.toml" not in written(place)
    write("sft", place)
    assert {*files} <= {*written(place)} and largest in written(place)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Train a tiny model, which answers to the name of the model in the recipes."""
    folder = tmp_path_factory.mktemp("base")
    tables = tiny_tables(folder, chats(40))
    tables["model"]["scratch"]["context"] = 2048
    tables["train"]["steps"] = 1
    must_succeed(write_recipe(folder / "recipe.toml", tables))
    return folder / "run/model"


@pytest.fixture
def place(base, tmp_path):
    """Give a folder with that model under the names that the recipes have for theirs."""
    for name in ("Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        shutil.copytree(base, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    "kind",
    [k if k in ("lora", "tools") else pytest.param(k, marks=only_full) for k in GENERAL],
)
def test_the_commands_of_a_recipe_run_as_written(kind, place):
    if kind == "qlora":
        pytest.importorskip("bitsandbytes")
    must_succeed("init", kind, cwd=place)
    commands = commands_of(files_of(kind)[f"recipes/{kind}.toml"])
    alone = [shlex.split(command)[1:] for command in commands if command.startswith("plugsft")]
    assert alone[0] == ["check", f"recipes/{kind}.toml"] and [f"recipes/{kind}.toml"] in alone
    for words in alone:
        short = ["train.steps=2"] if words[0].endswith(".toml") and not FULL else []
        asked = ["--ask", "Who?", "--max-tokens", "4"] if words[0] == "chat" else []
        done = must_succeed(*words, *asked, *short, cwd=place)
        if words[0] == "check":
            assert done.stdout.endswith(f"\nready: plugsft recipes/{kind}.toml\n"), done.stdout


def test_a_message_that_names_a_launch_file_says_how_to_write_it(tiny, tmp_path):
    env = {"ACCELERATE_USE_DEEPSPEED": "true"}
    recipe = tiny(plugins={"compile": {}})
    lines = run_plugsft("check", recipe, cwd=tmp_path, env=env).stderr.splitlines()
    assert any("launch with recipes/accelerate/fsdp2.yaml" in line for line in lines)
    hint = "recipes/accelerate/fsdp2.yaml is not here yet: `plugsft init launch` writes it"
    assert lines[-1] == hint
    assert hint not in run_plugsft("check", recipe, env=env).stderr  # in the clone it is there


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("pl", ["plan", "plugins"]),
        ("rec", ["recipes/my.toml"]),
        ("my", ["my.toml"]),
        ("check m", ["my.toml"]),
        ("my.toml --resume-", ["--resume-auto", "--resume-from"]),
        ("init lo", ["lora"]),
        ("nonsense ch", ["chat", "check"]),
    ],
)
def test_the_shell_completes_commands_recipes_and_options(typed, completed, tmp_path):
    (tmp_path / "recipes").mkdir()
    for name in ("my.toml", "recipes/my.toml"):
        (tmp_path / name).touch()
    words = f"plugsft {typed}"
    env = {"_PLUGSFT_COMPLETE": "complete_bash", "COMP_WORDS": words}
    env["COMP_CWORD"] = str(words.count(" "))
    done = run_plugsft(cwd=tmp_path, env=env)
    assert not done.stderr and sorted(done.stdout.split()) == completed
