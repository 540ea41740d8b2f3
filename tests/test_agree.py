"""Ranks agree on the host: whether an operation succeeded, and whether facts are equal."""

import os
import socket
import time
from functools import partial

import pytest
from accelerate import Accelerator
from conftest import chats, start_ranks, tiny_tables, write_jsonl, write_recipe
from forks import FORKS

from plugsft.base.errors import DiskError, LaunchError, TrainError
from plugsft.ranks.agree import agreed, ensure_alike
from plugsft.ranks.stopping import Stopping, Vote

RANKS = 4


def _fail(rank, failing, error):
    if rank in failing:
        raise error


# Operations that four ranks enter one after another, as a run does: each with the body's error.
FULL = DiskError("checkpoints: cannot be written: the disk is full", "free some")
CASES = {
    "fine": ("saving step 1", lambda rank: None),
    "the main rank fails": ("saving step 2", lambda rank: _fail(rank, [0], FULL)),
    "the last fails": ("loading", lambda rank: _fail(rank, [3], ValueError("two\nlines"))),
    "two fail": ("saving step 3", lambda rank: _fail(rank, [1, 2], KeyError(f"weight {rank}"))),
    "fine again": ("saving step 4", lambda rank: None),
}


def _rank(rank, port, answers):
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        OMP_NUM_THREADS="1",
    )
    Accelerator(cpu=True)  # joins the process group
    said = {}

    def note(name, enter, body=lambda rank: None):
        try:
            with enter():
                body(rank)
        except Exception as error:
            said[name] = (type(error).__name__, str(error))

    for name, (operation, body) in CASES.items():
        note(name, partial(agreed, operation), body)
    note("elsewhere", partial(agreed, "saving" if rank else "evaluating"))

    try:
        ensure_alike({"tokens": "a", "seed": "1"}, "Cure.")
        ensure_alike({"tokens": "ab"[rank == 2], "seed": str(rank // 2)}, "Cure.")
    except LaunchError as error:
        said["alike"] = str(error)
    seconds = []
    for _ in range(100):
        started = time.perf_counter()
        with agreed("a step"):
            pass
        seconds.append(time.perf_counter() - started)
    said["seconds"] = min(seconds)  # other work on the machine can only add to it
    answers.put((rank, said))


@pytest.fixture(scope="module")
def said():
    """What each of four ranks was told."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = FORKS.Queue()
    ranks = [FORKS.Process(target=_rank, args=(rank, port, answers)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=300) for _ in ranks)
    for process in ranks:
        process.join(300)
        assert process.exitcode == 0
    return [found[rank] for rank in range(RANKS)]


def test_agreeing_without_a_failure_raises_nothing_and_is_cheap(said):
    assert not any({"fine", "fine again"} & {*one} for one in said)
    print(f"\nan agreement of {RANKS} ranks: {said[0]['seconds'] * 1e3:.2f} ms")
    assert said[0]["seconds"] < 0.1


@pytest.mark.parametrize(
    "name, failing, own, others",
    [
        (
            "the main rank fails",
            [0],
            ("DiskError", str(FULL)),
            f"rank 0 failed in saving step 2: {FULL}",
        ),
        (
            "the last fails",
            [3],
            ("ValueError", "two\nlines"),
            "rank 3 failed in loading: ValueError: two; lines",
        ),
        (
            "two fail",
            [1, 2],
            ("KeyError", "'weight {rank}'"),
            "rank 1 failed in saving step 3: KeyError: 'weight 1'",
        ),
    ],
)
def test_a_rank_that_fails_ends_all_with_its_reason(said, name, failing, own, others):
    for rank, one in enumerate(said):
        kind, text = own
        expected = (kind, text.format(rank=rank)) if rank in failing else ("PeerError", others)
        assert one[name] == expected, rank


def test_an_error_names_both_operations_of_ranks_that_differ(said):
    groups = "rank 0 has evaluating, rank 1 and 2 more have saving"
    text = f"the ranks are at different operations: {groups}"
    assert {one["elsewhere"] for one in said} == {("TrainError", text)}


def test_an_error_names_what_differs_between_ranks(said):
    text = (
        "the ranks differ in seed: rank 0 and 1 more have 0, rank 2 and 1 more have 1; "
        "tokens: rank 0 and 2 more have a, rank 2 has b. Cure."
    )
    assert {one["alike"] for one in said} == {text}


def test_one_process_agrees_with_itself():
    ensure_alike({"tokens": "a"}, "Cure.")
    with pytest.raises(TrainError, match="mine"), agreed("saving"):
        raise TrainError("mine")


def test_ranks_with_other_rows_behind_one_path_stop_before_step_1(tmp_path):
    """As two machines do that have disks of their own, each mounted at its own place."""
    recipe = write_recipe(tmp_path / "recipe.toml", tiny_tables(tmp_path))
    rows = [write_jsonl(tmp_path / f"rows-{seed}.jsonl", chats(24, seed)) for seed in range(2)]
    words = [(recipe, f"data.source={path}") for path in rows]
    ended = [rank.wait() for rank in start_ranks(2, words=words)]
    assert [one.returncode for one in ended] == [2, 2], [one.stderr for one in ended]
    said = " ".join(ended[0].stderr.split())
    assert "the ranks differ in the training data: rank 0 has 24 examples of" in said
    assert "rank 1 has 24 examples of" in said and "same files on all of them" in said
    assert "step 1" not in ended[0].stdout and not (tmp_path / "run/run.json").exists()


def test_a_checkpoint_is_saved_after_a_failure_only_if_every_failed_rank_can_save():
    harmless = Vote("step 3", failure="a notice failed", can_save=True)
    fatal = Vote("step 3", failure="its state is half updated")
    stopping = Stopping()
    for votes, can_save in (([harmless, Vote("step 3")], True), ([harmless, fatal], False)):
        stopping.learn(votes)
        assert stopping.all_can_save is can_save
