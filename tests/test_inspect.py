"""plugsft inspect shows what preparation makes."""

import os
import pty
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, chats, must_succeed, run_plugsft, tiny_tables, write_jsonl, write_recipe
from formats import ASK, ROWS, TELL
from hypothesis import given, settings
from hypothesis import strategies as st
from plugin_packages import activate, install
from rich.cells import cell_len
from rich.console import Console
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from plugsft import DataError, RecipeError
from plugsft.api import PlugsftError
from plugsft.audit.inspect_data import Piece, draw, make_visible
from plugsft.audit.rows import choose_ranges, histogram, quantiles, special_tokens
from plugsft.commands import data as inspection
from plugsft.data import prepare
from plugsft.data.chat import CHATML
from plugsft.data.defaults import DataDefaults
from plugsft.registry import load as registry

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
    def run(path, *overrides, **options):
        inspection.inspect(path, list(overrides), [], **options)
        return capsys.readouterr().out

    return run


def read_view(shown):
    """Return the text of the rows in a view, without the names of its parts; its trained text."""
    text = trained = ""
    named = r"  (?:prompt  |answer  |text    |rest    |        )"
    lines = [line[10:] for line in shown.splitlines() if re.match(named, line)]
    lines = [line for line in lines if not re.match(r" *\d+( - +\d+)? +\d+  ▇", line)]
    for line, marks in zip(lines, [*lines[1:], ""], strict=True):
        if re.fullmatch("[ ^~]+", line):
            continue
        column = 0
        marks = marks if re.fullmatch("[ ^~]+", marks) else ""
        for character in line:
            width = cell_len(character)
            is_trained = marks[column : column + width].strip() if width else character in trained
            trained += character if is_trained else ""
            column += width
        assert len(marks) <= column
        text += line + "\n" * line.endswith("⏎")
    return text, trained


def test_the_trained_tokens_of_a_row_are_underlined(tiny, tmp_path, inspect):
    shown = inspect(tiny([TALK, *chats(20)]), rows=1)
    assert f"{tmp_path / 'data.jsonl'}, row 1: " in shown
    assert shown.startswith("trained tokens: underlined, ^ and ~ in turn.")
    text, trained = read_view(shown)
    assert "<|im_start|>user⏎\nsay hello<|im_end|>⏎\n<|im_start|>assistant⏎\n" in text
    # A character of several tokens comes whole, and no row may steer the terminal.
    assert trained == "hello 東京⏎and\\n\\x1b[31m bye<|im_end|>"
    assert "\x1b" not in shown and "\ufffd" not in shown


def prepare_tokens(path):
    recipe, active = registry.load(path)
    active.attach(DataDefaults(recipe.folder))
    return prepare.prepare(recipe, active).tokens


def test_counts_are_those_of_preparing(tiny, inspect):
    path = tiny(chats(40), data={"max_length": 50})
    tokens = prepare_tokens(path)
    shown = inspect(path, rows=40)
    facts = tokens.facts
    assert f"{facts['trained_tokens']:,} of {facts['tokens']:,} tokens" in shown
    assert facts["truncated"]["count"] > 1
    counts = re.findall(r"row \d+: (\d+) tokens, (\d+) trained", shown)
    assert [int(length) for length, _ in counts] == tokens.lengths.tolist()
    assert [int(trained) for _, trained in counts] == tokens.targets.tolist()
    assert shown.count(", truncated\n") == facts["truncated"]["count"]
    # The lengths are those before anything is cut.
    whole = prepare_tokens(tiny(chats(40))).lengths
    bars = re.findall(r"^ *(\d+) - +(\d+) +(\d+)  ▇*(?: too long)?$", shown, re.MULTILINE)
    assert shown.count(" too long\n") == 1 and "51" in next(zip(*bars, strict=True))
    for low, high, count in np.array(bars, int):
        assert count == np.sum((low <= whole) & (whole <= high))
    assert sum(int(count) for *_, count in bars) == 40
    assert f"longest {max(whole)}; max_length 50" in shown
    over = np.clip(whole - 50, 0, None).sum()
    assert f"longer than data.max_length = 50; cut by {over} tokens" in shown


