"""A recipe's model without its weights: shapes, counts, and a micro-batch's way through it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Module, Parameter
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig

from ...base.errors import PlugsftError, RecipeError
from ...base.types import Batch
from ...batches.labels import IGNORED, heard
from ...model.defaults import ModelDefaults
from ...model.fused_head import Behind, Positions, fused_loss
from ...model.load import Load, decoder_layers, load_of
from ...ranks.precision import autocast_experts
from ...recipe.tables import Recipe
from ...registry.active import Active
from .peak_memory import Trace, through

FLASH = "plugsft_forecast"
"""Attention in one launch, as every kernel keeps its memory: what goes in, what comes out."""
DOCUMENTS = 16
"""So many documents of a row are computed apart: more hold the same, and take longer to count."""
ROOM = {"cpu": 2**28, "cuda": 2**30}
"""Bytes of logits that [plugins.fused_loss] holds at a time."""


@dataclass
class Bare(Load):
    """Makes the model of a configuration; inside a mode of torch that gives it no memory."""

    config: PretrainedConfig = field(kw_only=True)

    def build(self) -> Any:
        """Make it."""
        rest = {name: value for name, value in self.kwargs.items() if name != "revision"}
        make: Any = AutoModelForCausalLM.from_config
        return make(self.config, **rest)


@dataclass(frozen=True)
class Unit:
    """A part of the model, as sharding gathers and frees it."""

    count: int = 0
    trained_count: int = 0
    whole: int = 0
    """Bytes of its weights."""
    trained: int = 0
    """Of these, bytes of trained ones."""


@dataclass(frozen=True)
class Weights:
    """What a model's weights are, in all and by parts."""

    count: int
    trained_count: int
    whole: int
    trained: int
    largest: int
    """Numbers of the largest tensor."""
    persistent: int
    """Numbers in small tensors, which ZeRO-3 does not shard."""
    layers: list[Unit]
    table: Unit
    """Embeddings by themselves, where the head has other weights."""
    tail: Unit
    """Norm and head, with the embeddings where these are one weight."""


