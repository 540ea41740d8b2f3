"""activation_offload: the same gradients, less memory on the device, copies in a safe order."""

import gc
import re
import weakref
from functools import partial

import pytest
import torch
from conftest import bare_tables, chats, only_full
from launching import TRAIN, learns_what_one_does_without
from peft import LoraConfig, get_peft_model
from small_models import SIX_LAYERS, apply
from transformers import AutoModelForCausalLM, LlamaConfig

from plugsft import PluginError, RecipeError, testing
from plugsft.base.machine import look
from plugsft.plugins.activation_offload import ActivationOffload, layers
from plugsft.plugins.gradient_checkpointing import GradientCheckpointing
from plugsft.registry.load import resolve

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
LAYERS = SIX_LAYERS["num_hidden_layers"]
TOKENS = 120


def make(options=None, checkpointing=None, adapters=False, dropout=0.1):
    """Return a model with the plugins on."""
    torch.manual_seed(0)
    shape = SIX_LAYERS | {"attention_dropout": dropout}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), attn_implementation="sdpa")
    if adapters:
        adapter = LoraConfig(target_modules="all-linear", lora_dropout=0.1)
        model = get_peft_model(model, adapter)
    model = model.train()
    if checkpointing is not None:
        model = apply(model, GradientCheckpointing(**checkpointing))
    if options is None:
        return model, None
    plugin = ActivationOffload(**options)
    return apply(model, plugin), plugin


def train(model, micro_batches=2):
    """Return the gradients of some micro-batches."""
    torch.manual_seed(1)
    for number in range(micro_batches):
        ids = (torch.arange(TOKENS).view(2, -1) * (3 + number)) % 97
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [each.grad for each in model.parameters() if each.requires_grad]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("checkpointing", [None, {}, {"every": 2}], ids=["", "all", "half"])
def test_gradients_are_the_same_bit_for_bit(checkpointing, adapters, autocast):
    found = []
    for options in (None, {"min_bytes": 0}):
        model, plugin = make(options, checkpointing, adapters)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(train(model))
    assert all(map(torch.equal, *found))
    assert plugin.offload.moved > 0


def test_selective_checkpoints_too():
    checkpointing = {"selective": "ops"}
    expected = train(make(None, checkpointing, dropout=0.0)[0])
    assert all(
        map(torch.equal, train(make({"min_bytes": 0}, checkpointing, dropout=0.0)[0]), expected)
    )


def test_with_checkpoints_only_the_inputs_of_layers_move():
    model, plugin = make({"min_bytes": 0}, {})
    train(model, micro_batches=1)
    assert plugin.offload.moved == (LAYERS - 1) * TOKENS * SIX_LAYERS["hidden_size"] * 4


