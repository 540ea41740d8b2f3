"""Rendering: text and trained spans of rows are those of transformers and TRL."""

import os
import re
from dataclasses import replace
from json import dumps

import numpy as np
import pytest
from conftest import chats, tiny_tables
from formats import ASK, CALL, FOLDER, RESULT, SYSTEM, TELL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from plugsft import DataError, Encoded
from plugsft.data.chat import BLOCKS, CHATML, DROPPED_THOUGHT, SERVED, Chat
from plugsft.data.examples import target_mask
from plugsft.data.jinja import compile_template
from plugsft.data.jsonl import RowList
from plugsft.data.load_tokenizer import train_tokenizer
from plugsft.data.render import render_rows as render
from plugsft.output.folder import wrong_inputs
from plugsft.recipe.parse import anchored
from plugsft.recipe.tables import Data, Recipe
from plugsft.tokens.tokenizer import lighten

# PLUGSFT_FULL=1 (tools/test --full) makes this many chats, otherwise a tenth.
COUNT = 2_000 if os.environ.get("PLUGSFT_FULL") == "1" else 200
TEMPLATES = {path.stem: path.read_text("utf8") for path in sorted(FOLDER.glob("*.jinja"))}
MARKED = [name for name, source in TEMPLATES.items() if compile_template(source).marked]

