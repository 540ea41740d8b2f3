"""Each turn is trained as a server writes it: compared with transformers' own renderer."""

import re
from collections import Counter

import pytest
from served import (
    AGAIN,
    ASK,
    BERGEN,
    CHATS,
    OSLO,
    TEMPLATES,
    WITH_TOOLS,
    answer,
    call,
    chat_of,
    compare,
    conversation,
    examples_of,
    result,
    thought,
)

from plugsft.data.chat import WHOLE
from plugsft.data.formats import BadRow

WORDS = ("a", "1", "end", "assistant", '"}', "<b>html</b>", "\u65e5\u672c\u8a9e", "  spaced  ")


def test_every_turn_of_every_template_is_as_served():
    counts, wrong = Counter(), []
    for name, source in TEMPLATES.items():
        chat = chat_of(source)
        for kind, turns in CHATS.items():
            try:
                examples = examples_of(chat, turns, kind in WITH_TOOLS)
            except BadRow as error:
                counts["refused"] += 1
                assert re.search("; set |takes none", str(error)), (name, kind, error)
                continue
            difference = compare(chat, turns, kind in WITH_TOOLS, examples)
            counts["differing" if difference else "exact"] += 1
            wrong += [(name, kind, difference)] * bool(difference)
    print(dict(counts))
    assert not wrong, "\n".join(map(str, wrong))
    assert counts == {"exact": 336, "refused": 94}


def test_other_words_change_nothing_else():
    compared = 0
    for name, source in TEMPLATES.items():
        chat = chat_of(source)
        for fields in ({}, thought("YYY")):
            turns = [ASK, answer("XXX", **fields), AGAIN, answer("Then 6.")]
            try:
                (asked, told), (_, last) = examples_of(chat, turns)
            except BadRow:
                continue
            for words in WORDS:
                turns[1] = answer(words, **fields)
                (prompt, trained), (_, end) = examples_of(chat, turns)
                assert (prompt, end) == (asked, last), (name, words)
                expected = told.replace("XXX", words)
                # Templates strip an answer as they like.
                assert trained == expected or words != words.strip(), (name, words)
                assert "".join(trained.split()) == "".join(expected.split()), (name, words)
                compared += 1
    assert compared > 500


def test_glm_trains_the_token_that_it_writes_only_before_the_next_message():
    chat = chat_of(TEMPLATES["glm4moe"])
    answers = [words for _, words in examples_of(chat, CHATS["plain"])]
    ends = "4.<|user|>", "6.<|user|>"
    assert all(words.endswith(end) for words, end in zip(answers, ends, strict=True))
    called, told = (words for _, words in examples_of(chat, CHATS["call"], True))
    assert called.endswith("</tool_call><|observation|>") and told.endswith("there.<|user|>")


@pytest.mark.parametrize("words", ["sunny", "a", "ob", "observation", "<|observation|>"])
def test_words_of_the_next_message_do_not_change_how_a_turn_ends(words):
    turns = [ASK, answer("I look."), {"role": "tool", "content": words}, answer("Sunny.")]
    (_, looked), _ = examples_of(chat_of(TEMPLATES["glm4moe"]), turns)
    assert looked.endswith("I look.<|observation|>")


def test_an_answer_ends_with_the_first_stop_token():
    # Phi 3.5 writes a second one behind the last turn.
    answers = [words for _, words in examples_of(chat_of(TEMPLATES["phi3_5"]), CHATS["plain"])]
    assert answers == ["It is 4.<|end|>", "Then 6.<|end|>"]


def test_gpt_oss_ends_each_answer_as_a_server_does():
    chat = chat_of(TEMPLATES["gptoss"])
    first, second = (words for _, words in examples_of(chat, CHATS["plain"]))
    assert first.endswith("4.<|return|>") and second.endswith("6.<|return|>")
    called, told = (words for _, words in examples_of(chat, CHATS["call"], True))
    assert called.endswith("<|call|>") and told.endswith("Sunny there.<|return|>")
    with pytest.raises(BadRow, match=r"leaves out .* of a call; set model.chat_template"):
        examples_of(chat, CHATS["two calls"], True)


