"""What the console shows, and that other ranks stay silent."""

import io
import logging
import re
import subprocess
import sys

import pytest
from conftest import ROOT, must_succeed
from rich.console import Console

from plugsft.base import console
from plugsft.base.for_commands import quiet_libraries


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of a person who watches."""
    file = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=file, force_terminal=True, width=80))
    monkeypatch.setattr(console.sys.stdout, "isatty", lambda: True, raising=False)
    return file


def test_a_line_is_printed_as_it_is_and_never_broken(capsys):
    text = "[red]x[/red] data.jsonl:100: " + "word " * 100
    console.say(text)
    console.print_error(text)
    said = capsys.readouterr()
    assert said.out == said.err == text + "\n"


def test_marks_that_turn_the_direction_of_text_are_shown(capsys):
    console.say("a\u202egpj.exe\u2066b")
    console.print_error("\u200fname")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("a\ufffdgpj.exe\ufffdb\n", "\ufffdname\n")


def test_control_characters_in_messages_of_libraries_are_shown(caplog):
    """As of a foreign model_type, which transformers quotes."""
    quiet_libraries()
    logging.getLogger("some.library").warning("a model of type %s", "\x1b[2Jevil\u202e")
    assert caplog.messages == ["a model of type ␛[2Jevil\ufffd"]


def test_other_ranks_are_silent_but_for_errors(monkeypatch, capsys):
    monkeypatch.setattr(console.out, "quiet", True)
    console.say("not this")
    console.print_error("this")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "this\n")


def test_a_closed_output_is_no_mistake(tiny):
    command = f"{sys.executable} -P -m plugsft check {tiny()} >&-"
    assert subprocess.run(["sh", "-c", command], cwd=ROOT).returncode == 0


def test_no_bar_without_a_terminal(capsys):
    with console.progress("tokenizing", 3, "rows") as advance:
        advance(3, "30 tokens")
    assert capsys.readouterr().out == ""


def test_a_bar_where_somebody_does(terminal):
    with console.progress("tokenizing", 3, "rows") as advance:
        advance(1, "10 tokens")
        advance(2, "30 tokens")
    text = terminal.getvalue()
    assert "tokenizing" in text and "3/3" in text and "30 tokens" in text


def test_metrics_of_pairs_are_printed_beside_the_loss(tiny):
    rows = [{"prompt": "who? ", "chosen": f"owls {n}", "rejected": f"elks {n}"} for n in range(16)]
    held_out = {"every": 2, "split": "train[:8]"}
    result = must_succeed(tiny(rows, train={"steps": 2}, eval=held_out, plugins={"dpo": {}}))
    beside = r"  accuracy [01]\.\d{3}  margin -?\d\.\d{3}"
    assert (
        len(re.findall(rf"^step \d/2 .*  loss \d\.\d{{4}}{beside}  grad", result.stdout, re.M)) == 2
    )
    assert re.search(rf"^step 2  eval loss \d\.\d{{4}}{beside}$", result.stdout, re.M)
