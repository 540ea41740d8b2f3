"""Check my_plugin in real runs on a tiny model."""

from plugsft import testing


def test_it_changes_nothing_that_is_learned() -> None:
    testing.keeps_gradients("my_plugin", {"below": 0.0})


def test_it_resumes() -> None:
    tables = {"eval": {"every": 3, "split": "train[:8]"}}
    testing.resumes("my_plugin", {"below": 0.0}, tables=tables)


def test_it_stops_the_run_on_one_and_on_two_ranks() -> None:
    testing.ranks_agree("my_plugin", {"below": 5.75, "patience": 3})
    said = testing.summary("my_plugin", {"below": 9.0}, tables={"checkpoint": {"every": 1}})
    assert said.endswith(", saved as step-000001, completed"), said