def test_a_lost_call_is_refused_though_all_that_it_says_stands_elsewhere():
    chat = chat_of(TEMPLATES["gptoss"])
    chat.train_on, chat.mask = "all", WHOLE
    rain = {"role": "tool", "content": "weather in Bergen, 4 days: rain; weather of Oslo, 3 days"}
    turns = [ASK, answer("", tool_calls=[OSLO, BERGEN]), rain, answer("weather: rain in Bergen.")]
    with pytest.raises(BadRow, match="leaves out 'weather' of a call"):
        chat.examples(conversation(turns, tools=True))
    turns[1] = answer("", tool_calls=[OSLO])
    (parts,) = chat.examples(conversation(turns, tools=True)).examples
    assert "Oslo" in "".join(parts)


def test_equal_numbers_of_other_types_are_other_values_of_a_call():
    numbers = {"days": 5, "hours": 5.0, "times": 1, "now": True}
    turns = [ASK, answer("", tool_calls=[call(numbers)]), result("sunny"), answer("Sunny.")]
    (_, called), _ = examples_of(chat_of(TEMPLATES["qwen3"]), turns, True)
    assert '{"days": 5, "hours": 5.0, "times": 1, "now": true}' in called


@pytest.mark.parametrize("kind", WITH_TOOLS)
def test_no_word_of_the_next_message_is_trained(kind):
    # Gemma 4 ends a call with a stop token that not every tokenizer names.
    chat = chat_of(TEMPLATES["gemma4"], without="<|tool_response>")
    for _, words in examples_of(chat, CHATS[kind], True):
        assert "!ask!" not in words and "sunny" not in words


def test_qwen3_gives_an_example_for_each_answer():
    chat = chat_of(TEMPLATES["qwen3"])
    found = chat.examples(conversation(CHATS["plain"]))
    assert len(found.examples) == 2 and not found.warnings
    header, empty = "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
    first = f"<|im_start|>user\nWhat is 2+2?<|im_end|>\n{header}"
    second = f"{first}It is 4.<|im_end|>\n<|im_start|>user\nAnd 3+3?<|im_end|>\n{header}"
    assert examples_of(chat, CHATS["plain"]) == [
        (first, f"{empty}It is 4.<|im_end|>"),
        (second, f"{empty}Then 6.<|im_end|>"),
    ]


def test_a_chat_may_begin_with_the_assistant_where_the_template_has_a_system_prompt():
    # As SmolLM2's: the prompt of no message has no system prompt.
    source = (
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\n"
        "Be brief.<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    header = "<|im_start|>assistant\n"
    first, second = examples_of(chat_of(source), [answer("Welcome."), ASK, answer("It is 4.")])
    assert first == (header, "Welcome.<|im_end|>")
    written = f"<|im_start|>system\nBe brief.<|im_end|>\n{header}Welcome.<|im_end|>\n"
    asked = f"<|im_start|>user\nWhat is 2+2?<|im_end|>\n{header}"
    assert second == (written + asked, "It is 4.<|im_end|>")


def test_an_answer_closes_the_thought_that_the_prompt_leaves_open():
    # As Nemotron's: the prompt opens a thought, and an answer without one is written without it.
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% else %}"
        "<think>\n{% endif %}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    (prompt, words), _ = examples_of(chat_of(source), CHATS["plain"])
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")
    assert words == "\n</think>\nIt is 4.<|im_end|>"
    (_, words), _ = examples_of(chat_of(source), CHATS["thoughts"])
    assert words == "two and two\n</think>\nIt is 4.<|im_end|>"


