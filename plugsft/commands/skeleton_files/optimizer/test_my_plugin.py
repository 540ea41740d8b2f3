"""Check my_plugin in real runs on a tiny model."""

import pytest

from plugsft import testing


def test_it_resumes() -> None:
    testing.resumes("my_plugin", ranks=2)


def test_two_ranks_learn_what_one_learns() -> None:
    testing.ranks_agree("my_plugin", {"decay": -0.5})


def test_a_wrong_option_is_refused() -> None:
    with pytest.raises(AssertionError, match="it should be below 0"):
        testing.summary("my_plugin", {"decay": 0.8})
