"""Each of four ranks writes, checks and reads its own share of a checkpoint."""

import json
import resource
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from launching import FSDP2
from saved_runs import Run, on_ranks

from plugsft.api import PlugsftError
from plugsft.base.atomic import MANIFEST, list_checkpoints
from plugsft.checkpoint import files as shard_files

RANKS = 4
_reading: list[list[str]] = []


def _heard(event, arguments):
    if event == "open" and _reading and str(arguments[1]).startswith("r"):
        _reading[-1].append(Path(str(arguments[0])).name)


@contextmanager
def counted():
    """Give the names of the files of tensors that this process reads whole, and those it opens."""
    whole, opened, really = [], [], shard_files.safe_open

    def noted(path, *rest):
        opened.append(Path(path).name)
        return really(path, *rest)

    _reading.append(whole)
    shard_files.safe_open = noted
    try:
        yield whole, opened
    finally:
        _reading.pop()
        shard_files.safe_open = really


@contextmanager
def no_room():
    """Let this process write no file of more than a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def shares(name, accelerator, recipe, active):
    """Save and restore on four ranks, with faults on one of them; say what each step read."""
    sys.addaudithook(_heard)
    run, rank = Run("AdamW", accelerator, recipe, active), accelerator.process_index
    run.train(range(1, 3))
    said = {}
    with counted() as said["save"]:
        run.checkpoints.save(2)
    run.train(range(3, 5))
    run.checkpoints.save(4)
    found = [*reversed(list_checkpoints(recipe.folder / "checkpoints"))]
    with counted() as said["restore"]:
        run.checkpoints.restore(found)
    said["newest"] = run.checkpoints.published
    try:
        if rank == 2:
            with no_room():
                run.checkpoints.save(5)
        else:
            run.checkpoints.save(5)
    except PlugsftError as error:
        said["full"] = f"{type(error).__name__}: {error}"
    accelerator.wait_for_everyone()
    said["after"] = sorted(path.name for path in (recipe.folder / "checkpoints").iterdir())
    accelerator.wait_for_everyone()
    run.checkpoints.save(6)
    accelerator.wait_for_everyone()
    if rank == 0:
        file = recipe.folder / "checkpoints/step-000006/rank-00003-000.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    accelerator.wait_for_everyone()
    run.checkpoints.restore([*reversed(list_checkpoints(recipe.folder / "checkpoints"))])
    said["flipped"] = run.checkpoints.published
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shares")
    answers = on_ranks(RANKS, FSDP2, folder, [("shares", shares)])
    assert all(isinstance(answer["shares"], dict) for answer in answers), answers
    return [answer["shares"] for answer in answers], folder / "run/checkpoints/step-000004"


@pytest.mark.parametrize("doing", ["save", "restore"])
def test_each_byte_is_compared_by_one_rank_and_by_all_alike(said, doing):
    answers, checkpoint = said
    sizes = {
        name: size for name, (size, _) in json.loads((checkpoint / MANIFEST).read_text()).items()
    }
    tensors = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    read = [[name for name in answer[doing][0] if name in tensors] for answer in answers]
    assert sorted(name for names in read for name in names) == sorted(tensors)
    shares = [sum(tensors[name] for name in names) / sum(tensors.values()) for names in read]
    print(f"\n{doing}: shares of the bytes compared: {', '.join(f'{s:.2f}' for s in shares)}")
    assert max(shares) < 1.2 / RANKS
    files = {path.name for path in checkpoint.iterdir()}
    assert files == {*tensors, "state.json", MANIFEST}, "the ranks' stamps are in the manifest"


def test_each_rank_opens_its_own_files_alone(said):
    for rank, one in enumerate(said[0]):
        assert {*one["restore"][1]} == {f"rank-{rank:05d}-000.safetensors"}
        assert one["newest"] == 4


def test_a_rank_that_cannot_write_ends_the_save_on_all(said):
    for rank, one in enumerate(said[0]):
        if rank == 2:
            assert one["full"].startswith("DiskError: ") and "cannot be written" in one["full"]
        else:
            assert one["full"].startswith("PeerError: rank 2 failed in saving step 5: ")
        assert one["after"] == ["step-000002", "step-000004"], "nothing half-written stays"


def test_all_ranks_go_back_to_the_same_checkpoint(said):
    assert [one["flipped"] for one in said[0]] == [4] * RANKS