def test_the_stop_token_behind_a_thought_that_is_closed_at_once_is_found():
    # As GLM 4.7: the token that ends an answer is written only before the next message.
    source = (
        "{# <|user|> eos_token #}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant'"
        " %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}{% endif %}</think>"
        "{% endif %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    )
    answers = [words for _, words in examples_of(chat_of(source), CHATS["plain"])]
    assert answers == ["</think>It is 4.<|user|>", "</think>Then 6.<|user|>"]


def test_a_template_with_a_date_writes_the_day_of_the_run():
    source = "{{ strftime_now('%d %b %Y') }}" + TEMPLATES["qwen2_5"]
    for day, written in (("2026-11-25", "25 Nov 2026"), ("2025-01-02", "02 Jan 2025")):
        prompts = [prompt for prompt, _ in examples_of(chat_of(source, day), CHATS["plain"])]
        assert all(prompt.startswith(written + "<|im_start|>") for prompt in prompts)


VALUES = {
    "city": "Oslo",
    "days": 0,
    "hours": 0.0,
    "now": True,
    "later": False,
    "note": "",
    "unit": None,
    "more": {},
    "tags": [],
    "deep": {"near": [False, "x", {"far": None}], "on": True},
}
KEPT = "{{ n }}={{ v | tojson }};"
# What a template does with each value v of a call, under its name n.
LOSING = {
    "falsy values": ("{% if v %}" + KEPT + "{% endif %}", "'days'"),
    "falsy values, not names": ("{{ n }}={% if v %}{{ v }}{% endif %};", "'days'"),
    "null": ("{% if v is not none %}" + KEPT + "{% endif %}", "'unit'"),
    "null, written as nothing": ("{{ n }}={{ '' if v is none else v }};", "'unit'"),
    "false": ("{% if v is not false %}" + KEPT + "{% endif %}", "'later'"),
    "true": ("{% if v is not true %}" + KEPT + "{% endif %}", "'now'"),
    "booleans": ("{% if v is not boolean %}" + KEPT + "{% endif %}", "'now'"),
    "booleans' values": ("{{ n }}={% if v is not boolean %}{{ v | tojson }}{% endif %};", "'now'"),
    "which boolean": ("{{ n }}={{ 'yes' if v is boolean else v | tojson }};", "'now'"),
    "all but texts": ("{% if v is string %}" + KEPT + "{% endif %}", "'days'"),
    "numbers": ("{% if v is not number or v is boolean %}" + KEPT + "{% endif %}", "'days'"),
    "0": ("{% if v != 0 or v is boolean %}" + KEPT + "{% endif %}", "'days'"),
    "floats": ("{% if v is not float %}" + KEPT + "{% endif %}", "'hours'"),
    "empty texts": ("{% if v != '' %}" + KEPT + "{% endif %}", "'note'"),
    "empty objects": ("{% if v != {} %}" + KEPT + "{% endif %}", "'more'"),
    "empty lists": ("{% if v != [] %}" + KEPT + "{% endif %}", "'tags'"),
    "what is empty": ("{{ n }}={% if v %}{{ v }}{% else %}{{ '' }}{% endif %}", "'days'"),
    "names": ("{{ v | tojson }};", "the argument's name 'city'"),
    "inner names": ("{{ n }}={{ (v.values() | list if v is mapping else v) | tojson }};", "'near'"),
    "inner values": (
        "{{ n }}={% if v is mapping %}{% for k in v %}{{ k }}="
        "{{ v[k] | select | list if v[k] is sequence else v[k] }}{% endfor %}"
        "{% endif %}{{ v | tojson if v is not mapping or not v }};",
        "false, the value of 0 in a call",
    ),
}


def losing(write):
    """ChatML, where the values of a call's arguments are written in a way."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}:"
        "{% for n, v in c.function.arguments.items() %}" + write + "{% endfor %}</call>{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        "{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
    )


CALLED = [ASK, answer("", tool_calls=[call(VALUES)]), result("sunny"), answer("Sunny.")]


@pytest.mark.parametrize("lost", LOSING)
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_a_template_that_leaves_out_a_part_of_a_call_is_refused(lost, train_on):
    write, says = LOSING[lost]
    chat = chat_of(losing(write))
    chat.train_on, chat.mask = train_on, WHOLE if train_on == "all" else chat.mask
    with pytest.raises(BadRow, match=f"leaves out .*{re.escape(says)}.*; set model.chat_template"):
        chat.examples(conversation(CALLED))
    chat.examples(conversation([ASK, answer("", tool_calls=[call({})]), *CALLED[2:]]))


@pytest.mark.parametrize("kept", [KEPT, "{{ n }}={{ v }};", "{{ {n: v} }}", "<{{ n }}>{{ v }}</>"])
def test_a_template_that_leaves_out_nothing_of_a_call_is_taken(kept):
    (_, called), _ = examples_of(chat_of(losing(kept)), CALLED)
    assert "Oslo" in called and "later" in called
