"""Published chat templates: each turn is trained as a server writes it, or refused with a cure."""

import json
import re
from collections import Counter

import pytest
from conftest import FULL, ROOT, run_plugsft, write_jsonl, write_recipe
from downloads import (
    TOKENIZERS,
    llama_cpp_templates,
    real_calls,
    real_chats,
    smollm2,
    unpack_tokenizer,
)
from served import CHATS, TEMPLATES, WITH_TOOLS, chat_of, compare, examples_of, served, words_lost

from plugsft.data.formats import BadRow
from plugsft.data.load_tokenizer import data_tokenizer, load_tokenizer
from plugsft.data.render import render_rows
from plugsft.recipe.tables import Data, Model

ENDED = re.compile(r"(</think[^<>]*>|<\|END_THINKING\|>|<channel\|>)\s*$")
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CURE = re.compile(r"set data\.template_kwargs = \{ (\w+) = (\S+) \}$")


def published(name, folder):
    """Return the folder of a published tokenizer, and its chat template: gpt-oss' is in TRL."""
    config = json.loads((unpack_tokenizer(name, folder) / "tokenizer_config.json").read_text())
    return folder, config.get("chat_template", TEMPLATES["gptoss"])


def collection(folder):
    """Return llama.cpp's templates, those of five tokenizers, and TRL's: each text once."""
    named = [(name, text) for name, text in llama_cpp_templates().items()]
    named += [(f"published {name}", published(name, folder)[1]) for name in TOKENIZERS]
    named += [(f"trl {name}", text) for name, text in TEMPLATES.items()]
    return {name: text for text, name in {text: name for name, text in named[::-1]}.items()}


def unwritable(chat, turns, tools):
    """Why no served model writes a chat so; "" if one does."""
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        try:
            prompt = served(chat, turns[:number], tools, True)
            whole = served(chat, turns[: number + 1], tools, False)
        except Exception as error:  # a template raises what it likes
            return f"raises {error}"
        results = [other["content"] for other in turns[:number] if other["role"] == "tool"]
        if (tools and "weather" not in prompt) or any(one not in prompt for one in results):
            return "loses the tools, or a result"
        if words_lost(turn, whole.partition(turns[0]["content"])[2] or whole):
            return "loses words or calls"
        thinks = "thinking" in turn or "<think>" in turn["content"]
        if thinks and ENDED.search(prompt):
            return "ends the thought before the model writes it"
    return ""


