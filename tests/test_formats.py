"""Formats of rows: each becomes messages, whatever its columns are called."""

import json

import pytest
from formats import ASK, TELL

from plugsft.data.formats import FORMATS, BadRow, format_of, read_chat

SYSTEM = {"role": "system", "content": "be brief"}
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "owl"}}}
TOOL = {"type": "function", "function": {"name": "look_up"}}


def messages(row, kind="messages"):
    return read_chat(kind, row).messages


def reason(row, kind="messages"):
    with pytest.raises(BadRow) as caught:
        read_chat(kind, row)
    return str(caught.value)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_format_is_recognised_by_its_columns(kind):
    row = dict.fromkeys(FORMATS[kind], "")
    assert format_of({"id": 1, **row}) == kind
    for column in row:
        assert format_of({name: "" for name in row if name != column}) is None


def test_the_richest_format_is_taken():
    every = [column for columns in FORMATS.values() for column in columns]
    for kind, columns in FORMATS.items():
        assert format_of(dict.fromkeys(every)) == kind
        every = [column for column in every if column not in columns]
    assert format_of({"zzz": 1}) is None and format_of({}) is None


def test_plain_messages_are_not_copied():
    turns = [SYSTEM, ASK, TELL]
    talk = read_chat("messages", {"messages": turns, "id": 3})
    assert talk.messages is turns and not (talk.flags or talk.num_prompt)
    assert read_chat("messages", {"messages": turns}, "another").messages == turns
    assert read_chat("messages", {"messages": turns[1:]}, "be brief").messages == turns


def test_sharegpt():
    turns = [("system", "be brief"), ("human", "who?"), ("gpt", "owls")]
    row = {"conversations": [{"from": who, "value": said} for who, said in turns]}
    assert messages(row, "conversations") == [SYSTEM, ASK, TELL]
    assert messages({"messages": row["conversations"]}) == [SYSTEM, ASK, TELL]
    # Its columns may also hold messages, and its system prompt a column of its own.
    assert messages({"conversation": [ASK, TELL]}, "conversation") == [ASK, TELL]
    column = {"conversations": [ASK, TELL], "system": "be brief"}
    assert messages(column, "conversations") == [SYSTEM, ASK, TELL]
    assert messages({**column, "system": ""}, "conversations") == [ASK, TELL]
    elf = {"conversations": [{"from": "gtp", "value": "x"}]}
    says = "unknown role 'gtp'; did you mean 'gpt'? known are system, developer, user, assistant"
    assert reason(elf, "conversations").startswith(says)
    for column in ("system", "tools"):
        assert f"'{column}' is not" in reason({**row, column: 0}, "conversations")


def test_sharegpt_s_tools():
    call = {"name": "look_up", "arguments": {"word": "owl"}}
    turns = [("human", "who?"), ("function_call", json.dumps(call)), ("observation", "a bird")]
    row = {"conversations": [{"from": who, "value": said} for who, said in turns]}
    talk = read_chat("conversations", {**row, "tools": json.dumps([TOOL])})
    assert talk.messages == [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "a bird"},
    ]
    assert talk.tools == [TOOL]
    row["conversations"][1]["value"] = "look up owls"
    assert (
        reason(row, "conversations")
        == "a tool call is not an object with a name, or the JSON of one"
    )
    row["conversations"][1]["value"] = json.dumps([{"arguments": {}}])
    assert (
        reason(row, "conversations")
        == "a tool call is not an object with a name, or the JSON of one"
    )


