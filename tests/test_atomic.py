"""Folders and files appear whole or not at all, with real processes really killed."""

import errno
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import time
from threading import Timer

import pytest
from conftest import ROOT, run_plugsft, wait_for

from plugsft import DiskError
from plugsft.api import PlugsftError
from plugsft.base import atomic as publishing
from plugsft.base.atomic import (
    HOST_ID,
    MANIFEST,
    damage,
    discard,
    foreign_files,
    is_published,
    is_whole,
    publish,
    sweep,
    write_text,
    writing,
)
from plugsft.base.build_once import Claims, once
from plugsft.base.for_commands import refusal_of

BUILDER = """
import os, sys, time
from pathlib import Path
from plugsft.base import build_once as claims
folder, note, go = map(Path, sys.argv[1:4])
claims.PATIENCE, claims.HEARTBEAT = {patience}, 0.1
def build(building):
    with (building / "data-parts").open("a") as file:
        file.write(f"{{os.getpid()}}\\n")
    (building / "half").write_text("half")
    if "start_worker" in globals():
        start_worker()
    # Last: a test that reads its number may kill it at once.
    with note.open("a") as file:
        file.write(f"{{os.getpid()}}\\n")
    while not go.exists():
        time.sleep(0.01)
    (building / "whole").write_text(str(os.getpid()))
claims.once(folder, fill=build)
print((folder / "whole").read_text())
"""


@pytest.fixture
def place(tmp_path):
    return tmp_path / "parent/folder"