THINK = {**TELL, "reasoning_content": "birds at night"}
WORD = {"type": "string", "description": "What to look up."}
TOOL = {
    "name": "look_up",
    "description": "Look a word up.",
    "parameters": {"type": "object", "properties": {"word": WORD}, "required": ["word"]},
}
CHATS = {
    "one turn": {"messages": [ASK, TELL]},
    "two turns": {"messages": [ASK, TELL, ASK, TELL]},
    "system": {"messages": [SYSTEM, ASK, TELL]},
    "reasoning": {"messages": [ASK, THINK]},
    "reasoning twice": {"messages": [SYSTEM, ASK, THINK, ASK, THINK]},
    "tools": {
        "messages": [ASK, CALL, RESULT, TELL],
        "tools": [{"type": "function", "function": TOOL}],
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    def texts(batch, source, wrapped):
        return render(batch, wrapped, Data(source="none"))

    return train_tokenizer([RowList(chats(40))], texts, 500)


@pytest.fixture
def with_template(tokenizer):
    """Give the tokenizer another template for a test."""

    def change(template, **names):
        tokenizer.chat_template = template
        for name, value in names.items():
            setattr(tokenizer, name, value)
        return tokenizer

    yield change
    tokenizer.chat_template, tokenizer.eos_token = CHATML.read_text(), "<|im_end|>"
    tokenizer.bos_token = None


def rendered(tokenizer, *rows, blocks=False, **data):
    """Render rows; with `blocks` as if the recipe named the template's file."""
    light = replace(lighten(tokenizer), honours_blocks=blocks)
    return render(list(rows), light, Data(source="none", **data))


def trained(tokenizer, row, **options):
    """The text of one row, and the parts of it that are trained on."""
    result = rendered(tokenizer, row, **options)
    assert not result.bad
    (text,), (spans,) = result.texts, result.spans
    return text, [text[start:stop] for start, stop in spans]


def unrolled(tokenizer, row, **options):
    """The text before each trained part of a row, and the part."""
    result = rendered(tokenizer, row, **options)
    assert not result.bad
    examples = zip(result.texts, result.spans, strict=True)
    return [(text[:start], text[start:stop]) for text, spans in examples for start, stop in spans]


def test_chats_train_what_the_assistant_says(tokenizer):
    text, parts = trained(tokenizer, {"messages": [SYSTEM, ASK, TELL, ASK, TELL]})
    assert parts == ["owls<|im_end|>"] * 2
    assert text.count("who?") == 2 and text.startswith("<|im_start|>system\nbe brief<|im_end|>\n")
    assert trained(tokenizer, {"messages": [ASK, TELL] * 2}, train_on="last")[1] == [
        "owls<|im_end|>"
    ]
    text, parts = trained(tokenizer, {"messages": [ASK, TELL]}, train_on="all")
    assert parts == [text]


def test_prompts_and_completions(tokenizer):
    row = {"prompt": "2 + 2 = ", "completion": "4"}
    assert trained(tokenizer, row) == ("2 + 2 = 4<|im_end|>", ["4<|im_end|>"])
    assert trained(tokenizer, row, train_on="all")[1] == ["2 + 2 = 4<|im_end|>"]
    assert trained(tokenizer, {**row, "completion": "4<|im_end|>"})[0] == "2 + 2 = 4<|im_end|>"
    assert trained(tokenizer, {**row, "prompt": ""})[0] == "4<|im_end|>"
    assert rendered(tokenizer, row).special_tokens is True
    chat = {"prompt": [ASK, TELL, ASK], "completion": [TELL]}
    assert trained(tokenizer, chat)[1] == ["owls<|im_end|>"], "the prompt's answers are not"
    assert rendered(tokenizer, chat).special_tokens is False


def test_text(tokenizer):
    assert trained(tokenizer, {"text": "owls"}) == ("owls<|im_end|>", ["owls<|im_end|>"])


def test_columns_by_other_names(tokenizer):
    row = {"dialogue": [ASK, TELL], "text": "not this"}
    assert trained(tokenizer, row, columns={"messages": "dialogue"})[1] == ["owls<|im_end|>"]
    # What is renamed does not stand under its old name any more.
    row = {"text": "2 + 2 = ", "prompt": "4"}
    swapped = {"prompt": "text", "completion": "prompt"}
    assert trained(tokenizer, row, columns=swapped)[1] == ["4<|im_end|>"]
    assert rendered(tokenizer, {"zzz": 1}) is None


def test_other_formats_of_chats(tokenizer):
    text = trained(tokenizer, {"messages": [SYSTEM, ASK, TELL]})[0]
    turns = [("system", "be brief"), ("human", "who?"), ("gpt", "owls")]
    sharegpt = {"conversations": [{"from": who, "value": said} for who, said in turns]}
    alpaca = {"system": "be brief", "instruction": "who?", "output": "owls"}
    for row in (sharegpt, alpaca):
        assert trained(tokenizer, row) == (text, ["owls<|im_end|>"])
        assert rendered(tokenizer, row).special_tokens is False


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"chosen": [ASK, TELL], "rejected": [ASK, TELL]}, "messages"),
        ({"prompt": "who?", "chosen": [ASK, TELL], "rejected": [ASK, TELL]}, "messages"),
        ({"prompt": [ASK], "chosen": [TELL], "rejected": [TELL]}, "completion"),
        ({"prompt": "who? ", "chosen": "owls", "rejected": "elks"}, "completion"),
        ({"chosen": "who? owls", "rejected": "who? elks"}, "text"),
    ],
)
def test_preferences_are_refused_with_a_cure_that_works(tokenizer, row, column):
    with pytest.raises(
        DataError, match=rf'set \[data.columns\] {column} = "chosen" and .*; .* \[plugins.dpo\]'
    ) as refused:
        rendered(tokenizer, row)
    assert 'data.ignore = ["rejected"]' in str(refused.value)
    del row["rejected"]
    assert trained(tokenizer, row, columns={column: "chosen"})[1][-1].endswith("owls<|im_end|>")


