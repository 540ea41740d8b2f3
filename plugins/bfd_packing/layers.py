"""One layer of each kind of a model, as its own code trains it, in float32 on the CPU.

Layers have the widths and heads of the model. Small is only what computes each token alone: the
head, and the inner widths of MLPs. Limits of attention are lowered to a few tokens: documents that
exceed a window of 4,096 would take a CPU minutes. Weights are random: leaks that small weights hide
show in them, and a sharded model has none yet. So a model of 7 billion weights takes a second.
"""

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.nn import Embedding, Module, ModuleList, Parameter
from transformers import GradientCheckpointingLayer, PretrainedConfig, PreTrainedModel

LIMIT = 6
"""Tokens of each attention limit that the run reaches."""
ROWS, INNER_WIDTH = 128, 16
"""Most rows of the head, and most inner width of an MLP."""
GAIN, SHIFT = 1.5, 7
"""Scale of the weights, and how far a row begins after the one before: rows overlap, so that few
numbers are drawn, and a large vocabulary takes little memory."""
INNER_WIDTHS = ("intermediate_size", "ffn")
"""Parts of the names of inner widths."""
RANDOM = ("drop", "jitter")
"""Parts of the names of what draws random numbers in training."""
NUMBERS = ("idx", "index", "layer_id", "layer_number")
"""Parts of the names of a layer's own number."""


@torch.no_grad()
def build_layers(
    model_class: type[Any], config: PretrainedConfig, reached: Mapping[str, int]
) -> PreTrainedModel:
    """Build the model with one layer of each kind; the others pass on what they are given.

    `reached`: attention limits to lower, so that short documents exceed them. The run's random
    state stays as it was.
    """
    config = copy.deepcopy(config)
    for inner in nested_configs(config):
        _lower(inner, reached)
    config._attn_implementation = "eager"
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with init_empty_weights(include_buffers=False):
            model: Any = model_class(config)
        _draw_weights(model, _keep_one_of_each_kind(model))
        return model.train()  # type: ignore[no-any-return]


def nested_configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield a configuration and those nested in it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from nested_configs(value)


def _lower(config: Any, reached: Mapping[str, int]) -> None:
    """Lower the attention limits and the inner widths in one configuration."""
    for name, value in list(vars(config).items()):
        if name in reached and value:
            setattr(config, name, LIMIT)
        elif type(value) is int and any(part in name for part in INNER_WIDTHS):
            setattr(config, name, min(value, INNER_WIDTH))
        elif type(value) is float and any(part in name for part in RANDOM):
            setattr(config, name, 0.0)
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes.update(dict.fromkeys({*reached} & {*ropes}, LIMIT))
    config.dtype = torch.float32


def _keep_one_of_each_kind(model: Any) -> set[Module]:
    """Let all layers but the first of each kind pass on what they are given; return their modules.

    No layer is taken out: a model looks up masks and kinds by the number of a layer.
    """
    config, first_of, passing = model.config.get_text_config(), dict[str, Any](), set[Module]()
    modules = [*model.modules()]
    layers: list[Any] = [it for it in modules if isinstance(it, GradientCheckpointingLayer)]
    if not layers:  # a model from elsewhere
        lists = [it for it in modules if isinstance(it, ModuleList)]
        layers = [it for each in lists if len(each) == config.num_hidden_layers for it in each]
    for number, layer in enumerate(layers):
        first = first_of.setdefault(_kind_of(layer, number, config), layer)
        if first is layer:
            layer.register_forward_hook(_remember)
        else:
            layer.forward = partial(_pass_on, first)
            passing.update(layer.modules())
    return passing


def _kind_of(layer: Module, number: int, config: PretrainedConfig) -> str:
    """Return all that tells a layer from others, but its number and its weights."""
    kind: list[Any] = [layer, [weight.shape for weight in layer.parameters()]]
    for values in vars(config).values():
        # A list of distinct values numbers the layers.
        per_layer = isinstance(values, list) and len(values) == config.num_hidden_layers
        if per_layer and len({*map(repr, values)}) < len(values):
            kind.append(values[number % len(values)])
    for name, module in layer.named_modules():
        for key, value in vars(module).items():
            numbers_it = type(value) is int and any(part in key for part in NUMBERS)
            if isinstance(value, int | float | str | None) and not numbers_it:
                kind.append((name, key, value))
    return repr(kind)


def _remember(layer: Any, _inputs: Any, output: Any) -> None:
    layer.given_back = output


def _pass_on(first: Any, *inputs: Any, **options: Any) -> Any:
    """Return a layer's input, in the form of the output of the first layer of its kind."""
    hidden = inputs[0] if inputs else options["hidden_states"]
    return (hidden, *first.given_back[1:]) if isinstance(first.given_back, tuple | list) else hidden


def _draw_weights(model: Any, passing: set[Module]) -> None:
    """Give random weights to all modules that compute."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if module in passing:
            continue
        for name, weight in [*module.named_parameters(recurse=False)]:
            shape = weight[:ROWS].shape if module is head else weight.shape
            if len(shape) < 2:
                values = 0.1 * torch.randn(shape) + (not name.endswith("bias"))
            else:
                columns = shape[-1]
                rows = shape.numel() // columns
                numbers = GAIN * columns**-0.5 * torch.randn(SHIFT * rows + columns)
                values = numbers.as_strided((rows, columns), (SHIFT, 1))
                if not isinstance(module, Embedding):
                    values = values.contiguous().view(shape)
            setattr(module, name, Parameter(values, requires_grad=False))