def test_alpaca():
    row = {"instruction": "who?", "input": "", "output": "owls"}
    assert messages(row, "alpaca") == [ASK, TELL]
    whole = {
        "instruction": "who?",
        "input": "at night",
        "output": "owls",
        "system": "be brief",
        "history": [["who?", "owls"]],
    }
    asked = {"role": "user", "content": "who?\nat night"}
    assert messages(whole, "alpaca") == [SYSTEM, ASK, TELL, asked, TELL]
    bare = {"instruction": "who?", "output": "owls", "input": None, "history": None, "system": None}
    assert messages(bare, "alpaca") == [ASK, TELL]
    assert reason({**row, "output": ""}, "alpaca") == "'output' is empty"
    for column in ("input", "system"):
        for wrong in (3, 0, False, [], {}, 0.0):
            assert reason({**row, column: wrong}, "alpaca") == f"'{column}' is not text"
    for wrong in (0, False, {}, "x"):
        assert reason({**row, "history": wrong}, "alpaca") == "'history' is not a list of pairs"
    assert reason({**row, "instruction": ""}, "alpaca") == "an empty turn of the user"
    assert reason({**row, "history": ["who?"]}, "alpaca") == "'history' is not a list of pairs"


@pytest.mark.parametrize("key", ["wieght", "trian", "tool_call"])
def test_a_misspelt_key_of_a_turn_is_named(key):
    meant = {"wieght": "weight", "trian": "train"}.get(key, "tool_calls")
    says = f"a turn has '{key}', which nothing reads; did you mean '{meant}'?"
    assert reason({"messages": [ASK, {**TELL, key: 0}]}) == says
    # A table gives each turn the keys of all; templates may read keys of their own.
    row = {"messages": [ASK, {**TELL, key: None, "images": [], "notes": 1, "id": "7"}]}
    assert read_chat("messages", row).messages


@pytest.mark.parametrize("arguments", [None, "", '{"a":', "5", [1]])
def test_arguments_that_are_no_object_are_refused(arguments):
    for given in ({"arguments": arguments}, {"argments": {}}):
        call = {"function": {"name": "look_up"} | given}
        row = {"messages": [ASK, {"role": "assistant", "tool_calls": [call]}]}
        found = repr(arguments) if "arguments" in given else "missing"
        says = f"the arguments of a call of look_up are {found}; write an object, or its JSON: "
        assert reason(row).replace('"', "'") == (says + "{} for none").replace('"', "'")


def call_of(text, **names):
    turn = {"role": "assistant", "tool_calls": [{"name": "look_up", "arguments": text}]}
    return {"messages": [ASK, turn], **names}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1e999", "the number 1e999 in JSON is read as inf"),
        ("NaN", "the number NaN in JSON is read as nan"),
        ("-Infinity", "the number -Infinity in JSON is read as -inf"),
        ("1.10", "1.10 in JSON is read as 1.1; write it as it is read, or as a text"),
        ("1e5", "the number 1e5 in JSON is read as 100000.0"),
        ("0.12345678901234567890", "in JSON is read as 0.12345678901234568"),
        ('{"a": 1, "\\u0061": 2}', "the key 'a' is there more than once"),
    ],
)
def test_what_json_text_of_a_call_says_is_trained_or_refused(text, says):
    assert says in reason(call_of(f'{{"a": [{text}]}}'))
    told = json.dumps({"name": "look_up", "arguments": {}}).replace("{}", f'{{"a": {text}}}')
    turns = [{"from": "human", "value": "who?"}, {"from": "function_call", "value": told}]
    assert says in reason({"conversations": turns}, "conversations")
    number = json.loads(text)
    if isinstance(number, float) and not -1e9 < number < 1e9:  # what a parser makes of it
        assert "hold what is not JSON" in reason(call_of({"a": [number]}))


def test_numbers_that_are_trained_as_they_are_written():
    numbers = {"a": [1, -2, 0, 12345678901234567890, 0.5, -1.1, 1e-07, 1e22, 1.0]}
    row = call_of(json.dumps(numbers))
    (call,) = messages(row)[1]["tool_calls"]
    assert repr(call["function"]["arguments"]) == repr(numbers)


@pytest.mark.parametrize("key", ["loss", "mask", "training", "loss_weight"])
@pytest.mark.parametrize("value", [False, True, 0, 1])
def test_other_tools_words_for_what_is_trained_are_refused_with_ours(key, value):
    says = reason({"messages": [ASK, {**TELL, key: value}]})
    assert says.startswith(f"'{key}' of a turn says whether") and "'train'" in says
    assert messages({"messages": [ASK, {**TELL, key: None}]}) == [ASK, TELL]
    part = {"type": "text", "text": "owls", key: value}
    says = reason({"messages": [ASK, {**TELL, "content": [part]}]})
    assert says == f"a part of a turn has '{key}'; only a turn may: as 'train' or 'weight'"