@pytest.fixture
def start(tmp_path, place):
    """Start builders of one folder, who wait for a file; what is left of them ends with the test.

    Without a name, the file exists. Nobody's patience ends in a test that does not set it.
    """
    processes = []

    def begin(go=".", patience=9000.0, before=""):
        script = before + BUILDER.format(patience=patience)
        words = [place, tmp_path / "note", tmp_path / go, tmp_path / "claim"]
        command = [sys.executable, "-c", script, *words]
        processes.append(
            subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, cwd=ROOT)
        )
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def builders(tmp_path, count, timeout=120.0):
    """Wait until so many processes have begun to build; return their numbers."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        text = (tmp_path / "note").read_text() if (tmp_path / "note").exists() else ""
        if len(text.splitlines()) >= count:
            return [int(line) for line in text.splitlines()]
        time.sleep(0.02)
    raise AssertionError(f"{count} builders did not come: {text}")


def left_over(place):
    return sorted(path.name for path in place.parent.glob(".*"))


def test_a_folder_appears_with_its_manifest(place):
    with publish(place) as building:
        (building / "inner").mkdir()
        (building / "inner/a.txt").write_text("a")
        (building / "b.txt").write_text("b")
        assert not place.exists()
    assert is_published(place) and damage(place) is None
    assert sorted(json.loads((place / MANIFEST).read_text())) == ["b.txt", "inner/a.txt"]
    assert left_over(place) == []


def test_everything_is_on_disk_before_the_name_is(place, monkeypatch):
    synced = []
    really = publishing.sync
    monkeypatch.setattr(publishing, "sync", lambda path: (synced.append(path), really(path)))
    with publish(place) as building:
        (building / "inner").mkdir()
        (building / "inner/a.txt").write_text("a")
    inside = ["inner", "inner/a.txt", MANIFEST, "."]
    assert {*synced} == {*(building / name for name in inside), place.parent}
    assert synced[-1] == place.parent


def test_a_folder_that_appears_before_the_claim_is_not_built_again(place, monkeypatch):
    really = Claims.hold

    def slow(claims, name):
        with publish(place) as building:
            (building / "data-1").write_text("done")
        return really(claims, name)

    monkeypatch.setattr(Claims, "hold", slow)
    once(place, fill=None)
    assert left_over(place) == []


def test_a_failing_build_leaves_nothing(place):
    def build(building):
        (building / "data-1").write_text("done")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), publish(place) as building:
        build(building)
    with pytest.raises(ZeroDivisionError):
        once(place, fill=build)
    assert list(place.parent.iterdir()) == []


def test_a_build_continues_after_ctrl_c_from_its_finished_parts(place):
    def interrupted(building):
        (building / "data-1").write_text("done")
        (building / "data-1.json").write_text("its note")
        (building / ".data-2.tmp").write_text("ha")
        (building / "half").write_text("half")
        (building / "inner").mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        once(place, fill=interrupted)
    [left] = left_over(place)
    assert left.startswith(".folder.parts-")
    found = []
    once(
        place, fill=lambda building: found.extend(sorted(path.name for path in building.iterdir()))
    )
    assert found == ["data-1", "data-1.json"], "what was being written is not kept"
    assert damage(place) is None and left_over(place) == []


def test_links_in_a_shared_cache_are_not_gone_on_from(place, tmp_path):
    """Someone else may have put them there; publishing lets everyone read its files."""
    private = tmp_path / "private"
    private.write_text("mine")
    private.chmod(0o600)
    (place.parent / f".{place.name}.parts-000001").mkdir(parents=True)
    (place.parent / f".{place.name}.parts-000001/data-1").symlink_to(private)
    once(place, fill=lambda building: None)
    assert private.stat().st_mode & 0o777 == 0o600 and not (place / "data-1").exists()


def test_half_files_are_not_published(place):
    with publish(place) as building:
        (building / "inner").mkdir()
        (building / "inner/.a.12.tmp").write_text("ha")
        (building / ".kept").write_text("x")
    assert sorted(path.name for path in place.rglob("*")) == [".kept", "inner", MANIFEST]
    assert list(json.loads((place / MANIFEST).read_text())) == [".kept"]


def test_the_second_process_replaces_a_folder_only_if_asked(place):
    for text in ("first", "second"):
        with publish(place) as building:
            (building / "a").write_text(text)
    assert (place / "a").read_text() == "first"
    with publish(place, replace=True) as building:
        (building / "a").write_text("third")
    assert (place / "a").read_text() == "third" and left_over(place) == []


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda folder: (folder / "a").unlink(), "a is missing"),
        (lambda folder: (folder / "a").write_text("other"), "a is not what was written"),
        (lambda folder: (folder / "a").write_text("teXt"), "a is not what was written"),
        (lambda folder: (folder / MANIFEST).write_text('{"a": [1'), "its manifest cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text("[1, 2]"), "its manifest cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text('{"a": 3}'), "its manifest cannot be read"),
        (
            lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe"),
            "its manifest cannot be read",
        ),
        (lambda folder: (folder / MANIFEST).unlink(), "its manifest cannot be read"),
        (
            lambda folder: (folder / MANIFEST).write_text(f'{{"a": [1{"0" * 400}, ""]}}'),
            "its manifest cannot be read",
        ),
    ],
)
def test_damage_is_found(place, harm, expected):
    with publish(place) as building:
        (building / "a").write_text("text")
    harm(place)
    assert expected in damage(place)


def test_a_quick_look_finds_what_breaks_the_structure(place):
    with publish(place) as building:
        (building / "a").write_text("text")
        (building / "b.json").write_text("{}")
    assert is_whole(place)
    (place / "a").write_text("teXt")
    assert is_whole(place) and damage(place) and damage(place, quick=True) is None
    (place / "a").write_text("longer")
    assert damage(place, quick=True) == "a is not what was written"
    (place / "a").write_text("text")
    (place / "b.json").write_text("[]")
    assert damage(place, quick=True) == "b.json is not what was written"


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "a").write_text("longer"),
        lambda folder: (folder / "a").unlink(),
    ],
)
def test_a_damaged_folder_is_built_again(place, harm):
    def build(building):
        (building / "a").write_text("text")

    once(place, fill=build)
    harm(place)
    once(place, fill=build)
    assert damage(place) is None and left_over(place) == []
    once(place, fill=None)


ENDLESS = f'{{"a": [Infinity, "{"0" * 32}"]}}'


@pytest.mark.parametrize("manifest", ["{", None, ENDLESS])
def test_a_folder_without_a_readable_manifest_is_not_replaced(place, manifest):
    once(place, fill=lambda building: (building / "a").write_text("text"))
    (place / MANIFEST).unlink() if manifest is None else (place / MANIFEST).write_text(manifest)
    with pytest.raises(DiskError, match=r"did not write .*/a, or .* is damaged; move the folder"):
        once(place, fill=fill_python)
    assert (place / "a").read_text() == "text"
    assert {path.name for path in place.parent.iterdir()} == {place.name}


def test_a_folder_that_may_not_stay_stays_until_the_new_one_is_there(place):
    once(place, fill=lambda building: (building / "a").write_text("old"))

    def build(building):
        assert (place / "a").read_text() == "old"
        (building / "a").write_text("new")

    once(place, fill=build, is_complete=lambda folder: (folder / "a").read_text() == "new")
    assert (place / "a").read_text() == "new" and left_over(place) == []


def test_a_link_to_nothing_is_not_what_was_written(place):
    with publish(place) as building:
        (building / "a").write_text("text")
    (place / "a").unlink()
    (place / "a").symlink_to(place / "b")
    assert foreign_files(place, sized=True) == [place / "a"]


def test_discarding(place):
    with publish(place):
        pass
    discard(place)
    discard(place)
    assert list(place.parent.iterdir()) == []


def test_a_text_is_never_half_written(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \udcff")
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_eight_processes_build_one_folder_once(start, tmp_path, place):
    all_of_them = [start("go") for _ in range(8)]
    builders(tmp_path, 1)
    (tmp_path / "go").touch()
    said = [process.communicate()[0] for process in all_of_them]
    (builder,) = builders(tmp_path, 1)
    assert {int(words.split()[-1]) for words in said} == {builder}
    assert damage(place) is None and left_over(place) == []


def test_a_killed_builder_is_replaced_at_once(start, tmp_path, place):
    first = start("never")
    assert builders(tmp_path, 1) == [first.pid]
    second = start()
    assert b"waiting for another process" in second.stdout.readline()
    # Nobody waits for the dead one: it is a zombie, as a killed rank is to its launcher.
    os.kill(first.pid, signal.SIGKILL)
    assert builders(tmp_path, 2)[1] == second.pid
    second.communicate()
    assert damage(place) is None and left_over(place) == []
    kept = (place / "data-parts").read_text().split()
    assert kept == [str(first.pid), str(second.pid)], "it went on from the first one's parts"


FORKS = """
import os, sys, time
from pathlib import Path
def start_worker():
    # It has what its parent has open, and outlives it.
    if os.fork():
        return
    end = time.monotonic() + 60.0
    while time.monotonic() < end and not Path(sys.argv[1]).exists():
        time.sleep(0.05)
    Path(sys.argv[2]).with_name("worker").write_text(f"{time.monotonic() < end}")
    os._exit(0)
