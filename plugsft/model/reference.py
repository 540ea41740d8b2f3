"""The reference that preference losses compare with; the loop does not use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Dropout, Module

from ..hooks import RunModel


class Reference:
    """A model that is not trained: with adapters the base without them, else a frozen copy.

    `path`: another model.
    """

    def __init__(self, model: RunModel, path: str | None = None) -> None:
        module: Any = getattr(model.module, "module", model.module)
        self._adapted: Any = None
        self._frozen: Module | None = None
        if not path and (name := self.without_adapters(model)):
            self.name, self._adapted = name, module
        else:
            self.name, self._frozen = path or "a frozen copy", model.load_frozen(path or "")

    @staticmethod
    def without_adapters(model: RunModel) -> str:
        """Name the model that remains while adapters are off; "" if there are none."""
        module: Any = getattr(model.module, "module", model.module)
        if not hasattr(module, "disable_adapter"):
            return ""
        if getattr(module, "initial_digest", ""):
            return "the model with the adapters before training"
        return "the base without adapters"

    @contextmanager
    def in_place(self, model: Module) -> Iterator[Module]:
        """Yield the module that computes the reference; `model` is the trained one."""
        if self._frozen is not None:
            yield self._frozen
        else:
            with self._adapted.disable_adapter():
                yield model


def remove_dropout(model: Module) -> None:
    """Turn off the model's dropout; that of adapters stays."""
    for name, module in model.named_modules():
        if isinstance(module, Dropout) and "lora_" not in name:
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
