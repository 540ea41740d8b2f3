"""Every command of the README runs as written."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, chats, run_plugsft, tiny_tables, write_jsonl, write_recipe

README = (ROOT / "README.md").read_text(encoding="utf8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)
LINES = [line.partition("#")[0].strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS = [line for line in LINES if line]
# But for plain training, which shows that the console script starts.
PLAIN = re.compile(r"plugsft (?!my\.toml$)[^|>&$*]*")
TOOLS = ["tools/quickstart", ".venv/bin/plugsft chat runs/quickstart", "tools/test"]


def test_the_tools_of_the_readme_are_tested_elsewhere_and_used_by_ci():
    assert COMMANDS[:3] == TOOLS  # the first two in test_quickstart.py; the third runs this
    assert "\ntools/test\n" in (ROOT / ".ci/run").read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Give a folder with what the README's recipe names: a model, rows, and the recipe."""
    folder = tmp_path_factory.mktemp("readme")
    tables = tiny_tables(folder / "tiny", chats(70))
    tables["model"]["scratch"]["context"] = 2048
    tables["train"]["steps"] = 1
    done = run_plugsft(write_recipe(folder / "tiny/recipe.toml", tables))
    assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "tiny/run/model", folder / "Qwen/Qwen3-0.6B")
    write_jsonl(folder / "chats.jsonl", chats(70))
    (folder / "recipes").symlink_to(ROOT / "recipes")
    recipe, *_ = re.findall(r"```toml\n(.*?)```", README, re.S)
    (folder / "my.toml").write_text(recipe, encoding="utf8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS[3:])
def test_a_command_of_the_readme(place, command, forked_trials):
    shutil.rmtree(place / "runs", ignore_errors=True)
    if "--resume" in command:
        plugsft(place, "plugsft my.toml")
    if " diff " in command:
        for output in ("runs/my-model", "runs/other"):
            plugsft(place, f"plugsft my.toml output={output}")
    if "quickstart_dpo" in command:  # test_quickstart.py runs it with the quickstart's own
        shutil.copytree(place / "Qwen/Qwen3-0.6B", place / "runs/quickstart/model")
    if "--merge" in command:
        plugsft(place, "plugsft my.toml plugins.lora.r=4")
    done = plugsft(place, command) if PLAIN.fullmatch(command) else in_a_shell(place, command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    # Nothing stands between our lines, of the launcher's or of anybody's.
    assert not done.stderr


def plugsft(place, command):
    """Run a command that a shell would only split into words, in a fork."""
    done = run_plugsft(*shlex.split(command)[1:], cwd=place)
    assert done.returncode == 0, done.stderr
    return done


def in_a_shell(place, command):
    """Run a command as a user would."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        command, shell=True, cwd=place, env=env, capture_output=True, text=True, timeout=300
    )
