"""The chat templates with tools: their text, and how transformers reads calls back from it."""

import json
import re

import pytest
from conftest import ROOT, must_succeed, only_full, tiny_tables, write_recipe
from formats import tokenizer_of
from served import (
    AGAIN,
    ASK,
    CHATS,
    TEMPLATES,
    WITH_TOOLS,
    answer,
    chat_of,
    conversation,
    examples_of,
    served,
)
from transformers import AutoTokenizer
from transformers.utils.chat_parsing import ResponseParser, parse_response

from plugsft.base.errors import RecipeError
from plugsft.commands.starting_files import write_missing
from plugsft.data.formats import BadRow, read_chat
from plugsft.data.load_tokenizer import load_tokenizer
from plugsft.recipe.tables import Model

OURS = ("chatml_tools", "llama3_tools")
PLAIN = [kind for kind in CHATS if kind not in WITH_TOOLS]
SINGLE = ("call", "no arguments", "steps")
SYSTEM = CHATS["system"][0]
DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
QUOTED = re.compile('(?<=ipython<.end_header_id.>\n\n)"(.*?)"')
FILES = {name: ROOT / f"recipes/{name}.jinja" for name in OURS}
RESPONSES = {
    name: json.loads(file.with_suffix(".response.json").read_text("utf8"))
    for name, file in FILES.items()
}


def page_blocks(language):
    page = (ROOT / "docs/tools.md").read_text("utf8")
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def called(*calls):
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return [{"type": "function", "function": function} for function in functions]


@pytest.mark.parametrize(
    "ours, theirs, kinds, before",
    [
        ("chatml_tools", "qwen3_instruct_2507", CHATS, []),
        ("chatml_tools", "qwen2_5", CHATS, [SYSTEM]),
        ("llama3_tools", "llama3", PLAIN, []),
        ("llama3_tools", "llama3_1", SINGLE, []),
        ("llama3_tools", "llama3_1", [*PLAIN, *SINGLE], [SYSTEM]),
    ],
)
def test_the_text_is_that_of_a_published_template(ours, theirs, kinds, before):
    ours, theirs = chat_of(TEMPLATES[ours]), chat_of(TEMPLATES[theirs])
    for kind in kinds:
        turns, tools = before + CHATS[kind], kind in WITH_TOOLS
        for stop in range(len(before) + 1, len(turns) + 1):
            for prompt in (True, False):
                expected = served(theirs, turns[:stop], tools, prompt).replace(DATES, "")
                expected = QUOTED.sub(r"\1", expected)
                assert served(ours, turns[:stop], tools, prompt) == expected, (kind, stop, prompt)


CALLS = {
    "single": [("weather", {"city": "Oslo", "days": 3})],
    "parallel": [("weather", {"city": "Oslo"}), ("now", {}), ("weather", {"city": "Rome"})],
    "nested": [("plan", {"trips": [{"to": {"x": [1, 2.5, -3]}, "by": None}], "paid": True})],
    "other letters": [("weather", {"city": "札幌 🦉 \u2028 é"}), ("wetter", {"städte": ["Köln"]})],
    "no arguments": [("now", {})],
    "JSON in a text": [("say", {"text": '"}; {"name": "now", "parameters": {}}\n\\'}), ("now", {})],
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("kind", CALLS)
def test_what_is_trained_is_read_back(name, kind):
    turns = [ASK, answer("", tool_calls=called(*CALLS[kind])), AGAIN, answer("So {it} is.")]
    (example,) = chat_of(TEMPLATES[name]).examples(conversation(turns, tools=True)).examples
    expected = {"role": "assistant", "tool_calls": called(*CALLS[kind])}
    for prompt, told, message in (
        (example[0], example[1], expected),
        ("".join(example[:3]), example[3], {"role": "assistant", "content": "So {it} is."}),
    ):
        for end in ("", "<|pad|>\n<|pad|>"):  # generate pads the rows of a batch
            assert parse_response(told + end, RESPONSES[name], prefix=prompt) == message
        stream = ResponseParser(RESPONSES[name], prefix=prompt)
        for letter in told:
            stream.feed(letter)
        assert stream.finalize()[0] == message


def test_words_beside_a_call():
    turns = [ASK, answer("Let me look.", tool_calls=called(*CALLS["parallel"]))]
    chatml, llama = (chat_of(TEMPLATES[name]) for name in OURS)
    ((prompt, told),) = examples_of(chatml, turns, tools=True)
    read = parse_response(told, RESPONSES["chatml_tools"], prefix=prompt)
    assert read == turns[1]
    with pytest.raises(BadRow, match="Llama 3 writes no words beside a call; set model"):
        examples_of(llama, turns, tools=True)


@pytest.mark.parametrize("name", OURS)
def test_both_shapes_of_rows_on_the_page_give_one_text(name):
    rows = [json.loads(text) for text in page_blocks("json")]
    texts = [chat_of(TEMPLATES[name]).examples(read_chat("messages", row)) for row in rows]
    assert len(texts) == 2 and texts[0] == texts[1]
    assert '"city": "Bergen"' in texts[0].examples[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [OURS[0], pytest.param(OURS[1], marks=only_full)])
def test_a_trained_model_calls_a_tool_and_answers(name, tmp_path, monkeypatch):
    """The code of the page, with a tiny model that knows the first example row by heart."""
    lines = (ROOT / "recipes/data/tools.jsonl").read_text("utf8").splitlines()
    tokenizer = tokenizer_of("BPE").train_new_from_iterator(lines, 1200)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    tables = tiny_tables(tmp_path, [row := json.loads(lines[0])])
    tables["model"] = {
        "scratch": {"hidden": 64, "layers": 2, "heads": 2, "context": 1024},
        "tokenizer": str(tmp_path / "tokenizer"),
        "chat_template": str(FILES[name]),
    }
    tables["data"]["max_length"] = 1024
    tables["train"] |= {"batch_size": 1, "micro_batch": 1, "steps": 80, "learning_rate": 1e-2}
    must_succeed(write_recipe(tmp_path / "recipe.toml", tables))
    place = tmp_path / "place"
    write_missing("tools", place)
    (place / "runs/tools").mkdir(parents=True)
    (place / "runs/tools/merged").symlink_to(tmp_path / "run/model")
    monkeypatch.chdir(place)
    (code,) = page_blocks("python")
    exec(code, names := {})
    messages = conversation(row["messages"]).messages
    messages[2].pop("name")
    assert [{"content": "", **message} for message in names["messages"]] == messages


def test_a_template_brings_how_its_answers_are_read(tmp_path):
    own = tokenizer_of("BPE", "qwen3")
    own.response_template = {"of": "its own template"}
    own.save_pretrained(tmp_path / "own")

    def loaded(file):
        return load_tokenizer(Model(path=str(tmp_path / "own"), chat_template=file), tmp_path)

    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    for file, expected in ((FILES["llama3_tools"], RESPONSES["llama3_tools"]), (template, None)):
        loaded(str(file)).save_pretrained(tmp_path / "saved")
        again = AutoTokenizer.from_pretrained(tmp_path / "saved")
        assert again.response_template == expected
    assert loaded("auto").response_template == own.response_template
    template.with_suffix(".response.json").write_text("[]")
    with pytest.raises(RecipeError, match=r"template\.response\.json' cannot be read \(a JSON obj"):
        loaded(str(template))