"""


def test_a_killed_builder_is_replaced_while_its_workers_still_live(start, tmp_path, place):
    first = start("never", before=FORKS)
    builders(tmp_path, 1)
    os.kill(first.pid, signal.SIGKILL)
    second = start()
    assert int(second.communicate()[0].split()[-1]) == second.pid
    wait_for((tmp_path / "worker").exists)
    assert (tmp_path / "worker").read_text() == "True", "it lived until the folder was there"
    assert damage(place) is None and left_over(place) == []


def test_a_waiter_follows_when_the_building_fails(place, start, tmp_path):
    first = start("never")
    builders(tmp_path, 1)
    second = start()
    assert b"waiting for another process" in second.stdout.readline()
    os.kill(first.pid, signal.SIGINT)
    assert int(second.communicate()[0].split()[-1]) == second.pid
    assert left_over(place) == []


def test_a_builder_without_a_heartbeat_is_replaced_and_does_no_harm(start, tmp_path, place):
    first = start("go", patience=1.0)
    builders(tmp_path, 1)
    os.kill(first.pid, signal.SIGSTOP)
    second = start(patience=1.0)
    assert int(second.communicate()[0].split()[-1]) == second.pid
    (tmp_path / "go").touch()
    os.kill(first.pid, signal.SIGCONT)
    # It finds the name taken, throws its own away, and goes on with the other's.
    assert int(first.communicate()[0].split()[-1]) == second.pid
    assert builders(tmp_path, 2) == [first.pid, second.pid]
    assert damage(place) is None and left_over(place) == []


def test_a_sleeper_that_wakes_while_another_builds_waits_for_it(start, tmp_path, place):
    # A machine that is busy may hold up a heartbeat for a while: the first waits longer.
    first = start("go")
    builders(tmp_path, 1)
    os.kill(first.pid, signal.SIGSTOP)
    second = start("second", patience=1.0)
    builders(tmp_path, 2)
    (tmp_path / "go").touch()
    os.kill(first.pid, signal.SIGCONT)
    assert b"waiting for another process" in first.stdout.readline()
    (tmp_path / "second").touch()
    said = {int(process.communicate()[0].split()[-1]) for process in (first, second)}
    assert said == {second.pid} and len(builders(tmp_path, 2)) == 2
    assert (place / "whole").read_text() == str(second.pid)
    assert damage(place) is None and left_over(place) == []


def test_of_many_that_find_a_dead_builder_one_takes_over(start, tmp_path, place):
    first = start("never")
    builders(tmp_path, 1)
    waiting = [start("go") for _ in range(6)]
    for process in waiting:
        process.stdout.readline()  # it says that it waits
    os.kill(first.pid, signal.SIGKILL)
    builders(tmp_path, 2)
    (tmp_path / "go").touch()
    said = {int(process.communicate()[0].split()[-1]) for process in waiting}
    # Some may find it dead at one moment, and all begin: all take the folder of one of them.
    (killed, *later), (named,) = builders(tmp_path, 2), said
    assert killed == first.pid and named in later and len(later) < len(waiting)
    assert damage(place) is None and left_over(place) == []


LATE = """
import sys, time
from pathlib import Path
really = Path.unlink
def late(path, missing_ok=False):
    # It has found the builder dead, and removes its claim once another builds.
    if path.name.endswith(".claim-builder") and path.read_text() == Path(sys.argv[4]).read_text():
        Path(sys.argv[4]).with_name("found").touch()
        while len(Path(sys.argv[2]).read_text().splitlines()) < 2:
            time.sleep(0.01)
    really(path, missing_ok)
