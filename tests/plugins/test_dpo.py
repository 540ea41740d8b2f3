"""dpo: pairs of answers rendered, compared and measured as in TRL, in every layout."""

import json
import math
import re
import tomllib

import numpy as np
import pytest
import torch
from conftest import (
    must_succeed,
    only_full,
    read_metrics,
    read_record,
    run_launch,
    run_plugsft,
    run_ranks,
    tiny_tables,
    write_recipe,
)
from dpo_steps import MEASURED, assert_trl_s, of_trl, open_dpo
from first_step import ask, logps_of, pairs, say, shaken
from gradients import assert_equal, gradients
from hypothesis import assume, given
from hypothesis import strategies as st
from launching import TRAIN, config
from peft import LoraConfig
from plugin_packages import activate, install
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from plugsft import DataError, RecipeError
from plugsft.base.machine import look
from plugsft.data import prepare
from plugsft.data.chat import CHATML
from plugsft.data.defaults import DataDefaults
from plugsft.data.formats import ROLES
from plugsft.data.pairs import split_pair
from plugsft.registry.active import check
from plugsft.registry.load import resolve

# Rows become pairs.

ASK, GOOD, POOR = ask("who?"), say("owls sing"), say("owls sleep")
TOOLS = [{"type": "function", "function": {"name": "look"}}]
GIVEN = {"chosen": [GOOD], "rejected": [POOR]}
READ = [
    ({"prompt": [ASK], **GIVEN}, ([ASK], [GOOD], [POOR])),
    ({"prompt": "who? ", "chosen": "owls", "rejected": "cats"}, ("who? ", "owls", "cats")),
    # Answers that are texts, of a prompt that is turns; and turns, of a prompt that is a text.
    (
        {"prompt": [ASK], "chosen": "owls sing", "rejected": "owls sleep"},
        ([ASK], [GOOD], [POOR]),
    ),
    ({"prompt": "who?", **GIVEN}, ([ASK], [GOOD], [POOR])),
    ({"prompt": "who?", "chosen": GOOD, "rejected": POOR}, ([ASK], [GOOD], [POOR])),
    # The prompt stands in the answers, too, or only there, whatever the column says.
    ({"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, POOR]}, ([ASK], [GOOD], [POOR])),
    ({"chosen": [ASK, GOOD], "rejected": [ASK, POOR]}, ([ASK], [GOOD], [POOR])),
    (
        {"prompt": "who?", "chosen": [ASK, GOOD], "rejected": [ASK, POOR]},
        ([ASK], [GOOD], [POOR]),
    ),
    (
        {"prompt": None, "chosen": [ASK, GOOD, ASK, GOOD], "rejected": [ASK, GOOD, ASK, POOR]},
        ([ASK, GOOD, ASK], [GOOD], [POOR]),
    ),
    # They part earlier than at their last turn.
    (
        {"chosen": [ASK, GOOD, ASK, GOOD], "rejected": [ASK, POOR, ASK, GOOD]},
        ([ASK], [GOOD, ASK, GOOD], [POOR, ASK, GOOD]),
    ),
    # The last space of a common beginning belongs to the words behind it.
    ({"chosen": "who? owls", "rejected": "who? cats"}, ("who?", " owls", " cats")),
    # An answer is never empty.
    ({"chosen": "owls", "rejected": "owls sing"}, ("owl", "s", "s sing")),
    # ShareGPT's turns.
    (
        {
            "prompt": "who?",
            "chosen": [{"from": "model", "value": "owls"}],
            "rejected": [{"from": "gpt", "value": "cats"}],
        },
        ([ASK], [{"from": "model", "value": "owls"}], [{"from": "gpt", "value": "cats"}]),
    ),
]


@pytest.mark.parametrize(("row", "expected"), READ)
def test_a_row_is_read_as_a_prompt_and_two_answers(row, expected):
    more = {"tools": TOOLS, "chat_template_kwargs": {"short": True}}
    prompt, chosen, rejected = expected
    assert split_pair(row) == [{"prompt": prompt, "completion": one} for one in (chosen, rejected)]
    assert split_pair(row | more | {"score": 1}) == [
        {"prompt": prompt, "completion": one, **more} for one in (chosen, rejected)
    ]


WORDS = st.text(min_size=1, max_size=6)


@given(WORDS, WORDS, WORDS)
def test_the_common_beginning_of_two_texts_is_their_prompt(prompt, chosen, rejected):
    assume(chosen != rejected)
    one, other = split_pair({"chosen": prompt + chosen, "rejected": prompt + rejected})
    assert one["prompt"] == other["prompt"] and one["completion"] and other["completion"]
    assert (one["prompt"] + " ").startswith(prompt)
    assert one["prompt"] + one["completion"] == prompt + chosen
    assert other["prompt"] + other["completion"] == prompt + rejected


BAD = [
    ({"prompt": "x", "chosen": "y"}, "no 'rejected': the row has chosen, prompt"),
    ({"rejected": None, "chosen": "y"}, "'rejected' is null"),
    ({"other": 1}, "no 'chosen': the row has other"),
    ({}, "no 'chosen': the row has no columns"),
    ({"chosen": "x", "rejected": [GOOD]}, "not both texts, or both lists of turns"),
    ({"chosen": 1, "rejected": 2}, "not both texts, or both lists of turns"),
    ({"prompt": "x", "chosen": "y", "rejected": "y"}, "chosen and rejected are the same"),
    (
        {"chosen": "abc", "rejected": "xyz"},
        "no prompt, and chosen and rejected have no",
    ),
    ({"chosen": [POOR, ASK], "rejected": [ASK]}, "have no common beginning"),
    (
        {"prompt": "x!", "chosen": [ASK, GOOD], "rejected": [ASK, POOR]},
        "the text of 'prompt' is in no turn of 'chosen'",
    ),
    ({"system": "s", "prompt": "x", "chosen": "y", "rejected": "z"}, "'system' is for chats"),
    *(
        ({"system": wrong, "prompt": [ASK], "chosen": "y", "rejected": "z"}, "'system' is not text")
        for wrong in (0, False, [])
    ),
    ({"prompt": None, "chosen": "who? owls", "rejected": "who? cats"}, "'prompt' is null"),
    *(
        ({"prompt": wrong, "chosen": one, "rejected": other}, "'prompt' is .*, and should be a")
        for wrong in (5, 0, False, {})
        for one, other in (("who? owls", "who? cats"), ([ASK, GOOD], [ASK, POOR]))
    ),
]


@pytest.mark.parametrize(("row", "says"), BAD)
def test_a_row_without_two_answers_says_why(row, says):
    with pytest.raises(ValueError, match=says):
        split_pair(row)


# Pairs become tokens.


@pytest.fixture
def prepared(tmp_path):
    """Give `prepared(rows, max_length=...)`: tokens and tokenizer, and each example in words.

    In words it is, for each of its two sequences, the text that is not trained, and that which is.
    """

    def make(rows, template=None, **data):
        tables = tiny_tables(tmp_path, rows)
        if template:
            tables["model"]["chat_template"] = str(template)
        tables["data"] |= data
        recipe, active = resolve({**tables, "plugins": {"dpo": {}}})
        active.attach(DataDefaults(recipe.folder))
        made = prepare.prepare(recipe, active)
        return made.tokens, [in_words(made, number) for number in range(len(made.tokens))]

    return make


def in_words(made, number):
    ids, mask = made.tokens.example(number)
    counts, _ = made.tokens.sequences([number])
    assert len(counts) == 2
    found, start = [], 0
    for count in counts.tolist():
        here = slice(start, start + count)
        found.append(tuple(made.tokenizer.decode(ids[here][mask[here] == on]) for on in (0, 1)))
        start += count
    assert start == len(ids)
    return found


CHAT = "<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("column", [{}, {"chosen": "good", "rejected": "poor", "prompt": "asked"}])
def test_answers_alone_are_trained(prepared, column):
    rows = [{"prompt": [ASK], **GIVEN}, {"chosen": [ASK, POOR], "rejected": [ASK, GOOD]}]
    rows = [{column.get(name, name): value for name, value in row.items()} for row in rows]
    tokens, words = prepared(rows, columns=column)
    sides = [(CHAT + "\n", f"{one['content']}<|im_end|>") for one in (GOOD, POOR)]
    assert words == [sides, sides[::-1]]
    assert tokens.facts["pairs"] == 2
    assert "of two answers: each answer as a server would write it" in tokens.facts["mask"]


def test_turns_of_an_answer_s_assistant_are_trained_and_none_of_the_prompt(prepared):
    row = {"prompt": [ASK, GOOD, ASK], "chosen": [GOOD, ASK, POOR], "rejected": [POOR]}
    _, [[chosen, rejected]] = prepared([row])
    assert chosen[1] == "owls sing<|im_end|>owls sleep<|im_end|>"
    assert rejected == (f"{CHAT}owls sing<|im_end|>\n{CHAT}\n", "owls sleep<|im_end|>")


def test_texts_are_pairs_too(prepared):
    rows = [
        {"prompt": "who?\n", "chosen": "owls", "rejected": "cats"},
        {"chosen": "why?\nowls", "rejected": "why?\ncats"},
    ]
    _, words = prepared(rows)
    answers = ["owls<|im_end|>", "cats<|im_end|>"]
    assert words == [[(asked, answer) for answer in answers] for asked in ("who?\n", "why?\n")]


def test_tools_and_variables_reach_both_conversations(prepared, tmp_path):
    template = tmp_path / "tools.jinja"
    tools = "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    short = "{% if short is defined %}, shortly{% endif %}|"
    template.write_text(tools + short + CHATML.read_text())
    more = {"tools": TOOLS, "chat_template_kwargs": {"short": True}}
    _, words = prepared([{"prompt": "who?", **GIVEN} | more], template=template)
    assert [one[0] for one in words[0]] == [f"look, shortly|{CHAT}\n"] * 2


def test_bad_rows_are_named_with_their_side(prepared):
    good = {"prompt": [ASK], **GIVEN}
    rows = [
        good,
        {**good, "rejected": None},
        {**good, "chosen": [say("")]},
        {**good, "rejected": "owls"},
        {**good, "rejected": [{"role": "nobody", "content": "x"}]},
        good,
    ]
    tokens, words = prepared(rows, on_bad_row="drop")
    assert len(words) == 2 and words[0] == words[1]
    assert tokens.rows.tolist() == [0, 5]
    told = {reason: entry["rows"] for reason, entry in tokens.facts["bad_rows"].items()}
    assert told == {
        "'rejected' is null": [1],
        "chosen: an empty turn of the assistant": [2],
        "chosen and rejected are not both texts, or both lists of turns": [3],
        "rejected: unknown role 'nobody'; known are " + ", ".join(ROLES): [4],
    }
    # Where all of the rows that are looked at are bad, too, it is they that are told.
    with pytest.raises(DataError, match=r"line 1: chosen and rejected are not both "):
        prepared(rows[3:4])
    with pytest.raises(DataError, match=r"line 3: chosen: an empty turn of the assistant"):
        prepared(rows)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_pair_is_left_out_whole_where_an_answer_is_cut_away(prepared, side):
    """A long answer loses its end; one whose beginning is cut away leaves no pair."""
    far = {**GIVEN, side: [ask("why " * 20), GOOD]}
    long = {**GIVEN, side: [say("owls " * 40)]}
    rows = [{"prompt": [ASK], **GIVEN}, {"prompt": [ASK], **far}, {"prompt": [ASK], **long}]
    tokens, words = prepared(rows, max_length=30, too_long="truncate", on_bad_row="drop")
    assert tokens.rows.tolist() == [0, 2] and tokens.facts["truncated"]["count"] == 1
    counts, _ = tokens.sequences(np.arange(2))
    assert sorted(counts.tolist()[2:])[1] == 30
    place = ("chosen", "rejected").index(side)
    assert words[1][place][1].startswith("owls owls") and "<|im_end|>" not in words[1][place][1]
    assert words[1][1 - place] == words[0][1 - place]
    left_out = tokens.facts["warnings"][
        "no trained token, or two equal answers, within data.max_length; left out"
    ]
    assert left_out == {"count": 1, "rows": [1]} and not tokens.facts["bad_rows"]
    with pytest.raises(DataError, match=r"lines 2, 3: longer than 30 tokens"):
        prepared(rows, max_length=30, on_bad_row="drop", too_long="error")
    tokens, _ = prepared(rows, max_length=30, on_bad_row="drop", too_long="drop")
    assert tokens.rows.tolist() == [0]


def test_a_pair_whose_answers_are_equal_once_cut_is_left_out(prepared):
    far = {side: [say("owls " * 40 + side)] for side in ("chosen", "rejected")}
    rows = [{"prompt": [ASK], **GIVEN}, {"prompt": [ASK], **far}, {"prompt": [ASK], **GIVEN}]
    tokens, _ = prepared(rows, max_length=30, too_long="truncate")
    assert tokens.rows.tolist() == [0, 2] and tokens.facts["truncated"]["count"] == 0
    [(reason, left_out)] = tokens.facts["warnings"].items()
    assert "two equal answers" in reason and left_out == {"count": 1, "rows": [1]}
    assert prepared(rows, max_length=300)[0].rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize("rows", [[{"messages": [ASK, GOOD]}] * 3, [{"chosen": "x"}] * 3])
def test_data_without_pairs_ends_in_one_line(tiny, rows):
    result = run_plugsft(tiny(rows=rows, plugins={"dpo": {}}))
    assert result.returncode == 2
    [line] = result.stderr.strip().splitlines()
    assert "no row has two answers to compare: no '" in line
    assert '[data.columns], for instance chosen = "good"' in line


# Losses, gradients and measures are those of TRL.

LOSSES = [("sigmoid", 0.3), ("hinge", 0.05), ("ipo", 0.4), ("length_normalized", 4.0)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("loss", "beta"), LOSSES)
def test_full_fine_tuning_equals_trl(tmp_path, loss, beta):
    reference = tmp_path / "reference"
    first = open_dpo(tmp_path / "first")
    shaken(first.model, 0.1).save_pretrained(reference)
    run = open_dpo(tmp_path / "run", loss=loss, beta=beta, reference=str(reference))
    model, other = (
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)
        for one in (run.folder, reference)
    )
    loss, measured = assert_trl_s(run, *of_trl(tmp_path, run, loss, beta, model, other))
    assert abs(measured["margin"]) > 0.005 and 0 < measured["accuracy"] < 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("loss", "beta"), LOSSES)
