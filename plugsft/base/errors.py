"""Exceptions that the command line prints as one line each, without a traceback.

PlugsftError
├── RecipeError      the recipe, or an override of it, is wrong
├── PluginError      a plugin cannot be found, loaded, combined, or broke its contract
├── DataError        a source cannot be read, or its rows cannot be trained on
├── LaunchError      the launcher was asked for other processes than it started
├── DiskError        a file or folder cannot be written
├── CheckpointError  a checkpoint is missing, damaged, or of another run
├── Stopped          a signal ended the run early (exit code 128 + the signal)
└── TrainError       training itself failed (exit code 1: not a mistake in the input)

A message names the place, the problem and the cure.

Errors of the operating system and of transformers are explained here, too, and messages of
libraries that nobody needs are hidden.
"""

import errno
import os
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from .limits import read_json_object

MEMORY = (
    "out of memory",
    "allocate memory",
    "Cannot allocate",
    "not enough memory",
    "memory allocation of",  # Rust, in tokenizers and safetensors
    "bad_alloc",
    "ALLOC_FAILED",
)
"""Out-of-memory messages of torch, CUDA, C++ and the operating system."""
REASONS = {errno.ENOSPC: "the disk is full", errno.ENOTDIR: "a folder of its path is a file"}
"""Error number of the operating system -> plain words, where its own are not."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
SETTINGS = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "tokenizer.json",
)
"""Model files with one JSON object each."""
TRUST = "trust_remote_code"
"""Occurs in each error of transformers about a model's own code."""


class PlugsftError(Exception):
    """A failure that the user can solve."""

    exit_code = 2


class RecipeError(PlugsftError):
    """The recipe is wrong. Holds every problem found, one line each."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def of_model(self, key: str) -> "RecipeError":
        """Return the problems of a model that another key than model.path names."""
        return RecipeError([problem.replace("model.path", key, 1) for problem in self.problems])


class PluginError(PlugsftError):
    """A plugin cannot be used, or broke its contract."""


class DataError(PlugsftError):
    """A source cannot be read, or its rows cannot be trained on."""


class DiskError(PlugsftError):
    """A file or folder cannot be written: disk full, read-only, no permission."""

    def __init__(self, reason: str, cure: str) -> None:
        self.reason = reason
        super().__init__(reason, cure)

    def __str__(self) -> str:
        return "; ".join(self.args)


class LaunchError(PlugsftError):
    """The launcher was asked for other processes than it started."""


class CheckpointError(PlugsftError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class TrainError(PlugsftError):
    """Training itself failed."""

    exit_code = 1


def out_of_memory(error: BaseException) -> bool:
    """Tell whether an error, its cause, or one that was being handled is out of memory."""
    if isinstance(error, MemoryError) or any(message in str(error) for message in MEMORY):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and out_of_memory(cause)


def reason_of(error: BaseException) -> str:
    """Return an error's reason in one line, without error number and path."""
    if isinstance(error, OSError) and error.errno is not None:
        text = os.strerror(error.errno)
        return REASONS.get(error.errno, text[0].lower() + text[1:])
    return " ".join(str(error).split())


class Stopped(PlugsftError):
    """A signal ended the run early."""

    def __init__(self, message: str, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def choices(word: str, options: Collection[str], lead: str = "known:") -> str:
    """Return a hint for a wrong word: "; did you mean 'x'? known: x, y"."""
    return f"{did_you_mean(word, options) or ';'} {lead} {', '.join(options) or 'none'}"


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the most similar option, else ""."""
    ending = Path(word).suffix  # files are not alike because both end with .jsonl
    names = {option.removesuffix(ending).lower(): option for option in options}
    close = get_close_matches(word.removesuffix(ending).lower(), names, n=1, cutoff=0.57)
    return f"; did you mean '{names[close[0]]}'?" if close else ""


def explain_load_error(path: str, error: Exception) -> str:
    """Return the reason: a broken file of the folder, or transformers' message."""
    if path.endswith(".gguf"):
        return "a GGUF file is for llama.cpp; docs/start.md says how to make a folder of it"
    for name in SETTINGS:
        file = Path(path) / name
        try:
            if file.is_file():
                read_json_object(file)
        except (OSError, ValueError) as broken:
            return f"{name}: {reason_of(broken)}. Download the file again"
    if "couldn't find them in the cached files" in str(error):
        return (
            "there is no such folder, it is not in the hub's cache, and the hub cannot be reached. "
            "Name a folder, or connect (and unset HF_HUB_OFFLINE)"
        )
    first, _, rest = str(error).strip().partition("\n")
    # "Validation error for field 'x':" has its reason on the next line.
    detail = " " + rest.strip().partition("\n")[0] if first.rstrip().endswith(":") else ""
    reason = f"{type(error).__name__}: {first}{detail}"
    if TRUST in str(error):
        reason += (
            ". Python code that comes with a model runs only if you allow it: "
            "model.trust_remote_code = true in your recipe, or --trust-remote-code for chat and "
            "export"
        )
    return reason