def test_inspect_shows_prompt_and_answer_of_each_turn_that_qwen3_trains(tmp_path):
    (folder := tmp_path / "qwen3").mkdir()
    published("qwen3", folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    *rows, alone = [*real_chats()[:3], {"messages": [{"role": "user", "content": "Anyone?"}]}]
    data = {"source": str(write_jsonl(tmp_path / "chats.jsonl", [*rows, alone]))}
    tables = {"output": str(tmp_path / "run"), "model": {"path": str(folder)}, "data": data}
    tables["data"] |= {"on_bad_row": "drop", "max_length": 500}
    tables["train"] = {"batch_size": 4, "learning_rate": 1e-4}
    recipe = write_recipe(tmp_path / "recipe.toml", tables)
    shown = run_plugsft("inspect", recipe).stdout
    examples = re.split(
        r"^\S+, row (\d): example (\d+) of (\d+), 1 turn, (\d+) tokens.*\n", shown, flags=re.M
    )
    counts = Counter()
    for row, number, of, tokens, drawn in zip(*(examples[n::5] for n in range(1, 6)), strict=True):
        turns = rows[int(row) - 1]["messages"][: 2 * int(number)]
        asked, told = (re.sub(r"\s", "", turn["content"]) for turn in turns[-2:])
        text = re.sub(r"^[ ^~]+$|\s|[␣⏎]", "", drawn, flags=re.M)
        prompt, _, answer = text.partition("<|im_start|>assistantanswer")
        assert prompt.startswith("prompt<|im_start|>user")
        assert prompt.endswith(f"<|im_start|>user{asked}<|im_end|>")
        assert answer.startswith(f"<think></think>{told}<|im_end|>") or int(tokens) == 500
        counts[row] += 1
        assert counts[row] == int(number) <= int(of) and int(tokens) <= 500
    total = sum(counts.values())
    assert total > 10 and counts.keys() == {"1", "2", "3"}
    assert re.search(r"^warning    lines? [1-3, ]+: no trained token, or two equal", shown, re.M)
    prepared = run_plugsft("prepare", recipe)
    line = f"data: {total} examples (chains of turns) of 4 rows, "
    assert line in prepared.stdout, prepared.stderr


def test_each_command_warns_of_what_turns_cost_under_qwen3s_template(tmp_path):
    (folder := tmp_path / "qwen3").mkdir()
    _, template = published("qwen3", folder)
    for condition in (
        "loop.index0 > ns.last_query_index",
        "loop.last or (not loop.last and reasoning_content)",
    ):
        assert condition in template
        template = template.replace(condition, "true")
    (tmp_path / "all_thoughts.jinja").write_text(template)
    data = {"source": str(write_jsonl(tmp_path / "chats.jsonl", real_chats()[:4]))}
    scratch = {"hidden": 16, "layers": 1, "heads": 2, "context": 2048}
    tables = {
        "output": str(tmp_path / "run"),
        "model": {"scratch": scratch, "tokenizer": str(folder)},
        "data": data | {"max_length": 2048},
        "train": {"batch_size": 2, "micro_batch": 2, "steps": 1, "learning_rate": 1e-4},
    }
    recipe = write_recipe(tmp_path / "recipe.toml", tables)
    printed = [
        run_plugsft(command, recipe).stdout for command in ("check", "inspect", "prepare", "train")
    ]
    costs = re.compile(r"makes (\S+) times the tokens, .* about \1 times as long, with (\S+) times")
    found = {costs.search(text)[0] for text in printed}
    (times, steps) = map(float, costs.search(found.pop()).groups())
    assert not found and times > 5 and steps > 5
    cure = f"model.chat_template={tmp_path / 'all_thoughts.jinja'}"
    for change in (cure, "data.train_on=last"):
        assert "times the tokens" not in run_plugsft("check", recipe, change).stdout


def test_published_templates_train_what_a_server_writes_or_refuse_with_a_cure(tmp_path):
    counts, reasons, wrong = Counter(), Counter(), []
    for name, source in [*collection(tmp_path).items()][:: 1 if FULL else 6]:
        chat = chat_of(source)
        for kind, turns in CHATS.items():
            tools = kind in WITH_TOOLS
            try:
                difference = compare(chat, turns, tools, examples_of(chat, turns, tools))
            except BadRow as error:
                reason, _, cure = str(error).partition("; ")
                possible = not unwritable(chat, turns, tools)
                counts["refused" if possible else "not writable"] += 1
                reasons[reason] += possible
                assert cure.startswith("set ") or "takes none" in reason, (name, kind, error)
                difference = cured(source, turns, tools, CURE.search(cure))
            else:
                counts["differing" if difference else "exact"] += 1
            wrong += [(name, kind, difference)] * bool(difference)
    share = counts["exact"] / (counts["exact"] + counts["refused"])
    print(f"{dict(counts)}: of what a served model can write, {share:.1%} are exact")
    print(*(f"{count} refused: {reason}" for reason, count in (+reasons).items()), sep="\n")
    assert not wrong, "\n".join(map(str, wrong))
    assert share > 0.94 or not FULL
    assert counts == {"exact": 764, "refused": 46, "not writable": 210} or not FULL


def cured(source, turns, tools, cure):
    """Compare the turns once the cure of the message is applied."""
    if cure is None:
        return ""
    chat = chat_of(source)
    chat.options = {cure[1]: json.loads(cure[2])}
    chat.variables |= chat.options
    return compare(chat, turns, tools, examples_of(chat, turns, tools))


def load(name, folder):
    """Return the tokenizer of a published template, and the template."""
    folder, source = published(name, folder)
    (folder / "chat_template.jinja").write_text(source)
    model = Model(path=str(folder))
    return data_tokenizer(load_tokenizer(model, folder), model, "2026-11-25"), source


@pytest.mark.parametrize("name, most", [("qwen3", 9), ("gptoss", 1)])
def test_real_function_calls_are_trained_whole_or_refused(name, most, tmp_path):
    """gpt-oss' template writes the first call of a message only."""
    rows = real_calls()[:: 1 if FULL else 10]
    rendered = render_rows(rows, load(name, tmp_path)[0], Data(source="x"))
    calls = [row["messages"][-1]["tool_calls"] for row in rows]
    assert rendered.bad.keys() == {n for n, made in enumerate(calls) if len(made) > most}
    assert all("; set model.chat_template" in reason for reason in rendered.bad.values())
    for number, text, [(start, stop)] in zip(
        rendered.rows, rendered.texts, rendered.spans, strict=True
    ):
        position = start
        for function in (call["function"] for call in calls[number]):
            position = text.index(function["name"], position, stop)
            for value in function["arguments"].values():
                position = text.index(json.dumps(value, ensure_ascii=False), position, stop)


@pytest.mark.parametrize(
    "name, template", [("qwen3", "chatml_tools"), ("llama3_1", "llama3_tools")]
)
def test_real_function_calls_are_read_back_as_trained(name, template, tmp_path):
    file = ROOT / f"recipes/{template}.jinja"
    model = Model(path=str(unpack_tokenizer(name, tmp_path)), chat_template=str(file))
    tokenizer = load_tokenizer(model, tmp_path)
    rows = real_calls()[:: 1 if FULL else 10]
    rendered = render_rows(rows, data_tokenizer(tokenizer, model, ""), Data(source="x"))
    assert not rendered.bad and rendered.rows == [*range(len(rows))]
    for row, text, [(start, stop)] in zip(rows, rendered.texts, rendered.spans, strict=True):
        ids = tokenizer.encode(text[start:stop], add_special_tokens=False)
        assert ids[-1] in tokenizer.added_tokens_decoder
        read = tokenizer.parse_response(ids, prefix=text[:start])
        assert read["tool_calls"] == row["messages"][-1]["tool_calls"]


@pytest.mark.parametrize(
    ("change", "tokens"),
    [({}, [9, 9, 8]), ({"add_tokens": [*LLAMA]}, []), ({"chat_template": "auto"}, [])],
)
def test_markers_of_llama3_are_ordinary_text_to_smollm2(change, tokens):
    folder = smollm2()
    model = Model(path=str(folder), chat_template=str(ROOT / "recipes/llama3_tools.jinja"))
    model = model.model_copy(update=change)
    tokenizer = load_tokenizer(model, folder)
    rendered = render_rows(real_chats()[:3], data_tokenizer(tokenizer, model, ""), Data(source="x"))
    counts = [len(tokenizer.encode(marker)) for marker in LLAMA]
    assert not rendered.bad and (counts == tokens or not tokens)
    for warning, rows in rendered.warnings.items():
        assert rows == [0, 1, 2] and tokens
        assert f"writes {', '.join(LLAMA)}, which the tokenizer reads as ordinary text" in warning
        assert "several tokens each" in warning
    assert bool(rendered.warnings) == bool(tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_real_chat_is_refused_without_a_cure(name, tmp_path):
    tokenizer, source = load(name, tmp_path)
    rows = real_chats()[: 1000 if FULL else 50]
    rendered = render_rows(rows, tokenizer, Data(source="x"))
    print(name, len(rows), "chats,", len(rendered.texts), "examples,", len(rendered.bad), "refused")
    # One of the thousand has a turn without a word, which no template can give.
    uncured = {reason for reason in rendered.bad.values() if "; set " not in reason}
    assert uncured <= {"an empty turn of the assistant"}, uncured
    assert len({*rendered.rows}) == len(rows) - len(rendered.bad)
    chat = chat_of(source)
    for row in rows[:10]:
        assert not compare(chat, row["messages"], False, examples_of(chat, row["messages"]))
