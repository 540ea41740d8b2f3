"""A model without data: the sizes of its parameters, and the memory of a micro-batch, traced.

The model's own code runs, forward and backward, so that every family, attention and plugin is
counted without formulas.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Module, Parameter
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PretrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer

from ...base.errors import PlugsftError, RecipeError
from ...base.types import Batch, Ints
from ...batches.labels import IGNORED, model_inputs
from ...model.config import load_error
from ...model.defaults import ModelDefaults
from ...model.for_plugins import decoder_layers
from ...model.fused_head import LogitTransform, Positions, fused_loss
from ...model.load import ModelLoad, make_load
from ...model.published import build
from ...model.tensor_shards import num_weights
from ...ranks.precision import autocast_experts
from ...recipe.tables import Recipe
from ...registry.active import Active

LAYERS, HEAD, GRADIENTS = range(3)
"""Owners of memory: embeddings and layers, the loss head after them, the gradients."""
GROUPED = torch.ops.aten._grouped_mm.default
"""The product of experts: torch knows the shape of its result in bfloat16 only."""
FLASH = "plugsft_forecast"
"""Attention like a fused kernel: it stores inputs and output only."""
UNSHARDED = 100_000
"""Elements of the largest tensor that ZeRO-3 leaves whole."""
DOCUMENTS = 16
"""Most documents of a packed row that are traced: more take longer, and the same memory."""
LOGITS = {"cpu": 2**28, "cuda": 2**30}
"""Bytes of logits that a fused head computes at a time by default."""


@dataclass(frozen=True)
class Trace:
    """The memory of one micro-batch, at each allocation."""

    activations: Ints
    """[LAYERS or HEAD, moment]: bytes."""
    gradients: Ints
    """[moment]: bytes of finished gradients."""


@dataclass
class _Allocation:
    """A live tensor's memory."""

    size: int
    owner: int
    watch: Any
    """Tells when the memory is freed."""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped upstream
    """Records every allocation of a tensor until it is freed."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped upstream
        self._live: dict[int, _Allocation] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self.owner, self.bytes = LAYERS, [0, 0, 0]
        self.moments: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Run the operation and record the tensors that it makes."""
        dtype = args[0].dtype if func is GROUPED else None
        if dtype:
            args = [*map(Tensor.bfloat16, args[:2]), *args[2:]]
        result: Any = func(*args, **(kwargs or {}))
        if dtype:
            result = result.to(dtype)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._record(tensor)
        return result

    def _record(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._live:
            return
        watch = weakref.ref(storage, lambda _: self._free(key))
        self._live[key] = _Allocation(size, self.owner, watch)
        self.bytes[self.owner] += size
        self.moments.append(tuple(self.bytes))

    def finish_gradient(self, parameter: Tensor) -> None:
        """Count a finished gradient apart from activations; it stays until the step."""
        assert parameter.grad is not None
        key = parameter.grad.untyped_storage()._cdata
        if allocation := self._live.pop(key, None):
            self.bytes[allocation.owner] -= allocation.size
            self.bytes[GRADIENTS] += allocation.size
            self._known.add(key)
        self.moments.append(tuple(self.bytes))

    def _free(self, key: int) -> None:
        if (allocation := self._live.pop(key, None)) is not None:
            self.bytes[allocation.owner] -= allocation.size


@dataclass
class _ConfigLoad(ModelLoad):
    """Makes the model from its configuration, without weight files."""

    config: PretrainedConfig = field(kw_only=True)

    def load_model(self) -> Any:
        """Make the model."""
        rest = {name: value for name, value in self.kwargs.items() if name != "revision"}
        quantization = rest.pop("quantization_config", None)
        try:
            model = build(self.config, self.text_only, **rest)
        except Exception as error:  # of a model's own class, from settings of other types
            raise load_error(self.path, error) from error
        if quantization is not None:
            quantizer: Any = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
            quantizer.preprocess_model(model, device_map=None)
            model.config.quantization_config = quantization
        return model


@dataclass(frozen=True)
class Unit:
    """A part of the model that sharding gathers and frees as a whole."""

    count: int
    """Number of parameters."""
    trained_count: int
    bytes: int
    trained_bytes: int


@dataclass(frozen=True)
class Weights(Unit):
    """The sizes of a model's weights, in total and by units."""

    state_bytes: float
    """Bytes of the optimizer's states."""
    largest: int
    """Elements of the largest tensor."""
    unsharded_count: int
    """Elements in small tensors, which ZeRO-3 does not shard."""
    layers: list[Unit]
    embeddings: Unit
    """Empty if the head is tied to them."""
    tail: Unit
    """Norm and head, with the embeddings if they are tied."""


class MetaModel:
    """A model whose tensors have shapes but no data.

    A bfloat16 model computes under autocast, as in one process and DDP; or, if `casts_weights`,
    with bfloat16 weights, as under FSDP2 and DeepSpeed.
    """

    def __init__(
        self,
        recipe: Recipe,
        active: Active,
        config: PretrainedConfig,
        casts_weights: bool = False,
    ) -> None:
        self.recipe, self._active = recipe, active
        self._mode = FakeTensorMode()
        AttentionInterface.register(FLASH, _attend)
        load = make_load(recipe.model, recipe.folder)
        if casts_weights:
            load.kwargs["dtype"] = getattr(torch, recipe.model.dtype)
        # Plugins accept a model on the meta device: FSDP2 loads it the same way.
        with torch.device("meta"):
            load = _ConfigLoad(
                load.path, dict(load.kwargs), text_only=load.text_only, config=config
            )
            self.model: Any = active.hooks.optimize_model(load=load)
        with self._mode:
            _make_fake(self.model)
        self.model.train()
        if recipe.model.dtype != recipe.model.weights and not casts_weights:
            autocast_experts()
            computed = torch.autocast("cpu", torch.bfloat16)(self.model.forward)
            self.model.forward = convert_outputs_to_fp32(computed)
        try:
            self.layers = decoder_layers(self.model, "")
        except RecipeError:
            self.layers = []

    def weights(self) -> Weights:
        """Count the parameters."""
        parameters = list(self.model.parameters())
        embeddings = self.model.get_input_embeddings()
        head = self.model.get_output_embeddings()
        tied = head is not None and head.weight is embeddings.weight
        in_layers = {id(weight) for layer in self.layers for weight in layer.parameters()}
        embedded = set[int]() if tied else {id(weight) for weight in embeddings.parameters()}
        return Weights(
            **vars(_unit(parameters)),
            state_bytes=self._state_bytes(),
            largest=max(weight.numel() for weight in parameters),
            unsharded_count=_unit([w for w in parameters if w.numel() <= UNSHARDED]).count,
            layers=[_unit([*layer.parameters()]) for layer in self.layers],
            embeddings=_unit([w for w in parameters if id(w) in embedded]),
            tail=_unit([w for w in parameters if id(w) not in in_layers | embedded]),
        )

    def _state_bytes(self) -> float:
        """The bytes of the optimizer's states, from a step of one weight of each shape."""
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        optimizer = self._active.hooks.optimizer(model=self.model, train=self.recipe.train)
        shapes = {(weight.shape, weight.dtype): weight for weight in trained}
        with self._mode:
            for weight in shapes.values():
                weight.grad = torch.empty_like(weight)
            # An optimizer that reads numbers fails, after it has made a state at least.
            with suppress(Exception):
                optimizer.step()
        self.model.zero_grad()
        total = count = 0
        for weight in trained:
            if state := optimizer.state.get(shapes[weight.shape, weight.dtype]):
                # Counters, which are one number, do not matter.
                values = [
                    each for each in state.values() if isinstance(each, Tensor) and each.dim()
                ]
                total += sum(value.nbytes for value in values)
                count += weight.numel()
        return float(total * sum(weight.numel() for weight in trained) / max(1, count))

    def trace(self, batch: Batch, device: str, flash: bool) -> Trace:
        """Trace the memory of a micro-batch, forward and backward."""
        batch = merge_documents(batch)
        masked = "attention_mask" in batch and not bool(batch["attention_mask"].all())
        if not masked:
            batch.pop("attention_mask", None)  # transformers ignores a mask without padding
        positions = int((batch["labels"][:, 1:] != IGNORED).sum())
        config = self.model.config.get_text_config()
        attention = config._attn_implementation
        if flash or (attention == "sdpa" and not masked):
            config._attn_implementation = FLASH
        try:
            with self._mode:
                fake = {
                    name: self._mode.from_tensor(value) if isinstance(value, Tensor) else value
                    for name, value in batch.items()
                }
                return self._record(lambda: self._loss(fake, positions, device))
        except PlugsftError:
            raise
        except Exception as error:  # a model's own code may raise anything
            name = self.model.config.model_type
            first = str(error).strip().partition("\n")[0]
            raise RecipeError(
                f"model: the memory of a model of type '{name}' cannot be forecast from shapes "
                f"({type(error).__name__}: {first}); measure it: plugsft tune, or a run of a few "
                "steps (train.steps=3)"
            ) from error
        finally:
            config._attn_implementation = attention

    def _record(self, loss: Callable[[], Tensor]) -> Trace:
        """Compute a loss and its gradients; record the memory at each moment."""
        model = self.model
        tracer = Tracer([*model.parameters(), *model.buffers()])
        in_backward = False

        def enter_head(_module: Any, _inputs: Any, output: Any) -> None:
            if in_backward:
                return  # a layer that is recomputed
            tracer.owner = HEAD
            hidden = output if isinstance(output, Tensor) else output[0]
            if hidden.requires_grad:
                hidden.register_hook(leave_head)

        def leave_head(_: Tensor) -> None:
            tracer.owner = LAYERS

        hooks = [layer.register_forward_hook(enter_head) for layer in self.layers[-1:]]
        for parameter in model.parameters():
            if parameter.requires_grad:
                hooks.append(parameter.register_post_accumulate_grad_hook(tracer.finish_gradient))
        with tracer:
            total = loss()
            in_backward = True
            total.backward()  # type: ignore[no-untyped-call]  # untyped upstream
            del total
        for hook in hooks:
            hook.remove()
        model.zero_grad()
        moments = np.array(tracer.moments, np.int64).reshape(-1, 3).T
        return Trace(moments[[LAYERS, HEAD]], moments[GRADIENTS])

    def _loss(self, batch: Batch, positions: int, device: str) -> Tensor:
        fused = self.recipe.provides("fused_head")
        if fused is None:
            return ModelDefaults().token_nll(self.model, batch, True)
        causal = getattr(self.model, "get_base_model", lambda: self.model)()
        head, losses = causal.get_output_embeddings(), list[Tensor]()
        chunk = fused.value or max(1, LOGITS[device] // (4 * len(head.weight)))

        def forward(hidden: Tensor) -> Tensor:
            rows = torch.zeros(positions, dtype=torch.int64)
            trained = hidden.flatten(0, 1).index_select(0, rows)
            autocast = torch.is_autocast_enabled("cpu")
            dtype = torch.bfloat16 if autocast else head.weight.dtype
            targets = Positions(
                trained, head.weight, head.bias, rows, LogitTransform(), chunk, dtype
            )
            losses.append(fused_loss(targets, True))
            return losses[0][None, None]

        head.forward = forward
        try:
            self.model(**model_inputs(batch), use_cache=False)
        finally:
            del head.forward
        return losses[0].sum()


def merge_documents(batch: Batch) -> Batch:
    """Merge the documents of a packed row into a few with the same total length."""
    documents = batch.get("documents")
    if not documents or len(documents) <= DOCUMENTS or "seen" in batch:
        return dict(batch)
    total = sum(documents)
    cuts = [total * number // DOCUMENTS for number in range(DOCUMENTS + 1)]
    parts = tuple(stop - start for start, stop in pairwise(cuts))
    return {**batch, "documents": parts}


def _make_fake(model: Module) -> None:
    """Replace meta tensors by fake ones, which have a device."""
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, Parameter)
            fakes[id(tensor)] = Parameter(empty, tensor.requires_grad) if is_parameter else empty
            fakes[id(tensor)].__dict__ |= tensor.__dict__  # the shape before quantization
        return fakes[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors |= {
                name: fake(tensor) for name, tensor in tensors.items() if tensor is not None
            }


def _unit(parameters: list[Parameter]) -> Unit:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return Unit(
        sum(map(num_weights, parameters)),
        sum(map(num_weights, trained)),
        sum(parameter.nbytes for parameter in parameters),
        sum(parameter.nbytes for parameter in trained),
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
