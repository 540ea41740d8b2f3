"""The trained model, as plugins see it: score, generate, load another, and swap weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedTokenizerBase

from ..base.types import Ints
from ..hooks import Hooks
from ..model.generate import Speaker
from ..model.load import Load
from ..tokens.store import Tokens
from .agree import together
from .load_batches import BatchLoader
from .sharding import is_sharded, shard_frozen_model
from .train_state import TrainState


class TrainedModel:
    """What plugins see of the model (the protocol `RunModel`).

    All ranks must enter each operation together. A rank that fails, or enters another one, ends
    all ranks with its reason.
    """

    def __init__(
        self,
        module: Module,
        accelerator: Accelerator,
        hooks: Hooks,
        loader: BatchLoader,
        load: Load,
        state: TrainState,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.module = module
        self.load = load
        mixed = accelerator.mixed_precision != "no"
        self.exact = load.kwargs["dtype"] == torch.float32 and not mixed
        self._accelerator, self._hooks, self._loader = accelerator, hooks, loader
        self._state, self._tokenizer = state, tokenizer

    @torch.no_grad()
    def score(self, tokens: Tokens, examples: Ints, module: Module | None = None) -> Tensor:
        """Return -log p of the targets of examples, computed as one micro-batch of the run.

        All ranks call it together, even without examples. `module`: a frozen model to use instead.
        """
        with together(self._accelerator, "scoring examples"):
            batch = self._loader.load_batch(tokens, examples)
            module = self.module if module is None else module
            with evaluating(module):
                return self._hooks.token_nll(model=module, batch=batch, summed=False)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[str], max_tokens: int = 64, temperature: float = 0.0
    ) -> list[str]:
        """Answer prompts with the chat template, on all ranks alike; temperature 0 is greedy."""
        sharded = is_sharded(self._accelerator)
        with together(self._accelerator, "generating"):
            plain: Any = self._state.plain
            with evaluating(plain):
                speaker = Speaker(plain, self._tokenizer, max_tokens, temperature, sharded)
                return speaker.answer([speaker.ask(prompt) for prompt in prompts])

    def load_frozen(self, path: str = "", revision: str | None = None) -> Module:
        """Load a frozen model with the run's settings: the run's model again, or another."""
        kwargs = dict(self.load.kwargs)
        if self._accelerator.mixed_precision == "bf16":
            kwargs["dtype"] = torch.bfloat16  # it is not trained
        if path:
            kwargs = {name: value for name, value in kwargs.items() if name != "revision"}
            kwargs |= {"revision": revision} if revision else {}
        with together(self._accelerator, f"loading {path or 'the initial model'}"):
            load = Load(path or self.load.path, kwargs, is_sharded(self._accelerator))
            return shard_frozen_model(self._accelerator, load, load.build())


@contextmanager
def evaluating(module: Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the block."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