def test_a_part_of_a_turn_has_no_weight_and_a_turn_no_images():
    part = {"type": "text", "text": "owls", "weight": 0}
    says = "a part of a turn has 'weight'; only a turn may: as 'train' or 'weight'"
    assert reason({"messages": [ASK, {**TELL, "content": [part]}]}) == says
    for key, held in (("images", "images"), ("video", "videos"), ("Audio", "sounds")):
        says = f"'{key}' of a turn holds {held}, and only text is trained; take it out"
        assert reason({"messages": [{**ASK, key: ["x"]}, TELL]}) == says


@pytest.mark.parametrize("key", ["train", "weight", "reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("value", [{}, 5, ["x"]])
def test_a_key_of_a_turn_of_another_type_is_refused(key, value):
    assert reason({"messages": [ASK, {**TELL, key: value}]}).startswith(f"'{key}' of a turn is ")


def test_calls_of_another_type_or_under_two_keys_are_refused():
    for key in ("tool_calls", "function_call"):
        for wrong in (0, False, {}, ""):
            says = reason({"messages": [ASK, {**TELL, key: wrong}]})
            assert says == "a tool call is not an object with a name, or the JSON of one"
    both = {**TELL, "function_call": CALL["function"], "tool_calls": [CALL]}
    assert "'function_call' and 'tool_calls'" in reason({"messages": [ASK, both]})
    alone = {**TELL, "function_call": CALL["function"]}
    assert messages({"messages": [ASK, alone]})[1]["tool_calls"] == [CALL]
    asked = {**ASK, "tool_calls": [CALL]}
    says = "a turn of the user has 'tool_calls'; only the assistant's may"
    assert reason({"messages": [asked, TELL]}) == says


def test_parts_of_content_are_joined():
    parts = [{"type": "text", "text": "ow"}, {"type": "text", "text": "ls"}]
    assert messages({"messages": [ASK, {"role": "assistant", "content": parts}]}) == [ASK, TELL]
    for part, kind in (
        ({"type": "image_url", "image_url": "x"}, "image_url"),
        ("owls", "str"),
        ({"type": "text"}, "text"),
    ):
        row = {"messages": [{"role": "user", "content": [*parts, part]}, TELL]}
        assert reason(row) == f"a part of a turn of the user is not text ({kind})"


def test_tools_are_a_list_or_its_json():
    row = {"messages": [ASK, TELL]}
    for given in ([TOOL], json.dumps([TOOL])):
        assert read_chat("messages", {**row, "tools": given}).tools == [TOOL]
    for nothing in (None, "", [], "[]"):
        assert read_chat("messages", {**row, "tools": nothing}).tools is None
    for wrong in ("{", {"a": 1}, {}, "{}", ["look_up"], 3, 0, "0", False, '"x"'):
        assert reason({**row, "tools": wrong}) == "'tools' is not a list of tools, or its JSON"
    for nameless in ({"function": ["x"]}, {"function": "x"}, {"function": {"name": ""}}, {}):
        says = f"a tool is not a function with a name: {nameless}"
        assert reason({**row, "tools": [TOOL, nameless]}) == says
        assert reason({**row, "tools": json.dumps([nameless])}) == says


def test_a_row_s_own_variables():
    row = {"messages": [ASK, TELL], "chat_template_kwargs": {"enable_thinking": False}}
    assert read_chat("messages", row).variables == {"enable_thinking": False}
    assert reason({**row, "chat_template_kwargs": "x"}) == "'chat_template_kwargs' is not an object"


def test_reasoning_reaches_the_template_under_every_name():
    for name in ("reasoning_content", "thinking", "reasoning"):
        (message,) = messages({"messages": [{**TELL, name: "birds at night"}]})
        assert message["reasoning_content"] == message["thinking"] == "birds at night"
    assert messages({"messages": [{**TELL, "thinking": None, "name": None}]}) == [TELL]


@pytest.mark.parametrize(
    ("said", "wish"),
    [
        ({}, None),
        ({"weight": None, "train": None}, None),
        ({"weight": 0}, False),
        ({"weight": 1.0}, True),
        ({"train": False}, False),
        ({"train": True}, True),
        ({"train": True, "weight": 0}, False),
    ],
)
def test_wishes(said, wish):
    talk = read_chat("messages", {"messages": [ASK, {**TELL, **said}]})
    assert talk.flags == ({} if wish is None else {1: wish})


def test_wishes_that_are_not_understood():
    row = {"messages": [ASK, {**TELL, "weight": 0.5}]}
    assert reason(row) == "'weight' of a turn is 0.5, and should be 0 or 1"
    row = {"messages": [ASK, {**TELL, "train": "yes"}]}
    assert reason(row) == "'train' of a turn is 'yes', and should be true or false"


def test_prompts_are_never_trained():
    row = {"prompt": [ASK, TELL, ASK], "completion": [TELL]}
    assert format_of(row) == "chat completion"
    talk = read_chat("chat completion", row)
    assert talk.messages == [ASK, TELL, ASK, TELL] and talk.num_prompt == 3
    talk = read_chat("chat completion", row, "be brief")
    assert talk.messages == [SYSTEM, ASK, TELL, ASK, TELL] and talk.num_prompt == 4


def test_turns_without_words():
    for role in ("system", "tool"):
        for nothing in ({"content": ""}, {"content": None}, {}):
            turn = {"role": role, **nothing}
            assert messages({"messages": [turn, ASK, TELL]})[0] == {"role": role, "content": ""}
    for role in ("user", "assistant"):
        for nothing in ({"content": ""}, {"content": None}):
            row = {"messages": [{"role": role, **nothing}]}
            assert reason(row) == f"an empty turn of the {role}"
        assert reason({"messages": [{"role": role}]}) == "no 'content': the turn has role"
    for role in ("system", "user", "tool"):
        misspelt = reason({"messages": [{"role": role, "contnet": "x"}, ASK, TELL]})
        assert misspelt == "a turn has 'contnet', which nothing reads; did you mean 'content'?"
        other = reason({"messages": [{"role": role, "words": "x"}, ASK, TELL]})
        assert other == "no 'content': the turn has role, words"
    shared = {"conversations": [{"from": "system", "vlaue": "x"}, ASK, TELL]}
    assert reason(shared, "conversations") == "no 'content': the turn has role, vlaue"
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert messages({"messages": [ASK, called]}) == [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    for nothing in (None, []):
        assert messages({"messages": [ASK, {**TELL, "tool_calls": nothing}]}) == [ASK, TELL]
    for wrong in ("look_up", [3], [{"function": {}}], [{"function": "look_up"}]):
        row = {"messages": [ASK, {**called, "tool_calls": wrong}]}
        assert reason(row) == "a tool call is not an object with a name, or the JSON of one"


def test_a_row_without_the_columns_names_those_it_has():
    assert reason({"text": "a", "id": 1}) == "no 'messages': the row has id, text"
    assert reason({}) == "no 'messages': the row has no columns"
    assert reason({"messages": None}) == "'messages' is null"


def test_calls_are_read_as_servers_give_them_to_templates():
    arguments = {"word": "鷹"}
    for given in (arguments, json.dumps(arguments)):
        flat = {"name": "look_up", "arguments": given}
        for call in (flat, {"function": flat}, {"type": "function", "function": flat}):
            for nothing in ({"content": None}, {"content": ""}, {}):
                turn = {"role": "assistant", "tool_calls": [{**call, "id": "1"}], **nothing}
                (message,) = messages({"messages": [turn]})
                function = {"name": "look_up", "arguments": arguments}
                called = {"type": "function", "function": function, "id": "1"}
                assert message == {"role": "assistant", "content": "", "tool_calls": [called]}