class Ghost:
    """A model of shapes, without memory.

    In bfloat16 it computes under autocast, as one process and DDP do; or, if `sharded`, with
    bfloat16 weights, as under FSDP2 and DeepSpeed.
    """

    def __init__(
        self, recipe: Recipe, active: Active, config: PretrainedConfig, sharded: bool = False
    ) -> None:
        self.recipe = recipe
        self._mode = FakeTensorMode()
        AttentionInterface.register(FLASH, _attend)
        how = load_of(recipe.model, recipe.folder)
        if sharded:
            how.kwargs["dtype"] = getattr(torch, recipe.model.dtype)
        # The plugins know models whose weights are still in their files: of FSDP2.
        with torch.device("meta"), active.name_failing_plugin():
            load = Bare(how.path, dict(how.kwargs), config=config)
            self.model: Any = active.hook.optimize_model(load=load)
        with self._mode:
            _place(self.model)
        self.model.train()
        if recipe.model.dtype != recipe.model.weights and not sharded:
            # As a run does.
            autocast_experts()
            computed = torch.autocast("cpu", torch.bfloat16)(self.model.forward)
            self.model.forward = convert_outputs_to_fp32(computed)
        try:
            self.layers = decoder_layers(self.model, "")
        except RecipeError:
            self.layers = []
        for layer in self.layers:
            if layer.gradient_checkpointing:
                layer._gradient_checkpointing_func = _again

    def weights(self, persistent: int = 100_000) -> Weights:
        """Count them."""
        sizes = list(self.model.parameters())
        table, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        tied = head is not None and head.weight is table.weight
        inside = {id(one) for layer in self.layers for one in layer.parameters()}
        tabled = {id(one) for one in table.parameters()} if not tied else set()
        rest = [one for one in sizes if id(one) not in inside | tabled]
        whole = _unit(sizes)
        return Weights(
            count=whole.count,
            trained_count=whole.trained_count,
            whole=whole.whole,
            trained=whole.trained,
            largest=max(one.numel() for one in sizes),
            persistent=_unit([one for one in sizes if one.numel() <= persistent]).count,
            layers=[_unit(list(layer.parameters())) for layer in self.layers],
            table=_unit([one for one in sizes if id(one) in tabled]),
            tail=_unit(rest),
        )

    def trace(self, batch: Batch, device: str, flash: bool) -> Trace:
        """Run a micro-batch forward and backward."""
        batch = merged(batch)
        masked = "attention_mask" in batch and not bool(batch["attention_mask"].all())
        if "attention_mask" in batch and not masked:
            batch.pop("attention_mask")  # transformers makes no mask of it
        positions = int((batch["labels"][:, 1:] != IGNORED).sum())
        try:
            with self._attending(flash, masked), self._mode:
                fake = {
                    name: self._mode.from_tensor(one) if isinstance(one, Tensor) else one
                    for name, one in batch.items()
                }
                return through(self.model, self.layers, lambda: self._loss(fake, positions, device))
        except PlugsftError:
            raise
        except Exception as error:  # whatever a model's own code raises of tensors without values
            name = self.model.config.model_type
            first = str(error).strip().partition("\n")[0]
            raise RecipeError(
                f"model: what a model of type '{name}' holds cannot be told from shapes alone "
                f"({type(error).__name__}: {first}); measure it: plugsft tune, or a run of some "
                "steps (train.steps=3)"
            ) from error

    def _loss(self, batch: Batch, positions: int, device: str) -> Tensor:
        if not self.recipe.has("fused_loss"):
            return ModelDefaults().score(self.model, batch, True)
        causal = getattr(self.model, "get_base_model", lambda: self.model)()
        head, found = causal.get_output_embeddings(), list[Tensor]()
        chunk = self.recipe.plugins["fused_loss"].get("chunk")
        chunk = chunk or max(1, ROOM[device] // (4 * len(head.weight)))

        def forward(hidden: Tensor) -> Tensor:
            rows = torch.zeros(positions, dtype=torch.int64)
            kept = hidden.flatten(0, 1).index_select(0, rows)
            on = torch.is_autocast_enabled("cpu")
            dtype = torch.bfloat16 if on else head.weight.dtype
            given = Positions(kept, head.weight, head.bias, rows, Behind(), chunk, dtype)
            found.append(fused_loss(given, True))
            return found[0][None, None]

        head.forward = forward
        try:
            self.model(**heard(batch), use_cache=False)
        finally:
            del head.forward
        return found[0].sum()

    @contextmanager
    def _attending(self, flash: bool, masked: bool) -> Iterator[None]:
        """Take the kernel that a run would."""
        config = self.model.config.get_text_config()
        before = config._attn_implementation
        if flash or (before == "sdpa" and not masked):
            config._attn_implementation = FLASH
        try:
            yield
        finally:
            config._attn_implementation = before


def merged(batch: Batch) -> Batch:
    """Take a row of many documents for one of a few, as long together."""
    documents = batch.get("documents")
    if not documents or len(documents) <= DOCUMENTS or "seen" in batch:
        return dict(batch)
    total = sum(documents)
    cuts = [total * number // DOCUMENTS for number in range(DOCUMENTS + 1)]
    parts = tuple(stop - start for start, stop in pairwise(cuts))
    return {**batch, "documents": parts}


def _place(model: Module) -> None:
    """Say of each tensor that it is on a device, with nothing behind it."""
    made: dict[int, Tensor] = {}

    def there(one: Tensor) -> Tensor:
        if id(one) not in made:
            plain = torch.empty(one.shape, dtype=one.dtype)
            parameter = isinstance(one, Parameter)
            made[id(one)] = Parameter(plain, one.requires_grad) if parameter else plain
        return made[id(one)]

    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            kept |= {name: there(one) for name, one in kept.items() if one is not None}


def _unit(sizes: list[Parameter]) -> Unit:
    return Unit(
        sum(one.numel() for one in sizes),
        sum(one.numel() for one in sizes if one.requires_grad),
        sum(one.numel() * one.element_size() for one in sizes),
        sum(one.numel() * one.element_size() for one in sizes if one.requires_grad),
    )


def _again(function: Any, *inputs: Any, **others: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=False, **others
    )


def _attend(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    shared = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=shared
    )
    return output.transpose(1, 2).contiguous(), None
