"""The pages agree with the program: commands run, recipes load, options and keys exist.

Most commands run as written, once, whatever the number of pages that name them. TOO_SLOW names
the others and the reason: of these, only the words, the options and the files are checked.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from conftest import (
    FULL,
    ROOT,
    chats,
    run_launch,
    run_plugsft,
    tiny_tables,
    write_jsonl,
    write_recipe,
)

from plugsft import cli
from plugsft.recipe.tables import Eval, Recipe
from plugsft.registry.load import load

README = (ROOT / "README.md").read_text(encoding="utf8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# families.md is written by tests/family_runs.py, with the errors of other programs in it.
TEXTS = {page: page.read_text(encoding="utf8") for page in PAGES if page.stem != "families"}
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.S)

TOOLS = {"tools/quickstart", ".venv/bin/plugsft chat runs/quickstart", "tools/test"}
"""The first two run in test_quickstart.py; the third runs this."""
TOO_SLOW = {
    "pip install .": "test_wheel.py installs the wheel",
    "plugsft quickstart": "test_wheel.py runs it with few steps, test_quickstart.py with all",
    "plugsft chat runs/quickstart": "test_quickstart.py runs it",
    "tools/install fast,quantize": "tools/test installs more",
    "tools/install dev,deepspeed,fast,fp8,liger,quantize,trackers": "tools/test runs it",
    "tools/install --oldest dev,deepspeed,fast,fp8,liger,quantize,trackers": "tools/test "
    "--full runs it",
    "PLUGSFT_OLDEST=1 .venv-oldest/bin/pytest -W ignore::DeprecationWarning "
    "-W ignore::FutureWarning tests/test_loop.py": "tools/test --full runs it",
    "tools/check": "its parts are in tools/test",
    "plugsft recipes/quickstart_dpo.toml": "test_quickstart.py runs it with --full",
    "tools/test --full": "takes longer than CI has",
    "plugsft bench my.toml --only bfd_packing --rounds 1 --steps 3": "a minute; "
    "test_bench.py runs benches",
    "plugsft tune my.toml": "half a minute; test_tune.py tunes",
    "plugsft export runs/my-model --to hub:me/my-model": "test_hub.py has a hub to upload to",
    **dict.fromkeys(
        (
            "plugsft launch my.toml --nodes 2 --node 0 --host 10.0.0.1",
            "plugsft launch my.toml --nodes 2 --node 1 --host 10.0.0.1",
        ),
        "they need two machines; test_many_machines.py runs both on one, with --full",
    ),
    "NODES=2 HOST=10.0.0.1 bash recipes/launch/torchrun.sh my.toml": "it needs two machines; "
    "test_many_machines.py has torchrun's agents, without this file",
    "accelerate launch -m plugsft recipes/tulu_sft.toml": "8 billion weights; test_recipes.py runs "
    "it with few",
    "sbatch recipes/launch/slurm.sbatch my.toml": "test_slurm.py has a Slurm and runs it with "
    "--full",
    "plugsft launch my.toml --ranks 2": "test_many_machines.py launches so",
    "plugsft launch my.toml --ranks 2 --strategy fsdp2": "the next line of accelerate is the same",
    "accelerate launch --config_file recipes/accelerate/gpu8.yaml --num_processes 2 "
    "-m plugsft my.toml": "plugsft launch runs the same line, but for the file",
    "accelerate launch --config_file recipes/accelerate/zero3.yaml --num_processes 2 "
    "-m plugsft my.toml": "DeepSpeed's start; test_launch.py trains with this file",
}
"""Command -> why it is only parsed."""
SILENT = {"plugsft cache gc --keep-days 30", "plugsft chat runs/my-model"}
"""Commands that print nothing if there is nothing to remove, or nothing on the keyboard."""
REFUSED = {"plugsft my.toml data.too_long=cut"}
"""Commands that show a mistake."""
SHOWN = {
    command: output
    for content in TEXTS.values()
    for command, output in re.findall(r"([^\n]+)\n```\n\n```text\n(.*?)```", content, re.S)
}
"""Command -> its output, or part of it, if a page shows that below the command."""
# But for plain training, which shows that the console script starts.
PLAIN = re.compile(r"plugsft (?!my\.toml$)[^|>&$*]*")


def blocks(language):
    """Return (page, text) of each block in a language."""
    return [
        (page, text)
        for page, content in TEXTS.items()
        for name, text in BLOCK.findall(content)
        if name == language
    ]


def commands(text):
    """Return the commands of a block, without comments."""
    lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


COMMANDS = list(dict.fromkeys(line for _, text in blocks("bash") for line in commands(text)))
RUN = [command for command in COMMANDS if command not in TOOLS and command not in TOO_SLOW]


def test_every_command_runs_here_or_is_named_with_its_reason():
    assert set(COMMANDS) >= TOOLS | set(TOO_SLOW)


def test_ci_runs_the_test_command_of_the_readme():
    quickstart, test = commands(BLOCK.search(README)[2])
    assert quickstart == "tools/quickstart"
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == test


def test_check_runs_files_that_exist():
    names = re.search(r"core=\(([^)]*)\)", (ROOT / "tools/check").read_text())[1].split()
    assert names and all((ROOT / f"tests/test_{name}.py").is_file() for name in names)


def test_one_page_says_that_plugsft_is_not_on_pypi():
    saying = [page.name for page, text in TEXTS.items() if "not on pypi" in text.lower()]
    assert saying == ["start.md"]
    notebooks = "".join(path.read_text() for path in (ROOT / "docs/notebooks").glob("*.ipynb"))
    assert not re.search(r"install plugsft\b(?!\[)", notebooks + "".join(TEXTS.values()))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Give a folder in which the commands of the pages run."""
    return make_place(tmp_path_factory.mktemp("docs"))


