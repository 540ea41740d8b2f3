"""What a server reads and writes under a chat template: computed by transformers' own renderer."""

import json
import re

import tokenizers
from conftest import ROOT
from formats import FOLDER
from transformers.utils.chat_template_utils import render_jinja_template

from plugsft.data.chat import Chat
from plugsft.data.formats import read_turns
from plugsft.recipe.tables import Data
from plugsft.tokens.tokenizer import Tokenizer

FILES = [*sorted(FOLDER.glob("*.jinja")), *sorted((ROOT / "recipes").glob("*_tools.jinja"))]
TEMPLATES = {
    path.stem: path.read_text("utf8") for path in FILES if not path.stem.endswith("_training")
}
"""TRL's, and ours that know tools."""
MARKUP = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|<\uff5c[^<>]{1,40}\uff5c>|</?[a-z_]{3,20}>|\[/?[A-Z_]{3,20}\]|<[a-z_|]{3,20}>"
)
STOPS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>"),
    *("<|return|>", "<|call|>", "<end_of_turn>", "<turn|>", "<|eot|>", "<end_of_utterance>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|END_OF_TURN_TOKEN|>", "<|tool_response>"),
    *("<|user|>", "<|observation|>", "<|assistant_end|>", "<|eos|>", "<|end_of_turn|>", "[e~["),
    *("<seed:eos>", "<|message_sep|>", "</assistant>", "<SPECIAL_12>", "<|turn_end|>", "</s>"),
    *("<|hy_User|>", "<|end_of_msg|>", "<|role_end|>", "<|calls|>", "<sep>"),
    "<end_of_sentence>",
)
OPENED = re.compile(r"<think>$|<\|START_THINKING\|>$|<\|open\|>think<\|sep\|>$")
CLOSED = re.compile(r"</\w+>$|\[/\w+\]$|\|>$")
CLOSING = re.compile(r"^(</think>|<\|END_THINKING\|>|<\|close\|>think<\|sep\|>)")
HEADER = re.compile(r"(<[^<>]+>|\[/?\w+\]|)[^<>\[\]]*$")
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
    "mixed": [
        *(ASK, answer("It is 4.", **thought("two and two")), AGAIN, answer("Then 6.")),
        *(ASK, answer("Four again.", **thought("as before"))),
    ],
    "call": [ASK, answer("", tool_calls=[OSLO]), result("sunny"), answer("Sunny there.")],
    "two calls": [
        *(ASK, answer("", tool_calls=[OSLO, BERGEN]), result("sunny"), result("rain", 4)),
        answer("Sunny and rain."),
    ],
    "no arguments": [ASK, answer("", tool_calls=[call("{}")]), result("sunny"), answer("Sunny.")],
    "words and a call": [
        *(ASK, answer("Let me look.", tool_calls=[OSLO]), result("sunny"), answer("Sunny there.")),
    ],
    "steps": [
        *(ASK, answer("", tool_calls=[OSLO], **thought("first Oslo")), result("sunny")),
        *(answer("", tool_calls=[BERGEN], **thought("then Bergen")), result("rain", 4)),
        answer("Sunny and rain.", **thought("both known")),
    ],
}
WITH_TOOLS = ("call", "two calls", "no arguments", "words and a call", "steps")


def chat_of(source, day="", without=""):
    """A chat template with a tokenizer that has the tokens which it writes."""
    stops = [stop for stop in STOPS if stop in source and stop != without]
    tokens = sorted({*MARKUP.findall(source), *stops, "</s>", "<s>"})
    if "<|return|>" in stops:
        stops = ["<|return|>", "<|call|>"]  # gpt-oss: <|end|> is between a thought and the answer
    end = "</s>" if not stops or "eos_token" in source else stops[0]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.add_special_tokens(tokens)
    names = {"eos_token": end, "bos_token": "<s>"}
    light = Tokenizer(backend, source, names, more_stops=tuple(stops), day=day)
    chat = Chat(light, Data(source="x"))
    chat.source, chat.options, chat.tokenizer = source, {}, light
    return chat