def test_lora_equals_trl(tmp_path, loss, beta):
    run = open_dpo(tmp_path / "run", loss=loss, beta=beta, plugins={"lora": {"r": 4, "alpha": 8}})
    model = AutoModelForCausalLM.from_pretrained(run.folder, dtype=torch.float32)
    peft = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    trainer, batch = of_trl(tmp_path, run, loss, beta, model, peft=peft)
    ours = shaken(run.model, 0.1).state_dict()
    trainer.model.load_state_dict({name: ours[name] for name in trainer.model.state_dict()})
    loss, measured = assert_trl_s(run, trainer, batch)
    assert abs(measured["margin"]) > 0.005 and 0 < measured["accuracy"] < 1


# Formulas that TRL lacks, or computes in another way.


@pytest.fixture
def other(tmp_path):
    """Give a model that is not the one that a run begins with."""
    shaken(open_dpo(tmp_path / "other").model, 0.1).save_pretrained(tmp_path / "shaken")
    return tmp_path / "shaken"


FORMULAS = {
    "sigmoid": lambda beta, scores, lengths: beta * (scores[:, 0] - scores[:, 1]),
    "length_normalized": lambda beta, scores, lengths: (
        beta * (scores[:, 0] / lengths[:, 0] - scores[:, 1] / lengths[:, 1])
    ),
}


