"""The trained model, as plugins see it: score, generate, load another, and swap weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from ..base.checksums import digest
from ..base.errors import PluginError, RecipeError
from ..base.types import Ints
from ..hooks import Purpose, Run, with_plugins
from ..model.generate import Speaker, attention_with_cache
from ..model.load import ModelLoad
from ..model.same_base import weights_digest
from ..tokens.store import Tokens
from .agree import agreed, from_main, together
from .precision import half_dtype
from .sharding import is_sharded, shard_frozen_model


class RunModel:
    """What plugins see of the model, under the name `RunModel`.

    All ranks must enter each operation together. A rank that fails, or enters another one, ends
    all ranks with its reason.
    """

    def __init__(self, run: Run) -> None:
        self.module, self.load = run.module, run.loaded.load
        self._run, self._weights = run, run.weights
        self._accelerator = run.accelerator
        mixed = self._accelerator.mixed_precision != "no"
        self.exact = self.load.kwargs["dtype"] == torch.float32 and not mixed
        """Whether the model computes in float32 everywhere."""

    @torch.no_grad()
    def score(self, tokens: Tokens, examples: Ints, module: Module | None = None) -> Tensor:
        """Return -log p of the targets of examples, computed as one micro-batch of the run.

        All ranks call it together, even without examples. `module`: a frozen model to use instead.
        """
        with together("scoring examples"):
            batch = self._run.loader.load_batch(tokens, examples)
            module = self.module if module is None else module
            with evaluating(module):
                return self._run.hooks.token_nll(model=module, batch=batch, summed=False)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[str | list[dict[str, str]]],
        max_tokens: int = 64,
        temperature: float = 0.0,
    ) -> list[str]:
        """Answer questions or chats with the chat template, on all ranks alike.

        Temperature 0 is greedy. Random numbers depend on the seed and the step alone, and those of
        the training go on as before.
        """
        plain: Any = self._weights.plain
        device, sharded = self._accelerator.device, is_sharded(self._accelerator)
        seed = np.random.SeedSequence([self._run.recipe.train.seed, self._run.step])

        def work() -> list[str]:
            with (
                evaluating(plain),
                attention_with_cache(plain),
                torch.random.fork_rng([device] if device.type == "cuda" else []),
            ):
                torch.manual_seed(int(seed.generate_state(1)[0]))
                speaker = Speaker(plain, self._run.tokenizer, max_tokens, temperature, sharded)
                return speaker.answer_all(prompts)

        asked = digest({"prompts": [*prompts]})[:6]
        with together(f"generating answers to the prompts {asked}"):
            answers: list[str] = work_with_weights(self._run, "generate", work)
            return answers

    def load_frozen(self, path: str = "") -> Module:
        """Load a frozen model with the run's settings: the run's model again, or another."""
        kwargs = dict(self.load.kwargs)
        if half := half_dtype(self._accelerator):
            kwargs["dtype"] = half  # it is not trained
        if path:
            kwargs.pop("revision", None)
        with together(f"loading {path or 'the initial model'}"):
            load = ModelLoad(path or self.load.path, kwargs, is_sharded(self._accelerator))
            load.new_tokens = self.load.new_tokens
            model = load.load_model()
            try:
                for prove in self.load.proofs if path else ():
                    prove(model)
            except RecipeError as error:
                raise RecipeError(f"{path}: {error}") from error
            return shard_frozen_model(self._accelerator, load, model)

    def weights_digest(self, path: str = "") -> str:
        """Return a checksum of the weights that `load_frozen` loads; a collective."""
        revision = None if path else self.load.kwargs.get("revision")
        found = ""
        with agreed("reading the weights of a frozen model"):
            if self._run.is_main:
                found = weights_digest(path or self.load.path, revision)
        return str(from_main(found))

    def shards(self) -> dict[str, Tensor]:
        """Return this rank's part of each trained weight, in float32; clone it to keep it."""
        return self._weights.shards()

    @contextmanager
    def swapped(self, shards: Mapping[str, Tensor]) -> Iterator[None]:
        """Put other weights in place inside the block, and the trained ones back after it."""
        trained = {name: shard.clone() for name, shard in self.shards().items() if name in shards}
        with together("swapping weights"):
            self._weights.ensure_fitting(shards)
        try:
            self._weights.set_shards(shards)
            yield
        finally:
            self._weights.set_shards(trained)


def work_with_weights(run: Run, purpose: Purpose, work: Callable[[], Any]) -> Any:
    """Do work with the weights that plugins put in place for its purpose, such as averages."""
    results = []

    def noted() -> Any:
        results.append(work())
        return results[-1]

    result = run.hooks.use_weights(run=run, purpose=purpose, work=noted)
    maker = with_plugins(run.hooks.use_weights)
    if not results:
        raise PluginError(f'{maker} did not call work() for "{purpose}"; it must')
    if result is not results[-1]:
        raise PluginError(f'{maker} did not return what work() returned for "{purpose}"; it must')
    return result


@contextmanager
def evaluating(module: Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the block."""
    training = module.training
    module.eval()
    module.training = False  # DeepSpeed's engine leaves its own
    try:
        yield
    finally:
        module.train(training)
        module.training = training
