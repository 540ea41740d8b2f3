"""gradient_checkpointing: which operations are recomputed, the stored bytes, random numbers."""

import weakref
from collections import Counter
from copy import deepcopy

import pytest
import torch
from conftest import bare_tables, chats, only_full
from launching import TRAIN, learns_what_one_does_without
from peft import LoraConfig, get_peft_model
from small_models import SIX_LAYERS, apply
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from plugsft import RecipeError, testing
from plugsft.plugins.gradient_checkpointing import GradientCheckpointing
from plugsft.plugins.gradient_checkpointing.layers import (
    ATTENTION,
    Selection,
    checkpoints,
    dropout_of,
)
from plugsft.registry.load import resolve

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
LAYERS = SIX_LAYERS["num_hidden_layers"]
KINDS = ("none", "full", "attention", "ops")


class Operations(TorchDispatchMode):
    """Counts operations, and the bytes of the storages that they made and that live."""

    def __init__(self):
        super().__init__()
        self.counts, self._live = Counter(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.counts[func._schema.name] += 1
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                watch = weakref.ref(storage, lambda _, key=storage._cdata: self._live.pop(key))
                self._live.setdefault(storage._cdata, (storage.nbytes(), watch))
        return result

    @property
    def stored(self):
        return sum(size for size, _ in self._live.values())


def make(kind, adapters=None, dropout=0.0):
    """Return a model without checkpoints, with full, or with selective ones."""
    torch.manual_seed(0)
    shape = SIX_LAYERS | {"attention_dropout": dropout}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), attn_implementation="sdpa")
    if adapters is not None:
        options = {"target_modules": "all-linear", "lora_dropout": adapters}
        model = get_peft_model(model, LoraConfig(**options))
    options = {"none": None, "full": {}}.get(kind, {"selective": kind})
    model = model.train()
    return model if options is None else apply(model, GradientCheckpointing(**options))


def train(model):
    """Return all gradients, the operations of both passes, and the bytes between the passes."""
    ids = torch.arange(120).view(2, 60) % 97
    torch.manual_seed(1)
    with Operations() as operations:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        stored, forward = operations.stored, operations.counts.copy()
        loss.backward()
    gradients = [each.grad for each in model.parameters() if each.requires_grad]
    return gradients, forward, operations.counts - forward, stored


def test_only_what_is_not_stored_is_recomputed():
    """In float32 all gradients are the same bits; what is stored lies between none and all."""
    results = {kind: train(make(kind)) for kind in KINDS}
    expected = results["none"][0]
    for kind, (gradients, *_) in results.items():
        assert all(map(torch.equal, gradients, expected)), kind
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert all(forward[attention] == LAYERS for _, forward, _, _ in results.values())
    again = {kind: backward[attention] for kind, (_, _, backward, _) in results.items()}
    assert again == {"none": 0, "full": LAYERS, "attention": 0, "ops": 0}
    # Products of the backward pass itself, and those that are recomputed: of seven in each layer,
    # the last is not needed.
    own = results["none"][2]["aten::mm"]
    again = {kind: backward["aten::mm"] - own for kind, (_, _, backward, _) in results.items()}
    assert again == {"none": 0, "full": 6 * LAYERS, "attention": 6 * LAYERS, "ops": 0}
    stored = {kind: stored for kind, (*_, stored) in results.items()}
    print(f"\nbytes between the passes: {stored}")
    assert stored["full"] < stored["attention"] < stored["ops"] < stored["none"]


@pytest.mark.parametrize("kind", ["full", "attention", "ops"])
def test_dropout_of_adapters_is_repeated(kind):
    expected, gradients = (train(make(each, adapters=0.2))[0] for each in ("none", kind))
    assert all(map(torch.equal, gradients, expected))
    assert not all(map(torch.equal, train(make("none", adapters=0.0))[0], expected))


def test_recomputation_leaves_the_random_numbers_after_it_alone():
    state = torch.get_rng_state()
    train(make("none", dropout=0.2))
    after = torch.get_rng_state()
    train(make("full", dropout=0.2))
    assert torch.equal(torch.get_rng_state(), after) and not torch.equal(after, state)


def test_attention_with_dropout_is_refused():
    with pytest.raises(RecipeError, match="one with dropout; remove selective"):
        train(make("attention", dropout=0.2))