def make_place(folder):
    """Put into a folder what the README's recipe names: a model, rows, and the recipe."""
    tables = tiny_tables(folder / "tiny", chats(70))
    tables["model"]["scratch"]["context"] = 2048
    tables["train"]["steps"] = 1
    done = run_plugsft(write_recipe(folder / "tiny/recipe.toml", tables))
    assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "tiny/run/model", folder / "Qwen/Qwen3-0.6B")
    write_jsonl(folder / "chats.jsonl", chats(70))
    for kind in ("launch", "quickstart"):
        assert run_plugsft("init", kind, cwd=folder).returncode == 0
    # Smaller steps than the README's, for speed.
    recipe = dict(BLOCK.findall(README))["toml"].replace("batch_size = 64", "batch_size = 16")
    (folder / "my.toml").write_text(recipe, encoding="utf8")
    for name, settings in OTHERS.items():
        (folder / name).write_text(json.dumps(settings))
    return folder


OTHERS = {
    "qlora.yaml": {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 1e-4},
    "sft.yaml": {"model_name_or_path": "m", "stage": "sft", "dataset": "identity"},
    "dpo.yaml": {"model_name_or_path": "m", "dataset_name": "d", "beta": 0.1},
}
"""Configurations of axolotl, LLaMA-Factory and TRL."""


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_a_command_of_the_pages(place, command, forked_trials):
    for results in ("runs", "shipped", "tenth-step"):
        shutil.rmtree(place / results, ignore_errors=True)
    prepare_for(command, plugsft, place)
    if command.startswith("accelerate launch") and "fsdp2" in command:
        code, out, err = run_launch(*in_folder(shlex.split(command)[2:], place))
        done = subprocess.CompletedProcess(command, code, out, err)
    elif PLAIN.fullmatch(command):
        done = plugsft(place, command)
    else:
        done = in_a_shell(place, command)
    lines = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
    assert SHOWN.get(command, "").strip("\n") in "\n".join(lines)
    if command in REFUSED:
        assert done.returncode == 2 and not done.stdout
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or command in SILENT
    # Nothing stands between our lines, of the launcher's or of anybody's.
    assert not done.stderr


def prepare_for(command, run, place):
    """Make the runs that a command needs; each is trained once, and a copy of it is used."""
    if "--resume" in command or "--overwrite" in command or " runs/my-model" in command:
        give_run(place, run, "my-model", " plugins.lora.r=4" if "--merge" in command else "")
    if " diff " in command:
        give_run(place, run, "other", " output=runs/other")


