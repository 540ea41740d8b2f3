"""What decides what a run learns, beside the keys of its recipe; a resume must find it again.

Data are known by the checksums of their tokens, so that files may be moved or written in another
format. A model is known by the bytes of its weights, its config.json and its Python files. The main
process reads the weights beside the first steps: no step waits for it, only the first checkpoint
does.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from transformers.utils import GENERATION_CONFIG_NAME

from ..base.checksums import digest, file_digest
from ..base.console import say
from ..base.errors import reason_of
from ..model.same_base import WEIGHTS, read_settings, settings_of, weights_digest
from ..ranks.precision import dtypes_of
from ..registry.active import Active, options_of

if TYPE_CHECKING:
    from ..run import Run

REMOTE_CODE = "transformers_modules"
"""The package into which transformers copies the Python files of models."""


@dataclass
class Contents:
    """What a run learns from, by names that a message can use."""

    checksums: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Small values, which a message shows."""
    noted: dict[str, str] = field(default_factory=dict)
    """What may change, with a warning: versions, and the code of plugins that are not bundled."""
    evaluation: str = ""
    """The checksum of the tokens of the evaluation data."""
    weights: Future[dict[str, str]] = field(default_factory=Future)
    """On the main process: checksums of weights, which are computed in the background."""

    def read_weights(self, models: Mapping[str, tuple[str, str | None]]) -> None:
        """Read the files of the weights of models."""
        found = {}
        for name, model in models.items():
            try:
                found[name] = weights_digest(*model)
            except Exception as error:  # they may be moved once the model is loaded
                say(f"warning: {name} cannot be compared at a resume: {reason_of(error)}")
                found[name] = ""
        self.weights.set_result(found)

    def described(self) -> dict[str, Any]:
        """Return what a checkpoint stores; the main process alone, which waits for checksums."""
        return {
            "checksums": self.checksums | self.weights.result(),
            "settings": self.settings,
            "noted": self.noted,
        }


def contents_of(run: Run) -> Contents:
    """Describe what a run learns from; the main process begins to read weights."""
    load, tokens = run.loaded.load, run.tokens
    base = load.path, load.kwargs.get("revision")
    models = {WEIGHTS: base}
    settings = settings_of(*base)
    settings["the class of the model"] = load.kept.published
    dtypes = dtypes_of(run.accelerator, run.weights, run.optimizer)
    settings["the number type of computing"] = dtypes["compute"]
    reference = run.recipe.provides("reference_model")
    if reference and reference.value:
        models["the weights of the reference"] = reference.value, None
        settings |= settings_of(reference.value, None, "the reference's config.json")
    contents = Contents(
        {
            "the tokens of the training data": tokens.facts["index"],
            "the tokenizer": tokens.facts["key_parts"]["tokenizer"],
            "the chat template": digest({"template": run.tokenizer.chat_template}),
            "the Python files of the model": digest(code_of(run.weights.plain)),
        },
        settings,
        run.facts["versions"] | noted_of_plugins(run.active),
    )
    contents.noted[GENERATION_CONFIG_NAME] = digest(read_settings(*base, GENERATION_CONFIG_NAME))
    if run.evaluation_tokens:
        contents.evaluation = run.evaluation_tokens.facts["index"]
    if run.is_main:
        Thread(target=contents.read_weights, args=(models,), daemon=True).start()
    return contents


def code_of(model: Any) -> dict[str, str]:
    """Return the checksums of the Python files that came with a model."""
    # Of all parts: adapters stand around the model.
    classes = {one for part in model.modules() for one in type(part).__mro__}
    own = (one for one in classes if one.__module__.startswith(REMOTE_CODE))
    folders = {Path(inspect.getfile(one)).parent for one in own}
    return {file.name: file_digest(file) for folder in folders for file in folder.glob("*.py")}


def noted_of_plugins(active: Active) -> dict[str, str]:
    """Describe the plugins that are not bundled: the others name what changes results."""
    noted = {}
    for name, plugin in active.plugins.items():
        if not active.is_bundled(name):
            noted[f"the code of plugin {name}"] = active.source_digest(name)
            noted[f"the options of plugin {name}"] = digest(options_of(plugin))
    return noted
