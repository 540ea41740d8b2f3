"""The error classes, and the nearest right name."""

import errno

import pytest

from plugsft.base import errors
from plugsft.base.errors import PlugsftError, RecipeError, TrainError, did_you_mean, reason_of


@pytest.mark.parametrize(
    ("word", "options", "expected"),
    [
        ("learning_rat", ["learning_rate", "epochs"], "; did you mean 'learning_rate'?"),
        ("EPOCHS", ["learning_rate", "epochs"], "; did you mean 'epochs'?"),
        ("zzz", ["learning_rate", "epochs"], ""),
        ("", ["epochs"], ""),
        ("x", [], ""),
    ],
)
def test_the_nearest_name(word, options, expected):
    assert did_you_mean(word, options) == expected


def test_a_recipe_s_problems_are_lines():
    assert RecipeError("one").problems == ["one"]
    assert str(RecipeError(["one", "two"])) == "one\ntwo"


def test_every_error_is_of_the_family_and_in_its_picture():
    family = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, PlugsftError)
    ]
    assert all(one.__name__ in errors.__doc__ for one in family)
    # A mistake in what was given ends with 2; training that goes wrong by itself, with 1.
    assert {one for one in family if one.exit_code != 2} == {TrainError}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileExistsError(errno.EEXIST, "File exists", "/a/b"), "file exists"),
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), "permission denied"),
        (OSError(errno.EMFILE, "x", "/a/b"), "too many open files"),
        (OSError("two\nlines"), "two lines"),
        (ValueError("its checksum is wrong"), "its checksum is wrong"),
    ],
)
def test_a_reason_has_no_error_number_and_no_path(error, expected):
    assert reason_of(error) == expected


@pytest.mark.parametrize("text", ["std::bad_alloc", "memory allocation of 262144 bytes failed"])
def test_memory_that_runs_out_in_a_library_is_known(text):
    assert errors.out_of_memory(RuntimeError(text)) and not errors.out_of_memory(OSError("x"))