def give_run(place, run, name, words):
    trained = place / f"trained{words.replace('/', '-')}"
    if trained.exists():
        shutil.copytree(trained, place / "runs" / name)
    else:
        assert run(place, f"plugsft my.toml{words}").returncode == 0
        shutil.copytree(place / "runs" / name, trained)


def plugsft(place, command):
    """Run a command that a shell would only split into words, in a fork."""
    return run_plugsft(*shlex.split(command)[1:], cwd=place)


def in_folder(words, place):
    """Name the recipe and the output of launch words for ranks that start in the clone."""
    names = {"my.toml": str(place / "my.toml")}
    return [names.get(word, word) for word in words] + [
        f"output={place}/runs/my-model",
        f"model.path={place}/Qwen/Qwen3-0.6B",
        f"data.source={place}/chats.jsonl",
    ]


def in_a_shell(place, command, programs=Path(sys.executable).parent):
    """Run a command as a user would, with the programs of an environment."""
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    return subprocess.run(
        command,
        shell=True,
        cwd=place,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_the_code_of_the_python_page_runs(place, monkeypatch, capsys):
    """In the order of the page, as the cells of a notebook."""
    shutil.rmtree(place / "runs", ignore_errors=True)
    monkeypatch.chdir(place)
    cells = [text for page, text in blocks("python") if page.stem == "python"]
    names = {"__name__": "__main__"}
    for cell in cells:
        if "ranks=" not in cell or FULL:
            exec(compile(cell, "docs/python.md", "exec"), names)
    assert len(cells) == 10 and len(names["answers"]) == 2
    assert names["stopped"].record["plugins"][-1]["name"] == "stop_below"
    assert len(names["stopped"].metrics) < len(names["runs"][1e-5].metrics)
    assert "did you mean 'batch_size'?" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_and_files_that_it_names(command):
    words = shlex.split(command)
    if "plugsft" in words and words[0] != "pip":
        parse(words[words.index("plugsft") + 1 :])
    for word in words:
        if word.startswith(("tools/", "recipes/")):
            assert (ROOT / word).is_file(), word


def parse(words):
    """Parse the words of a plugsft command; an unknown option or a wrong value is an error."""
    command = typer.main.get_command(cli.app)
    rest = cli.with_command(words)
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context("plugsft", rest)


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_and_keys_named_in_a_sentence_exist(page):
    code = "\n".join(re.findall(r"`([^`\n]+)`", BLOCK.sub("", TEXTS[page])))
    named = re.findall(r"(?:^| )(--[a-z][a-z_-]+)", code, re.MULTILINE)
    assert {*named} <= {*OF_OTHERS, *options(typer.main.get_command(cli.app))}
    keys = re.findall(r"^(model|data|train|eval|checkpoint)\.(\w+)", code, re.MULTILINE)
    for table, key in keys:
        fields = Recipe.model_fields[table].annotation
        assert key in getattr(fields, "model_fields", Eval.model_fields), f"{table}.{key}"


OF_OTHERS = {
    *("--help", "--full", "--config_file", "--strict", "--index-url"),
    *("--max-lora-rank", "--chat-template", "--modelfile", "--enable-lora", "--generation-config"),
    *("--ntasks-per-node", "--against"),
}
"""Options of typer, accelerate, mypy, pip, Slurm, our tools, and of servers of models."""


def options(command):
    """Yield the options of a command and of those below it."""
    for below in getattr(command, "commands", {}).values():
        yield from options(below)
    yield from (name for parameter in command.params for name in parameter.opts)


# A page's fragment stands in a recipe like this.
BASE = {
    "output": "runs/my-model",
    "model": {"path": "Qwen/Qwen3-0.6B"},
    "data": {"source": "chats.jsonl"},
    "train": {"batch_size": 64, "learning_rate": 1e-5},
}


@pytest.mark.parametrize("page, text", blocks("toml"), ids=lambda value: getattr(value, "name", ""))
def test_a_recipe_of_the_pages_loads(page, text, tmp_path):
    tables = tomllib.loads(text)
    for name, table in BASE.items():
        tables[name] = table if isinstance(table, str) else {**table, **tables.get(name, {})}
    if "sources" in tables["data"]:
        del tables["data"]["source"]
    load(write_recipe(tmp_path / "recipe.toml", tables), [], [])