@pytest.mark.parametrize("in_function", [False, True], ids=["in sight of autograd", "hidden"])
def test_products_that_change_in_place_are_recomputed(in_function):
    """As those to which a fused layer adds an adapter's product; torch would reuse them changed."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight)
            return x.matmul(weight).mul_(2)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.matmul(ctx.saved_tensors[0].t()) * 2, None

    def layer(x):
        attended = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        product = Twice.apply(attended, weight) if in_function else (attended @ weight).mul_(2)
        return ((product @ weight).sigmoid() * product).sum()

    weight, inputs = torch.randn(4, 4), torch.randn(1, 1, 5, 4, requires_grad=True)
    layer(inputs).backward()
    expected, inputs.grad = inputs.grad, None
    with Operations() as operations:
        checkpoints("ops")(layer, inputs).backward()
    assert torch.equal(inputs.grad, expected)
    # Two forward, one again, and two of the backward pass.
    assert operations.counts["aten::mm"] == 5


def test_known_operations_exist():
    """Those of torch; the packages are not installed. Each has `dropout_p`, or no dropout."""
    for name in ATTENTION:
        namespace, operation = name.split("::")
        if namespace in ("aten", "torch_attn"):
            overload = getattr(getattr(torch.ops, namespace), operation).default
            names = [argument.name for argument in overload._schema.arguments]
            assert name == "torch_attn::_varlen_attn" or "dropout_p" in names, name
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert dropout_of(flash, (None, None, None, 0.5), {}) == 0.5
    assert dropout_of(flash, (None, None, None), {"dropout_p": 0.25}) == 0.25
    assert dropout_of(flash, (None, None, None), {}) == 0.0
    selection = Selection("attention")
    assert not selection.has(flash, (None, None, None, 0.5), {}) and not selection.has_attention
    assert selection.has(flash, (None, None, None), {}) and selection.has_attention


@pytest.mark.parametrize("selective", [None, "attention"])
def test_the_kernel_for_packed_rows_runs_once(selective):
    """Shapes only, as the kernel needs a GPU."""

    def layer(x):
        bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
        return varlen_attn(x * 2, x * 3, x * 4, bounds, bounds, 5, 5).sin()

    with FakeTensorMode():
        inputs = torch.empty(8, 2, 4, requires_grad=True)
        with Operations() as operations:
            checkpoints(selective)(layer, inputs).sum().backward()
    assert operations.counts["torch_attn::_varlen_attn"] == (1 if selective else 2)
    assert inputs.grad.shape == inputs.shape


@pytest.mark.parametrize(
    ("other", "selective", "words"),
    [
        ("compile", "attention", r"remove selective, or \[plugins.compile\]"),
        ("liger", "ops", r'set selective = "attention", or remove \[plugins.liger\]'),
    ],
)
def test_plugins_that_hide_operations_are_refused(tmp_path, other, selective, words):
    plugins = {other: {}, "gradient_checkpointing": {"selective": selective}}
    recipe, _ = resolve(bare_tables(tmp_path, plugins))
    with pytest.raises(RecipeError, match=words):
        GradientCheckpointing(selective=selective).check(recipe)


def test_a_run_with_adapters_learns_the_same():
    tables = {"plugins": {"lora": {"r": 4, "dropout": 0.1}, "fused_loss": {}, "bfd_packing": {}}}
    options = {"selective": "ops"}
    testing.keeps_gradients("gradient_checkpointing", options, tables=tables, tolerance=1e-6)


@only_full
@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
@pytest.mark.parametrize("selective", ["attention", "ops"])
@pytest.mark.parametrize("adapters", [{}, {"lora": {"r": 4}}], ids=["whole", "lora"])
def test_sharded_ranks_learn_what_one_does_without(tiny, tmp_path, name, selective, adapters):
    plugins = {
        "gradient_checkpointing": {"selective": selective},
        "bfd_packing": {},
        "fused_loss": {},
        **deepcopy(adapters),
    }
    train = TRAIN | {"micro_batch": 1, "steps": 5}
    recipe = tiny(rows=chats(21), train=train, plugins=plugins)
    _, out = learns_what_one_does_without("gradient_checkpointing", name, recipe, tmp_path)
    assert "with stored outputs of attention" in out
