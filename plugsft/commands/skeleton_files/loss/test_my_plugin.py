"""Check my_plugin in real runs on a tiny model."""

import pytest

from plugsft import testing


def test_it_is_the_usual_loss_where_gamma_is_0() -> None:
    testing.keeps_gradients("my_plugin", {"gamma": 0.0})


def test_it_is_another_loss_where_gamma_is_not_0() -> None:
    with pytest.raises(AssertionError, match="step 1: loss is"):
        testing.keeps_gradients("my_plugin", {"gamma": 1.0})


def test_two_ranks_learn_what_one_learns() -> None:
    testing.ranks_agree("my_plugin", tables={"eval": {"every": 6, "split": "train[:8]"}})