@pytest.mark.parametrize(("loss", "beta"), [("sigmoid", 0.3), ("length_normalized", 4.0)])
def test_label_smoothing_and_nll(tmp_path, other, loss, beta):
    options = {"loss": loss, "beta": beta, "label_smoothing": 0.2, "nll": 0.5}
    run = open_dpo(tmp_path / "run", reference=str(other), **options)
    found, measured = run.losses()
    mine, theirs = (
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)
        for one in (run.folder, other)
    )
    logps, lengths = logps_of(mine, run)
    scores = logps - logps_of(theirs, run)[0].detach()
    z = FORMULAS[loss](beta, scores, lengths)
    compared = 0.8 * torch.log(1 + torch.exp(-z)) + 0.2 * torch.log(1 + torch.exp(z))
    nll = -logps[:, 0] / lengths[:, 0]
    expected = (compared + 0.5 * nll).mean()
    expected.backward()
    assert found == pytest.approx(expected.item(), rel=1e-5)
    assert_equal(gradients(run.model), gradients(mine))
    assert measured["nll"] == pytest.approx(nll.mean().item(), rel=1e-5)
    assert {*measured} == {*MEASURED, "nll"}


# Real runs.

RUNS = TRAIN | {"learning_rate": 1e-2, "steps": 6}
KINDS = {"full": {"dpo": {}}, "lora": {"dpo": {}, "lora": {"r": 4, "alpha": 8}}}
EVAL = {"every": 3, "split": "train[:5]"}
MEASURES = ("loss", "grad_norm", *MEASURED)


