"""Tokens on disk compared with plain lists and with `datasets`."""

import datasets
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plugsft.base.checksums import digest
from plugsft.base.types import Shard
from plugsft.tokens.shards import Examples, write_index, write_shard
from plugsft.tokens.store import Tokens

SEQUENCE = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=40)
EXAMPLE = st.lists(SEQUENCE, min_size=1, max_size=3)
"""One example: a list of sequences of (token, trained)."""
SHARDS = st.lists(st.lists(st.lists(EXAMPLE, max_size=6), max_size=3), min_size=1, max_size=4)
"""Shards of batches of examples."""


def pack(examples, first_row):
    """Make the flat arrays of a batch from lists."""
    flat = [pair for example in examples for sequence in example for pair in sequence]
    return Examples(
        ids=np.array([token for token, _ in flat], np.int32),
        mask=np.array([trained for _, trained in flat], np.bool_),
        counts=np.array([len(one) for example in examples for one in example], np.int64),
        num_sequences=np.array([len(example) for example in examples], np.int64),
        rows=np.arange(first_row, first_row + len(examples)),
    )


def alike(example):
    """Count the tokens that a pair begins with, naively."""
    if len(example) != 2:
        return 0
    count = 0
    for one, other in zip(*example, strict=False):
        if one != other or one[1]:
            break
        count += 1
    return count


def write(folder, shards):
    """Write shards; return the examples in order."""
    everything, made, trained = [], [], 0
    for number, batches in enumerate(shards):
        batch = [example for examples in batches for example in examples]
        packed = pack(batch, len(everything))
        everything += batch
        made.append(Shard(f"data-{number}.arrow", examples=len(batch)))
        trained += write_shard(folder / made[-1].file, packed)
    facts = {"key": "k", "sources": [{"examples": len(everything)}]}
    write_index(folder, made, facts)
    assert trained == sum(yes for one in everything for part in one for _, yes in part)
    return everything


@settings(max_examples=60, deadline=None)
@given(SHARDS, st.booleans())
def test_what_is_read_is_what_was_written(tmp_path_factory, shards, in_memory):
    folder = tmp_path_factory.mktemp("tokens")
    everything = write(folder, shards)
    tokens = Tokens(folder, in_memory)
    assert len(tokens) == len(everything)
    naive = [[pair for part in example for pair in part] for example in everything]
    assert tokens.lengths.tolist() == [len(one) for one in naive]
    assert tokens.targets.tolist() == [sum(yes for _, yes in one) for one in naive]
    assert tokens.rows.tolist() == list(range(len(naive)))
    # Any order: a batch is gathered from anywhere.
    for number in np.random.default_rng(0).permutation(len(naive)):
        ids, mask = tokens.example(int(number))
        assert ids.tolist() == [token for token, _ in naive[number]]
        assert mask.tolist() == [yes for _, yes in naive[number]]
        assert ids.dtype == np.int32 and mask.dtype == np.bool_


@settings(max_examples=15, deadline=None)
@given(SHARDS.filter(lambda shards: any(batch for shard in shards for batch in shard)))
def test_datasets_opens_it_with_the_same_content(tmp_path_factory, shards):
    folder = tmp_path_factory.mktemp("tokens")
    everything = write(folder, shards)
    opened = datasets.load_from_disk(str(folder)).to_list()
    contents = [example.pop("content") for example in opened]
    assert contents == Tokens(folder).contents.tolist()
    assert len({*contents}) == len({str(example) for example in everything})
    assert opened == [
        {
            "input_ids": [token for part in example for token, _ in part],
            "loss_mask": [yes for part in example for _, yes in part],
            "lengths": [len(part) for part in example],
            "shared": alike(example),
            "trained": sum(yes for part in example for _, yes in part),
            "row": number,
        }
        for number, example in enumerate(everything)
    ]


def test_masks_that_start_within_a_byte(tmp_path):
    pattern = [bool(number % 3) for number in range(100)]
    examples = [[[(1, one) for one in pattern[start : start + 7]]] for start in range(0, 100, 7)]
    write(tmp_path, [[examples]])
    tokens = Tokens(tmp_path)
    read = [bool(one) for number in range(len(tokens)) for one in tokens.example(number)[1]]
    assert read == pattern


def test_an_example_knows_its_source_and_row(tmp_path):
    write(tmp_path, [[[[[(1, True)]]] * 5]])
    tokens = Tokens(tmp_path)
    tokens.facts["sources"] = [{"examples": 2}, {"examples": 0}, {"examples": 3}]
    assert [tokens.source_of(number) for number in range(5)] == [
        (0, 0),
        (0, 1),
        (2, 2),
        (2, 3),
        (2, 4),
    ]


def test_a_digest_names_content_not_order():
    assert digest({"a": 1, "b": [1, {"c": None}]}) == digest({"b": [1, {"c": None}], "a": 1})
    assert digest({"a": 1}) != digest({"a": "1"})
    assert len(digest({})) == 16
