"""Check my_plugin in real runs on a tiny model."""

from plugsft import testing


def test_it_keeps_gradients() -> None:
    testing.keeps_gradients("my_plugin", {"longer_than": 16})


def test_it_works_in_a_worker_process() -> None:
    testing.survives_a_worker("my_plugin")


def test_it_counts() -> None:
    # 24 rows, two at a time, two epochs.
    assert testing.summary("my_plugin", {"longer_than": 1}).startswith("24 of 24 ")
    assert testing.summary("my_plugin", {"longer_than": 999}).startswith("0 of 24 ")
