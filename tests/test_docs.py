"""The pages agree with the program: commands run, recipes load, options and keys exist.

Most commands run as written, once, whatever the number of pages that name them. TOO_SLOW names
the others and the reason: of these, only the words, the options and the files are checked.
"""

import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
import typer
from conftest import FULL, ROOT, run_here, run_launch, run_plugsft, write_recipe
from pages import (
    BLOCK,
    COMMANDS,
    README,
    REFUSED,
    RUN,
    TEXTS,
    TOO_SLOW,
    TOOLS,
    blocks,
    commands,
    in_a_shell,
    make_place,
    parse_command,
    prepare_for,
)

from plugsft import cli
from plugsft.recipe.tables import Eval, Recipe
from plugsft.registry.load import load

SILENT = {"plugsft cache gc --keep-days 30", "plugsft chat runs/my-model"}
"""Commands that print nothing if there is nothing to remove, or nothing on the keyboard."""
SHOWN = {
    command: output
    for content in TEXTS.values()
    for command, output in re.findall(r"([^\n]+)\n```\n\n```text\n(.*?)```", content, re.S)
}
"""Command -> its output, or part of it, if a page shows that below the command."""
# But for plain training, which shows that the console script starts.
PLAIN = re.compile(r"plugsft (?!my\.toml$)[^|>&$*]*")


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


def test_a_csv_is_a_source_as_troubleshooting_says(tiny, tmp_path):
    recipe = next(text for page, text in blocks("toml") if page.stem == "troubleshooting")
    (tmp_path / "qa.csv").write_text("question,answer\n" + "Who?,Nobody\n" * 8)
    data = tomllib.loads(recipe)["data"] | {"source": str(tmp_path / "qa.csv")}
    assert run_here("prepare", tiny(data=data)) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_and_files_that_it_names(command):
    words = shlex.split(command)
    if "plugsft" in words and words[0] != "pip":
        parse_command(words[words.index("plugsft") + 1 :])
    for word in words:
        if word.startswith(("tools/", "recipes/")):
            assert (ROOT / word).is_file(), word


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
    *("--ntasks-per-node", "--against", "--workers", "--plugins"),
    *("--enable-auto-tool-choice", "--tool-call-parser"),
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
