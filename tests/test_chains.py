"""Turns that continue each other are one example, and train what each of them would alone."""

import numpy as np
import pytest
import tokenizers
import torch
from conftest import only_full, read_metrics, run_plugsft, write_jsonl, write_recipe
from families import sees, tiny_config
from formats import END, MAKERS, backend_of
from served import (
    AGAIN,
    ASK,
    BERGEN,
    OSLO,
    TEMPLATES,
    WEATHER,
    answer,
    chat_of,
    compare,
    conversation,
    examples_of,
    result,
    thought,
)
from tokenizers import AddedToken
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from plugsft.base.types import Shard
from plugsft.data import chains, chat
from plugsft.data.chains import find_seams, make_chains
from plugsft.data.examples import TRUNCATED, make_examples, trained_mask
from plugsft.data.render import render_rows
from plugsft.recipe.tables import Data
from plugsft.tokens.shards import offsets_of
from plugsft.tokens.tokenizer import Tokenizer

AGENT = [
    *(ASK, answer("", tool_calls=[OSLO], **thought("first Oslo")), result("sunny")),
    *(answer("", tool_calls=[BERGEN], **thought("then Bergen")), result("rain", 4)),
    *(answer("Sunny and rain.", **thought("both known")), AGAIN),
    *(answer("", tool_calls=[OSLO], **thought("Oslo again")), result("snow")),
    answer("It is snowing.", **thought("as it says")),
]
"""Two questions, which take three turns and two."""
TOOLS = [{"type": "function", "function": WEATHER}]
ROWS = [{"messages": AGENT[:stop], "tools": TOOLS} for stop in (8, 10)]


def tokenizer(kind="BPE"):
    """Make a tokenizer with Qwen3's template, which keeps the thoughts of the last question."""
    return Tokenizer(backend_of(kind), TEMPLATES["qwen3"], {"eos_token": END})


def alone(monkeypatch):
    """Leave each turn alone, as if none continued another."""
    monkeypatch.setattr(chat, "make_chains", lambda turns, seams: turns)


def prepare(made, **options):
    """Return the examples of rows, and the shard that says what was left out."""
    data, shard = Data(source="x", **options), Shard("")
    rendered = render_rows(ROWS, made, data)
    assert not rendered.bad
    encoded = made.encode_texts(rendered.texts, False)
    mask = trained_mask(encoded, rendered)
    numbers = np.arange(len(ROWS))
    return make_examples(encoded, mask, rendered, numbers, data, shard), shard


def targets(examples):
    """Each trained token of a row, with all tokens before it."""
    found, starts = [], offsets_of(examples.counts)
    for row, start, stop in zip(examples.rows, starts, starts[1:], strict=False):
        ids = examples.ids[start:stop].tolist()
        places = np.flatnonzero(examples.mask[start:stop]).tolist()
        found += [(int(row), *ids[: place + 1]) for place in places]
    return sorted(found)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "gptoss", "glm4moe", "nemotron_3_nano"])
