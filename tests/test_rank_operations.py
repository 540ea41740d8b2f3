"""Operations that all ranks must enter together end all ranks if one fails or stays away."""

import json
import shutil

import numpy as np
import pytest
from conftest import chats, must_succeed, start_ranks, tiny_tables, write_recipe
from plugin_packages import activate, install

# In `ready`, two ranks enter each operation in turn; on rank 1, something goes wrong.
ENTERS = """
    import json, os, time

    import numpy as np
    import torch

    from plugsft.kit import artefact

    @plugin()
    class Enters:
        folder: str
        tokens: object = state()
        tries: int = state(0)

        @hookimpl(wrapper=True)
        def add_columns(self):
            self.tokens = self.tokens or (yield)
            return self.tokens

        def next(self):
            self.tries += 1
            return str(self.tries)

        def operations(self, run, wrong=False):
            model, ranks = run.model, run.ranks

            def swap():
                shards = {"no.weight": torch.ones(1)} if wrong else model.shards()
                with model.swapped(shards):
                    pass

            def load():
                kwargs = model.load.kwargs
                if wrong:
                    model.load.kwargs = {**kwargs, "attn_implementation": "nothing"}
                try:
                    model.load_frozen()
                finally:
                    model.load.kwargs = kwargs

            def build(folder):
                with ranks.agree("writing an artefact"):
                    if wrong:
                        raise OSError("no place")
                    if folder is not None:
                        (folder / "facts.json").write_text("{}")

            def agree():
                with ranks.agree("reading a file"):
                    if wrong:
                        raise OSError("no such file")

            return {
                "score": lambda: model.score(self.tokens, np.array([10**9 if wrong else 0])),
                "generate": lambda: model.generate(["hello"], max_tokens="x" if wrong else 2),
                "load_frozen": load,
                "swapped": swap,
                "artefact": lambda: artefact(
                    ranks, {"try": self.next()}, build, lambda *_: "read"
                ),
                "agree": agree,
            }

        @hookimpl
        def ready(self, run):
            second, told = run.ranks.rank == 1, {}

            def note(name, operation):
                text = "fine"
                try:
                    operation()
                except Exception as error:
                    text = f"{type(error).__name__}: {error}"
                told[name] = text

            def stay_away():
                run.stopping.fail(RuntimeError("boom"), fatal=True)
                try:
                    with run.agreed("making batches"):
                        pass
                finally:
                    run.stopping.own_error = None

            def reduce():
                run.ranks.reduce(torch.ones(1))

            fine, failing = self.operations(run), self.operations(run, wrong=second)
            for name in fine:
                note(f"{name}: fine", fine[name])
                note(f"{name}: inside", failing[name])
                note(f"{name}: before", stay_away if second else fine[name])
                note(f"{name}: another", reduce if second else fine[name])
                note(f"{name}: fine again", fine[name])
            with open(os.path.join(self.folder, f"{run.ranks.rank}.json"), "w") as file:
                json.dump(told, file)
"""
NAMES = ["score", "generate", "load_frozen", "swapped", "artefact", "agree"]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of two ranks was told, in each operation."""
    from conftest import tiny_tables, write_recipe

    folder = tmp_path_factory.mktemp("operations")
    with pytest.MonkeyPatch.context() as patch:
        activate(install(folder / "site", enters=ENTERS), patch)
        tables = tiny_tables(folder, chats(24))
        tables["train"] |= {"steps": 2}
        tables["plugins"] = {"enters": {"folder": str(folder)}}
        ranks = start_ranks(2, write_recipe(folder / "recipe.toml", tables))
        ended = [rank.wait() for rank in ranks]
    assert [rank.returncode for rank in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_fails_in_an_operation_ends_it_on_all(told, name):
    for rank in told:
        assert rank[f"{name}: fine"] == rank[f"{name}: fine again"] == "fine"
    first, second = told
    assert "rank 1 failed in " in first[f"{name}: inside"]
    assert first[f"{name}: inside"].startswith("PeerError")
    reason = second[f"{name}: inside"].partition(": ")[2].splitlines()[0]
    assert reason[:40] in first[f"{name}: inside"], "the reason of the failed rank"


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_failed_before_an_operation_ends_it_on_all(told, name):
    first, second = told
    assert first[f"{name}: before"] == (
        "PeerError: rank 1 failed in making batches: RuntimeError: boom"
    )
    assert second[f"{name}: before"] == "RuntimeError: boom"


@pytest.mark.parametrize("name", NAMES)
def test_an_error_names_both_operations_of_ranks_that_differ(told, name):
    for rank in told:
        text = rank[f"{name}: another"]
        assert text.startswith("TrainError: the ranks are at different operations: rank 0 has ")
        assert text.endswith("rank 1 has reducing values of a plugin (torch.float32 [1])")


HANGS = """
    import os
    import torch
    from plugsft.ranks import failures

    failures.GRACE = 2.0

    @plugin()
    class Hangs:
        @hookimpl
        def stepped(self, run):
            if run.step == 2:
                run.ranks.reduce(torch.ones(1, device="meta" if run.ranks.rank else "cpu"))
"""


def test_a_rank_that_waits_in_a_collective_for_a_failed_one_ends_with_its_reason(
    tiny, tmp_path, monkeypatch
):
    activate(install(tmp_path / "site", hangs=HANGS), monkeypatch)
    recipe = tiny(rows=chats(24), train={"steps": 3}, plugins={"hangs": {}})
    ended = [rank.wait() for rank in start_ranks(2, recipe)]
    assert ended[0].returncode == ended[1].returncode == 1
    assert "rank 1 failed: NotImplementedError" in ended[0].stderr
    assert "raised by plugin 'hangs', in its hook 'stepped'" in ended[1].stderr


@pytest.mark.slow
def test_ranks_with_other_model_files_are_refused_before_step_1(tiny, tmp_path):
    must_succeed(tiny(train={"steps": 1}))
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        shutil.copytree(tmp_path / "run/model", folder)
    weights = folders[1] / "model.safetensors"
    raw = np.fromfile(weights, np.uint8)
    raw[len(raw) // 2 :] ^= 1
    raw.tofile(weights)
    tables = tiny_tables(tmp_path) | {"model": {"path": str(folders[0])}}
    recipe = write_recipe(tmp_path / "again.toml", tables)
    output = f"output={tmp_path / 'again'}"
    words = [(recipe, output, f"model.path={folder}") for folder in folders]
    ended = [rank.wait() for rank in start_ranks(2, words=words)]
    assert [one.returncode for one in ended] == [2, 2], ended
    assert "the ranks differ in the model's files" in ended[0].stderr
