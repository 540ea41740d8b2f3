"""Private names of libraries: where each stands, why, and what is relied on.

A library may change them in any release. So each stands in one of the tables here, with its files
and the reason, and has a check that fails if it means something else. `tools/test --full` runs the
checks under the oldest versions too.
"""

import ast
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from conftest import ROOT
from datasets import Dataset
from peft import LoraConfig
from peft.tuners import lora
from peft.utils import transformers_weight_conversion as conversion
from torch import distributed as dist
from torch._dynamo import config as compiling
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Linear, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations import deepspeed
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear
from transformers.quantizers.base import HfQuantizer

SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
IDS = torch.tensor([[1, 2, 3]])


class Use(NamedTuple):
    """A private name: the files where it stands, why no public name does, and its check."""

    files: str
    why: str
    check: Callable[[], object]


class Operators(TorchDispatchMode):
    """Collects the operators of a block."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **options))


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1))


def storages_have_an_identity():
    with FakeTensorMode():
        fake = torch.ones(2, 3)
        assert fake.untyped_storage()._cdata == fake.T.untyped_storage()._cdata
    one, other = torch.ones(3), torch.ones(3)
    assert one.untyped_storage()._cdata == one[1:].untyped_storage()._cdata
    assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


def changes_in_place_are_counted():
    tensor = torch.ones(3)
    before = tensor._version
    tensor[1:].add_(1)
    assert tensor._version == before + 1


def nested_tensors_are_found():
    one = torch.ones(2)
    assert tree_leaves({"a": [one, 5], "b": (None,)})[:2] == [one, 5]
    shifted, number = tree_map_only(torch.Tensor, lambda it: it + 1, (one, 5))
    assert shifted.tolist() == [2, 2] and number == 5


def the_compiler_has_its_settings_and_reports_programs():
    assert isinstance(compiling.recompile_limit, int) and compiling.suppress_errors in (True, False)
    calls, before = [], sum(counters["graph_break"].values())
    callback_handler.register_start_callback(calls.append)
    callback_handler.register_end_callback(calls.append)
    try:
        torch.compile(lambda it: it + 1, backend="eager")(torch.ones(2))
    finally:
        callback_handler.remove_start_callback(calls.append)
        callback_handler.remove_end_callback(calls.append)
    assert len(calls) == 2 and all(isinstance(call, CallbackArgs) for call in calls)
    # FUNCTION/VARIANT: the first program of a function.
    assert str(calls[1].compile_id).endswith("/0")
    assert sum(counters["graph_break"].values()) == before
    torch._dynamo.reset()


def casts_can_be_kept_in_compiled_programs():
    assert inductor.emulate_precision_casts in (True, False)


def the_operator_of_flash_attention_takes_these_arguments():
    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[3:10] == [
        "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
    ]  # fmt: skip
    assert {"scale", "window_size_left", "window_size_right"} <= {*names[10:]}


def a_mode_sees_each_operator():
    tensor = torch.ones(2)
    with Operators() as operators:
        tensor.add_(1)
    assert [func._schema.name for func in operators.seen] == ["aten::add_"]


def operators_name_what_they_change():
    add, change = torch.ops.aten.add.Tensor._schema, torch.ops.aten.add_.Tensor._schema
    assert (add.is_mutable, change.is_mutable) == (False, True)
    first, second, *_ = change.arguments
    assert first.name == "self" and first.alias_info.is_write and second.alias_info is None


def modes_are_counted():
    assert torch._C._len_torch_dispatch_stack() == 0
    with Operators():
        assert torch._C._len_torch_dispatch_stack() == 1


def hooks_of_a_weight_are_seen():
    one, other = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    assert not one._backward_hooks and not one._post_accumulate_grad_hooks
    one.register_hook(lambda gradient: None)
    other.register_post_accumulate_grad_hook(lambda weight: None)
    assert one._backward_hooks and other._post_accumulate_grad_hooks


def hooks_of_a_module_are_seen():
    module = Linear(2, 2)
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    assert not any(getattr(module, name) for name in names)
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    assert all(getattr(module, name) for name in names)


def ddp_leaves_named_tensors_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = Linear(2, 2)
        module._ddp_params_and_buffers_to_ignore = ["bias"]
        wrapped = DistributedDataParallel(module)
        assert [*wrapped.parameters_to_ignore] == ["bias"]
        del wrapped.logger, wrapped.reducer  # or the end of the group hangs; see `disconnect`
    finally:
        dist.destroy_process_group()


def a_call_is_queued_for_the_end_of_a_backward_pass():
    calls, weight = [], torch.ones(2, requires_grad=True)
    engine, loss = torch.autograd.Variable._execution_engine, weight.sum()
    weight.register_hook(lambda _: calls.append("gradient"))
    loss.register_hook(lambda _: engine.queue_callback(lambda: calls.append("end")))
    loss.backward()
    assert calls == ["gradient", "end"]


def many_tensors_are_multiplied_at_once():
    tensors = [torch.full((2,), 4.0), torch.full((3,), 2.0)]
    torch._foreach_mul_(tensors, 1 / torch.full((), 2.0))
    assert [it.tolist() for it in tensors] == [[2, 2], [1, 1, 1]]


def the_scale_of_a_loss_is_halved_and_doubled():
    scale, steps = torch.full((), 8.0), torch.zeros((), dtype=torch.int32)
    seen = []
    for overflowed in (1.0, 0.0, 0.0):
        torch._amp_update_scale_(scale, steps, torch.tensor(overflowed), 2.0, 0.5, 2)
        seen.append((float(scale), int(steps)))
    assert seen == [(4, 0), (4, 1), (8, 0)]


def autocast_can_be_left_out():
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    product = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (product @ product).dtype == torch.bfloat16
        with torch._C._ExcludeDispatchKeyGuard(keys):
            assert (product @ product).dtype == torch.float32


def products_of_groups_are_computed():
    left, right = torch.ones(4, 8).bfloat16(), torch.ones(2, 8, 8).bfloat16()
    ends = torch.tensor([1, 4], dtype=torch.int32)
    assert (torch._grouped_mm(left, right, ends) == 8).all()


def fake_tensors_have_a_device():
    with FakeTensorMode():
        assert (torch.ones(2, 3) @ torch.ones(3, 4)).device.type == "cpu"


def tensors_of_a_module_can_be_replaced():
    module = torch.nn.BatchNorm1d(2)
    assert {*module._parameters} == {"weight", "bias"} and "running_mean" in module._buffers
    module._buffers |= {"running_mean": torch.ones(2)}
    assert module.running_mean.tolist() == [1, 1]


CHECKPOINTED = "plugins/gradient_checkpointing/layers.py plugins/activation_offload/layers.py"
TORCH = {
    "_cdata": Use(
        "plugins/activation_offload/layers.py plugins/gradient_checkpointing/layers.py "
        "plugsft/lab/forecast/meta_model.py",
        "whether tensors share memory, fake ones too: data_ptr() of a fake tensor raises",
        storages_have_an_identity,
    ),
    "_version": Use(
        "plugins/activation_offload/layers.py plugins/lora/layers.py",
        "whether a tensor was changed in place; torch compares it itself in the backward pass",
        changes_in_place_are_counted,
    ),
    "torch.utils._pytree": Use(
        "plugins/activation_offload/layers.py plugins/gradient_checkpointing/layers.py "
        "plugsft/lab/forecast/meta_model.py",
        "tensors in nested arguments; it has no public name yet",
        nested_tensors_are_found,
    ),
    "torch._dynamo": Use(
        "plugins/compile/programs.py",
        "the limit of programs, and their count and seconds; torch.compiler has neither",
        the_compiler_has_its_settings_and_reports_programs,
    ),
    "torch._inductor": Use(
        "plugins/fp8/convert.py",
        "compiled float8 layers that skip casts may end in NaN",
        casts_can_be_kept_in_compiled_programs,
    ),
    "_flash_attention_forward": Use(
        "plugins/flash_attention/varlen.py",
        "varlen_attn calls it through Python in both passes, which a GPU waits for",
        the_operator_of_flash_attention_takes_these_arguments,
    ),
    "torch.utils._python_dispatch": Use(
        "plugins/gradient_checkpointing/layers.py plugins/profiler/recorder.py "
        "plugsft/lab/forecast/meta_model.py",
        "TorchDispatchMode sees every operator; it is documented, and has no public module",
        a_mode_sees_each_operator,
    ),
    "_schema": Use(
        "plugins/gradient_checkpointing/layers.py",
        "an operator's name and the arguments that it changes",
        operators_name_what_they_change,
    ),
    "_len_torch_dispatch_stack": Use(
        "plugins/lora/layers.py",
        "whether someone stores outputs, which then must not change in place",
        modes_are_counted,
    ),
    "_post_accumulate_grad_hooks": Use(
        "plugins/lora/layers.py",
        "whether someone wants to see a weight's gradient before it is added",
        hooks_of_a_weight_are_seen,
    ),
    **dict.fromkeys(
        ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
        Use(
            "plugins/lora/layers.py",
            "whether a module must be called as one: ZeRO-3 gathers weights by such hooks",
            hooks_of_a_module_are_seen,
        ),
    ),
    "_ddp_params_and_buffers_to_ignore": Use(
        "plugins/lora/adapters.py plugins/quantize/base.py",
        "DDP copies all other buffers in each forward pass; its own method for this is private too",
        ddp_leaves_named_tensors_alone,
    ),
    "_execution_engine": Use(
        "plugins/profiler/clock.py",
        "the end of a backward pass, before gradients are reduced",
        a_call_is_queued_for_the_end_of_a_backward_pass,
    ),
    "_foreach_mul_": Use(
        "plugsft/ranks/loss_scale.py",
        "one launch for all gradients, as torch's own optimizers",
        many_tensors_are_multiplied_at_once,
    ),
    "_amp_update_scale_": Use(
        "plugsft/ranks/loss_scale.py",
        "a new scale without waiting for the device; GradScaler belongs to one optimizer",
        the_scale_of_a_loss_is_halved_and_doubled,
    ),
    "torch._C": Use(
        "plugins/lora/layers.py plugsft/ranks/precision.py",
        "a kernel under autocast must call the one below it",
        autocast_can_be_left_out,
    ),
    "_grouped_mm": Use(
        "plugsft/lab/forecast/meta_model.py plugsft/ranks/precision.py",
        "the operator that autocast leaves out, and whose shapes torch knows in bfloat16 only",
        products_of_groups_are_computed,
    ),
    "torch._subclasses": Use(
        "plugsft/lab/forecast/meta_model.py",
        "tensors without memory that have a device; tensors on meta have none",
        fake_tensors_have_a_device,
    ),
    **dict.fromkeys(
        ("_parameters", "_buffers"),
        Use(
            "plugsft/lab/forecast/meta_model.py",
            "tensors of another kind in their places, which setattr refuses",
            tensors_of_a_module_can_be_replaced,
        ),
    ),
}


def attention_is_named_and_set():
    model = llama(attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"
    config = LlamaConfig(**SMALL)
    config._attn_implementation = "eager"
    assert LlamaForCausalLM(config).config._attn_implementation == "eager"


def attention_is_put_back_without_a_check():
    model = llama(attn_implementation="sdpa")
    model.config._attn_implementation_internal = "a name that nobody registered"
    assert model.config._attn_implementation == "a name that nobody registered"


def a_layer_is_called_by_the_function_that_it_is_given():
    model, calls = llama().train(), []
    [layer] = model.model.layers

    def call(forward, *inputs):
        calls.append(forward)
        return forward(*inputs)

    layer._gradient_checkpointing_func, layer.gradient_checkpointing = call, True
    model(IDS, use_cache=False)
    assert len(calls) == 1


def saving_undoes_the_conversions_of_a_model():
    model, names = mixtral(), []
    for conversions in ([], None):
        model._weight_conversions = conversions
        names.append({*revert_weight_conversion(model, model.state_dict())})
    assert names[0] == {*model.state_dict()} != names[1]


def models_say_what_attention_they_support():
    assert LlamaForCausalLM._supports_sdpa and LlamaForCausalLM._supports_flash_attn
    assert LlamaForCausalLM._supports_attention_backend
    assert LlamaForCausalLM._compatible_flash_implementations is None
    assert PreTrainedModel._supports_sdpa is False

    class Eager(LlamaForCausalLM):
        _supports_sdpa = False

    assert Eager(LlamaConfig(**SMALL)).config._attn_implementation == "eager"


def a_model_names_weights_of_other_dtypes():
    assert not llama()._get_dtype_plan(torch.bfloat16)


def a_class_leaves_out_names():
    model = llama()
    model._keys_to_ignore_on_load_unexpected = {"^mtp"}
    names = SimpleNamespace(missing_keys=set(), unexpected_keys={"mtp.weight", "strange"})
    model._adjust_missing_and_unexpected_keys(names)
    assert names.unexpected_keys == {"strange"}


def classes_of_layers_are_named():
    assert {*llama()._no_split_modules} == {"LlamaDecoderLayer"}


def zero3_of_transformers_can_be_switched_off_and_on():
    assert deepspeed._hf_deepspeed_config_weak_ref is None
    deepspeed._hf_deepspeed_config_weak_ref = lambda: SimpleNamespace(is_zero3=lambda: True)
    enabled = deepspeed.is_deepspeed_zero3_enabled()
    deepspeed.unset_hf_deepspeed_config()
    assert enabled and deepspeed._hf_deepspeed_config_weak_ref is None


def models_name_tensors_that_are_not_saved():
    assert not llama()._keys_to_ignore_on_save


def experts_multiply_by_groups():
    inputs = torch.arange(32.0).view(4, 8).bfloat16()
    weight = torch.stack([torch.ones(8, 16), torch.full((8, 16), 2.0)]).bfloat16()
    ends = torch.tensor([1, 4], dtype=torch.int32)
    expected = torch.cat([inputs[:1] @ weight[0], inputs[1:] @ weight[1]])
    result = _grouped_linear(inputs, weight, ends, is_transposed=True)
    torch.testing.assert_close(result, expected)


def experts_are_computed_by_the_function_of_their_name():
    calls = []

    def compute(experts, hidden, chosen, weights):
        calls.append(experts)
        assert experts._apply_gate(torch.ones(2, 32)).shape == (2, 16)
        return torch.zeros_like(hidden)

    ALL_EXPERTS_FUNCTIONS.register("plugsft_test", compute)
    model = mixtral()
    experts = model.model.layers[0].mlp.experts
    experts.config._experts_implementation = "plugsft_test"
    model(IDS)
    assert calls == [experts] and experts.has_gate is True


def a_quantizer_sees_the_model_before_and_after_its_weights():
    for name in ("_process_model_before_weight_loading", "_process_model_after_weight_loading"):
        assert callable(getattr(HfQuantizer, name))
    assert PreTrainedModel._keep_in_fp32_modules is None


def a_module_that_has_its_weights_is_not_initialized():
    model = llama()
    head, query = model.lm_head, model.model.layers[0].self_attn.q_proj
    for module in (head, query):
        module.weight = Parameter(torch.full_like(module.weight, 5))
        module._is_hf_initialized = module is head
    model.initialize_weights()
    assert (head.weight == 5).all() and (query.weight != 5).all()


def models_name_their_routers():
    model = mixtral().model
    recorder = type(model)._can_record_outputs["router_logits"]
    kind = getattr(recorder, "target_class", recorder)
    assert [type(it) for it in model.modules() if isinstance(it, kind)] == [kind]


TRANSFORMERS = {
    "_attn_implementation": Use(
        "plugins/dpo_reference/reference_pass.py plugins/flash_attention/kernels.py "
        "plugsft/lab/forecast/meta_model.py plugsft/model/generate.py plugsft/model/load.py "
        "plugsft/model/config.py plugsft/model/published.py plugins/bfd_packing/layers.py "
        "plugins/bfd_packing/proof.py",
        "the attention that a model uses; models read it themselves, under this name only",
        attention_is_named_and_set,
    ),
    "_attn_implementation_internal": Use(
        "plugsft/model/generate.py",
        "the attention of before comes back as it was, whatever transformers thinks of it",
        attention_is_put_back_without_a_check,
    ),
    "_gradient_checkpointing_func": Use(
        f"{CHECKPOINTED} plugins/compile/layers.py",
        "a function of our own around each layer; gradient_checkpointing_enable takes options only",
        a_layer_is_called_by_the_function_that_it_is_given,
    ),
    "_weight_conversions": Use(
        "plugsft/model/load.py plugsft/model/published.py",
        "saving reverses the conversions of loading, which is ours under FSDP2",
        saving_undoes_the_conversions_of_a_model,
    ),
    "_supports_sdpa": Use(
        "plugins/flash_attention/kernels.py plugsft/model/load.py",
        "whether SDPA computes a model's attention, before it is loaded",
        models_say_what_attention_they_support,
    ),
    **dict.fromkeys(
        (
            "_supports_flash_attn",
            "_supports_attention_backend",
            "_compatible_flash_implementations",
        ),
        Use(
            "plugins/flash_attention/kernels.py",
            "whether a kernel computes a model's attention, before it is loaded",
            models_say_what_attention_they_support,
        ),
    ),
    "_get_dtype_plan": Use(
        "plugsft/model/load.py",
        "whether some weights keep another dtype",
        a_model_names_weights_of_other_dtypes,
    ),
    "_hf_deepspeed_config_weak_ref": Use(
        "plugsft/model/published.py",
        "a second model, made without ZeRO-3; transformers can only unset it",
        zero3_of_transformers_can_be_switched_off_and_on,
    ),
    "_adjust_missing_and_unexpected_keys": Use(
        "plugsft/model/kept_tensors.py",
        "which names in files a class leaves out; what it loads does not tell them from no name",
        a_class_leaves_out_names,
    ),
    "_no_split_modules": Use(
        "plugsft/ranks/sharding.py",
        "accelerate's policy for FSDP2 names classes of layers that were taken out",
        classes_of_layers_are_named,
    ),
    "_keys_to_ignore_on_save": Use(
        "plugsft/checkpoint/final_model.py",
        "which tensors transformers does not write",
        models_name_tensors_that_are_not_saved,
    ),
    "_grouped_linear": Use(
        "plugins/lora/experts.py",
        "the product of transformers' own grouped experts",
        experts_multiply_by_groups,
    ),
    **dict.fromkeys(
        ("_experts_implementation", "_apply_gate"),
        Use(
            "plugins/lora/experts.py",
            "experts with adapters; set_experts_implementation knows no names of others",
            experts_are_computed_by_the_function_of_their_name,
        ),
    ),
    **dict.fromkeys(
        (
            "_process_model_before_weight_loading",
            "_process_model_after_weight_loading",
            "_keep_in_fp32_modules",
        ),
        Use(
            "plugins/quantize/int8.py",
            "the methods by which a quantizer of another package works",
            a_quantizer_sees_the_model_before_and_after_its_weights,
        ),
    ),
    "_is_hf_initialized": Use(
        "plugins/quantize/int8.py",
        "a layer whose weight was converted is not initialized again",
        a_module_that_has_its_weights_is_not_initialized,
    ),
    "_can_record_outputs": Use(
        "plugins/router_loss/routers.py",
        "which modules are routers",
        models_name_their_routers,
    ),
}


def a_linear_layer_can_have_another_adapter():
    class Mine(lora.Linear):
        pass

    config = LoraConfig(target_modules=["q_proj"])
    config._register_custom_module({Linear: Mine})
    model = lora.LoraModel(llama(), config, "default")
    assert [type(it) for it in model.modules() if isinstance(it, lora.LoraLayer)] == [Mine]


def peft_lists_the_layers_that_became_experts():
    kind = conversion._MODEL_TO_CONVERSION_PATTERN["mixtral"]
    assert {"w1", "w2", "w3"} < {*conversion._MOE_TARGET_MODULE_MAPPING[kind]}


def accelerate_forgets_its_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    kind = Accelerator(cpu=True).distributed_type
    assert PartialState._shared_state["distributed_type"] == kind
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    assert not PartialState._shared_state and not AcceleratorState._shared_state


def data_of_the_hub_has_a_fingerprint():
    one, same, other = (Dataset.from_dict({"a": [number]}) for number in (1, 1, 2))
    assert one._fingerprint == same._fingerprint != other._fingerprint


OTHERS = {
    "_register_custom_module": Use(
        "plugins/lora/adapters.py",
        "peft's layer with fewer passes over memory; documented by peft under this name",
        a_linear_layer_can_have_another_adapter,
    ),
    **dict.fromkeys(
        ("_MODEL_TO_CONVERSION_PATTERN", "_MOE_TARGET_MODULE_MAPPING"),
        Use(
            "plugins/lora/experts.py",
            "which layers peft takes for experts of an older version of the model",
            peft_lists_the_layers_that_became_experts,
        ),
    ),
    "_shared_state": Use(
        "plugsft/ranks/connect.py",
        "accelerate shards a model on a CPU only if it takes it for a GPU",
        accelerate_forgets_its_state,
    ),
    "_reset_state": Use(
        "plugsft/api/isolation.py",
        "a second run from Python may have other settings",
        accelerate_forgets_its_state,
    ),
    "_fingerprint": Use(
        "plugsft/data/readers/dataset.py",
        "whether data of the hub has changed",
        data_of_the_hub_has_a_fingerprint,
    ),
}
"""Names of peft, accelerate, datasets and Python."""

NAMES = TORCH | TRANSFORMERS | OTHERS
CHECKS = {use.check.__name__: use.check for use in NAMES.values()}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_private_name_means_what_is_relied_on(check):
    check()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names in a piece of code, but those of `self`; of a private module the path."""
    if isinstance(node, ast.Attribute):
        text = ast.unparse(node)
        if text not in (f"self.{node.attr}", f"cls.{node.attr}"):
            yield text if text in NAMES else node.attr
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        parts = node.module.split(".")
        places = [number for number, part in enumerate(parts, 1) if is_private(part)]
        yield from [".".join(parts[: places[0]])] if places else (it.name for it in node.names)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("getattr", "hasattr", "setattr"):
            yield str(getattr(node.args[1], "value", ""))
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("vars("):
        yield str(getattr(node.slice, "value", ""))
    elif isinstance(node, ast.ClassDef):  # it may answer for its library's class
        yield from (it.name for it in node.body if isinstance(it, ast.FunctionDef))


def own_names(trees: list[ast.Module]) -> set[str]:
    """Return the private names that plugsft defines, and those that Python documents."""
    names = {"_exit", "_fields"}
    for node in [node for tree in trees for node in ast.walk(tree)]:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) == "self" else set()
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target).removeprefix("self."))
    return names - {*NAMES}


def test_every_private_name_of_a_library_is_listed_with_its_files():
    files = [*(ROOT / "plugsft").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf8")) for path in files}
    own, found = own_names([*trees.values()]), {}
    for file, tree in trees.items():
        for name in {name for node in ast.walk(tree) for name in names_in(node)} - own:
            if is_private(name) or is_private(name.rpartition(".")[2]):
                found.setdefault(name, set()).add(file)
    assert found == {name: {*use.files.split()} for name, use in NAMES.items()}
