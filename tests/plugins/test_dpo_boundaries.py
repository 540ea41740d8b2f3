"""dpo: both answers of a pair are trained from the same token on, as in TRL."""

import warnings
from pathlib import Path

import pytest
import torch
import trl
from conftest import only_full, tiny_tables
from dpo_steps import assert_trl_s, of_trl, open_dpo, prepared_by_trl
from first_step import say, shaken
from formats import CALL, MAKERS, RESULT, TEMPLATES, tokenizer_of
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from plugsft.data import prepare
from plugsft.data.defaults import DataDefaults
from plugsft.data.examples import align_pairs, target_mask
from plugsft.plugins.dpo import Dpo
from plugsft.recipe.tables import Data
from plugsft.registry.load import resolve
from plugsft.tokens.tokenizer import lighten

with warnings.catch_warnings():
    warnings.simplefilter("ignore")

pytestmark = pytest.mark.filterwarnings("ignore")  # trl's own


FOLDER = Path(trl.__file__).parent / "chat_templates"


def ask(words):
    return say(words, "user")


PROMPTS = ("6 x 7 is ", "6 x 7 is", "who?\n", "who? 🦉", "who? 🦉 ", "a\n\n", "wor")
ANSWERS = (("42", "forty"), ("🦉", "🦊"), ("\nowls", "owls"), ("ds", "dim"), ("\n\nb", " c"))
PAIRS = [(prompt, *answers) for prompt in PROMPTS for answers in ANSWERS]
TEXTS = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in PAIRS]
FORMATS = {
    "prompts": TEXTS,
    "common beginnings": [
        {side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in TEXTS
    ],
    "chats": [
        {name: [say(words, "user" if name == "prompt" else "assistant")]}
        | {side: [say(row[side])] for side in ("chosen", "rejected")}
        for row in TEXTS
        for name, words in [("prompt", row["prompt"])]
    ],
}


def of_ours(tokenizer, rows, folder):
    """Return (ids, mask) of both answers of rows, as plugsft prepares them."""
    tables = tiny_tables(folder, rows)
    tokenizer.save_pretrained(folder / "tokenizer")
    tables["model"]["tokenizer"] = str(folder / "tokenizer")
    tables["data"]["max_length"] = 4096
    recipe, active = resolve({**tables, "plugins": {"dpo": {}}})
    active.attach(DataDefaults(recipe.folder))
    tokens = prepare.prepare(recipe, active).tokens
    assert len(tokens) == len(rows)
    found = []
    for number in range(len(rows)):
        ids, mask = (some.tolist() for some in tokens.example(number))
        first = int(tokens.sequences([number])[0][0])
        found.append([(ids[:first], mask[:first]), (ids[first:], mask[first:])])
    return found


KINDS = [
    *(("prompts", kind, None) for kind in MAKERS),
    *(("common beginnings", kind, None) for kind in MAKERS),
    *(("chats", "BPE", name) for name in ("chatml", "qwen2_5", "llama3", "gemma", "qwen3")),
    *(("chats", "BPE across spaces", name) for name in ("chatml", "qwen2_5")),
    *(("chats", "Unigram", name) for name in ("chatml", "llama3")),
    *(("chats", "byte fallback", name) for name in ("chatml", "qwen2_5")),
]


NEWLINE = ("chatml", "qwen2_5", "gemma", "qwen3")
"""Templates that write one behind the end of an answer, which TRL trains and we do not."""


@pytest.mark.parametrize(("form", "kind", "template"), KINDS)
def test_ids_and_masks_equal_those_of_trl(tmp_path, form, kind, template):
    tokenizer, rows = tokenizer_of(kind, template), FORMATS[form]
    theirs, ours = prepared_by_trl(tokenizer, rows), of_ours(tokenizer, rows, tmp_path)
    for row, expected, found in zip(rows, theirs, ours, strict=True):
        for (their_ids, begin), (ids, mask) in zip(expected, found, strict=True):
            assert ids == their_ids, row
            # The first token is in no one's loss: nothing stands before it.
            assert mask.index(True) == max(begin, 1), row
            end = max(place for place, trained in enumerate(mask) if trained) + 1
            assert sum(mask) == end - max(begin, 1), row
            newline = "\n" if template in NEWLINE else ""
            assert tokenizer.decode(ids[end:]).strip(" ") == newline, row


WORD = {"word": {"type": "string", "description": "w"}}
TOOL = {
    "name": "look_up",
    "description": "Look a word up.",
    "parameters": {"type": "object", "properties": WORD, "required": ["word"]},
}


def think(words, thought):
    return {**say(words), "reasoning_content": thought}


def pair(prompt, chosen, rejected, **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


TOOLS = {"tools": [{"type": "function", "function": TOOL}]}
WHO = [ask("who? ")]
CHATS = {
    "plain": pair(WHO, [say("42")], [say("forty")]),
    "several turns": pair([say("brief", "system"), *WHO, say("a"), *WHO], [say("\na")], [say("a")]),
    "both think": pair(WHO, [think("owls", "at night")], [think("elks", "by day")]),
    "one thinks": pair(WHO, [think("owls", "at night")], [say("elks")]),
    "longer": pair(WHO, [say("owls"), *WHO, say("so")], [say("elks")]),
    "tools": pair(WHO, [CALL, RESULT, say("owls")], [say("elks")], **TOOLS),
    "a result": pair([*WHO, CALL, RESULT], [say("owls")], [say("elks")], **TOOLS),
    "own variables": pair(
        WHO, [say("owls")], [say("elks")], chat_template_kwargs={"enable_thinking": False}
    ),
}  # fmt: skip
OFTEN = ("chatml", "qwen2_5", "qwen2_5_training", "qwen3_5_nothink", "nemotron_3_nano", "llama3_1")
# Those of models that see images take lists of parts, and drop the texts that TRL gives them.
BLIND = ("idefics3", "llava_next", "smolvlm")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in OFTEN else only_full) for one in TEMPLATES]
)
def test_no_template_lets_a_prompt_be_trained(name):
    """What the template writes to ask for the answer is not, nor does one answer begin later."""
    tokenizer, tried = tokenizer_of("BPE", name), 0
    light, data = lighten(tokenizer), Data(source="none")
    for kind, row in CHATS.items():
        rendered = Dpo().render([row], light, data)
        if rendered.bad:
            continue  # test_rendering.py tells why
        encoded = light.encode_texts(rendered.texts, rendered.special_tokens)
        mask = target_mask(encoded, rendered.texts, rendered.spans)
        align_pairs(encoded, rendered, mask)
        first = int(encoded.counts[0])
        begins = mask[:first].argmax(), mask[first:].argmax()
        assert begins[0] == begins[1], kind
        tried += 1
        if name.startswith(BLIND) or (name.startswith("diffusion_gemma") and kind == "a result"):
            continue  # behind a result it asks for nothing, and writes the role all the same
        if name.startswith(("nemotron", "deepseek_r1")):
            continue  # TRL leaves the thought of the prompt open
        [expected] = prepared_by_trl(tokenizer, [row])
        ids = encoded.ids.tolist()
        for (theirs, begin), found in zip(expected, (ids[:first], ids[first:]), strict=True):
            assert begin == begins[0], kind
            assert theirs[:begin] == found[:begin], kind
    # DeepSeek's prompt opens a thought that its template never writes.
    assert tried >= 3 or name.startswith("deepseek")


