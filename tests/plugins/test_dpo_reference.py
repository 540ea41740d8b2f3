"""dpo_reference: two numbers per pair, computed once, equal to those of each step."""

import json

import numpy as np
import pytest
from conftest import (
    must_succeed,
    only_full,
    read_metrics,
    run_launch,
    run_plugsft,
    run_ranks,
    start_plugsft,
)
from first_step import pairs
from launching import config
from plugin_packages import activate, install

from plugsft.plugins.dpo_reference.log_probs import read_block, write_block

NUMBERS = ("loss", "grad_norm", "margin", "accuracy", "reward_chosen", "logp_rejected", "eval_loss")
TRAIN = {"batch_size": 8, "micro_batch": 2, "steps": 5, "learning_rate": 3e-3}
REFERENCE = "plugins.dpo_reference={}"
PACKED = ("plugins.bfd_packing.capacity=160", "train.micro_batch=1")


@pytest.fixture
def recipe(tiny):
    return tiny(rows=pairs(23), train=TRAIN, plugins={"dpo": {"beta": 0.5}})


def curve(run):
    return [line[name] for line in read_metrics(run) for name in NUMBERS if name in line]


def said(done):
    [line] = [one for one in done.stdout.splitlines() if one.startswith("plugin dpo_reference:")]
    return line


@pytest.mark.parametrize(
    "words",
    [(), ("plugins.lora.r=4",), PACKED, (*PACKED, "plugins.fused_loss={}", "plugins.lora.r=4")],
    ids=["full", "lora", "packed", "all"],
)
def test_the_same_is_learned_as_with_a_reference_in_each_step(recipe, tmp_path, words):
    evaluated = ("eval.every=2", "eval.split=train[:5]")
    must_succeed(recipe, f"output={tmp_path / 'fly'}", *words, *evaluated)
    done = must_succeed(recipe, f"output={tmp_path / 'kept'}", *words, *evaluated, REFERENCE)
    assert "computed before step 1" in done.stdout
    assert "23 of 23 pairs computed in" in said(done) and "; 5 pairs known" in said(done)
    assert curve(tmp_path / "kept") == pytest.approx(curve(tmp_path / "fly"), rel=1e-5, abs=1e-6)


def test_a_second_run_finds_it_whatever_its_batches_packing_and_ranks(recipe, tmp_path, home):
    cached = ("plugins.arrow_cache={}", REFERENCE)
    first = must_succeed(recipe, f"output={tmp_path / 'one'}", *cached)
    assert "23 of 23 pairs" in said(first) and str(home) in said(first)
    for name, words in {"same": (), "large": ("train.batch_size=4",), "packed": PACKED}.items():
        done = must_succeed(recipe, f"output={tmp_path / name}", *cached, *words)
        assert "23 pairs known, 4 of them recomputed as a check (" in said(done), name
    assert curve(tmp_path / "same") == curve(tmp_path / "one")
    two = run_ranks(2, recipe, f"output={tmp_path / 'two'}", *cached)
    assert two.returncode == 0 and "23 pairs known" in said(two)
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=1e-5, abs=1e-6)
    listed = must_succeed("cache", "ls").stdout
    assert "reference of " in listed and "sizes match" in listed


def test_cached_references_are_found_by_the_tokens_of_a_row(tiny, tmp_path, home):
    """Of a part all is known; of more, what was there before."""
    recipe = tiny(
        rows=pairs(23),
        train=TRAIN,
        plugins={"dpo": {}, "dpo_reference": {}, "arrow_cache": {}},
    )
    must_succeed(recipe, f"output={tmp_path / 'base'}", "data.split=train[:20]")
    base = tmp_path / "base"
    tables = recipe.read_text().replace("[model.scratch]", "[unused]")
    tables = tables[: tables.index("[unused]")] + tables[tables.index("[data]") :]
    recipe.write_text(tables.replace("[data]", f'[model]\npath = "{base / "model"}"\n\n[data]'))
    done = must_succeed(recipe, f"output={tmp_path / 'some'}", "data.split=train[3:15]")
    assert "12 of 12 pairs computed" in said(done)  # the model is another now
    done = must_succeed(recipe, f"output={tmp_path / 'part'}", "data.split=train[5:11]")
    assert "plugin dpo_reference: 6 pairs known" in said(done)
    done = must_succeed(recipe, f"output={tmp_path / 'more'}", "data.split=train[:23]")
    assert "11 of 23 pairs computed" in said(done)


KILLER = """
    import os, signal

    @plugin()
    class Killer:
        after: int = 20
        seen: int = state(0)

        @hookimpl(wrapper=True)
        def token_nll(self):
            self.seen += 1
            if self.seen > self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            return (yield)
"""