Path.unlink = late
"""


def test_two_waiters_that_find_a_builder_dead_build_one_after_the_other(start, tmp_path, place):
    """The later one removes the claim of the living one: a claim is a hint, and does no harm."""
    first = start("never")
    builders(tmp_path, 1)
    os.kill(first.pid, signal.SIGKILL)
    (claim,) = place.parent.glob(".*.claim-builder")
    (tmp_path / "claim").write_text(claim.read_text())
    third = start("third", before=LATE)
    wait_for((tmp_path / "found").exists)
    second = start("second")
    builders(tmp_path, 3)
    (tmp_path / "second").touch()
    assert b"waiting for another process" in second.stdout.readline()
    (tmp_path / "third").touch()
    said = {int(process.communicate()[0].split()[-1]) for process in (second, third)}
    assert builders(tmp_path, 3) == [first.pid, second.pid, third.pid]
    assert said == {third.pid}, "the second finds its folder taken, and waits"
    assert (place / "data-parts").read_text().split() == [*map(str, builders(tmp_path, 3))]
    assert damage(place) is None and left_over(place) == []


def test_who_looked_long_ago_does_not_outbid_the_living(place, monkeypatch):
    place.parent.mkdir()
    old = Claims(place).path("builder")
    old.write_text(f"{HOST_ID} {2**22 - 1} 0")
    really, new = Claims.hold, f"{HOST_ID} {os.getpid()} 0"

    def slow(claims, name):
        # Between its look and its own claim, another began.
        old.write_text(new)
        return really(claims, name)

    monkeypatch.setattr(Claims, "hold", slow)
    with Claims(place).build() as mine:
        assert mine is None
    assert old.read_text() == new and left_over(place) == [old.name]


def test_a_process_of_another_machine_is_judged_by_its_heartbeat_alone(place):
    place.parent.mkdir()
    claim = Claims(place).path("builder")
    for host, living in (("another-host", [claim]), (HOST_ID, [])):
        claim.write_text(f"{host} {2**22 - 1} 0")  # no process has this number here
        assert Claims(place).living() == living


def test_a_claim_that_is_another_s_by_now_is_not_removed(place):
    place.parent.mkdir()
    with Claims(place).build() as mine:
        assert mine.holds()
        mine.path.write_text("another's")
        assert not mine.holds()
    assert left_over(place) == [mine.path.name]


def test_a_slow_builder_with_a_heartbeat_is_waited_for(start, tmp_path):
    first = start("go")
    builders(tmp_path, 1)
    second = start(patience=2.0)
    assert b"waiting for another process" in second.stdout.readline()
    time.sleep(4.0)
    (tmp_path / "go").touch()
    said = {int(process.communicate()[0].split()[-1]) for process in (first, second)}
    assert said == set(builders(tmp_path, 1)) and len(said) == 1


@pytest.mark.parametrize("text", ["", "3", f"{HOST_ID}", f"elsewhere {2**22 - 1} 0"])
def test_an_unfinished_claim_counts_as_dead_after_a_while(start, place, text):
    place.parent.mkdir()
    (place.parent / f".{place.name}.claim-builder").write_text(text)
    only = start(patience=0.5)
    assert int(only.communicate()[0].split()[-1]) == only.pid and left_over(place) == []


SLEEPER = """
import sys, time
from pathlib import Path
from plugsft.base import atomic
with atomic.publish(Path(sys.argv[1])) as building:
    (building / "half").write_text("half")
    print("begun", flush=True)
    time.sleep(100)
