"""The command line: light, forgiving of typos, and without tracebacks."""

import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from conftest import ROOT, run_here, run_plugsft

from plugsft import __version__, cli
from plugsft.base.errors import RecipeError, Stopped
from plugsft.commands import load_recipe

COMMANDS = [
    *[
        "quickstart",
        "init",
        "convert",
        "train",
        "launch",
        "fetch",
        "prepare",
        "check",
        "inspect",
        "plugins",
        "show",
        "diff",
        "schema",
        "chat",
        "export",
        "new-plugin",
        "bench",
        "tune",
        "plan",
    ]
]


def test_help_is_quick_and_names_every_command():
    command = [sys.executable, "-m", "plugsft", "--help"]
    times = []
    for _ in range(3):
        before = os.times()
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        # The processor's time, not the clock's: other work may run beside this.
        times.append(sum(os.times()[2:4]) - sum(before[2:4]))
    assert all(f" {name} " in result.stdout for name in COMMANDS)
    # Twice what is promised.
    assert min(times) < 1.2


def test_the_command_line_imports_nothing_heavy():
    code = (
        "import sys; from plugsft import cli\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'numpy', 'pyarrow') "
        "if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "[]\n", result.stdout + result.stderr


def test_version_is_printed():
    result = run_plugsft("--version")
    assert (result.returncode, result.stdout) == (0, f"plugsft {__version__}\n")


def test_every_command_is_there_with_its_help():
    names = [c.name or c.callback.__name__.replace("_", "-") for c in cli.app.registered_commands]
    assert names == COMMANDS
    for name in names:
        result = run_plugsft(name, "--help")
        assert result.returncode == 0 and "Usage: plugsft " + name in result.stdout
        assert not re.search(r"<\w+", result.stdout)  # types, as typer writes them


def test_the_cache_has_commands_of_its_own():
    names = [command.callback.__name__ for command in cli.cache_app.registered_commands]
    assert names == ["ls", "gc"]
    for name in names:
        result = run_plugsft("cache", name, "--help")
        assert result.returncode == 0 and f"Usage: plugsft cache {name}" in result.stdout
        assert "<" not in result.stdout
    with pytest.raises(RecipeError, match="did you mean 'cache'"):
        cli.with_command(["cahce"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], []),
        (["cache", "ls"], ["cache", "ls"]),
        (["--help"], ["--help"]),
        (["check", "a.toml"], ["check", "a.toml"]),
        (["a.yaml", "--resume"], ["train", "a.yaml", "--resume"]),
        (["a.toml", "--resume"], ["train", "a.toml", "--resume"]),
        (["--without", "lora", "a.toml"], ["train", "--without", "lora", "a.toml"]),
        (["recipes/quickstart.toml"], ["train", "recipes/quickstart.toml"]),
        (["--nonsense"], ["--nonsense"]),
        (["train.steps=3", "a.toml"], ["train", "train.steps=3", "a.toml"]),
    ],
)
def test_a_recipe_in_the_place_of_a_command_trains(words, expected):
    assert cli.with_command(words) == expected


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chekc"], "did you mean 'check'"),
        (["tain", "recipes/quickstart.toml"], "'tain' .* did you mean 'train'"),
        (["qqq"], "commands: quickstart, init, convert, train"),
        (["recipes"], "a folder; try: plugsft show recipes"),
    ],
)
def test_an_unknown_word_gets_a_hint(words, says, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(RecipeError, match=says):
        cli.with_command(words)


@pytest.mark.parametrize(
    "words",
    [
        ["nowhere"],
        ["nowhere.toml"],
        ["--nowhere"],
        ["train"],
        ["train", "nowhere.toml", "--resum"],
        ["check", "recipes/quickstart.toml", "--ranks", "0"],
        ["check", "recipes/quickstart.toml", "--ranks", "two"],
        ["check", "recipes"],
        ["inspect", "recipes/quickstart.toml", "--rows", "-1"],
        ["inspect", "nowhere.toml"],
        ["plugins", "nowhere.toml"],
        ["show", "nowhere.toml"],
        ["show", "recipes"],
        ["show", "recipes/quickstart.toml", "train.seed"],
        ["chat", "nowhere"],
        ["schema", "more"],
        ["cache", "nothing"],
        ["cache", "gc", "--keep-days", "-1"],
        ["check", "recipes/quickstart.toml", "--without", "nobody"],
        [""],
    ],
)
def test_mistakes_exit_with_2_and_no_traceback(words):
    result = run_plugsft(*words)
    assert result.returncode == 2, result.stdout
    assert result.stderr and "Traceback" not in result.stderr
    assert not result.stdout


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m plugsft schema | head -n 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "{\n" and not result.stderr


def test_what_the_system_refuses_is_one_line(tiny, monkeypatch, capsys):
    def refuse(*recipe):
        raise PermissionError(13, "Permission denied", "/secret")

    monkeypatch.setattr(load_recipe, "load", refuse)
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", str(tiny())])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: /secret: permission denied\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--learning_rate=1"],
            "--learning_rate: no such option; write train.learning",
        ),
        (["--max-length", "8"], "--max-length: no such option; write data.max_length="),
        (["--without", "looser"], "no [plugins.looser]; did you mean 'lora'? it has lora"),
        (["lr=1e-4"], "did you mean 'train.learning_rate'?"),
        (["train.lr=1e-4"], "did you mean 'train.learning_rate'?"),
        (["train.weight_decay=1e30"], "should be less than or equal to 1000"),
        (["model={path='/', revision='main'}"], "revision is for the hub, and / is a folder"),
        (["plugins.grpo={}"], 'docs/troubleshooting.md, "What you may look for"'),
        (["output=/proc/x"], "/proc: is no place for files; name another folder"),
        (["evaluation.every=3"], "did you mean 'eval'? allowed: "),
        (["train.learning_rate='1'"], "a number, such as 1e-4, without quotes"),
    ],
)
def test_a_mistake_on_the_command_line_is_answered_with_what_there_is(words, says, tiny, capsys):
    assert run_here("check", tiny(plugins={"lora": {}}), *words) == 2
    assert says in capsys.readouterr().err