def test_rows_that_cannot_be_used_say_why(tiny, inspect, capsys):
    rows = [*chats(2), {"messages": []}, {"messages": [{"role": "elf", "content": "x"}]}, *chats(9)]
    with pytest.raises(DataError) as caught:
        inspect(tiny(rows), rows=2, first=3)
    for line in str(caught.value).splitlines():
        assert re.search(r": line (3: 'messages|4: unknown).*\. Correct it, or set data.on_b", line)
    shown = capsys.readouterr().out
    assert "warning    line 4" not in shown
    dropped = inspect(tiny(rows), "data.on_bad_row=drop", rows=2, first=3)
    assert "warning    line 4: unknown role 'elf'" in dropped
    assert "row 3: cannot be used: 'messages' is not a list of turns" in shown
    assert "row 4: cannot be used: unknown role 'elf'" in shown
    assert "bad rows" not in shown
    long = ["data.on_bad_row=drop", "data.max_length=20"]
    assert "longer than data.max_length = 20; dropped" in inspect(
        tiny(rows), *long, "data.too_long=drop"
    )
    with pytest.raises(DataError, match=r"data.max_length = 20\. Raise data.max_length, or set"):
        inspect(tiny(rows), *long, "data.too_long=error", rows=1)


def test_texts_without_the_chat_template_of_their_tokenizer_are_warned_of(tiny, inspect):
    rows = [{"prompt": "who?", "completion": f"{n} owls"} for n in range(3)]
    says = ": texts are trained as they are, without the chat template; for a chat model"
    assert f"warning    lines 1, 2, 3{says}" in inspect(tiny(rows), rows=0)
    pairs = [{"prompt": "who?", "chosen": f"{n} owls", "rejected": "elks"} for n in range(3)]
    assert f"warning    lines 1, 2, 3{says}" in inspect(tiny(pairs, plugins={"dpo": {}}), rows=0)
    result = run_plugsft("prepare", tiny(pairs, plugins={"dpo": {}}))
    assert f"\nwarning: data: lines 1, 2, 3{says}" in result.stdout
    shown = inspect(tiny([ROWS["preference"]] * 3, plugins={"dpo": {}}), rows=0)
    assert "trained as they are" not in shown


def test_words_behind_the_last_answer_are_not_lost(audited):
    thanks = {"role": "user", "content": "thank you"}
    shown, _ = audited(FORGETS, [ASK, TELL, ASK, TELL, thanks])
    assert "warning    line 6: the conversation ends with a turn of the user" in shown
    assert "drops words" not in shown


def test_a_row_beyond_the_end_is_named_and_the_rest_is_measured(tiny, tmp_path, inspect):
    path = tiny()
    shown = inspect(path, first=99)
    assert "has no row 99, only 24 rows" in shown and "all 24 rows" in shown
    assert "row 1" not in inspect(path, rows=0)


def test_every_source_of_a_mixture_is_shown(tmp_path, inspect):
    tables = tiny_tables(tmp_path)
    more = write_jsonl(tmp_path / "more.jsonl", [{"text": "once upon a time"}] * 3)
    sources = [{"source": tables["data"].pop("source")}, {"source": str(more)}]
    tables["data"]["sources"] = sources
    shown = inspect(write_recipe(tmp_path / "mixed.toml", tables), rows=1)
    for source in sources:
        assert f"{source['source']}, row 1:" in shown
        assert f"{source['source']}: all" in shown


