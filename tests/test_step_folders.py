"""Checkpoint folders: `step-` and a number, in numeric order."""

import json
import os
import re
import shutil
import subprocess
from contextlib import contextmanager

import pytest
from conftest import must_succeed, run_plugsft
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plugsft.base.atomic import (
    MANIFEST,
    damage,
    list_checkpoints,
    parse_step,
    publish,
    stamp,
    step_folder,
)
from plugsft.base.machine import look
from plugsft.checkpoint.same_run import STATE
from plugsft.output.folder import newest_checkpoint
from plugsft.registry.load import load
from plugsft.start.open import open_recipe

# What users, other tools and file managers make of our names.
COPIES = ["best", "000002.backup", "000002 (copy)", "", "000003-good", "٣٤", "1_000", "+3", " 3"]
SUFFIXES = st.one_of(
    st.integers(0, 10**9).map(str),
    st.integers(0, 10**7).map("{:06d}".format),
    st.sampled_from(COPIES),
    st.text(st.characters(exclude_characters="/\0", codec="utf8"), max_size=12),
)


@settings(max_examples=80, deadline=None)
@given(st.sets(SUFFIXES, max_size=9))
@example({"999999", "1000000", "999998", "best"})
def test_only_numbers_are_ours_and_they_are_compared_as_numbers(tmp_path_factory, suffixes):
    folder = tmp_path_factory.mktemp("checkpoints")
    for suffix in suffixes:
        with publish(folder / f"step-{suffix}"):
            pass
    ours = [suffix for suffix in suffixes if re.fullmatch("[0-9]+", suffix)]
    found = list_checkpoints(folder)
    assert {path.name for path in found} == {f"step-{suffix}" for suffix in ours}
    steps = [parse_step(path) for path in found]
    assert steps == sorted(map(int, ours))
    assert newest_checkpoint(folder) == (found[-1] if found else None)


@given(st.integers(0, 10**12))
def test_a_step_s_folder_is_that_step_s(tmp_path_factory, step):
    assert parse_step(step_folder(tmp_path_factory.getbasetemp(), step)) == step


def edited(checkpoint, step, **recipe):
    """Make a checkpoint one of another step."""
    state = json.loads((checkpoint / STATE).read_text())
    state["step"] = step
    state["recipe"] |= recipe
    (checkpoint / STATE).write_text(json.dumps(state))
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest[STATE] = stamp(checkpoint / STATE)
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    return checkpoint.rename(step_folder(checkpoint.parent, step))


def test_a_run_goes_on_past_a_million_steps_and_leaves_copies_alone(tiny, tmp_path):
    recipe, folder = tiny(checkpoint={"every": 1, "keep": 2}), tmp_path / "run/checkpoints"
    assert run_plugsft(recipe, "train.steps=1").returncode == 0
    shutil.rmtree(tmp_path / "run/model")
    first = edited(folder / "step-000001", 999_997, **{"train.steps": 1_000_001})
    copies = [shutil.copytree(first, folder / f"step-{name}") for name in COPIES if name.isascii()]
    result = run_plugsft(recipe, "train.steps=1000001", "--resume")
    assert result.returncode == 0, result.stderr
    assert "going on after step 999997" in result.stdout
    assert [path.name for path in list_checkpoints(folder)] == ["step-1000000", "step-1000001"]
    assert all(damage(copy) is None for copy in copies)
    # Only the person can name a copy; a new run in this folder leaves it where it is.
    shutil.rmtree(tmp_path / "run/model")
    result = run_plugsft(recipe, "train.steps=1000001", "--resume-from", copies[0])
    assert result.returncode == 0 and "going on after step 999997" in result.stdout, result.stderr
    result = run_plugsft(recipe, "train.steps=1", "--overwrite")
    assert result.returncode == 0, result.stderr
    assert [path.name for path in list_checkpoints(folder)] == ["step-000001"]
    assert all(damage(copy) is None for copy in copies)


@pytest.mark.parametrize("manifest", ["", "{"])
def test_a_checkpoint_without_a_manifest_gives_way_to_the_one_before(tiny, tmp_path, manifest):
    recipe, folder = tiny(checkpoint={"every": 1, "keep": 3}), tmp_path / "run/checkpoints"
    assert run_plugsft(recipe, "train.steps=3").returncode == 0
    shutil.rmtree(tmp_path / "run/model")
    last = folder / "step-000003"
    (last / MANIFEST).unlink()
    if manifest:
        (last / MANIFEST).write_text(manifest)
    (last / "notes.txt").touch()
    refused = run_plugsft(recipe, "train.steps=3", "--resume")
    assert refused.returncode == 2 and "notes.txt: not written by plugsft" in refused.stderr
    (last / "notes.txt").unlink()
    result = run_plugsft(recipe, "train.steps=3", "--resume")
    assert result.returncode == 0, result.stderr
    assert "step-000003: the checkpoint is damaged: its manifest cannot be read" in result.stdout
    assert "going on after step 2" in result.stdout
    assert [damage(path) for path in list_checkpoints(folder)] == [None] * 3


@contextmanager
def busy(folder):
    """Make a folder one that cannot be renamed: EBUSY."""
    if subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def forbidden(folder):
    """Make a folder one whose files cannot be removed: EACCES."""
    if os.geteuid() == 0:
        pytest.skip("root may remove anything")
    folder.chmod(0o500)
    try:
        yield
    finally:
        for path in folder.parent.glob("*step-000001*"):
            path.chmod(0o700)


@pytest.mark.parametrize("fault", [busy, forbidden])
def test_a_checkpoint_that_cannot_be_removed_is_a_warning(tiny, tmp_path, fault):
    recipe, folder = tiny(checkpoint={"every": 1, "keep": 1}), tmp_path / "run/checkpoints"
    assert run_plugsft(recipe, "train.steps=1").returncode == 0
    shutil.rmtree(tmp_path / "run/model")
    first = edited(folder / "step-000001", 1, **{"train.steps": 3})
    with fault(first):
        result = run_plugsft(recipe, "train.steps=3", "--resume")
        assert result.returncode == 0, result.stderr
        warned = [line for line in result.stdout.splitlines() if "could not be removed" in line]
        assert warned and "step-000001" in warned[0], result.stdout
        assert (folder / "step-000003").is_dir() and (tmp_path / "run/model").is_dir()


def test_checkpoints_of_later_steps_are_an_earlier_runs_and_do_not_count(tiny, tmp_path):
    train = {"steps": 12, "batch_size": 8, "micro_batch": 4, "learning_rate": 1e-3}
    path = tiny(train=train, checkpoint={"every": 2, "keep": 9})
    must_succeed(path)
    recipe, active = load(path, ["checkpoint.keep=2"])
    folder = recipe.folder / "checkpoints"
    opened = open_recipe(recipe, active, look(), [step_folder(folder, 4)])
    opened.checkpoints.save(6)
    opened.checkpoints._thread.shutdown()  # it removes the oldest ones
    assert [parse_step(path) for path in list_checkpoints(folder)] == [4, 6, 8, 10, 12]