@pytest.fixture
def recipe(tiny):
    return of_kind(tiny, "full")


def of_kind(tiny, kind):
    return tiny(rows=pairs(21), train=RUNS, plugins=KINDS[kind], eval=EVAL)


def train(recipe, folder, *words):
    """Run; return all that it measured of what is learned."""
    must_succeed(recipe, f"output={folder}", *words)
    return measured(folder)


def measured(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = [*MEASURES, *(f"eval_{name}" for name in MEASURES)]
    found = [(name, line[name]) for line in lines for name in names if name in line]
    assert len(found) == 8 * 6 + 7 * 2
    return [value for _, value in found]


def about(values):
    return pytest.approx(values, rel=1e-5, abs=2e-5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Give `plain(kind)`: what a run measures that has no optimisation; each kind is run once."""
    folder, done = tmp_path_factory.mktemp("plain"), {}

    def make(kind):
        if kind not in done:
            tables = tiny_tables(folder, pairs(21)) | {"eval": EVAL, "plugins": KINDS[kind]}
            tables["train"] |= RUNS
            recipe = write_recipe(folder / "recipe.toml", tables)
            done[kind] = train(recipe, folder / kind)
        return done[kind]

    make.folder = folder
    return make


def test_the_first_loss_is_ln_2_and_pairs_are_learned(recipe, tmp_path):
    train(recipe, tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    assert lines[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert lines[0]["margin"] == pytest.approx(0, abs=1e-5) and lines[0]["grad_norm"] > 0.1
    assert lines[-1]["loss"] < 0.66 and lines[-1]["margin"] > 0.1


PACKED = ("bfd_packing.capacity=256",)
SHARED = (*PACKED, "dpo.share_prompt=true")
FUSED, AGAIN = "fused_loss.chunk=7", "gradient_checkpointing.every=1"
LAYOUTS = {
    "fused": (FUSED,),
    "again": (AGAIN,),
    "packed": PACKED,
    "packed fused": (*PACKED, FUSED),
    "packed again": (*PACKED, AGAIN),
    "shared": SHARED,
    "shared fused": (*SHARED, FUSED),
    "shared again": (*SHARED, AGAIN),
    "shared fused again": (*SHARED, FUSED, AGAIN, "async_collate={}"),
}


ALWAYS = [("full", "packed again"), ("full", "shared fused"), ("lora", "shared fused again")]
REST = [(kind, one) for one in LAYOUTS for kind in KINDS if (kind, one) not in ALWAYS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"), [*ALWAYS, *(pytest.param(*one, marks=only_full) for one in REST)]
)
def test_however_it_is_laid_out_the_same_is_learned(tiny, tmp_path, plain, kind, layout):
    words = [f"plugins.{one}" for one in LAYOUTS[layout]]
    if PACKED[0] in LAYOUTS[layout]:
        words.append("train.micro_batch=1")
    run = tmp_path / "laid"
    assert train(of_kind(tiny, kind), run, *words) == about(plain(kind))
    [summary] = [
        plugin["summary"] for plugin in read_record(run)["plugins"] if plugin["name"] == "dpo"
    ]
    assert "sigmoid loss, beta 0.1; reference: " in summary
    saved = re.search(r"prompts shared: (\d+)% fewer tokens \(proved, \de[-+]\d\d off\)", summary)
    assert bool(saved) == (SHARED[1] in LAYOUTS[layout])
    if saved:
        counts = [
            [line["tokens"] for line in read_metrics(it)] for it in (run, plain.folder / kind)
        ]
        assert sum(counts[0]) / sum(counts[1]) == pytest.approx(1 - int(saved[1]) / 100, abs=0.05)
        assert int(saved[1]) > 20


BLIND = """
    @plugin(after=["dpo", "bfd_packing"])
    class Blind:
        "Take from the second answer what it sees of the first one's document."

        @hookimpl(wrapper=True)
        def collate(self):
            batch = yield
            if "seen" in batch:
                batch["seen"] = tuple(0 for _ in batch["seen"])
            return batch
"""


def test_a_prompt_that_is_not_seen_is_noticed_before_step_1(recipe, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", blind=BLIND), monkeypatch)
    words = [f"plugins.{one}" for one in (*SHARED, "blind={}")]
    result = run_plugsft(recipe, *words, "train.micro_batch=1")
    assert result.returncode == 2 and "step 1/" not in result.stdout
    assert "plugins.dpo: share_prompt: losses of a pair differ by" in result.stderr
    assert "this model's attention does not support it; remove share_prompt" in result.stderr


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_two_ranks_learn_what_one_learns(tiny, tmp_path, plain, kind):
    """In some global batches and evaluations, the last rank gets fewer pairs, or none."""
    recipe, run = of_kind(tiny, kind), tmp_path / "two"
    result = run_ranks(2, recipe, f"output={run}", "train.micro_batch=5")
    assert result.returncode == 0, result.stderr
    assert measured(run) == about(plain(kind))
    # The global batch of five has one micro-batch: the other rank computes an empty one.
    shared = [f"plugins.{one}" for one in SHARED]
    run = tmp_path / "shared"
    result = run_ranks(2, recipe, f"output={run}", *shared, "train.micro_batch=1")
    assert result.returncode == 0, result.stderr
    assert measured(run) == about(plain(kind))


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_it_goes_on_as_if_it_had_not_been_stopped(tiny, tmp_path, kind):
    recipe, whole, again = of_kind(tiny, kind), tmp_path / "whole", tmp_path / "again"
    train(recipe, whole, "checkpoint.every=1", "checkpoint.keep=9")
    words = (recipe, "--resume-from", whole / "checkpoints/step-000002")
    must_succeed(*words, f"output={again}")
    there, rest = lines_of(again), [line for line in lines_of(whole) if line["step"] > 2]
    assert there == rest and len(rest) == 6
    [file] = (whole / "model").glob("*model.safetensors")
    assert (again / "model" / file.name).read_bytes() == file.read_bytes()
    other = run_plugsft(*words, f"output={tmp_path / 'other'}", "plugins.dpo.beta=0.2")
    assert other.returncode == 2 and "plugins.dpo.beta was not set and is 0.2" in other.stderr


def lines_of(run):
    """Return all that a run measured but its times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = {"step", *MEASURES, *(f"eval_{name}" for name in MEASURES), "trained_tokens"}
    return [{name: value for name, value in line.items() if name in kept} for line in lines]


WEIGH = """
    from pathlib import Path

    @plugin(after=["dpo"])
    class Weigh:
        "Note which share of the frozen copy a rank holds."

        folder: str

        @hookimpl(wrapper=True)
        def add_columns(self, model, tokens, ranks):
            make = model.load_frozen

            def frozen(*words):
                model = make(*words)
                held = whole = 0
                for one in model.parameters():
                    assert not one.requires_grad
                    whole += getattr(one, "ds_numel", one.numel())
                    part = getattr(one, "ds_tensor", one)
                    held += getattr(part, "to_local", lambda: part)().numel()
                Path(self.folder, f"share-{ranks.rank}").write_text(str(held / whole))
                return model

            model.load_frozen = frozen
            return (yield)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "launcher", "layout"),
    [
        ("full", "fsdp2", "shared fused again"),
        pytest.param("lora", "zero3", "shared fused again", marks=only_full),
        pytest.param("full", "zero3", "packed", marks=only_full),
        pytest.param("full", "zero3", "shared fused again", marks=only_full),
        pytest.param("full", "fsdp2", "again", marks=only_full),
        pytest.param("lora", "fsdp2", "shared fused", marks=only_full),
        pytest.param("lora", "fsdp2", "packed again", marks=only_full),
        pytest.param("lora", "zero3", "again", marks=only_full),
    ],
)
def test_sharded_ranks_learn_what_one_process_does(
    tiny, tmp_path, plain, monkeypatch, kind, launcher, layout
):
    activate(install(tmp_path / "site", weigh=WEIGH), monkeypatch)
    words = [f"plugins.{one}" for one in LAYOUTS[layout]]
    recipe, run = of_kind(tiny, kind), tmp_path / launcher
    words += [f"output={run}", "train.micro_batch=1", f"plugins.weigh.folder={tmp_path}"]
    code, _, err = run_launch(*config(launcher), "-m", "plugsft", recipe, *words)
    assert code == 0, err
    assert measured(run) == about(plain(kind))
    shares = [float(path.read_text()) for path in tmp_path.glob("share-*")]
    if kind == "full":
        assert len(shares) == 2 and sum(shares) == pytest.approx(1, abs=0.01)
        assert max(shares) < 0.6, "no rank holds the whole frozen copy"
    else:
        assert shares == [], "the base below the adapters is the reference"


# What cannot be.

REFUSED = [
    ({"loss": "hinge", "label_smoothing": 0.1}, {}, "label_smoothing has no effect with loss"),
    ({"loss": "ipo", "label_smoothing": 0.1}, {}, "label_smoothing has no effect with loss"),
    (
        {},
        {"data": {"train_on": "all"}},
        'data.train_on = "all" has no effect: only answers are compared',
    ),
    (
        {},
        {"plugins": {"bfd_packing": {"overlong": "truncate"}}},
        'plugins.bfd_packing: overlong = "truncate" would cut one answer of a pair; remove it',
    ),
    ({}, {"plugins": {"bfd_packing": {"overlong": "split"}}}, "would cut one answer of a pair"),
    ({"share_prompt": True}, {}, "share_prompt is for packed rows; add [plugins.bfd_packing]"),
    (
        {},
        {"plugins": {"fused_loss": {"kernel": "liger"}}},
        'kernel = "liger" gives all positions the same weight, but [plugins.dpo] weighs',
    ),
]


@pytest.mark.parametrize(("options", "tables", "says"), REFUSED)
def test_options_without_effect_are_refused(tiny, options, tables, says):
    more = {"plugins": {"dpo": options, **tables.get("plugins", {})}, "data": tables.get("data")}
    recipe = tiny(
        train={"micro_batch": 1}, **{name: value for name, value in more.items() if value}
    )
    recipe, active = resolve(tomllib.loads(recipe.read_text()))
    with pytest.raises(RecipeError) as refused:
        check(active.attach(), recipe, look())
    assert any(says in line for line in refused.value.problems), refused.value.problems


@pytest.mark.parametrize(
    "word", ["beta=0.0", "label_smoothing=0.5", "nll=-1.0", "loss=kto", 'reference=""']
)
def test_options_have_bounds(tiny, word):
    result = run_plugsft("check", tiny(rows=pairs(8), plugins={"dpo": {}}), f"plugins.dpo.{word}")
    assert (
        result.returncode == 2 and f"plugins.dpo.{word.partition('=')[0]}: given" in result.stderr
    )


NOISE = """
    import torch

    @plugin()
    class Noise:
        "A model that is not the same each time that it is called."

        @hookimpl(wrapper=True)
        def optimize_model(self):
            model = yield

            def shake(module, inputs, output):
                return output + 0.3 * torch.randn_like(output) if module.training else output

            model.model.norm.register_forward_hook(shake)
            return model
"""


@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo", "length_normalized"])
def test_a_model_that_differs_from_call_to_call_stops_at_step_1(
    recipe, tmp_path, monkeypatch, loss
):
    activate(install(tmp_path / "site", noise=NOISE), monkeypatch)
    result = run_plugsft(recipe, f"plugins.dpo.loss={loss}", "plugins.noise={}")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert re.search(r"plugins\.dpo: the first loss is \S+, but should be", result.stderr)
    assert "step 1/" not in result.stdout


def test_the_dropout_of_a_model_is_left_out_and_that_of_adapters_stays(recipe, tmp_path):
    must_succeed(recipe, "train.steps=1")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.3)
    sizes = {"vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 2, "n_head": 4}
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(**sizes, **rates))
    gpt2.save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    tables = tomllib.loads(recipe.read_text()) | {"model": {"path": str(tmp_path / "gpt2")}}
    recipe = write_recipe(recipe, tables)
    train(recipe, tmp_path / "plain")
    assert read_metrics(tmp_path / "plain")[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    lines = []
    for dropout in (0.0, 0.5):
        run = tmp_path / str(dropout)
        train(recipe, run, f"plugins.lora.dropout={dropout}")
        lines.append([line["loss"] for line in read_metrics(run)])
    assert lines[0][0] == pytest.approx(math.log(2), rel=1e-5)
    assert lines[0][0] == pytest.approx(lines[1][0]) and lines[0][2] != lines[1][2]
    # Adapters that were trained before begin with a random loss.
    words = (f"plugins.lora.adapter={run}/model", "plugins.lora.dropout=0.5")
    train(recipe, tmp_path / "on", *words)
    assert read_metrics(tmp_path / "on")[0]["loss"] != pytest.approx(math.log(2), rel=1e-4)


def test_packed_rows_have_room_for_a_pair(tiny):
    train = {"micro_batch": 1}
    for plugins, room in (({"dpo": {}}, 512), ({}, 256)):
        recipe, active = resolve(
            tomllib.loads(tiny(plugins={"bfd_packing": {}, **plugins}, train=train).read_text())
        )
        check(active.attach(), recipe, look())
        assert active.plugins["bfd_packing"].max_tokens == room


def test_tokens_do_not_depend_on_how_pairs_are_compared(tiny):
    recipe = tiny(rows=pairs(8), train={"steps": 1}, plugins={"dpo": {}})
    must_succeed(recipe)
    again = run_plugsft(recipe, "plugins.dpo.beta=0.5", "--overwrite")
    assert again.returncode == 0 and "from cache" in again.stdout


def test_a_reference_that_is_not_there_is_named(tiny, tmp_path):
    recipe = tiny(rows=pairs(8), plugins={"dpo": {}})
    for command in ("check", "train"):
        result = run_plugsft(command, recipe, f"plugins.dpo.reference={tmp_path / 'nope'}")
        assert result.returncode == 2, result.stdout
        assert f"plugins.dpo.reference: {tmp_path / 'nope'}: no such file" in result.stderr


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_reference_that_cannot_be_loaded_is_refused_before_data_are_prepared(
    tiny, tmp_path, command
):
    recipe = tiny(rows=pairs(8), plugins={"dpo": {}})
    folder = tmp_path / "reference"
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=400)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.ln_f.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for named, says in ((folder, f"the files of '{folder}' lack 1"), ("nosuch", "no causal")):
        result = run_plugsft(command, recipe, f"plugins.dpo.reference={named}")
        assert result.returncode == 2, result.stdout
        assert f"plugins.dpo.reference: {says}" in result.stderr, result.stderr
        assert "model.path" not in result.stderr and not (tmp_path / "run/tokens").exists()


def test_a_system_column_stands_before_the_prompt():
    row = {"system": "be brief", "prompt": [ASK], **GIVEN}
    assert [one["prompt"] for one in split_pair(row)] == [[say("be brief", "system"), ASK]] * 2
