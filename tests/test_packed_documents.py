"""Documents of a packed row are computed as if alone, or the model is refused."""

import numpy as np
import pytest
import torch
from families import PACKABLE, make_packable

from plugsft import PluginError
from plugsft.base.types import Shard
from plugsft.batches.labels import IGNORED
from plugsft.plugins.bfd_packing.documents import documents_of, pack
from plugsft.tokens.shards import Examples, write_index, write_shard
from plugsft.tokens.store import Tokens

LENGTHS = [13, 1, 30, 2, 17]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", PACKABLE)
def test_a_packed_row_is_its_documents_one_by_one(name):
    rng = np.random.default_rng(0)
    texts = [torch.from_numpy(rng.integers(0, 97, length)) for length in LENGTHS]
    packed, plain = make_packable(PACKABLE[name]), make_packable(PACKABLE[name], "eager")
    weights = torch.from_numpy(rng.standard_normal((sum(LENGTHS), 97))).float()
    row = packed(
        input_ids=torch.cat(texts)[None], **documents_of(np.array(LENGTHS)), use_cache=False
    ).logits[0]
    alone = torch.cat([plain(input_ids=text[None], use_cache=False).logits[0] for text in texts])
    assert alone.std() > 0.1
    assert (row - alone).abs().max() <= 2e-5 * alone.abs().max()
    for logits in (row, alone):
        (logits * weights).sum().backward()
    theirs = gradients(plain)
    for name, ours in gradients(packed).items():
        assert (ours - theirs[name]).abs().max() <= 1e-5 * theirs[name].abs().max(), name


@pytest.mark.parametrize("name", PACKABLE)
def test_a_prompt_that_stands_once_is_seen_by_both_answers(name):
    rng = np.random.default_rng(0)
    prompt, first, second, other = (
        torch.from_numpy(rng.integers(0, 97, length)) for length in (14, 6, 11, 5)
    )
    shared, plain = make_packable(PACKABLE[name]), make_packable(PACKABLE[name], "eager")
    # The second answer begins from the prompt's last token, as the first does.
    row = torch.cat([other, prompt, first, prompt[-1:], second])
    where = documents_of(np.array([5, 20, 12]), seen=np.array([0, 0, 13]))
    assert where["position_ids"][0, -12:].tolist() == [*range(13, 25)]
    ours = shared(input_ids=row[None], **where, use_cache=False).logits[0]
    texts = [other, torch.cat([prompt, first]), torch.cat([prompt, second])]
    alone = [plain(input_ids=text[None], use_cache=False).logits[0] for text in texts]
    theirs = torch.cat([*alone[:2], alone[2][13:]])
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()
    weights = torch.from_numpy(rng.standard_normal(ours.shape)).float()
    for logits in (ours, theirs):
        (logits * weights).sum().backward()
    expected = gradients(plain)
    # Rounding: of models with sinks 1.8e-5, and 1e-7 in float64.
    for key, gradient in gradients(shared).items():
        assert (gradient - expected[key]).abs().max() <= 3e-5 * expected[key].abs().max(), key


def test_padded_rows_and_caches_are_refused_by_name():
    model = make_packable(PACKABLE["llama"])
    with pytest.raises(PluginError, match="called with padded rows"):
        model(input_ids=torch.zeros(2, 3, dtype=torch.long), use_cache=False)
    alone = make_packable(PACKABLE["llama"], "sdpa")
    ids = torch.arange(5)[None]
    one = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(one, alone(input_ids=ids, use_cache=False).logits, atol=1e-5)


@pytest.fixture
def tokens(tmp_path):
    """Examples of 3, 1, 5 and 2 tokens, of which all but the last one's second are trained."""
    counts = np.array([3, 1, 5, 2])
    ids = np.arange(11, dtype=np.int32) + 100
    mask = np.ones(11, np.bool_)
    mask[-1] = False
    examples = Examples(ids, mask, counts, np.ones(4, np.int64), np.arange(4))
    write_shard(tmp_path / "data-0.arrow", examples)
    write_index(tmp_path, [Shard("data-0.arrow", examples=4)], {"key": ""})
    return Tokens(tmp_path)


def test_a_packed_batch(tokens):
    batch = pack(tokens, np.array([2, 0, 3]))
    assert batch["input_ids"].tolist() == [[104, 105, 106, 107, 108, 101 - 1, 101, 102, 109, 110]]
    no = IGNORED
    # The first of a document has nothing before it, whatever its mask says.
    assert batch["labels"].tolist() == [[no, 105, 106, 107, 108, no, 101, 102, no, no]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 5, 8, 10]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 5
    assert batch["documents"] == (5, 3, 2)


def test_a_row_is_filled_up_by_a_document_that_trains_nothing(tokens):
    batch = pack(tokens, np.array([0, 1]), length=9)
    assert batch["input_ids"].shape == (1, 9) and batch["documents"] == (3, 1, 5)
    assert (batch["labels"][0, 4:] == IGNORED).all()
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 4]]


def test_a_rank_without_examples_has_a_batch_that_trains_nothing(tokens):
    batch = pack(tokens, np.zeros(0, np.int64))
    assert batch["documents"] == (2,) and (batch["labels"] == IGNORED).all()
    model = make_packable(PACKABLE["llama"])
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    assert model(**inputs, use_cache=False).logits.shape == (1, 2, 97)
