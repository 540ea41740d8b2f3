"""How a plugin is declared, and when it receives the record."""

import json

import pytest
from conftest import run_plugsft
from plugin_packages import activate, install
from pydantic import ValidationError

from plugsft import hookimpl, plugin, state
from plugsft.hooks import PLUGIN
from plugsft.recipe.parse import fields


@plugin(after=["a"], requires=["b"], conflicts={"c": "because"})
class Squeeze:
    """Squeeze rows."""

    depth: int = 3
    """How deep."""
    name: str
    seen: list = state([])

    @hookimpl
    def summary(self):
        return f"depth {self.depth}"


def test_fields_are_options_and_state_is_none():
    assert [name for name, _ in fields(Squeeze)] == ["depth", "name"]
    made = Squeeze(name="x")
    assert (made.depth, made.name, made.seen, made.summary()) == (3, "x", [], "depth 3")
    with pytest.raises(ValidationError, match="seen"):
        Squeeze(name="x", seen=[1])
    made.seen.append(1)
    assert Squeeze(name="x").seen == [], "each has a state of its own"


def test_options_are_strict_and_named():
    for wrong in ({"depth": "3"}, {"depth": 3.0}, {"depth": True}, {"depht": 3}):
        with pytest.raises(ValidationError):
            Squeeze(name="x", **wrong)
    with pytest.raises(ValidationError):
        Squeeze(3, "x")


def test_a_contract_is_kept_with_the_class():
    contract = getattr(Squeeze, PLUGIN)
    assert (contract.after, contract.requires) == (["a"], ["b"])
    assert contract.conflicts == {"c": "because"}


def test_an_option_s_docstring_is_its_help():
    assert Squeeze.__pydantic_fields__["depth"].description == "How deep."


HEARS = """
    import json

    @plugin()
    class Hears:
        file: str
        refuse: bool = False

        def write(self, *facts) -> None:
            with open(self.file, "a") as file:
                file.write(json.dumps(facts) + "\\n")

        @hookimpl
        def ready(self, run) -> None:
            if self.refuse:
                raise PluginError("not here")
            self.write("ready", run.step, run.steps, run.facts.get("final"))

        @hookimpl
        def stepped(self, run) -> None:
            self.write("stepped", run.step, run.epoch)

        @hookimpl
        def logged(self, run, metrics) -> None:
            if "eval_loss" in metrics:
                self.write("logged", run.step, sorted(metrics))

        @hookimpl
        def saved(self, run, folder, kind, step) -> None:
            self.write("saved", kind, folder.name, folder.is_dir(), step)

        @hookimpl
        def finished(self, run, status) -> None:
            self.write("finished", status, run.step, run.facts["final"])
"""


def test_a_plugin_gets_every_notice_of_a_run(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path, hears=HEARS), monkeypatch)
    file = tmp_path / "heard"
    recipe = tiny(
        train={"steps": 2, "batch_size": 8},
        checkpoint={"every": 1},
        eval={"split": "train[:2]", "every": 2},
        plugins={"hears": {"file": str(file)}},
    )
    assert run_plugsft(recipe).returncode == 0
    run = json.loads((tmp_path / "run/run.json").read_text())
    per_epoch = run["steps"]["per_epoch"]
    heard = [json.loads(line) for line in file.read_text().splitlines()]
    # A checkpoint is written while the training goes on.
    first = ["saved", "checkpoint", "step-000001", True, 1]
    assert 2 <= heard.index(first) <= 4
    heard.remove(first)
    assert heard == [
        ["ready", 0, 2, None],
        ["stepped", 1, 1 / per_epoch],
        ["stepped", 2, 2 / per_epoch],
        ["logged", 2, ["eval_loss", "eval_tokens"]],
        ["saved", "checkpoint", "step-000002", True, 2],
        ["saved", "model", "model", True, 2],
        ["finished", "completed", 2, run["final"]],
    ]
    # Who refuses, refuses before anything is replaced.
    result = run_plugsft(recipe, "plugins.hears.refuse=true", "--overwrite")
    assert result.returncode == 2 and "not here" in result.stderr
    assert json.loads((tmp_path / "run/run.json").read_text()) == run
    assert (tmp_path / "run/model").is_dir()