def test_a_pass_that_was_killed_goes_on_where_it_was(recipe, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", killer=KILLER), monkeypatch)
    words = (recipe, REFERENCE, "plugins.dpo_reference.capacity=2")  # a pair at a time
    killed = run_plugsft(*words, "plugins.killer={}")
    assert killed.returncode == -9
    assert "7 of 23 pairs computed" in said(must_succeed(*words))


def test_two_runs_at_once_compute_it_once(recipe, tmp_path, home):
    words = (recipe, REFERENCE, "plugins.arrow_cache={}")
    both = [start_plugsft(*words, f"output={tmp_path / name}") for name in ("a", "b")]
    ended = [one.wait() for one in both]
    assert [one.returncode for one in ended] == [0, 0], [one.stderr for one in ended]
    assert curve(tmp_path / "a") == curve(tmp_path / "b")


def test_numbers_of_other_weights_are_noticed(recipe, tmp_path):
    must_succeed(recipe, REFERENCE)
    kept = folder_of(tmp_path / "run")
    facts = json.loads((kept / "facts.json").read_text())
    assert facts["rows"] == 23 and facts["seconds_per_pair"] > 0
    # A copy of the model whose weights are others has another key.
    other = must_succeed(recipe, REFERENCE, "train.seed=5", f"output={tmp_path / 'other'}")
    assert "23 of 23 pairs computed" in said(other)
    for path in kept.glob("data-*"):
        block = read_block(path)
        wrong = np.stack([block["chosen"], block["rejected"]], 1) + 1
        write_block(path, block["example"], block["id"], wrong)
    again = run_plugsft(recipe, REFERENCE, "--overwrite", "plugins.dpo_reference.probes=23")
    assert again.returncode == 2 and "Traceback" not in again.stderr, again.stderr
    assert "remove that folder, and the next run computes them again" in again.stderr


def folder_of(run):
    [folder] = [
        path.parent
        for path in run.glob("tokens/*/facts.json")
        if json.loads(path.read_text()).get("kind") == "reference"
    ]
    return folder


def test_a_given_reference_is_loaded_for_the_pass_alone(tiny, recipe, tmp_path):
    must_succeed(recipe, f"output={tmp_path / 'base'}")
    given = (f"plugins.dpo.reference={tmp_path / 'base/model'}",)
    must_succeed(recipe, f"output={tmp_path / 'fly'}", *given)
    done = must_succeed(recipe, f"output={tmp_path / 'kept'}", *given, REFERENCE)
    assert "23 of 23 pairs computed" in said(done)
    assert curve(tmp_path / "kept") == pytest.approx(curve(tmp_path / "fly"), rel=1e-5, abs=1e-6)
    assert read_metrics(tmp_path / "kept")[0]["loss"] != pytest.approx(0.6931, abs=1e-3)


def test_a_resumed_run_is_the_uninterrupted_one(recipe, tmp_path):
    words = (recipe, REFERENCE, "checkpoint.every=1", "checkpoint.keep=9")
    must_succeed(*words)
    resumed = must_succeed(
        *words,
        f"output={tmp_path / 'again'}",
        "--resume-from",
        tmp_path / "run/checkpoints/step-000003",
    )
    assert resumed.returncode == 0
    assert curve(tmp_path / "again") == curve(tmp_path / "run")[3 * 6 :]


def test_it_needs_the_objective_that_asks_for_it(tiny):
    result = run_plugsft("check", tiny(plugins={"dpo_reference": {}}))
    assert result.returncode == 2 and "dpo" in result.stderr


@only_full
@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_sharded_ranks_compute_the_same(recipe, tmp_path, kind):
    must_succeed(recipe, f"output={tmp_path / 'alone'}", REFERENCE, *PACKED)
    words = ("-m", "plugsft", recipe, f"output={tmp_path / kind}", REFERENCE, *PACKED)
    code, out, err = run_launch(*config(kind), *words)
    assert code == 0, err
    assert "23 of 23 pairs computed" in out
    assert curve(tmp_path / kind) == pytest.approx(curve(tmp_path / "alone"), rel=1e-5, abs=1e-6)


FILL = """
    import os

    @plugin(after=["dpo", "fused_loss"])
    class Fill:
        folder: str

        @hookimpl(wrapper=True)
        def token_nll(self):
            # The first pass has begun: its folder is there, and what it writes finds a full disk.
            if os.environ["RANK"] == "0" and not os.path.exists(f"{self.folder}/fill"):
                with open(f"{self.folder}/fill", "wb", buffering=0) as file:
                    try:
                        while file.write(bytes(4096)):
                            pass
                    except OSError:
                        pass
            return (yield)
"""


def test_all_ranks_build_again_where_the_disk_of_the_main_one_is_full(
    recipe, tmp_path, small_disk, monkeypatch
):
    """The main rank alone would build again, and the others wait in another exchange."""
    activate(install(tmp_path / "site", fill=FILL), monkeypatch)
    words = ("plugins.arrow_cache={}", REFERENCE, f"plugins.fill.folder={small_disk}")
    result = run_ranks(2, recipe, *words, env={"PLUGSFT_CACHE": str(small_disk)}, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "cache: not used" in result.stdout and "the disk is full" in result.stdout
    assert "23 of 23 pairs computed in" in said(result)
    assert str(tmp_path / "run/tokens") in said(result)