def test_weights_their_casts_and_what_layers_share_stay():
    """Only what has a row for each token moves; a weight's cast by autocast has none."""
    sizes = set()
    original = layers.SavedLayer.add

    def add(self, tensor):
        sizes.add((tuple(tensor.shape), tensor.dtype))
        return original(self, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers.SavedLayer, "add", add)
        for autocast in (False, True):
            model, _ = make({"min_bytes": 0})
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                train(model, micro_batches=1)
    widths = {shape for shape, _ in sizes}
    assert widths
    for shape in widths:
        assert torch.Size(shape).numel() % (TOKENS // 2) == 0, shape
    # cos and sin of the rotary embedding are as large as one head; all layers share them.
    assert TOKENS // 2 * 8 not in {torch.Size(shape).numel() for shape in widths}


def test_the_device_holds_what_two_layers_save(monkeypatch):
    live, peak, original = {}, [0], layers.SavedLayer.add

    def add(self, tensor):
        saved = original(self, tensor)
        storage = self._on_device[saved.storage].untyped_storage()
        if storage._cdata not in live:
            live[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, live.pop, storage._cdata)
        peak[0] = max(peak[0], sum(live.values()))
        return saved

    monkeypatch.setattr(layers.SavedLayer, "add", add)
    model, plugin = make({"min_bytes": 0}, dropout=0.0)
    train(model, micro_batches=1)
    layer = plugin.offload.moved / (LAYERS - 1)
    assert layer <= peak[0] <= 2.2 * layer


def test_memory_is_freed_without_the_collector():
    model, plugin = make({"min_bytes": 0})
    gc.disable()
    try:
        train(model, micro_batches=1)
        assert plugin.offload._pending is None and plugin.offload._latest() is None
    finally:
        gc.enable()


def test_small_activations_stay():
    model, plugin = make({"min_bytes": 10**6})
    train(model)
    plugin.steps = 1
    assert plugin.summary() == "nothing was moved: no activation has 1,000,000 bytes (min_bytes)"


class FakeStream:
    """Records what it is asked, and by which stream copies are made."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append((self.name, "after", other.name))

    def wait_event(self, event):
        self.log.append((self.name, "waits", event))

    def record_event(self):
        self.log.append((self.name, "event", len(self.log)))
        return len(self.log) - 1

    def __enter__(self):
        self.log.append(("enter", self.name))

    def __exit__(self, *_):
        self.log.append(("leave", self.name))


class FakeDevice:
    """A device module whose streams record their order."""

    def __init__(self):
        self.log = []
        self.computing, self.side = FakeStream(self.log, "computing"), None

    def Stream(self):
        self.side = FakeStream(self.log, "side")
        return self.side

    def current_stream(self):
        return self.computing

    def stream(self, stream):
        return stream

    def is_available(self):
        return True


def test_the_fake_device_has_what_a_gpu_has():
    for name in ("current_stream", "stream", "Stream", "is_available"):
        assert callable(getattr(torch.cuda, name))
    for name in ("wait_stream", "wait_event", "record_event"):
        assert hasattr(torch.cuda.Stream, name) and hasattr(FakeStream, name)


@pytest.fixture
def device(monkeypatch):
    made = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    return made


def test_copies_run_between_two_waits(device):
    stream = layers.SideStream(torch.device("cpu"))
    first = layers.SavedLayer(stream, lambda: None)
    second = layers.SavedLayer(stream, weakref.ref(first))
    source = torch.arange(6.0)
    saved = first.add(source[2:4])
    again = second.add(source)
    start = ["side", "after", "computing"]

    def log():
        entries, device.log[:] = [*device.log], []
        return entries

    # To the host: after what was computed; the memory is kept until the computing has waited.
    assert first.store() == source.nbytes
    [after, enter, leave, event] = log()
    assert [after, enter, leave] == [(*start,), ("enter", "side"), ("leave", "side")]
    assert first._on_device
    first.release()
    assert log() == [("computing", "waits", event[2])] and not first._on_device
    second.store(), second.release(), log()
    # Back: the layer itself, then the next one; the computing waits for the first copy only.
    assert torch.equal(second.fetch(again), source)
    entries = log()
    events = [entry for entry in entries if entry[1] == "event"]
    assert [entry for entry in entries if entry[:2] == ("side", "after")] == [(*start,)] * 2
    assert entries[-1] == ("computing", "waits", events[0][2]) and len(events) == 2
    assert torch.equal(first.fetch(saved), source[2:4])
    assert log() == [("computing", "waits", events[1][2])]
    # Both are there now.
    first.fetch(saved), second.fetch(again)
    assert not log()


def test_unneeded_copies_are_waited_for(device):
    """Else their memory would be reused while they run."""
    stream = layers.SideStream(torch.device("cpu"))
    layer = layers.SavedLayer(stream, lambda: None)
    saved = layer.add(torch.ones(3))
    layer.store(), layer.release(), layer.load()
    event = next(entry[2] for entry in reversed(device.log) if entry[1] == "event")
    device.log.clear()
    del saved, layer
    assert device.log == [("computing", "waits", event)]


def test_a_whole_pass_waits_before_each_use(device, monkeypatch):
    """A layer is freed after the next one has run, and comes back one layer ahead."""
    model, plugin = make({"min_bytes": 0}, {})
    inner = plugin.offload.layers[0]._gradient_checkpointing_func.args[1]

    def run(*inputs):
        output = inner(*inputs)
        device.log.append(("layer", "ran", None))
        return output

    for layer in plugin.offload.layers:
        layer._gradient_checkpointing_func = partial(plugin.offload.run, layer, run)
    original = layers.SavedLayer.fetch

    def fetch(self, saved):
        device.log.append(("fetch", "ran", None))
        tensor = original(self, saved)
        if device.log[-1][0] == "fetch":  # it is there: torch 2.11 saves a layer's input twice
            device.log.pop()
        else:
            device.log.append(("fetched", "ran", None))
        return tensor

    monkeypatch.setattr(layers.SavedLayer, "fetch", fetch)
    train(model, micro_batches=1)
    steps = [entry for entry in device.log if entry[1] in ("event", "waits", "ran")]
    names = [name for name, *_ in steps]
    moved = LAYERS - 1
    forward = ["layer", "side", *["layer", "computing", "side"] * (moved - 1), "layer", "computing"]
    # The last layer starts to fetch the one before it; each other one waits for its own.
    ahead = ["fetch", "side", "computing", "fetched"] * (moved - 1)
    backward = ["fetch", "side", "fetched", *ahead, "fetch", "computing", "fetched"]
    assert names == forward + backward
    events, waits = (
        [number for _, what, number in steps if what == kind] for kind in ("event", "waits")
    )
    assert waits == events and len(events) == 2 * moved


def test_a_change_in_place_is_refused():
    layer = layers.SavedLayer(layers.SideStream(torch.device("cpu")), lambda: None)
    tensor = torch.ones(3)
    layer.add(tensor.detach())
    layer.store()
    tensor.mul_(2)
    with pytest.raises(PluginError, match="changed an activation in place"):
        layer.release()


@pytest.mark.parametrize(
    ("plugins", "deepspeed", "words"),
    [
        ({}, "true", "under ZeRO-3 layers save gathered weights"),
        ({"gradient_checkpointing": {"every": 2}}, "true", "under ZeRO-3.*; let .*: remove every,"),
        ({"compile": {}}, "false", r"layers of \[plugins.compile\]; add \[plugins.gradient_ch"),
    ],
)
def test_what_needs_checkpoints_is_refused(monkeypatch, tmp_path, plugins, deepspeed, words):
    def ensure(plugins):
        layers.ensure_possible(resolve(bare_tables(tmp_path, plugins))[0], look())

    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", deepspeed)
    with pytest.raises(RecipeError, match=words):
        ensure(plugins | {"activation_offload": {}})
    ensure(plugins | {"activation_offload": {}, "gradient_checkpointing": {}})


TABLES = {
    "plugins": {
        "lora": {"r": 4, "dropout": 0.1},
        "bfd_packing": {},
        "fused_loss": {},
        "gradient_checkpointing": {},
    }
}


def test_a_run_reports_the_bytes_of_a_step():
    said = testing.summary("activation_offload", {"min_bytes": 0}, tables=TABLES)
    start = "activations of 1 of 2 layers wait in host memory; "
    assert re.fullmatch(start + r"\d+\.\d MiB a step moved there and back; a CPU gains .*", said)
    plugin = make({}, {})[1]
    assert plugin.summary().endswith("in host memory, from 1,000,000 bytes on (min_bytes)")


@only_full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_that_are_recomputed_learn_the_same():
    from plugsft.plugins.compile import Compile

    expected = train(make(None, {}, dropout=0.0)[0])
    model, plugin = make({"min_bytes": 0}, {}, dropout=0.0)
    try:
        found = train(apply(model, Compile()))
    finally:
        torch._dynamo.reset()
    assert plugin.offload.moved == 2 * (LAYERS - 1) * TOKENS * SIX_LAYERS["hidden_size"] * 4
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@only_full
def test_a_run_learns_the_same():
    options = {"min_bytes": 0}
    testing.keeps_gradients("activation_offload", options, tables=TABLES, tolerance=1e-6)


@only_full
@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "alone"])
def test_sharded_ranks_learn_what_one_does_without(tiny, tmp_path, name, checkpointing):
    if name == "zero3" and not checkpointing:
        pytest.skip("refused")
    plugins = {"activation_offload": {"min_bytes": 0}, "bfd_packing": {}, "fused_loss": {}}
    plugins |= {"gradient_checkpointing": {}} if checkpointing else {}
    recipe = tiny(rows=chats(21), train=TRAIN | {"micro_batch": 1, "steps": 5}, plugins=plugins)
    _, out = learns_what_one_does_without("activation_offload", name, recipe, tmp_path)
    assert "activations of 1 of 2 layers wait in host memory" in out