LOSSES = [
    ("prompts", "BPE", None),
    ("prompts", "Unigram", None),
    ("common beginnings", "BPE across spaces", None),
    ("common beginnings", "byte fallback", None),
    ("chats", "BPE", "chatml"),
    ("chats", "BPE", "qwen2_5"),
    ("chats", "byte fallback", "llama3"),
]


@pytest.mark.parametrize(("form", "kind", "template"), LOSSES)
def test_the_loss_and_its_gradients_equal_those_of_trl(tmp_path, form, kind, template):
    tokenizer, rows = tokenizer_of(kind, template), FORMATS[form][:5] + FORMATS[form][5::4]
    run = open_dpo(
        tmp_path / "run", rows, tokenizer, beta=0.3, plugins={"lora": {"r": 4, "alpha": 8}}
    )
    model = AutoModelForCausalLM.from_pretrained(run.folder, dtype=torch.float32)
    peft = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    trainer, batch = of_trl(tmp_path, run, "sigmoid", 0.3, model, peft=peft)
    ours = shaken(run.model, 0.1).state_dict()
    trainer.model.load_state_dict({name: ours[name] for name in trainer.model.state_dict()})
    completion = batch["completion_mask"]
    completion[:, 0] = 0  # nothing stands before it, so that it is in no loss
    if template in NEWLINE:
        last = batch["attention_mask"].sum(1) - 1
        assert tokenizer.batch_decode(batch["input_ids"].gather(1, last[:, None])) == ["\n"] * len(
            last
        )
        completion.scatter_(1, last[:, None], 0)
    assert_trl_s(run, trainer, batch)