"""


def test_what_killed_processes_left_is_swept_and_what_lives_is_not(place):
    command = [sys.executable, "-c", SLEEPER, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as first:
        first.stdout.readline()
        (half,) = place.parent.glob("*.tmp")
        sweep(place.parent)
        assert half.is_dir()
        first.kill()
    lost = place.parent / half.name.replace(place.name, "report.html")
    mine = place.parent / ".notes.tmp"
    for file in (lost, mine):
        file.touch()
        os.utime(file, (0, 0))
    with publish(place.parent / "another") as building:
        (building / "file").touch()
    assert not half.exists() and not lost.exists() and mine.exists()


def test_what_another_machine_left_is_swept_when_it_is_a_day_old(place):
    half = place.parent / f".{place.name}.elsewhere.0123abcd-1.tmp"
    half.mkdir(parents=True)
    sweep(place.parent)
    assert half.exists()
    os.utime(half, (0, 0))
    sweep(place.parent)
    assert not half.exists()


def test_a_process_that_waits_for_another_says_so_once(tmp_path, place, start, capsys):
    first = start("go")
    builders(tmp_path, 1)
    Timer(2.0, (tmp_path / "go").touch).start()
    once(place, fill=None)
    assert capsys.readouterr().out.splitlines() == [
        f"waiting for another process, which makes {place}"
    ]
    assert first.wait() == 0


def fill_python(building):
    (building / "big").write_bytes(b"x" * 3_000_000)


def fill_arrow(building):
    import numpy as np

    from plugsft.tokens.shards import Examples, write_shard

    many = np.ones(800_000, np.int32)
    counts = np.array([len(many)])
    write_shard(building / "a", Examples(many, many > 0, counts, counts // counts, counts))


def fill_safetensors(building):
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.ones(800_000)}, building / "a.safetensors")


def fill_tokenizer(building):
    from tokenizers import Tokenizer, models

    words = {"x" * 100 + str(number): number for number in range(20_000)}
    Tokenizer(models.WordLevel(words, unk_token=min(words))).save(str(building / "a.json"))


@pytest.mark.parametrize("fill", [fill_python, fill_arrow, fill_safetensors, fill_tokenizer])
def test_a_full_disk_is_named_with_path_and_free_space(small_disk, fill):
    place = small_disk / "folder"
    with pytest.raises(PlugsftError, match=r"the disk is full \([\d.,]+ \w+ are free\)") as caught:
        once(place, fill=fill)
    assert str(caught.value).startswith(f"{place}: cannot be written: ")
    assert str(caught.value).endswith("; free some, or name another folder")
    assert "\n" not in str(caught.value)
    assert list(small_disk.iterdir()) == [], "and leaves the room that it took"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG])
def test_a_write_error_of_a_disk_with_space_asks_for_another_folder(place, code):
    with pytest.raises(PlugsftError) as caught, writing(place):
        raise OSError(code, os.strerror(code), str(place))
    cure = "name another folder"
    assert str(caught.value) == f"{place}: cannot be written: {os.strerror(code).lower()}; {cure}"


def test_a_disk_too_small_for_the_first_checkpoint_is_known_before_anything_is_prepared(
    small_disk, tiny
):
    recipe = tiny(model={"scratch": {"hidden": 128, "layers": 2, "heads": 2, "context": 256}})
    for command in ("train", "check"):
        result = run_plugsft(command, recipe, f"output={small_disk}/run")
        assert result.returncode == 2 and "data:" not in result.stdout
        # But for the block of the lock file.
        assert re.search(r"(1\.0 MiB|1,020\.0 KiB)( are)? free", result.stderr), result.stderr
    assert list(small_disk.iterdir()) == []


def test_a_file_size_limit_is_named(place):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal, so that the write fails with EFBIG.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(PlugsftError, match=r"folder: cannot be written: file too large"):
            once(place, fill=fill_python)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(place.parent.iterdir()) == []


def test_a_full_disk_stops_a_run_with_one_line(small_disk, tiny):
    result = run_plugsft("prepare", tiny(), f"output={small_disk}/run", "model.scratch.vocab=20000")
    if result.returncode == 0:
        (small_disk / "fill").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096))
        result = run_plugsft("prepare", tiny(), f"output={small_disk}/run", "data.max_length=100")
    assert result.returncode == 2, result.stdout
    assert "cannot be written" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("/proc/run", "no such file or directory"),
        ("FILE/run", "FILE is not a folder"),
        ("FILE", "FILE is not a folder"),
        ("/dev/null", "/dev/null is not a folder"),
    ],
)
def test_an_output_that_cannot_be_written_stops_a_run_with_one_line(tiny, tmp_path, output, says):
    (tmp_path / "FILE").touch()
    result = run_plugsft(
        "prepare", tiny(), f"output={output.replace('FILE', str(tmp_path / 'FILE'))}"
    )
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    place, says = (text.replace("FILE", str(tmp_path / "FILE")) for text in (output, says))
    assert line.startswith(f"error: {place}/scratch/tokenizer-")
    assert line.endswith(f": cannot be written: {says}; name another folder")


def test_a_disk_that_a_plugin_finds_full_is_one_line_and_its_own_faults_keep_their_traceback():
    for code, says in ((errno.ENOSPC, "disk: the disk is full; by plugin"), (errno.EACCES, None)):
        error = OSError(code, "")
        error.add_note("by plugin")
        refused = refusal_of(error)
        assert (refused and str(refused)) == says


def test_a_full_disk_s_reason_travels_between_processes(place):
    with pytest.raises(DiskError) as caught, writing(place):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(place))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) == f"{again.reason}; name another folder"


def test_other_failures_pass_through(tmp_path):
    with pytest.raises(ValueError, match="ours"), writing(tmp_path):
        raise ValueError("ours")
    with pytest.raises(PlugsftError, match=r"^told already$"), writing(tmp_path):
        raise PlugsftError("told already")


def test_a_process_of_another_machine_is_not_looked_up_here(start, place, tmp_path):
    place.parent.mkdir()
    claim = place.parent / f".{place.name}.claim-builder"
    claim.write_text(f"elsewhere {2**22 - 1} 0")
    written = claim.stat().st_mtime
    only = start(patience=1.0)
    assert int(only.communicate()[0].split()[-1]) == only.pid
    waited = (tmp_path / "note").stat().st_mtime - written
    assert waited >= 1.0, "the other may live: its heartbeat decides"
    assert left_over(place) == []