def test_a_variable_that_is_not_of_plugsft_is_one_line(monkeypatch, capsys):
    for text in ("x", "[1]", '{"a": 1}'):
        monkeypatch.setenv("PLUGSFT_OWN_PLUGINS", text)
        assert run_here("plugins") == 2
        assert "PLUGSFT_OWN_PLUGINS, which plugsft sets itself" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_rows_beyond_the_context_are_refused_as_a_run_does(command, tiny, capsys):
    assert run_here(command, tiny(), "data.max_length=100_000") == 2
    assert "the model's context is" in capsys.readouterr().err


def test_files_are_not_alike_by_their_ending(tmp_path, tiny, capsys):
    for name in ("parts.jsonl", "charts.jsonl"):
        (tmp_path / name).write_text("{}")
    for missing, hint in {"chat.jsonl": "'charts.jsonl'", "owls.jsonl": ""}.items():
        assert run_here("check", tiny(), f"data.source={tmp_path / missing}") == 2
        said = capsys.readouterr().err
        assert (f"did you mean {hint}" in said) if hint else ("did you mean" not in said), said


def test_a_key_twice_is_named(tmp_path, capsys):
    (tmp_path / "twice.toml").write_text('output = "x"\noutput = "y"\n')
    assert run_here("check", tmp_path / "twice.toml") == 2
    assert "line 2, column 13): output is there twice; remove one" in capsys.readouterr().err


def test_a_third_ctrl_c_ends_a_waiting_rank_without_a_traceback(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(SystemExit, match="130"):
        cli._leave(Stopped("saved", 130))
