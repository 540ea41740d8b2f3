"""Shards of tensors on disk, read by any other number of ranks."""

import json
import os
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from plugsft.base.errors import CheckpointError
from plugsft.checkpoint import files as module
from plugsft.checkpoint.files import (
    ShardReader,
    copy_to_host,
    host_has_room,
    owned_shards,
    stamps_file,
    write_shards,
)
from plugsft.model.tensor_shards import TensorShard


def cut(tensor, ranks, by):
    """Cut a tensor as DeepSpeed (by numbers) or FSDP2 (by rows) do."""
    flat, unit = tensor.reshape(-1), 1 if by == "numbers" else tensor[:1].numel()
    each = -(-(flat.numel() // unit) // ranks) * unit
    starts = [min(rank * each, flat.numel()) for rank in range(ranks + 1)]
    return [TensorShard(flat[a:b].clone(), a, tuple(tensor.shape)) for a, b in pairwise(starts)]


CUTS = st.tuples(st.integers(1, 5), st.sampled_from(["numbers", "rows"]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), CUTS, CUTS)
def test_what_any_ranks_wrote_any_ranks_read(tmp_path_factory, shape, written, read):
    folder = tmp_path_factory.mktemp("parts")
    tensors = {"model/a": torch.randn(shape), "optimizer/a/step": torch.tensor(7.0)}
    for rank in range(written[0]):
        parts = {"model/a": cut(tensors["model/a"], *written)[rank]}
        # What all ranks have alike is written once.
        parts["optimizer/a/step"] = TensorShard(tensors["optimizer/a/step"].reshape(1), 0, ())
        write_shards(folder, rank, copy_to_host({}, owned_shards(rank, parts)))
    reader, back = ShardReader(folder), []
    for part in cut(torch.zeros(shape), *read):
        reader.fill("model/a", part)
        back.append(part.values)
    assert torch.equal(torch.cat(back).view(shape), tensors["model/a"])
    step = torch.zeros(1)
    reader.fill("optimizer/a/step", TensorShard(step, 0, ()))
    assert step.item() == 7


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("was", [*FLOATS, torch.int32, torch.uint8])
@pytest.mark.parametrize("now", [*FLOATS, torch.int32, torch.uint8])
def test_values_become_wider_numbers_and_are_never_rounded(tmp_path, was, now):
    values = torch.tensor([1.0, 3.0]).to(was)
    write_shards(tmp_path, 0, {"model/a": TensorShard(values, 0, (2,))})
    there = TensorShard(torch.zeros(2, dtype=now), 0, (2,))
    wider = {(a, b) for n, a in enumerate(FLOATS) for b in FLOATS[n:]} - {FLOATS[:2]}
    reader = ShardReader(tmp_path)
    if was == now or (was, now) in wider:
        reader.fill("model/a", there)
    else:
        with pytest.raises(CheckpointError, match="would be rounded to"):
            reader.fill("model/a", there)
        reader.fill("model/a", there, exact=False)
    assert there.values.tolist() == [1.0, 3.0]


def test_each_file_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    synced, sync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino) or sync(file))
    write_shards(tmp_path, 0, {"model/a": TensorShard(torch.ones(2), 0, (2,))})
    assert {path.stat().st_ino for path in tmp_path.glob("*.safetensors")} <= synced


def test_large_parts_go_to_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FILE_BYTES", 100)
    write_shards(
        tmp_path,
        3,
        {f"model/{n}": TensorShard(torch.full((30,), float(n)), 30, (90,)) for n in range(4)},
    )
    names = [f"rank-00003-00{n}.safetensors" for n in range(4)]
    assert [path.name for path in sorted(tmp_path.glob("*.safetensors"))] == names
    assert json.loads(stamps_file(tmp_path, 3).read_text()).keys() == {*names}


def test_saves_share_the_memory_of_their_copies():
    memory, values = {}, torch.arange(5.0)
    shards = {
        "model/a": TensorShard(values, 0, (5,)),
        "model/b": TensorShard(torch.tensor([1j, 2, 3]), 0, (3,)),
        "model/c": TensorShard(torch.ones(0), 0, (0,)),
    }
    first = copy_to_host(memory, owned_shards(0, shards))
    values += 10
    assert torch.equal(first["model/a"].values, torch.arange(5.0)), "a copy"
    second = copy_to_host(memory, owned_shards(0, shards))
    assert torch.equal(second["model/a"].values, values)
    assert second.keys() == {"model/a", "model/b"}
    for name, shard in first.items():
        assert shard.values.data_ptr() == second[name].values.data_ptr()
    assert owned_shards(1, shards) == {}, "the first rank writes whole tensors"


def test_copies_are_made_where_the_host_has_room_for_those_of_all_ranks(monkeypatch):
    rows = TensorShard(torch.ones(3000), 0, (6000,))  # 16 KiB of pinned memory, 16 KiB to write
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def has_room(available, shard, memory=None):
        monkeypatch.setattr(module, "available_memory", lambda: available)
        return host_has_room(memory or {}, {"model/a": shard})

    assert has_room(90_000, rows) and not has_room(80_000, rows)
    whole = TensorShard(torch.ones(3000), 0, (3000,))
    assert has_room(45_000, whole) and not has_room(40_000, whole), "one rank copies it"
    assert has_room(0, rows, {"model/a": torch.ones(3000)}), "memory of the last save"
    assert not has_room(0, rows, {"model/a": torch.ones(2000)})


@pytest.mark.parametrize("before", [torch.bfloat16, torch.int64])
def test_a_plugins_tensor_may_change_its_type_between_saves(before):
    memory, values = {}, torch.tensor([1 / 3, 2**20 + 1])
    copy_to_host(memory, {"plugins/a/t": TensorShard(values.to(before), 0, (2,))})
    copy = copy_to_host(memory, {"plugins/a/t": TensorShard(values, 0, (2,))})["plugins/a/t"].values
    assert copy.dtype == values.dtype and torch.equal(copy, values)


def test_what_a_missing_rank_held_is_missed(tmp_path):
    for rank, part in enumerate(cut(torch.arange(10.0), 2, "numbers")):
        write_shards(tmp_path, rank, {"model/a": part})
    (tmp_path / "rank-00001-000.safetensors").unlink()
    reader = ShardReader(tmp_path)
    with pytest.raises(CheckpointError, match="only 5 of 10"):
        reader.fill("model/a", TensorShard(torch.zeros(10), 0, (10,)))


@pytest.mark.parametrize("name, shape", [("model/b", (2,)), ("model/a", (1, 2))])
def test_another_models_checkpoint_is_refused(tmp_path, name, shape):
    save_file(
        {"model/a": torch.ones(2)},
        tmp_path / "rank-00000-000.safetensors",
        {"places": json.dumps({"model/a": [0, [2]]})},
    )
    reader = ShardReader(tmp_path)
    with pytest.raises(CheckpointError, match="of another model"):
        reader.fill(name, TensorShard(torch.zeros(2), 0, shape))