def test_a_row_of_another_format_is_bad(tokenizer):
    chat = {"messages": [ASK, TELL]}
    result = rendered(tokenizer, chat, {"text": "owls", "id": 3}, chat)
    assert result.rows == [0, 2] and result.bad == {1: "no 'messages': the row has id, text"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": None}, "'messages' is null"),
        ({"messages": []}, "'messages' is not a list of turns, or is empty"),
        ({"messages": "hi"}, "'messages' is not a list of turns, or is empty"),
        ({"messages": ["hi"]}, "a turn is not an object with a role"),
        ({"messages": [{"content": "hi"}]}, "no 'role': the turn has content"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "unknown role 'wizard'"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "unknown role ['user']"),
        (
            {"messages": [ASK, {"role": "assistant", "content": ""}]},
            "an empty turn of the assistant",
        ),
        ({"messages": [ASK, {**TELL, "content": " \n"}]}, "an empty turn of the assistant"),
        ({"messages": [{"role": "user"}, TELL]}, "no 'content': the turn has role"),
        (
            {"messages": [ASK, {**TELL, "function_call": {"name": "f", "arguments": "{}"}}]},
            "the chat template leaves out",
        ),
        ({"messages": [{"role": "user", "content": 3}, TELL]}, "a turn of the user is not text"),
        ({"messages": [SYSTEM, ASK]}, "no turn of the assistant to train"),
        (
            {"messages": [ASK, TELL], "chat_template_kwargs": {"enable_thinking": False}},
            "'chat_template_kwargs' sets 'enable_thinking', and the chat template reads no such",
        ),
        ({"messages": [ASK, TELL], "tools": [{"function": ["x"]}]}, "a tool is not a function"),
        ({"messages": [ASK, {**TELL, "content": "\ud83e"}]}, "half a character"),
        ({"prompt": "a", "completion": None}, "'completion' is null"),
        ({"prompt": None, "completion": "b"}, "'prompt' is null"),
        ({"prompt": "a", "text": "b"}, "no 'completion': the row has prompt, text"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty"),
        ({"prompt": "a", "completion": "  "}, "'completion' is empty"),
        ({"prompt": 3, "completion": "b"}, "'prompt' is not text"),
        ({"prompt": "a", "completion": [TELL]}, "'prompt' is not a list of turns"),
        ({"text": ""}, "'text' is empty"),
        ({"text": ["a"]}, "'text' is not text"),
        ({"text": "\ud83e"}, "half a character"),
    ],
)
def test_a_bad_row_is_separated_from_its_good_neighbours(tokenizer, row, reason):
    good = {
        "messages": {"messages": [ASK, TELL]},
        "prompt": {"prompt": "a", "completion": "b"},
        "text": {"text": "a"},
    }[next(iter(row))]
    if isinstance(row.get("completion"), list):
        good = {"prompt": [ASK], "completion": [TELL]}
    result = rendered(tokenizer, good, row, good)
    assert list(result.bad) == [1] and result.bad[1].startswith(reason)
    assert result.rows == [0, 2] and len(result.texts) == len(result.spans) == 2


def test_a_template_that_refuses_a_row_is_quoted_in_one_line(with_template):
    refuses = "{{ raise_exception('roles must\nalternate') }}{% generation %}{% endgeneration %}"
    result = rendered(with_template(refuses), {"messages": [ASK, TELL]})
    cure = "; set model.chat_template to another template, or change the row"
    assert result.bad == {0: f"the chat template refuses it: roles must alternate{cure}"}
    raises = ("{{ 1 / 0 }}", "{{ messages[0]['x']['y'] }}", "{{ messages.nothing() }}")
    for broken in (*raises, "{{ cycler() }}"):
        bad = rendered(with_template(broken), {"messages": [ASK, TELL]}).bad[0]
        assert bad.startswith("the chat template refuses it: ")


def test_a_template_that_is_no_jinja_is_refused(with_template):
    for broken in ("{% if", "{% generation %}", "{{ x | nothing }}", "{{ (9**99999) | string }}"):
        with pytest.raises(DataError, match="the chat template is not Jinja: "):
            rendered(with_template(broken), {"messages": [ASK, TELL]})


def test_a_tokenizer_without_a_template_is_refused_with_the_cure(with_template):
    for nothing in (None, ""):
        with pytest.raises(DataError, match=r"has no chat template. Set model.chat_template = "):
            rendered(with_template(nothing), {"messages": [ASK, TELL]})
    assert rendered(with_template(None), {"text": "needs none"}).texts


def test_template_variables(with_template):
    template = (
        "{{ name }}{{ eos_token }}{% generation %}{{ messages[1].content }}{% endgeneration %}"
    )
    row = {"messages": [ASK, TELL]}
    options = {"template_kwargs": {"name": "N"}, "blocks": True}
    assert trained(with_template(template), row, **options) == ("N<|im_end|>owls", ["owls"])
    own = {**row, "chat_template_kwargs": {"name": "M"}}
    assert trained(with_template(template), own, **options)[0].startswith("M")
    template += "{{ raise_exception('?') if not name }}"
    with pytest.raises(DataError, match=r"reads no 'nmae'; it reads eos_token, messages, name$"):
        rendered(with_template(template), row, template_kwargs={"nmae": "N"})