@pytest.mark.parametrize("plugin", ["dpo", "reward"])
def test_the_answers_of_a_pair_are_named(tiny, inspect, plugin):
    pairs = [{"prompt": "who?", "chosen": f"owl {n}", "rejected": f"elk {n}"} for n in range(20)]
    shown = inspect(tiny(pairs, plugins={plugin: {}}), rows=1)
    assert ", chosen before rejected" in shown
    assert shown.index("owl 0") < shown.index("elk 0")
    assert "rejected" not in inspect(tiny([TALK]), rows=1)


def test_plugins_show(tiny, tmp_path, monkeypatch, inspect):
    activate(install(tmp_path, upper=UPPER), monkeypatch)
    shown = inspect(tiny([TALK], plugins={"upper": {}}))
    # What a plugin renders is not what the template would make of the rows.
    assert "say HELLO" in shown and "stable" not in shown


def test_nothing_is_left_behind(tiny, tmp_path):
    (tmp_path / "tmp").mkdir()
    must_succeed("inspect", tiny(), env={"TMPDIR": str(tmp_path / "tmp")})
    assert not (tmp_path / "run").exists() and not list((tmp_path / "tmp").iterdir())


LENGTHS = st.lists(st.integers(2, 5_000), min_size=1, max_size=60).map(np.array)


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 6_000))
def test_bins_hold_every_length_once_and_end_at_the_longest_that_fits(lengths, longest):
    bins = histogram(lengths, longest)
    assert len(bins) <= 14 and bins[0][2] and bins[-1][2]
    for low, high, count in bins:
        assert count == np.sum((low <= lengths) & (lengths <= high))
    assert sum(count for *_, count in bins) == len(lengths)
    ends = [high for _, high, _ in bins]
    assert longest in ends or not lengths.min() <= longest < lengths.max()
    widths = {high - low + 1 for low, high, _ in bins if high < min(longest, lengths.max())}
    assert len(widths) <= 1, "but for the last that fits"
    assert all(one[1] + 1 == other[0] for one, other in pairwise(bins))
    points = quantiles(lengths)
    assert points["longest"] == lengths.max() and set(points.values()) <= {*lengths.tolist()}
    assert points["median"] == sorted(lengths)[(len(lengths) - 1) // 2]


def test_few_rows_make_few_bins(tiny, inspect):
    assert histogram(np.array([37]), 99) == [(37, 37, 1)]
    assert histogram(np.array([37, 37, 37]), 37) == [(37, 37, 3)]
    assert histogram(np.array([10, 1000]), 999) == [
        (10, 339, 1),
        (340, 669, 0),
        (670, 999, 0),
        (1000, 1000, 1),
    ]
    shown = inspect(tiny([TALK]), rows=0)
    assert re.search(r"^ +(\d+)  1  ▇{40}$", shown, re.MULTILINE), shown
    assert "its only row" in shown


def test_a_sample_comes_from_all_over_the_source(tiny, tmp_path, inspect):
    assert choose_ranges(700, False) == [range(700)]
    stretches = choose_ranges(20_000, False)
    assert [len(stretch) for stretch in stretches] == [50] * 20
    assert stretches[0].start == 0 and stretches[-1].stop == 20_000
    assert len({one.start - other.stop for other, one in pairwise(stretches)}) <= 2
    assert [row for one in choose_ranges(2_500, True) for row in one] == [*range(2_500)]
    rows = [{"text": f"owl {number}"} for number in range(1_500)] + [{"text": ""}]
    path = tiny(rows, data={"on_bad_row": "drop"})
    shown = inspect(path, rows=0)
    assert "1,000 of 1,501 rows, in 20 ranges" in shown and "'text' is empty" in shown
    write_jsonl(tmp_path / "data.jsonl", [{"text": ""}, *rows])
    shown = inspect(path, rows=0, everything=True)
    assert "all 1,502 rows" in shown and "lines 1, 1502: 'text' is empty" in shown
    facts = prepare_tokens(tiny([{"text": ""}, *rows], data={"on_bad_row": "drop"})).facts
    assert f"{facts['trained_tokens']:,} of {facts['tokens']:,} tokens" in shown


BLOCK = "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
ENDLESS = CHATML.read_text().replace(
    "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
)
BOTH = """{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""


# An answer begins with an empty thought until another turn follows.
FORGETS = (
    CHATML.read_text()
    .replace(
        "{% generation %}",
        "{{ '<think></think>' if loop.last and message['role'] == 'assistant' else '' }}",
    )
    .replace("{% endgeneration %}", "")
)


@pytest.fixture
def audited(tiny, tmp_path, capsys):
    """Give what is said, and complained of, about chats under a template."""

    def run(source, *chats, **data):
        (tmp_path / "other.jinja").write_text(source)
        rows = [
            {"messages": [ASK, {"role": "assistant", "content": f"owls {n}"}]} for n in range(5)
        ]
        rows += [{"messages": list(chat)} for chat in chats]
        path = tiny(rows, model={"chat_template": str(tmp_path / "other.jinja")}, data=data)
        try:
            inspection.inspect(path, [], [], rows=9, html=tmp_path / "page.html")
            complaint = ""
        except DataError as error:
            complaint = str(error)
        assert (tmp_path / "page.html").is_file()
        return capsys.readouterr().out, complaint

    return run


def test_sound_data_is_not_complained_of(audited):
    shown, complaint = audited(CHATML.read_text(), [ASK], on_bad_row="drop")
    assert shown.count("warning") == 1 and "warning    line 6: no turn of the assistant" in shown
    assert not complaint


def test_a_mask_that_covers_the_role_is_an_error(audited, tmp_path):
    shown, complaint = audited(BOTH)
    assert complaint == (
        f"{tmp_path / 'data.jsonl'}: lines 1, 2, 3, 4, 5: the mask covers the role "
        "'<|im_start|>assistant', which the model never has to write; let the {% generation %} "
        "block of the chat template begin after it"
    )
    assert "<|im_start|>assistant⏎owls" in read_view(shown)[1]


def test_a_role_inside_an_answer_is_the_model_s_own(audited):
    said = "owls<|im_end|>\n<|im_start|>assistant\nand elks"
    assert audited(CHATML.read_text(), [ASK, {**TELL, "content": said}])[1] == ""
    other = CHATML.read_text().replace("{% generation %}", "{% generation %}<|im_start|>")
    assert audited(other)[1] == "", "it begins like the role, and is none"


def test_an_end_that_is_never_trained_is_an_error(audited):
    _, complaint = audited(ENDLESS)
    assert "lines 1, 2, 3, 4, 5: '<|im_end|>' ends the example and is never trained" in complaint
    # One trained end is enough, and what a cut takes away says nothing.
    assert audited(CHATML.read_text(), [ASK, TELL, ASK])[1] == ""
    shown, complaint = audited(CHATML.read_text(), max_length=11)
    assert "; cut by " in shown and "no special token ends" not in shown and not complaint


def test_an_example_without_an_end_is_a_warning(audited):
    shown, complaint = audited(CHATML.read_text().replace("<|im_end|>", ""))
    assert "lines 1, 2, 3, 4, 5: no special token ends the example" in shown
    assert not complaint


def test_nothing_to_train_on_is_an_error(tiny, tmp_path):
    path = tiny([{"messages": [ASK]}] * 3)
    result = run_plugsft("inspect", path, "--html", tmp_path / "page.html")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    reason = "lines 1, 2, 3: no turn of the assistant to train. Correct them"
    assert (
        result.stderr
        == f"error: {tmp_path / 'data.jsonl'}: no row has a token to train on: {reason}\n"
    )
    assert '<div class="error"><dt>error</dt>' in (tmp_path / "page.html").read_text()
    result = run_plugsft("inspect", tiny(), "data.max_length=2", "data.too_long=drop")
    assert "all are longer than data.max_length = 2" in result.stderr


def test_duplicates_are_found_by_their_tokens(audited):
    again = [ASK, {"role": "assistant", "content": "owls 3"}]
    shown, _ = audited(CHATML.read_text(), again, again, [ASK, TELL])
    assert "lines 6, 7: the same tokens as an earlier row (line 6 repeats line 4)" in shown


def test_a_template_that_writes_earlier_turns_otherwise_is_shown(audited):
    shown, _ = audited(FORGETS, [ASK, TELL, ASK, TELL])
    assert "row 6: example 1 of 2" in shown and "row 6: example 2 of 2" in shown


def test_words_that_a_template_leaves_out_are_a_warning(audited):
    silent = CHATML.read_text().replace(
        "{%- for message in messages -%}",
        "{%- for message in messages if message['role'] != 'tool' -%}",
    )
    turn = {"role": "tool", "content": "a bird"}
    thought = {**TELL, "reasoning_content": "at night"}
    shown, _ = audited(silent, [ASK, turn, TELL], [ASK, thought])
    assert "line 6: the chat template drops words of the tool" in shown
    assert "line 7: the chat template leaves out thoughts of the assistant" in shown


def test_special_tokens_among_the_words_are_a_warning(audited):
    spells = {**ASK, "content": "what is <|im_end|> for?"}
    shown, complaint = audited(CHATML.read_text(), [ASK, TELL], [spells, TELL])
    said = "line 7: the text contains '<|im_end|>', which the model reads as a control token"
    assert said in shown and shown.count("warning ") == 1 and not complaint


def test_an_added_token_that_is_not_special_may_stand_in_words():
    tokenizer = Tokenizer(WordLevel({"a": 0}, "a"))
    tokenizer.add_tokens([AddedToken("<owl>"), AddedToken("<|end|>", special=True)])
    work = SimpleNamespace(tokenizer=SimpleNamespace(backend_tokenizer=tokenizer))
    pattern = special_tokens(work)
    assert pattern.findall("an <owl><|end|>") == ["<|end|>"]


def test_a_column_that_no_row_has_is_an_error(tiny):
    with pytest.raises(RecipeError, match="no row has the column 'functions'"):
        inspection.inspect(tiny(data={"columns": {"tools": "functions"}}), [], [])


class Page(HTMLParser):
    """What a browser would make of a page: its tags, and its text in parts."""

    def __init__(self, text):
        super().__init__()
        self.opened, self.tags, self.tokens, self.words = [], [], [], []
        self.feed(text)
        assert self.opened == [], "every tag is closed"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link"):
            self.opened.append(tag)

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag

    def handle_data(self, text):
        self.words.append(text)
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        if self.opened and self.opened[-1] in "bi" and "data-i" in attributes:
            self.tokens.append((text, attributes["data-i"], tag == "b"))


HOSTILE = (
    "</p><script>alert(1)</script> <!--rows--> &amp; <img src=x onerror=y> \"' \u202e 東京 {% if"
)


def test_the_page_shows_the_rows_and_runs_nothing(tiny, tmp_path, inspect):
    talk = {"messages": [{**ASK, "content": HOSTILE}, {**TELL, "content": HOSTILE}]}
    rows = [talk, {"messages": [{"role": HOSTILE, "content": "x"}]}, *chats(20)]
    path, html = tiny(rows, data={"on_bad_row": "drop"}), tmp_path / "page.html"
    shown = inspect(path, rows=2, html=html)
    assert f"page: {html}" in shown
    text = html.read_text()
    page = Page(text)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "iframe", "object", "form", "a", "svg"}
    given = {name for _, attributes in page.tags for name in attributes}
    assert not {name for name in given if name.startswith("on") or name in ("src", "action")}
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text
    assert not re.search(r"https?:|url\(|@import", text)
    # The very tokens of the row, in order, each with its ids and whether it is trained.
    tokens = prepare_tokens(tiny(rows, data={"on_bad_row": "drop"}))
    ids, trained = tokens.example(0)
    assert [int(word) for _, data, _ in page.tokens for word in data.split()] == ids.tolist()
    marks = [mark for _, data, mark in page.tokens for _ in data.split()]
    assert marks == trained.tolist()
    drawn = "".join(text for text, _, _ in page.tokens)
    assert drawn.count("<script>alert(1)</script>") == 2 and "\\u202e" in drawn
    assert any("unknown role" in words and HOSTILE.split()[0] in words for words in page.words)


def test_the_page_says_what_the_terminal_says(tiny, tmp_path, inspect):
    html = tmp_path / "page.html"
    path = tiny([*chats(30), {"messages": []}], data={"on_bad_row": "drop"})
    shown = inspect(path, "data.max_length=40", html=html)
    said = " ".join(" ".join(Page(html.read_text()).words).split())
    for label in ("lengths", "trained", "mask"):
        line = next(one for one in shown.splitlines() if one.startswith(f"{label:<11}"))
        assert line.removeprefix(f"{label:<11}") in said
    for warning in re.findall(r"^warning +(.*)$", shown, re.MULTILINE):
        assert warning in said
    bins = re.findall(r"^ *(\d+ - +\d+) +(\d+)  ▇*(?: too long)?$", shown, re.MULTILINE)
    assert bins and all(f"{span} {count}" in said for span, count in bins)
    assert "31 of 31 rows examined" in said and "max_length 40" in said


def test_a_page_needs_a_folder_and_rows(tiny, tmp_path):
    with pytest.raises(PlugsftError, match=r"--html: .*nowhere: no such folder"):
        inspection.inspect(tiny(), [], [], html=tmp_path / "nowhere/page.html")
    tables = tiny_tables(tmp_path)
    tables["data"] = {"tokens": str(tmp_path)}
    tables["model"] = {"path": str(tmp_path)}
    path = write_recipe(tmp_path / "tokens.toml", tables)
    with pytest.raises(RecipeError, match=r"data.tokens: .* holds no rows to inspect"):
        inspection.inspect(path, [], [])


def test_the_command_takes_its_options(tiny, tmp_path):
    page = tmp_path / "page.html"
    result = must_succeed("inspect", tiny(), "--all", "--rows", 1, "--first", 2, "--html", page)
    assert "row 2: " in result.stdout and "row 3: " not in result.stdout and page.is_file()


def test_data_is_looked_at_where_nothing_could_train(tiny):
    """As on the machine that prepares data for one with GPUs."""
    recipe = tiny(plugins={"flash_attention": {"kernel": "fa2"}})
    must_succeed("prepare", recipe)
    must_succeed("inspect", recipe, "--rows", 1)
    refused = run_plugsft(recipe)
    assert refused.returncode == 2 and "no NVIDIA GPU" in refused.stderr


# A combining mark that is a token of its own, one that is not, wide characters and extra spaces.
PIECES = [
    Piece("<s>", [0], False, True),
    Piece("  a 東京", [1], True),
    Piece("e\u0301", [2, 3], True),
    Piece(make_visible("\u0301"), [4], True),
    Piece(make_visible("b\tc \n"), [5], False),
    Piece("owl" * 9, [6], True),
]


def test_marks_stand_below_their_tokens_and_tokens_stay_whole():
    lines = [line.plain for line in draw(PIECES, 38, colour=False)]
    assert lines == [
        "  text    <s>␣␣a 東京e\u0301◌\u0301b⇥c␣⏎",
        "             ~~~~~~~~^~",
        f"          {'owl' * 9}",
        f"          {'~' * 27}",
    ]
    assert all(cell_len(line.plain) <= 30 for line in draw(PIECES, 30, colour=False))
    painted = [*draw(PIECES, 38, colour=True)]
    assert [line.plain for line in painted] == lines[::2]
    styles = [str(painted[0].get_style_at_offset(Console(), at)) for at in (10, 13, 19, 20)]
    assert "bold" in styles[0] and styles[1].replace("157", "78") == styles[2]
    assert all("on color" in style for style in styles[1:3])
    blank = Piece("x y", [1], True), Piece("⏎\n", [2], False), Piece("z ", [3], True)
    assert [line.plain for line in draw(blank, 80, colour=True)] == [
        "  text    x y⏎",
        "          z␣",
    ]


def test_prompts_and_answers_are_drawn_by_name(tiny, inspect):
    chat = [ASK, TELL, ASK, {**TELL, "content": "\nelks"}, {**ASK, "content": "why?"}]
    shown = inspect(tiny([{"messages": chat}, *chats(20)]), rows=1)
    lines = [line for line in shown.splitlines() if not re.fullmatch("[ ^~]+", line)]
    asked = ["<|im_start|>user⏎", "who?<|im_end|>⏎", "<|im_start|>assistant⏎"]
    drawn = [("prompt", asked), ("answer", ["owls<|im_end|>⏎"]), ("prompt", asked)]
    drawn += [("answer", ["⏎", "elks<|im_end|>⏎"])]
    drawn += [("rest", ["<|im_start|>user⏎", "why?<|im_end|>⏎"])]
    wanted = [
        f"  {'' if n else name:<8}{line}" for name, part in drawn for n, line in enumerate(part)
    ]
    assert lines[3 : 3 + len(wanted)] == wanted
    text = inspect(tiny([{"text": "once upon a time"}] * 3), rows=1)
    assert "\n  text    once upon a time<|im_end|>\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("colour", [True, False])
def test_on_a_terminal_trained_tokens_have_a_green_background(tiny, colour):
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "plugsft", "inspect", str(tiny([TALK])), "--rows", "1"]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    env |= {} if colour else {"NO_COLOR": "1"}
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
    text = shown.decode().replace("\r\n", "\n")
    trained = r"hello東京⏎and\n\x1b[31mbye<|im_end|>"
    if colour:
        green = re.findall(r"\x1b\[(?:1;)?38;5;16;48;5;(?:78|157)m(.*?)\x1b\[0m", text, re.DOTALL)
        assert re.sub(r"\s", "", "".join(green)) == f"trainedtokens{trained}"
    else:
        plain = re.sub(r"\x1b\[\d*m", "", text)
        assert "48;5" not in text and read_view(plain)[1].replace(" ", "") == trained


def test_a_template_without_a_prompt_and_a_system_turn_in_the_middle_are_warnings(audited):
    chatml = CHATML.read_text()
    unprompted = chatml.partition("{%- if add_generation_prompt -%}")[0]
    says = "writes '<|im_start|>assistant' before an answer, and not as its prompt"
    assert says in audited(unprompted, [ASK, TELL])[0]
    system = {"role": "system", "content": "be brief"}
    middle = "a turn of the system in the middle"
    shown, _ = audited(chatml, [system, ASK, TELL], [ASK, TELL, system, ASK, TELL])
    assert f"line 7: {middle}" in shown and says not in shown
    # An empty thought is no role: a server's prompt names the assistant.
    thinks = "{%- for m in messages -%}<|im_start|>{{ m['role'] }}\n{% if loop.last and m['role'] "
    thinks += "== 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n"
    thinks += "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
    assert "before an answer" not in audited(thinks, [ASK, TELL])[0]
    # Some models read an answer right after the question: there is nothing to write.
    bare = (
        "{%- for m in messages -%}{%- if m['role'] == 'user' -%}[{{ m['content'] }}]"
        "{%- else %} {{ m['content'] }}{{ eos_token }}{%- endif -%}{%- endfor -%}"
    )
    assert "before an answer" not in audited(bare, [ASK, TELL])[0]


def test_a_row_of_weight_0_is_shown_as_what_it_is(tiny):
    shown = run_plugsft("inspect", tiny([{"text": "owls", "weight": 0}, {"text": "elks"}])).stdout
    assert "row 1: weight 0; left out" in shown and "cannot be used" not in shown
