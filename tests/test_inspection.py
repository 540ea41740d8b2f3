"""plugsft inspect: what it shows is what preparing makes."""

import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, chats, run_plugsft, tiny_tables, write_jsonl, write_recipe
from making import activate, install

from plugsft import prepare, registry
from plugsft.answers import DataAnswers
from plugsft.commands import inspection

UPPER = '''
@plugin()
class Upper:
    """Shout."""

    @hookimpl(wrapper=True)
    def render(self, rows):
        rendered = yield
        rendered.texts = [text.replace("hello", "HELLO") for text in rendered.texts]
        return rendered
'''
TALK = {
    "messages": [
        {"role": "user", "content": "say hello"},
        {"role": "assistant", "content": "hello 東京\nand\\n\x1b[31m bye"},
    ]
}


@pytest.fixture
def inspect(capsys):
    def run(path, *overrides, rows=3, first=0):
        inspection.inspect(path, list(overrides), [], rows, first)
        return capsys.readouterr().out

    return run


def bare(text):
    """Take the marks of tokens and of training out again."""
    return re.sub(r"·| ?\[\[|\]\] ?", "", text)


def test_the_trained_tokens_of_a_row_stand_in_brackets(tiny, tmp_path, inspect):
    shown = inspect(tiny([TALK, *chats(20)]), rows=1)
    assert f"{tmp_path / 'data.jsonl'}, row 0: " in shown
    plain = bare(shown)
    assert "<|im_start|>user⏎\nsay hello<|im_end|>⏎\n<|im_start|>assistant⏎\n" in plain
    _, trained = re.findall(r"\[\[(.*?)\]\]", shown, re.DOTALL)
    # A character of several tokens comes whole, and no row may steer the terminal.
    assert bare(trained) == "hello 東京⏎\nand\\n\\x1b[31m bye<|im_end|>"
    assert "\x1b" not in shown and "\ufffd" not in shown


def test_counts_are_those_of_preparing(tiny, tmp_path, inspect):
    path = tiny(chats(40), data={"max_length": 50})
    recipe, active = registry.load(path)
    active.answer(DataAnswers(recipe.folder))
    tokens = prepare.prepare(recipe, active).tokens
    shown = inspect(path, rows=40)
    facts = tokens.facts
    assert f"{facts['trained_tokens']:,} of {facts['tokens']:,} tokens" in shown
    assert facts["truncated"]["count"] > 1
    assert f"truncated  {facts['truncated']['count']} (rows " in shown
    counts = re.findall(r"row \d+: (\d+) tokens, (\d+) trained", shown)
    assert [int(length) for length, _ in counts] == tokens.lengths.tolist()
    assert [int(trained) for _, trained in counts] == tokens.trained.tolist()
    assert shown.count(", truncated\n") == facts["truncated"]["count"]
    histogram = re.findall(r"^ *(\d+) - +(\d+) +(\d+)  ▇*$", shown, re.MULTILINE)
    for low, high, count in np.array(histogram, int):
        assert count == np.sum((low <= tokens.lengths) & (tokens.lengths <= high))
    assert sum(int(count) for _, _, count in histogram) == 40


def test_rows_that_cannot_be_used_say_why_and_stop_nothing(tiny, inspect):
    rows = [*chats(2), {"messages": []}, {"messages": [{"role": "elf", "content": "x"}]}, *chats(9)]
    shown = inspect(tiny(rows), rows=2, first=2)
    assert "row 2: cannot be used: 'messages' is no list of turns" in shown
    assert "row 3: cannot be used: unknown role 'elf'" in shown
    assert "bad rows   1 (row 3): unknown role 'elf'" in shown
    shown = inspect(tiny(rows), "data.max_length=20", "data.too_long=error", rows=1)
    assert "too long   " in shown


def test_a_row_beyond_the_end_is_named_and_the_rest_is_measured(tiny, tmp_path, inspect):
    path = tiny()
    shown = inspect(path, first=99)
    assert "there is no row 99: it has 24" in shown and "the first 24 of 24 rows" in shown
    assert "row 0" not in inspect(path, rows=0)


def test_every_source_of_a_mixture_is_shown(tmp_path, inspect):
    tables = tiny_tables(tmp_path)
    more = write_jsonl(tmp_path / "more.jsonl", [{"text": "once upon a time"}] * 3)
    sources = [{"source": tables["data"].pop("source")}, {"source": str(more)}]
    tables["data"]["sources"] = sources
    shown = inspect(write_recipe(tmp_path / "mixed.toml", tables), rows=1)
    for source in sources:
        assert f"{source['source']}, row 0:" in shown
        assert f"{source['source']}: the first" in shown


def test_plugins_show(tiny, tmp_path, monkeypatch, inspect):
    activate(install(tmp_path, upper=UPPER), monkeypatch)
    shown = bare(inspect(tiny([TALK], plugins={"upper": {}})))
    assert "say HELLO" in shown


def test_nothing_is_left_behind(tiny, tmp_path):
    (tmp_path / "tmp").mkdir()
    done = run_plugsft("inspect", tiny(), env={"TMPDIR": str(tmp_path / "tmp")})
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run").exists() and not list((tmp_path / "tmp").iterdir())


@pytest.mark.slow
def test_on_a_terminal_trained_tokens_are_green(tiny):
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "plugsft", "inspect", str(tiny([TALK])), "--rows", "1"]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=child, stderr=child, cwd=ROOT, env=env) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                shown += os.read(parent, 65_536)
            except OSError:
                break
    os.close(parent)
    assert process.returncode == 0
    text = shown.decode()
    green = "".join(re.findall(r"\x1b\[(?:1|1;4|4;1);32m(.*?)\x1b\[0m", text, re.DOTALL))
    assert re.sub(r"\s", "", green) == r"hello東京⏎and\n\x1b[31mbye<|im_end|>"