def test_names_in_messages_that_python_has_too(with_template):
    # Jinja takes the method, not the message's own field; and so do we, for the same text.
    row = {"messages": [ASK, {**TELL, "items": "x", "words": "y", "get": None}]}
    reads = (
        "{% for m in messages %}{{ m.items() | list }}{{ m.words }}{{ m.get('items') }}{% endfor %}"
    )
    tokenizer = with_template(reads)
    assert rendered(tokenizer, row, train_on="all").texts == [
        theirs(tokenizer, row, tokenize=False)
    ]


def test_a_template_among_several_is_the_default(with_template):
    named = {"default": CHATML.read_text(), "tools": "{{ nothing }}"}
    assert trained(with_template(named), {"messages": [ASK, TELL]})[1] == ["owls<|im_end|>"]


WHITE = st.text(st.sampled_from(" \t\n\r\f\v\xa0\x85\u2028\u3000\u200b\ufeff"), max_size=6)
ODD = st.sampled_from(
    [
        "",
        " ",
        "\n",
        "\\ud83e",
        "\ud83e",
        "\ud83e\udd89",
        "🦉👩‍👩‍👧",
        "\0",
        "\x1b[31m",
        "{{ x }}",
        "{% if %}",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<|im_end|>\n<|im_start|>",
        "None",
    ]
)
HUGE = st.builds(str.__mul__, st.text(min_size=1, max_size=3), st.integers(1_000, 5_000))
CONTENT = st.one_of(
    st.text(max_size=40), WHITE, ODD, HUGE, st.tuples(WHITE, st.text(), ODD, WHITE).map("".join)
)
ROLES = st.sampled_from(["user", "assistant", "user", "assistant", "system", "tool", "developer"])
TURNS = st.lists(st.fixed_dictionaries({"role": ROLES, "content": CONTENT}), min_size=1, max_size=7)


@settings(max_examples=COUNT, deadline=None, suppress_health_check=list(HealthCheck))
@given(TURNS)
def test_the_mask_is_transformers_mask(tokenizer, messages):
    result = rendered(tokenizer, {"messages": messages}, blocks=True)
    if result.bad:
        spoken = {message["role"] for message in messages if not message["content"].strip()} & {
            "user",
            "assistant",
        }
        halves = any("\ud83e" in message["content"] for message in messages)
        silent = not any(message["role"] == "assistant" for message in messages)
        reasons = (
            {"an empty turn of the user", "an empty turn of the assistant"} if spoken else set()
        )
        reasons |= {"half a character (a lone surrogate)"} if halves else set()
        reasons |= {"no turn of the assistant to train"} if silent else set()
        assert result.bad[0] in reasons
        return
    encoded = lighten(tokenizer).encode_texts(result.texts, result.special_tokens)
    theirs = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded.ids.tolist() == theirs["input_ids"]
    mask = target_mask(encoded, result.texts, result.spans)
    assert mask.astype(int).tolist() == theirs["assistant_masks"]


def test_a_first_token_has_no_predecessor_that_could_predict_it(tokenizer):
    result = rendered(tokenizer, {"text": "owls"})
    encoded = lighten(tokenizer).encode_texts(result.texts, False)
    mask = target_mask(encoded, result.texts, result.spans)
    assert not mask[0] and mask[1:].all()


def test_a_last_character_of_several_tokens_is_trained_whole(tokenizer):
    text = "owls 🦉 hoot"
    encoded = lighten(tokenizer).encode_texts([text], False)
    mask = target_mask(encoded, [text], [[(0, text.index("🦉") + 1)]])
    assert tokenizer.decode(encoded.ids[: mask.sum() + 1]) == "owls 🦉"


def test_an_end_of_text_that_the_tokenizer_adds_is_trained():
    ids, ends = np.arange(3, dtype=np.int32), np.array([3, 5, 5])
    encoded = Encoded(ids=ids, counts=np.array([3]), ends=ends)
    assert target_mask(encoded, ["owls."], [[(0, 5)]]).tolist() == [False, True, True]


def test_an_empty_span_takes_nothing_away(tokenizer):
    encoded = lighten(tokenizer).encode_texts(["owls and foxes"], False)
    whole = target_mask(encoded, ["owls and foxes"], [[(0, 14)]])
    assert not target_mask(encoded, ["owls and foxes"], [[(6, 6)]]).any()
    for place in range(15):
        assert (
            target_mask(encoded, ["owls and foxes"], [[(0, 14), (place, place)]]) == whole
        ).all()


