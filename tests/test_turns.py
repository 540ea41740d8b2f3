"""Each turn is trained as a server writes it: compared with transformers' own renderer."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import tokenizers
import trl
from transformers.utils.chat_template_utils import render_jinja_template

from plugsft.data.chat import Chat
from plugsft.data.messages import BadRow, read_turns
from plugsft.recipe.tables import Data
from plugsft.tokens.tokenizer import Tokenizer

FOLDER = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = {
    path.stem: path.read_text("utf8")
    for path in sorted(FOLDER.glob("*.jinja"))
    if not path.stem.endswith("_training")
}
MARKUP = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|<\uff5c[^<>]{1,40}\uff5c>|</?[a-z_]{3,20}>|\[/?[A-Z_]{3,20}\]|<[a-z_|]{3,20}>"
)
STOPS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>"),
    *(
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<turn|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    *("<|END_OF_TURN_TOKEN|>", "<|user|>", "<|observation|>", "<|eot|>"),
    *("<end_of_utterance>", "<|tool_response>"),
)
WORDS = ("a", "1", "end", "assistant", '"}', "<b>html</b>", "\u65e5\u672c\u8a9e", "  spaced  ")
ASK, AGAIN = ({"role": "user", "content": words} for words in ("What is 2+2?", "And 3+3?"))
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
WEATHER = {
    "name": "weather",
    "description": "Look the weather up.",
    "parameters": {"type": "object", "properties": PROPERTIES, "required": []},
}


def answer(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def call(arguments, number=3):
    function = {"name": "weather", "arguments": arguments}
    return {"id": f"abcdef12{number}", "type": "function", "function": function}


def result(content, number=3):
    return {
        "role": "tool",
        "name": "weather",
        "tool_call_id": f"abcdef12{number}",
        "content": content,
    }


def thought(words):
    return {"reasoning_content": words, "thinking": words}


OSLO, BERGEN = call({"city": "Oslo", "days": 3}), call({"city": "Bergen", "days": 4}, 4)
CHATS = {
    "plain": [ASK, answer("It is 4."), AGAIN, answer("Then 6.")],
    "system": [{"role": "system", "content": "Be brief."}, ASK, answer("It is 4.")],
    "thoughts": [
        *(ASK, answer("It is 4.", **thought("two and two"))),
        *(AGAIN, answer("Then 6.", **thought("more of them"))),
    ],
    "thoughts as text": [ASK, answer("<think>\ntwo and two\n</think>\n\nIt is 4.")],
    "call": [ASK, answer("", tool_calls=[OSLO]), result("sunny"), answer("Sunny there.")],
    "two calls": [
        *(ASK, answer("", tool_calls=[OSLO, BERGEN]), result("sunny"), result("rain", 4)),
        answer("Sunny and rain."),
    ],
    "no arguments": [ASK, answer("", tool_calls=[call("{}")]), result("sunny"), answer("Sunny.")],
}
WITH_TOOLS = ("call", "two calls", "no arguments")


def chat_of(source, day="", without=""):
    """A chat template with a tokenizer that has the tokens which it writes."""
    tokens = sorted({*MARKUP.findall(source), "</s>", "<s>"})
    stops = [stop for stop in STOPS if stop in source and stop != without]
    end = "</s>" if not stops or "eos_token" in source else stops[0]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.add_special_tokens(tokens)
    names = {"eos_token": end, "bos_token": "<s>"}
    light = Tokenizer(backend, source, names, more_stops=tuple(stops), day=day)
    chat = Chat(light, Data(source="x"))
    chat.source = source
    return chat


def conversation(turns, tools=False):
    chat = read_turns(json.loads(json.dumps(turns)))
    chat.tools = [{"type": "function", "function": WEATHER}] if tools else None
    return chat


def examples_of(chat, turns, tools=False):
    """The prompt and the answer of each trained turn."""
    texts = chat.render(conversation(turns, tools)).texts
    return [(text[:start], text[start:stop]) for text, spans in texts for start, stop in spans]


def served(chat, turns, tools, prompt):
    """What transformers writes; a server gives the arguments of calls as objects."""
    turns = json.loads(json.dumps(turns))
    for turn in turns:
        for one in turn.get("tool_calls", ()):
            if isinstance(one["function"]["arguments"], str):
                one["function"]["arguments"] = json.loads(one["function"]["arguments"])
        if chat.needs_parts and isinstance(turn["content"], str):
            turn["content"] = [{"type": "text", "text": turn["content"]}]
    (text,), _ = render_jinja_template(
        [turns],
        tools=[{"type": "function", "function": WEATHER}] if tools else None,
        chat_template=chat.source,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token=chat.end,
    )
    return text


def compare(chat, turns, tools, examples):
    """Compare the trained turns with what a server writes; "" if they are the same."""
    answers = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
    if len(examples) != len(answers):
        return f"{len(examples)} examples"
    for number, (prompt, words) in zip(answers, examples, strict=True):
        if prompt != served(chat, turns[:number], tools, True):
            return f"the prompt of turn {number}: {prompt[-200:]!r}"
        stop = next((stop for stop in chat.stops if words.endswith(stop)), None)
        if stop is None:
            return f"no stop at the end of {words!r}"
        body, whole = words.removesuffix(stop), served(chat, turns[: number + 1], tools, False)
        if body.strip() in whole:
            continue
        # The prompt leaves a thought open, and the answer closes it at once.
        closing, _, rest = body.partition("</think>")
        if closing.strip() or not prompt.rstrip().endswith("<think>") or rest.strip() not in whole:
            return f"the answer of turn {number}: {body!r}"
    return ""


def test_every_turn_of_every_template_is_as_served():
    counts, wrong = Counter(), []
    for name, source in TEMPLATES.items():
        chat = chat_of(source)
        for kind, turns in CHATS.items():
            try:
                examples = examples_of(chat, turns, kind in WITH_TOOLS)
            except BadRow as error:
                counts["refused"] += 1
                assert re.search("refuses it: .|; set |takes none", str(error)), (name, kind, error)
                continue
            difference = compare(chat, turns, kind in WITH_TOOLS, examples)
            counts["differing" if difference else "exact"] += 1
            wrong += [(name, kind, difference)] * bool(difference)
    print(dict(counts))
    assert not wrong, "\n".join(map(str, wrong))
    assert counts == {"exact": 230, "refused": 57}


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


def test_gpt_oss_ends_each_answer_as_a_server_does():
    chat = chat_of(TEMPLATES["gptoss"])
    first, second = (words for _, words in examples_of(chat, CHATS["plain"]))
    assert first.endswith("4.<|return|>") and second.endswith("6.<|return|>")
    called, told = (words for _, words in examples_of(chat, CHATS["call"], True))
    assert called.endswith("<|call|>") and told.endswith("Sunny there.<|return|>")
    with pytest.raises(BadRow, match=r"leaves out .* of a call; set model.chat_template"):
        examples_of(chat, CHATS["two calls"], True)


@pytest.mark.parametrize("kind", WITH_TOOLS)
def test_no_word_of_the_next_message_is_trained(kind):
    # Gemma 4 ends a call with a stop token that not every tokenizer names.
    chat = chat_of(TEMPLATES["gemma4"], without="<|tool_response>")
    for _, words in examples_of(chat, CHATS[kind], True):
        assert "!ask!" not in words and "sunny" not in words


def test_qwen3_gives_an_example_for_each_answer():
    chat = chat_of(TEMPLATES["qwen3"])
    rendered = chat.render(conversation(CHATS["plain"]))
    assert len(rendered.texts) == 2 and len(rendered.warnings) == 1
    header, empty = "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
    first = f"<|im_start|>user\nWhat is 2+2?<|im_end|>\n{header}"
    second = f"{first}It is 4.<|im_end|>\n<|im_start|>user\nAnd 3+3?<|im_end|>\n{header}"
    assert examples_of(chat, CHATS["plain"]) == [
        (first, f"{empty}It is 4.<|im_end|>"),
        (second, f"{empty}Then 6.<|im_end|>"),
    ]


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


def test_a_template_with_a_date_writes_the_day_of_the_run():
    source = "{{ strftime_now('%d %b %Y') }}" + TEMPLATES["qwen2_5"]
    for day, written in (("2026-11-25", "25 Nov 2026"), ("2025-01-02", "02 Jan 2025")):
        prompts = [prompt for prompt, _ in examples_of(chat_of(source, day), CHATS["plain"])]
        assert all(prompt.startswith(written + "<|im_start|>") for prompt in prompts)