def conversation(turns, tools=False):
    chat = read_turns(json.loads(json.dumps(turns)))
    chat.tools = [{"type": "function", "function": WEATHER}] if tools else None
    return chat


def examples_of(chat, turns, tools=False):
    """The prompt and the answer of each trained turn."""
    examples = chat.examples(conversation(turns, tools)).examples
    return [
        ("".join(parts[:answer]), parts[answer])
        for parts in examples
        for answer in range(1, len(parts), 2)
    ]


def served(chat, turns, tools, prompt):
    """What transformers writes; a server gives the arguments of calls as objects."""
    turns = json.loads(json.dumps(turns))
    for turn in turns:
        for one in turn.get("tool_calls", ()):
            if isinstance(one["function"]["arguments"], str):
                one["function"]["arguments"] = json.loads(one["function"]["arguments"])
        if chat.needs_parts and isinstance(turn["content"], str):
            turn["content"] = [{"type": "text", "text": turn["content"]}]
    try:
        return write(chat, turns, tools, prompt)
    except TypeError:
        # The template takes the arguments of calls as JSON only.
        for one in (one for turn in turns for one in turn.get("tool_calls", ())):
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
        return write(chat, turns, tools, prompt)


def write(chat, turns, tools, prompt):
    (text,), _ = render_jinja_template(
        [turns],
        tools=[{"type": "function", "function": WEATHER}] if tools else None,
        chat_template=chat.source,
        add_generation_prompt=prompt,
        **{"bos_token": "<s>", "eos_token": chat.end, **chat.options},
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
        whole = served(chat, turns[: number + 1], tools, False)
        wrong = compare_answer(chat, turns[number], prompt, words, whole)
        if wrong and "</think>" in turns[number]["content"]:
            # Behind a prompt that opens a thought, one in the text is written as one in a field.
            field, content = turns[number]["content"].split("</think>")
            field = thought(field.replace("<think>", "").strip())
            whole = served(chat, [*turns[:number], answer(content.strip(), **field)], tools, False)
            wrong = compare_answer(chat, turns[number], prompt, words, whole)
        if wrong:
            return f"{wrong} in the answer of turn {number}: {prompt[-60:]!r} {words!r} {whole!r}"
    return ""


def compare_answer(chat, turn, prompt, words, whole):
    """Compare an answer with the text of the messages up to and with it."""
    stop = max((stop for stop in chat.stops if words.endswith(stop)), key=len, default=None)
    if stop is None:
        return "no stop token"
    body = words.removesuffix(stop)
    if any(stop in body and stop not in str(turn) for stop in chat.stops):
        return "a stop token"
    if lost := words_lost(turn, body):
        return f"{lost} is missing"
    text, begun, written = ("".join(part.split()) for part in (whole, prompt, body))
    # The prompt may leave a thought open, and the answer closes it at once.
    opened = OPENED.search(begun)
    if opened and written not in text:
        written = CLOSING.sub("", written)
    if written not in text:
        return "other words"
    before, _, behind = text.rpartition(written)
    for token in sorted(chat.special, key=len, reverse=True):
        behind = behind.replace(token, "")
    if behind:
        return f"words behind it, {behind!r},"
    # Where the prompt ends, the answer begins: behind the same header, or a block that is closed.
    headers = [HEADER.search(part)[0] for part in (begun, OPENED.sub("", begun))]
    closed = begun.startswith(before) and CLOSED.search(begun)
    same = before == begun or closed or any(map(before.endswith, headers))
    return "" if same else f"another beginning, {before[-40:]!r},"


def words_lost(turn, text):
    """What a turn has and a text has not."""
    values = [turn["content"].rpartition("</think>")[2].strip()]
    for one in turn.get("tool_calls", ()):
        arguments = one["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        values += [one["function"]["name"], *map(str, arguments.values())]
    return next((value for value in values if text.count(value) < values.count(value)), "")