def test_a_block_inside_a_macro_is_found_too(with_template):
    said = "{% macro said(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    each = "{% for m in messages %}[{{ said(m) | upper if m.role == 'assistant' }}]{% endfor %}"
    row = {"messages": [ASK, TELL, ASK, TELL]}
    text, parts = trained(with_template(said + each), row, blocks=True)
    assert text == "[][OWLS][][OWLS]" and parts == ["OWLS", "OWLS"]


def test_blocks_inside_each_other_are_refused(with_template):
    block = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}"
    reason = "the chat template refuses it: its generation blocks are nested"
    reason += "; set model.chat_template to another template, or change the row"
    assert rendered(with_template(block), {"messages": [ASK, TELL]}).bad == {0: reason}


def parted(messages):
    """Messages as the templates of models that see images want them."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def theirs(tokenizer, row, **options):
    """What transformers makes of a chat; None where the template refuses it."""
    chat = Chat(lighten(tokenizer), Data(source="none"))
    messages = parted(row["messages"]) if chat.needs_parts else row["messages"]
    try:
        return tokenizer.apply_chat_template(messages, tools=row.get("tools"), **options)
    except Exception:  # a template raises what it likes
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_of_trl_writes_as_in_transformers(with_template, name):
    tokenizer, written = with_template(TEMPLATES[name], bos_token="<|im_start|>"), 0
    for kind, row in CHATS.items():
        result = rendered(tokenizer, row, train_on="all")
        expected = theirs(tokenizer, row, tokenize=False)
        if not result.bad:
            # One takes the arguments of calls as JSON only, and gets them so.
            assert result.texts == [expected] or (expected is None and name == "deepseekv3"), kind
            written += 1
        elif result.bad[0].startswith("it has tools, and the chat template takes none"):
            source = re.sub(r"(?s){#.*?#}", "", TEMPLATES[name])
            assert not re.search(r"\btools\b(?! is| =)", source), kind
        elif result.bad[0].startswith("the chat template leaves out 'look_up' of a call"):
            assert "tool_calls" not in TEMPLATES[name], kind
        else:
            assert expected is None and result.bad[0].startswith("the chat template refuses it: ")
    assert written >= 3


@pytest.mark.parametrize("name", MARKED)
def test_every_template_with_blocks_masks_as_in_transformers(with_template, name):
    tokenizer, masked = with_template(TEMPLATES[name], bos_token="<|im_start|>"), 0
    for kind, row in CHATS.items():
        result = rendered(tokenizer, row, blocks=True)
        if result.bad:
            continue  # the test above tells why
        assert result.mask == BLOCKS
        expected = theirs(tokenizer, row, return_dict=True, return_assistant_tokens_mask=True)
        encoded = lighten(tokenizer).encode_texts(result.texts, False)
        mask = target_mask(encoded, result.texts, result.spans)
        assert encoded.ids.tolist() == expected["input_ids"], kind
        assert mask.astype(int).tolist() == expected["assistant_masks"], kind
        masked += 1
    assert masked >= 3


BARE = re.sub(r"{% (end)?generation %}", "", CHATML.read_text())


def test_without_blocks_the_same_is_trained(with_template):
    rows = [{"messages": [SYSTEM, ASK, TELL, ASK, TELL]}, {"messages": [ASK, TELL, ASK]}]
    for train_on in ("assistant", "last", "all"):
        marked = rendered(with_template(CHATML.read_text()), *rows, blocks=True, train_on=train_on)
        bare = rendered(with_template(BARE), *rows, train_on=train_on)
        assert bare.spans == marked.spans
        # White space behind the last trained token is left out.
        for text, whole in zip(bare.texts, marked.texts, strict=True):
            assert whole.startswith(text) and not whole[len(text) :].strip()
    assert rendered(with_template(BARE), *rows).mask == SERVED
    assert rendered(with_template(CHATML.read_text()), *rows).mask == SERVED


@pytest.mark.parametrize(
    ("name", "end"), [("llama3_1", "<|eot_id|>"), ("llama3_2", "<|eot_id|>"), ("gemma4", "<turn|>")]
)
def test_white_space_behind_the_end_is_not_trained(with_template, name, end):
    tokenizer = with_template(TEMPLATES[name], bos_token="<|im_start|>", eos_token=end)
    row = {"messages": [SYSTEM, ASK, TELL, ASK, {**TELL, "content": "owls\n "}]}
    assert trained(tokenizer, row)[1] == [f"owls{end}"] * 2
    (_, called), (_, told) = unrolled(tokenizer, CHATS["tools"])
    assert '"look_up"' in called or "call:look_up" in called
    assert told == f"owls{end}"


def test_a_template_that_writes_earlier_turns_otherwise(with_template):
    # Qwen3 takes the empty thought out of a turn once it is answered.
    tokenizer, answer = with_template(TEMPLATES["qwen3"]), "<think>\n\n</think>\n\nowls<|im_end|>"
    header, asked = "<|im_start|>assistant\n", "<|im_start|>user\nwho?<|im_end|>\n"
    prompts = asked + header, f"{asked}{header}owls<|im_end|>\n{asked}{header}"
    two = CHATS["two turns"]
    assert unrolled(tokenizer, two) == [(prompt, answer) for prompt in prompts]
    result = rendered(tokenizer, CHATS["one turn"], two, CHATS["one turn"])
    assert (result.rows, result.turns) == ([0, 1, 1, 2], [0, 0, 1, 0])
    assert unrolled(tokenizer, two, train_on="last") == [(prompts[1], answer)]
    assert rendered(tokenizer, two, train_on="all").texts


def test_a_whole_chat_without_its_earlier_thoughts_is_warned_of(with_template):
    tokenizer = with_template(TEMPLATES["qwen3"])
    earlier = {**TELL, "reasoning_content": "they hoot"}
    rows = [CHATS["two turns"], CHATS["reasoning"], {"messages": [ASK, earlier, ASK, THINK]}]
    assert rendered(tokenizer, *rows, train_on="all").warnings == {DROPPED_THOUGHT: [2]}
    assert not rendered(tokenizer, *rows).warnings


@pytest.mark.parametrize(
    ("template", "plain"),
    [
        ("llama3", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
        ("chatml", []),
        ("gemma", ["<start_of_turn>", "<end_of_turn>"]),
        ("mistral", ["[INST]", "[/INST]"]),
    ],
)
def test_markers_that_the_tokenizer_reads_as_text_are_named(with_template, template, plain):
    source = {
        "llama3": TEMPLATES["llama3"],
        "chatml": CHATML.read_text(),
        "gemma": TEMPLATES["gemma"],
        "mistral": "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == "
        "'user' else m.content + eos_token }}{% endfor %}",
    }
    tokenizer = with_template(source[template], bos_token="<|im_start|>")
    row = CHATS["one turn"]
    result = rendered(tokenizer, row, CHATS["two turns"], blocks=True)
    assert not result.bad
    says = (
        f"the chat template writes {', '.join(plain)}, which the tokenizer reads as ordinary text"
    )
    assert [*result.warnings.values()] == ([[0, 1]] if plain else [])
    for warning in result.warnings:
        assert warning.startswith(says) and warning.endswith(f"model.add_tokens = {dumps(plain)}")
    assert not rendered(tokenizer, row).warnings, "a model knows its own template"
    light = replace(lighten(tokenizer), honours_blocks=True)
    light.backend_tokenizer = Tokenizer.from_str(light.json)
    light.backend_tokenizer.add_tokens(plain)
    assert not render([row], light, Data(source="none")).warnings


def test_a_template_that_leaves_out_answers(with_template):
    last = "{% for m in messages %}{{ m.content if loop.last else loop.index }}{% endfor %}"
    for row in (CHATS["two turns"], {"messages": [ASK, TELL, ASK]}):
        for train_on in ("assistant", "last"):
            bad = rendered(with_template(last), row, train_on=train_on).bad
            assert not bad or "set model.chat_template to another template" in bad[0]


def test_a_prompt_that_no_turn_begins_with(with_template):
    # The template asks for thoughts and writes none but those in the text: the answer closes it.
    thinks = BARE.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    ((prompt, answer),) = unrolled(with_template(thinks), {"messages": [ASK, TELL]})
    assert prompt.endswith("<think>") and answer == "\n\n</think>\n\nowls<|im_end|>"


def test_the_names_of_templates_are_no_places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables = tiny_tables(tmp_path)
    for name in ("auto", "own"):
        tables["model"] = {"path": "some/model", "chat_template": name}
        recipe = Recipe.model_validate(tables)
        assert wrong_inputs(recipe, tmp_path / "recipe.toml") == {}
        (tmp_path / name).mkdir()
        assert anchored(recipe)["model"]["chat_template"] == name


OWLS, ELKS = "owls<|im_end|>", "elks<|im_end|>"
OTHER = {"role": "assistant", "content": "elks"}


NO_WISH = "no trained token: the row's own flags leave nothing"


@pytest.mark.parametrize("source", [CHATML.read_text(), BARE], ids=["blocks", "bare"])
def test_single_turns_may_be_left_out(with_template, source):
    tokenizer = with_template(source)

    def parts(*turns, **data):
        return trained(tokenizer, {"messages": list(turns)}, **data)[1]

    for flag in ({"weight": 0}, {"train": False}):
        assert parts(ASK, {**TELL, **flag}, ASK, OTHER) == [ELKS]
        assert parts(ASK, TELL, ASK, {**OTHER, **flag}) == [OWLS]
        # Neighbours are told apart, and the user's turns never count.
        assert parts({**ASK, **flag}, TELL, {**OTHER, **flag}, TELL) == [OWLS, OWLS]
        row = {"messages": [ASK, TELL, ASK, {**OTHER, **flag}]}
        assert rendered(tokenizer, row, train_on="last").bad == {0: NO_WISH}
        assert rendered(tokenizer, {"messages": [ASK, {**TELL, **flag}]}).bad == {0: NO_WISH}
        for turns in ([{**ASK, **flag}, TELL], [ASK, {**TELL, **flag}, ASK, OTHER]):
            bad = rendered(tokenizer, {"messages": turns}, train_on="all").bad[0]
            assert bad.startswith('a turn is not to be trained, and data.train_on = "all" trains')
    assert parts(ASK, {**TELL, "weight": 1}, ASK, {**OTHER, "weight": 0}) == [OWLS]
    row = {"messages": [{**ASK, "train": True}, TELL]}
    assert rendered(tokenizer, row).bad == {
        0: "a turn of the user is to be trained; only the assistant's can be"
    }
    assert parts({**ASK, "train": True}, TELL, train_on="all")


def test_turns_that_blocks_do_not_tell_apart_are_refused_where_one_is_left_out(with_template):
    # One block around everything behind the first message.
    once = (
        "{% for m in messages[:1] %}[{{ m.content }}]{% endfor %}{% generation %}"
        "{% for m in messages[1:] %}[{{ m.content }}]{% endfor %}{% endgeneration %}"
    )
    row = {"messages": [ASK, {**TELL, "train": False}, ASK, OTHER]}
    bad = rendered(with_template(once), row, blocks=True).bad[0]
    assert bad.endswith("write one block for each answer")
    row = {"messages": [ASK, TELL, ASK, OTHER]}
    assert trained(with_template(once), row, blocks=True)[1] == ["[owls][who?][elks]"]


def test_turns_marked_in_two_blocks_are_trained_whole(with_template):
    end = "{% endgeneration %}{% generation %}"
    twice = CHATML.read_text().replace("<|im_end|>{% endg", f"{end}<|im_end|>{{% endg")
    assert twice.count("{% generation %}") == 2
    tokenizer, row = with_template(twice), {"messages": [ASK, TELL, ASK, OTHER]}
    assert trained(tokenizer, row, blocks=True)[1] == ["owls", "<|im_end|>", "elks", "<|im_end|>"]
    assert rendered(tokenizer, row, blocks=True).mask == BLOCKS
    bad = rendered(tokenizer, row, blocks=True, train_on="last").bad[0]
    assert bad.endswith("write one block for each answer")
    tokenizer = with_template(CHATML.read_text())
    assert trained(tokenizer, row, blocks=True, train_on="last")[1] == [ELKS]


def test_a_block_without_words_trains_nothing(with_template):
    empty = "{% generation %}{% endgeneration %}{{ messages }}"
    row = {"messages": [ASK, TELL]}
    assert rendered(with_template(empty), row, blocks=True).bad == {0: "no trained token"}


def test_calls_that_a_template_leaves_out_are_no_row(tokenizer, with_template):
    row = {"messages": CHATS["tools"]["messages"]}
    lost = re.compile("the chat template leaves out ('look_up' of a call|words of the assist)")
    # Words beside a call may name the tool and the value: they are no call.
    for content in ("", None, "let me see", "I look_up the owl"):
        called = {"messages": [ASK, {**CALL, "content": content}, RESULT, TELL]}
        for train_on in ("assistant", "last", "all"):
            assert lost.match(rendered(tokenizer, called, train_on=train_on).bad[0])
    (reason,) = rendered(tokenizer, CHATS["tools"]).bad.values()
    assert reason == (
        "it has tools, and the chat template takes none (set model.chat_template to one that "
        "`plugsft init tools` writes, take a model whose template does, or take the tools out)"
    )
    # That its name stands among the tools does not count.
    for train_on in ("assistant", "last", "all"):
        assert lost.match(rendered(with_template(TEMPLATES["lfm2"]), row, train_on=train_on).bad[0])
    assert trained(with_template(TEMPLATES["lfm2_v2"]), row)
    # Where the template writes the call, it is trained whatever stands beside it.
    function = {"name": "look_up", "arguments": {"word": "owl", "in": "", "by": ""}}
    called = {**CALL, "tool_calls": [{"type": "function", "function": function}]}
    beside = {"content": "I look_up the owl", "reasoning_content": "owl?", "thinking": "owl?"}
    for name in ("qwen2_5", "qwen3"):
        assert trained(with_template(TEMPLATES[name]), {"messages": [ASK, {**called, **beside}]})


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "glm4moe", "gptoss"])
def test_calls_are_given_as_the_template_takes_them(with_template, name):
    tokenizer = with_template(TEMPLATES[name], bos_token="<|im_start|>")
    tools, texts = CHATS["tools"]["tools"], set()
    for content in ("", None):
        for arguments in ({"word": "owl"}, '{"word": "owl"}'):
            function = {"name": "look_up", "arguments": arguments}
            call = {**CALL["tool_calls"][0], "function": function}
            turn = {"role": "assistant", "content": content, "tool_calls": [call]}
            row = {"messages": [ASK, turn, RESULT, TELL], "tools": tools}
            (_, called), (prompt, told) = unrolled(tokenizer, row)
            text, parts = prompt + told, [called, told]
            texts.add(text)
            assert "look_up" in parts[0] and "owl" in parts[0] and "\\" not in text
            assert "owls" in parts[-1] and "None" not in text
    assert len(texts) == 1


def test_reasoning_is_trained(with_template):
    tokenizer = with_template(TEMPLATES["qwen3_training"])
    for name in ("reasoning_content", "thinking", "reasoning"):
        (part,) = trained(tokenizer, {"messages": [ASK, {**TELL, name: "at night"}]})[1]
        assert part.startswith("<think>\nat night\n</think>\n\nowls<|im_end|>")


PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def test_a_chat_of_very_many_turns_is_refused_where_each_answer_would_be_compared(with_template):
    tokenizer, row = with_template(PLAIN), {"messages": [ASK, TELL] * 10_000}
    (reason,) = rendered(tokenizer, row).bad.values()
    assert reason.startswith("it has 10,000 trained answers, and at most 1,000 can be compared")
    assert not rendered(tokenizer, row, train_on="last").bad


@pytest.mark.parametrize(
    "expression",
    [
        *("n.a", "n.b", "n.__class__", "n._Namespace__attrs", "''.__class__", "''.join.__class__"),
        *("'{0.__class__}'.format(1)", "' a'.strip().upper()", "messages[0].role", "messages[0].x"),
        *("messages[0].keys() | list", "messages[0].pop('role')", "messages.append(1)"),
        *("loop.first", "loop.last", "loop.length", "loop._iterator", "loop.__class__"),
    ],
)
def test_fast_access_gives_what_the_plain_sandbox_gives(expression):
    loop = "{% set n = namespace(a=1) %}{% for m in messages %}{{ X }}{% endfor %}"
    source, results = loop.replace("X", expression), []
    plain = ImmutableSandboxedEnvironment().from_string(source)
    for template in (compile_template(source).template, plain):
        try:
            results.append(template.render(messages=[{"role": "user"}, {"role": "assistant"}]))
        except SecurityError as error:
            results.append(str(error))
    assert results[0] == results[1]