def test_the_turns_of_a_question_are_one_example(name):
    chat = chat_of(TEMPLATES[name])
    found = chat.examples(conversation(AGENT, tools=True)).examples
    assert [len(parts) // 2 for parts in found] == [3, 2]
    assert not compare(chat, AGENT, True, examples_of(chat, AGENT, True))


@pytest.mark.parametrize("kind", MAKERS)
def test_chains_train_what_their_turns_train_alone_and_cost_less(kind, monkeypatch):
    together, _ = prepare(tokenizer(kind))
    alone(monkeypatch)
    each, _ = prepare(tokenizer(kind))
    assert targets(together) == targets(each)
    assert together.mask.sum() == each.mask.sum()
    assert (len(together.rows), len(each.rows)) == (4, 9)
    assert len(together.ids) < 0.6 * len(each.ids)


@pytest.mark.parametrize("too_long", ["truncate", "drop"])
def test_of_a_chain_that_is_too_long_the_turns_stay_that_would_alone(too_long, monkeypatch):
    made, longest = tokenizer(), int(prepare(tokenizer())[0].counts.max())
    limits = range(2, longest + 2, 7)
    cut = {limit: prepare(made, max_length=limit, too_long=too_long) for limit in limits}
    alone(monkeypatch)
    for limit, (examples, shard) in cut.items():
        each, other = prepare(tokenizer(), max_length=limit, too_long=too_long)
        assert targets(examples) == targets(each), limit
        assert examples.counts.max(initial=0) <= limit
        # Nothing stands behind the last token that is trained.
        assert examples.mask[np.cumsum(examples.counts) - 1].all()
        assert {*shard.too_long} == {*other.too_long}
        # Of a turn that is left out, and of one that is cut, the row is named.
        named = {*shard.truncated, *shard.warnings.get(TRUNCATED, {"rows": []})["rows"]}
        assert named == {*other.truncated, *other.warnings.get(TRUNCATED, {"rows": []})["rows"]}
        assert shard.kept_rows == other.kept_rows


def test_a_turn_continues_the_longest_chain_that_begins_its_prompt():
    turns = [["a", "b;"], ["x", "y;"], ["a", "b;"], ["ab;c", "d;"], ["xy;", "z;"], ["ab;cd;e", "f"]]
    assert make_chains(turns, (";",)) == [
        *(["a", "b;", "c", "d;", "e", "f"], ["x", "y;", "", "z;"], ["a", "b;"])
    ]
    assert make_chains(turns, ()) == turns
    # Behind an end that is no token of its own, nothing is joined.
    assert make_chains([["a", "b"], ["ab", "c;"]], (";",)) == [["a", "b"], ["ab", "c;"]]


@pytest.mark.parametrize(
    "token, more, found",
    [
        ({}, [], (END,)),
        ({"normalized": True}, [], ()),
        ({"single_word": True}, [], ()),
        ({}, [f"{END}\n"], ()),
        ({}, [f"<s>{END}"], (END,)),
    ],
)
def test_a_seam_is_a_token_whatever_follows(token, more, found):
    added = [AddedToken(END, **{"normalized": False, **token}), *map(AddedToken, more)]
    assert find_seams([END, "other"], added) == found


def test_a_tokenizer_that_writes_a_turn_otherwise_in_a_chain_is_found(monkeypatch):
    monkeypatch.setattr(chains, "COMPARED", 1)
    made = tokenizers.Tokenizer.from_str(backend_of("BPE").to_str())
    prepare(Tokenizer(made, TEMPLATES["qwen3"], {"eos_token": END}))
    made.add_tokens([AddedToken(f"{END}\n", normalized=False)])
    names = {"eos_token": END}
    assert len(prepare(Tokenizer(made, TEMPLATES["qwen3"], names))[0].rows) == 9  # it is no seam
    monkeypatch.setattr(chat, "find_seams", lambda stops, added: tuple(stops))
    with pytest.raises(AssertionError, match="writes an answer otherwise where a turn follows"):
        prepare(Tokenizer(made, TEMPLATES["qwen3"], names))


def test_one_chain_in_so_many_is_compared(monkeypatch):
    encoded = []

    class Spy:
        def __init__(self, backend):
            self.backend_tokenizer = self
            self.encode = lambda text, **options: (
                encoded.append(text) or backend.encode(text, **options)
            )

    spy, answers = Spy(backend_of("BPE")), [(2, 10), (12, 20)]
    for number in range(10_000):
        chains.ensure_same_ids(f"{number:010}{END}", answers, spy)
    assert 25 < len(encoded) / 3 < 55


def publish(family, template, folder):
    """Write the folder of a tiny model with a published template; return the model."""
    written = chat_of(TEMPLATES[template])
    backend = tokenizers.Tokenizer.from_str(backend_of("BPE").to_str())
    backend.add_special_tokens(written.special)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=written.end, bos_token="<s>")
    made.chat_template = TEMPLATES[template]
    made.save_pretrained(folder)
    config = tiny_config(family)
    config.get_text_config().update({"vocab_size": 600, "max_position_embeddings": 4096})
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if sees(family) else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    stops = [made.convert_tokens_to_ids(stop) for stop in written.stops]
    model.generation_config = GenerationConfig(eos_token_id=stops)
    model.save_pretrained(folder)
    return made, model


def plain_step(made, model, template):
    """Return the loss and the gradients' norm over turns that are rendered and computed alone."""
    written, losses = chat_of(TEMPLATES[template]), []
    for row in ROWS:
        turns = examples_of(written, row["messages"], True)
        assert not compare(written, row["messages"], True, turns)  # as transformers renders them
        for prompt, words in turns:
            text = prompt + words
            encoded = made(text, add_special_tokens=False, return_offsets_mapping=True)
            ids = torch.tensor([encoded["input_ids"]])
            trained = torch.tensor([start >= len(prompt) for start, _ in encoded["offset_mapping"]])
            losses.append(cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none"))
            losses[-1] = losses[-1][trained[1:]]
    loss = torch.cat(losses).mean()
    loss.backward()
    grads = [weight.grad.norm() for weight in model.parameters() if weight.grad is not None]
    return loss.item(), torch.stack(grads).norm().item()


@pytest.mark.parametrize(
    "family, template, plugins",
    [
        ("qwen3", "qwen3", {}),
        ("qwen3", "qwen3", {"bfd_packing": {"capacity": 4096}}),
        pytest.param("qwen3_5", "qwen3_5_think", {}, marks=only_full),
        pytest.param("gpt_oss", "gptoss", {}, marks=only_full),
        pytest.param("glm4_moe", "glm4moe", {}, marks=only_full),
        pytest.param("glm4_moe", "glm4moe", {"bfd_packing": {"capacity": 4096}}, marks=only_full),
        pytest.param("nemotron_h", "nemotron_3_nano", {}, marks=only_full),
    ],
)
def test_a_step_of_chains_learns_what_turns_alone_teach(family, template, plugins, tmp_path):
    made, model = publish(family, template, tmp_path / "model")
    train = {"batch_size": 4, "steps": 1, "learning_rate": 1e-3, "log_every": 1}
    tables = {
        "output": str(tmp_path / "run"),
        "model": {"path": str(tmp_path / "model")},
        "data": {"source": str(write_jsonl(tmp_path / "rows.jsonl", ROWS)), "max_length": 4096},
        "train": train if plugins else train | {"micro_batch": 2},
        "plugins": plugins,
        "checkpoint": {"every": 0},
    }
    done = run_plugsft(write_recipe(tmp_path / "recipe.toml", tables))
    assert done.returncode == 0, done.stderr
    assert "4 examples (chains of turns) of 2 rows, " in done.stdout, done.stdout
    [line] = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    loss, norm = plain_step(made, model, template)
    print(family, line["loss"] / loss - 1, line["grad_norm"] / norm - 1)
    assert line["loss"] == pytest.approx(loss, rel=1e-5)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-5)
