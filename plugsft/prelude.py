"""What a plugin may do with the whole run before step 1, in `annotate`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.nn import Module

from .feeder import Feeder
from .hooks import Hooks
from .models import Load
from .spread import is_sharded, spread_frozen
from .tokens import Tokens
from .types import Ints


class Prelude:
    """It computes with the model on all ranks, keeps what was computed, and loads other models."""

    def __init__(self, accelerator: Accelerator, hook: Hooks, feeder: Feeder, load: Load) -> None:
        self.rank, self.ranks = accelerator.process_index, accelerator.num_processes
        mixed = accelerator.mixed_precision != "no"
        self.exact = load.kwargs["dtype"] == torch.float32 and not mixed
        self.load = load
        """How the model was loaded."""
        self._accelerator, self._hook, self._feeder = accelerator, hook, feeder

    def annotate(self, model: Module, tokens: Tokens) -> Tokens:
        """Let plugins add to tokens what must be computed with the model."""
        return self._hook.annotate(model=model, tokens=tokens, prelude=self)

    @torch.no_grad()
    def losses(self, model: Module, tokens: Tokens, examples: Ints) -> Tensor:
        """Return -log p of the targets of some examples, in one micro-batch as the run makes it.

        Under ZeRO-3 and FSDP2 all ranks compute at once; one without examples gives none.
        """
        batch = self._feeder.batch(tokens, examples)
        return self._hook.score(model=model, batch=batch, summed=False)

    def added(self, values: Tensor) -> Tensor:
        """Return the sums over all ranks."""
        there = values.to(self._accelerator.device)
        summed: Tensor = self._accelerator.reduce(there, reduction="sum")
        return summed

    def frozen(self, path: str = "", revision: str | None = None) -> Module:
        """Load a model as the run's was, that one again or another; it is never trained."""
        kwargs = dict(self.load.kwargs)
        if self._accelerator.mixed_precision == "bf16":
            kwargs["dtype"] = torch.bfloat16  # it is only computed with
        if path:
            kwargs = {name: one for name, one in kwargs.items() if name != "revision"}
            kwargs |= {"revision": revision} if revision else {}
        load = Load(path or self.load.path, kwargs, is_sharded(self._accelerator))
        return spread_frozen(self._accelerator, load, load.build())

    def keep(
        self, key: dict[str, Any], build: Callable[[Path | None], None], read: Callable[..., Any]
    ) -> Any:
        """Return what `read` makes of the folder of a key; where there is none, build it.

        All ranks build together: the main one in the folder, and the others beside it, with None.
        """
        if not self._accelerator.is_main_process:
            if self._told(None):
                build(None)
            return self._told(None)
        began = []

        def begin(folder: Path) -> None:
            began.append(self._told(True))
            build(folder)

        kept = self._hook.cache(key=key, build=begin, read=read)
        if not began:
            self._told(False)
        return self._told(kept)

    def _told(self, value: Any) -> Any:
        """Return what the main process says to all."""
        if self.ranks == 1:
            return value
        return broadcast_object_list([value])[0]
