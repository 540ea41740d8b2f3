"""How a plugin is declared."""

import pytest
from pydantic import ValidationError

from plugsft import hookimpl, plugin, state
from plugsft.hooks import PLUGIN
from plugsft.reading import fields


@plugin(after=["a"], requires=["b"], conflicts={"c": "because"})
class Squeeze:
    """Squeeze rows."""

    depth: int = 3
    """How deep."""
    name: str
    seen: list = state([])

    @hookimpl
    def verdict(self):
        return f"depth {self.depth}"


def test_fields_are_options_and_state_is_none():
    assert [name for name, _ in fields(Squeeze)] == ["depth", "name"]
    made = Squeeze(name="x")
    assert (made.depth, made.name, made.seen, made.verdict()) == (3, "x", [], "depth 3")
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
    assert (contract.after, contract.requires) == (("a",), ("b",))
    assert contract.conflicts == {"c": "because"}


def test_an_option_s_docstring_is_its_help():
    assert Squeeze.__pydantic_fields__["depth"].description == "How deep."
