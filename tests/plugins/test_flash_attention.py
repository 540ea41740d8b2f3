"""flash_attention: which kernel is chosen, what is refused, how it is called."""

import importlib
import inspect
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import must_succeed, read_record, run_plugsft
from families import SMALL
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma4TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    modeling_flash_attention_utils,
)
from transformers.utils import import_utils

from plugsft import PluginError, RecipeError, testing
from plugsft.plugins.bfd_packing.attention import attend_per_document
from plugsft.plugins.bfd_packing.documents import documents_of
from plugsft.plugins.flash_attention import FlashAttention, kernels, varlen
from plugsft.plugins.flash_attention.kernels import (
    PACKAGES,
    VARLEN,
    find_obstacle,
    find_obstacle_in_model,
    find_obstacle_in_package,
    head_widths,
    sums_of_token,
)
from plugsft.plugins.flash_attention.varlen import (
    attend,
    by_operator,
    fastest_kernel,
    kernel_inputs,
    operator_is_exact,
    varlen_kernel,
)

HOPPER, AMPERE, TURING, BLACKWELL = (9, 0), (8, 0), (7, 5), (10, 0)
MODELS = {
    "llama": LlamaConfig(**SMALL | {"num_key_value_heads": 4}),
    "qwen3": Qwen3Config(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=6),
}
GEMMA2 = Gemma2Config(**SMALL, sliding_window=6, attn_logit_softcapping=0.05)
LENGTHS = np.array([13, 1, 30, 2, 17])
FLASH = ["fa4", "fa3", "fa2", "torch"]
NARROW = LlamaConfig(hidden_size=48, num_attention_heads=4)


def conditions(gpu=HOPPER, half=True, packed=True, built=True, shared=False):
    return kernels.Conditions(gpu, half, packed, built, shared)


def install(folder, monkeypatch, kernel, version, code=""):
    """Put a package of that version on the path, without kernels."""
    distribution, module, *_ = PACKAGES[kernel]
    # flash-attention/hopper/setup.py writes underscores.
    name = {"fa3": "flash_attn_3"}.get(kernel, distribution)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    file = folder / f"{module.replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    for part in (module, module.split(".")[0]):
        monkeypatch.delitem(importlib.sys.modules, part, raising=False)


@pytest.mark.parametrize(
    ("kernel", "place", "reason"),
    [
        ("fa3", conditions(gpu=None), "no NVIDIA GPU"),
        ("torch", conditions(gpu=None), "no NVIDIA GPU"),
        ("fa3", conditions(AMPERE), r"made for Hopper \(9.0\), not for 8.0"),
        ("fa3", conditions(BLACKWELL), r"made for Hopper \(9.0\), not for 10.0"),
        ("fa4", conditions(AMPERE), r"made for Hopper and Blackwell \(9.0 to 11.0\), not for 8.0"),
        ("fa2", conditions(TURING), "needs compute capability 8.0, not 7.5"),
        ("torch", conditions(TURING), "needs compute capability 8.0, not 7.5"),
        ("fa2", conditions(half=False), "takes bfloat16, not float32"),
        ("torch", conditions(half=False), "takes bfloat16, not float32"),
        ("torch", conditions(packed=False), "takes packed rows only"),
        ("torch", conditions(built=False), "this torch was built without it"),
        ("fa3", conditions(), "flash-attn-3 is not installed"),
        ("fa4", conditions(BLACKWELL), "flash-attn-4 is not installed"),
        ("fa2", conditions(packed=False), "flash-attn is not installed"),
        ("fa2", conditions(shared=True), "cannot share the prompt of a pair"),
        ("fa3", conditions(shared=True), "cannot share the prompt of a pair"),
    ],
)
def test_a_kernel_that_cannot_run_here_is_refused_with_the_cure(kernel, place, reason):
    plugin = FlashAttention(kernel=kernel)
    with pytest.raises(
        RecipeError, match=f'kernel = "{kernel}" cannot run: {reason}; .'
    ) as stopped:
        plugin.ensure_no(find_obstacle(kernel, place))
    assert len(stopped.value.problems) == 1


@pytest.mark.parametrize(
    ("kernel", "place"),
    [
        ("torch", conditions(AMPERE)),
        ("torch", conditions(BLACKWELL)),
        ("sdpa", conditions(None, False, False, False)),
    ],
)
def test_a_kernel_that_can_run_here_is_accepted(kernel, place):
    assert find_obstacle(kernel, place) is None


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [("fa2", "2.5.9", "2.10.1"), ("fa3", "2", "3.0.0b1"), ("fa4", "3.9", "4.0.0b15")],
)
def test_the_version_of_a_package_counts(tmp_path, monkeypatch, kernel, old, new):
    for version in (old, new):
        folder = tmp_path / version
        folder.mkdir()
        install(folder, monkeypatch, kernel, version)
        why = find_obstacle(kernel, conditions())
        assert why is None if version == new else f"{old} is older than" in why[0]


@pytest.mark.parametrize("kernel", PACKAGES)
def test_packages_have_the_names_by_which_transformers_finds_them(kernel):
    distribution, module, *_ = PACKAGES[kernel]
    available = getattr(import_utils, f"is_flash_attn_{kernel[-1]}_available")
    assert f'"{distribution}"' in inspect.getsource(available)
    assert f"from {module} import" in inspect.getsource(
        modeling_flash_attention_utils._lazy_imports
    )


def test_a_package_that_was_built_for_another_torch_is_no_package(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "fa2", "2.8.3", "raise ImportError('undefined symbol: _ZN3c10')")
    reason, cure = find_obstacle_in_package(*PACKAGES["fa2"])
    assert "flash-attn 2.8.3 cannot be imported (undefined symbol: _ZN3c10)" in reason
    assert 'kernel = "auto"' in cure


@pytest.mark.parametrize(
    ("config", "reasons"),
    [
        (MODELS["mistral"], {}),
        (NARROW, dict.fromkeys(FLASH, "heads of 12")),
        (LlamaConfig(head_dim=512), dict.fromkeys(FLASH, "heads of 512")),
        (LlamaConfig(attention_dropout=0.1), dict.fromkeys(["fa4", "fa3", "torch"], "no dropout")),
        (GEMMA2, {"torch": "no soft cap"}),
        (DeepseekV3Config(), {"torch": "values as wide as keys", "fa4": "heads of 192"}),
        (GptOssConfig(), dict.fromkeys(FLASH, "takes other kernels only")),
        (Gemma4TextConfig(), dict.fromkeys(FLASH, "heads of ")),
        (LlamaConfig(head_dim=192), {"fa4": "heads of 192; it takes multiples of 8, to 128"}),
        (Llama4TextConfig(), dict.fromkeys(FLASH, "chunked attention")),
    ],
    ids=["plain", "odd", "wide", "dropout", "cap", "values", "sinks", "two", "192", "chunks"],
)  # fmt: skip
def test_kernels_without_the_attention_of_a_model_are_refused(config, reasons):
    for kernel in (*FLASH, "sdpa"):
        why = find_obstacle_in_model(kernel, config, packed=True)
        assert reasons.get(kernel, "") in (why or ("",))[0] and (why is None) == (
            kernel not in reasons
        )


def test_widths_of_heads():
    assert {*head_widths(MODELS["qwen3"])} == {8}
    assert {*head_widths(LlamaConfig(hidden_size=96, num_attention_heads=4))} == {24}
    assert {*head_widths(DeepseekV3Config())} == {192}


@pytest.mark.parametrize(
    ("place", "config", "chosen", "said"),
    [
        (
            conditions(),
            MODELS["llama"],
            "torch",
            "not fa3: flash-attn-3 is not installed; not fa4: flash-attn-4 is not installed; not",
        ),
        (
            conditions(None),
            MODELS["llama"],
            "sdpa",
            "SDPA, document by document; not fa3, fa4, fa2, torch: no",
        ),
        (conditions(None, packed=False), MODELS["llama"], "sdpa", "SDPA; not"),
        (conditions(None, packed=False), GEMMA2, "", "left to transformers; not"),
        (conditions(), GEMMA2, "sdpa", "not torch: it has no soft cap"),
    ],
)
def test_auto_takes_the_best_that_can_run_and_says_why_none_before(place, config, chosen, said):
    kernel, obstacle, result = kernels.choose("auto", config, place)
    assert (kernel, obstacle) == (chosen, None) and said in result


def test_auto_takes_what_is_installed(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "fa2", "2.8.3")
    kernel, _, result = kernels.choose("auto", MODELS["llama"], conditions())
    assert kernel == "fa2"
    assert result.startswith("flash-attn 2.8.3; not fa3: flash-attn-3 is not installed")
    # It takes padded rows, but not 32 bits.
    kernel, _, result = kernels.choose("auto", MODELS["llama"], conditions(packed=False))
    assert kernel == "fa2"
    assert "waits for the GPU in each layer: add [plugins.bfd_packing]" in result
    kernel, _, _ = kernels.choose("auto", MODELS["llama"], conditions(half=False))
    assert kernel == "sdpa"


LONG = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_hidden_layers=1)


@pytest.mark.parametrize("kernel", ["fa2", "torch"])
def test_a_row_whose_gradients_overflow_the_index_is_refused(kernel):
    # 32 heads of 128: 2**19 rows of sums.
    documents, tokens = 2048, 2**19 - 128 * 2048
    plugin = FlashAttention()
    plugin.sums, plugin.row_length = sums_of_token(kernel, LONG), "plugins.bfd_packing.capacity"

    def collate(tokens):
        work = plugin.collate()
        next(work)
        batch = {"input_ids": torch.empty(1, tokens, device="meta")}
        batch["cu_seq_lens_q"] = torch.empty(documents + 1, device="meta")
        with pytest.raises(StopIteration):
            work.send(batch)

    collate(tokens - 1)
    with pytest.raises(RecipeError, match=r"cannot index .* lower plugins.bfd_packing.capacity"):
        collate(tokens)
    # A head of 80 takes the room of 96, one of 160 that of 192.
    narrow = [LlamaConfig(head_dim=width, num_attention_heads=4) for width in (64, 80, 160)]
    assert [sums_of_token(kernel, config) // 4 for config in narrow] == [64, 96, 192]
    assert sums_of_token("fa3", LONG) == sums_of_token("sdpa", LONG) == 0


def plain(query, key, value, bounds, scale, window, softcap=None, wide=None):
    """Attend document by document, by the textbook; the last query sees the last key."""
    times = query.shape[1] // key.shape[1]
    outputs = []
    spans = (pairwise(ends.tolist()) for ends in (bounds, bounds if wide is None else wide))
    for (start, stop), (first, last) in zip(*spans, strict=True):
        q = query[start:stop].transpose(0, 1)
        k, v = (one[first:last].transpose(0, 1) for one in (key, value))
        k, v = (one.repeat_interleave(times, 0) for one in (k, v))
        scores = q @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        places = torch.arange(last - first)
        back = places[-(stop - start) :, None] - places
        seen = (back >= -window[1]) & ((back <= window[0]) | (window[0] < 0))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        outputs.append((weights @ v).transpose(0, 1))
    return torch.cat(outputs)


def stand_in(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """Compute what torch's kernel does, on a CPU; as strict about what it is given."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    return stand_in_2_11(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
    )


def stand_in_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1),
):  # fmt: skip
    """Compute what the kernel of torch 2.11 does; it takes grouped heads without a flag."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and isinstance(max_q, int)
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    assert query.shape[0] == int(cu_seq_q[-1])
    assert key.shape[0] == value.shape[0] == int(cu_seq_k[-1])
    return plain(query, key, value, cu_seq_q, scale, window_size, wide=cu_seq_k)


STAND_INS = [stand_in, stand_in_2_11]
SIGNATURES = {"2.11": stand_in_2_11, "2.12": stand_in, "2.13": stand_in}
"""By torch's release: 2.11 as in its wheel."""


def test_the_stand_in_has_the_signature_of_the_kernel():
    ours = SIGNATURES.get(".".join(torch.__version__.split(".")[:2]), stand_in)
    ours, theirs = (inspect.signature(one).parameters for one in (ours, varlen_attn))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def forward_of_operator(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, dropout, is_causal, debug, scale=None,
    window_size_left=None, window_size_right=None, **_,
):  # fmt: skip
    """Compute what torch's operator does, on a CPU."""
    assert dropout == 0.0 and not debug
    window = window_size_left, 0 if is_causal else window_size_right
    inputs = (one.float() for one in (query, key, value))
    output = plain(*inputs, cu_seq_q, scale, window, wide=cu_seq_k).to(query.dtype)
    lse = torch.zeros(query.shape[1], query.shape[0])
    state = torch.zeros(2, dtype=torch.uint64)
    return output, lse, state, torch.zeros(()), query.new_zeros(0)


def backward_of_operator(
    grad, query, key, value, output, lse, cu_seq_q, cu_seq_k, max_q, max_k, dropout, is_causal,
    rng_state, unused, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """Compute its gradients, by automatic differentiation in a thread: here it is off."""
    window = window_size_left, 0 if is_causal else window_size_right

    def differentiate():
        inputs = [one.detach().float().requires_grad_() for one in (query, key, value)]
        result = plain(*inputs, cu_seq_q, scale, window, wide=cu_seq_k)
        return torch.autograd.grad(result, inputs, grad.float())

    with ThreadPoolExecutor(1) as thread:
        grads = thread.submit(differentiate).result()
    return tuple(one.to(query.dtype) for one in grads)


@pytest.fixture
def operator():
    """Give torch's operator a kernel for CPUs; return a function that changes its parts."""
    libraries = []

    def implement(forward=forward_of_operator, backward=backward_of_operator):
        close()
        libraries.append(torch.library.Library("aten", "IMPL"))
        libraries[0].impl("_flash_attention_forward", forward, "CPU")
        libraries[0].impl("_flash_attention_backward", backward, "CPU")

    def close():
        operator_is_exact.cache_clear()
        for library in libraries:
            library._destroy()
        libraries.clear()

    implement()
    yield implement
    close()


def make(config, attention):
    attend_per_document()
    AttentionInterface.register(VARLEN, attend)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=attention)
    # Larger weights: what one document sees of another would show.
    for parameter in model.parameters():
        parameter.data *= 3
    return model.train()


def row(lengths=LENGTHS, seen=None):
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 97, (1, int(lengths.sum()))))
    return {"input_ids": ids, **documents_of(lengths, seen=seen), "use_cache": False}


def assert_same(model, other, seen=None):
    """Compare logits and gradients on a packed row."""
    ours, theirs = (one(**row(seen=seen)).logits for one in (model, other))
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()
    weights = torch.from_numpy(np.random.default_rng(1).standard_normal(ours.shape)).float()
    for logits in (ours, theirs):
        (logits * weights).sum().backward()
    expected = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        scale = expected[name].grad.abs().max()
        assert (parameter.grad - expected[name].grad).abs().max() <= 2e-5 * scale, name


@pytest.mark.parametrize("kernel", STAND_INS)
@pytest.mark.parametrize("name", MODELS)
def test_torchs_kernel_is_called_for_what_attention_per_document_computes(
    monkeypatch, name, kernel
):
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    assert_same(make(MODELS[name], VARLEN), make(MODELS[name], attend_per_document()))


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_torchs_operator_learns_what_attention_per_document_learns(operator, name):
    assert fastest_kernel("cpu") is by_operator
    seen = np.zeros_like(LENGTHS)
    seen[[1, 3]] = LENGTHS[[0, 2]] // 2
    for shared in (None, seen):
        pair = make(MODELS[name], VARLEN), make(MODELS[name], attend_per_document())
        assert_same(*pair, seen=shared)


def run_kernel(kernel, window=(-1, 0)):
    """Return the output and the gradients of a kernel, and the operators that it dispatched."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(9, heads, 8, generator=generator).bfloat16().requires_grad_()
        for heads in (4, 2, 2)
    )
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    with Dispatches() as dispatches:
        output = kernel(query, key, value, bounds, bounds, 5, 5, scale=0.3, window_size=window)
        grads = torch.autograd.grad(output, (query, key, value), torch.ones_like(output))
    return (output, *grads), dispatches.names


class Dispatches(TorchDispatchMode):
    """Collects the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("window", [(-1, 0), (2, 0)])
def test_the_operator_computes_the_numbers_of_varlen_attn_with_fewer_dispatches(operator, window):
    ours, direct = run_kernel(by_operator, window)
    theirs, wrapped = run_kernel(varlen_kernel(), window)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    # No custom operator of Python, and no zeros for its state.
    assert not any("torch_attn" in name or "zeros" in name for name in direct)
    assert sum("torch_attn" in name for name in wrapped) == 2
    assert len(direct) <= len(wrapped) - 4


def test_an_operator_that_is_wrong_or_has_no_derivative_gives_way_to_varlen_attn(operator):
    def without_window(*given, window_size_left=None, **more):
        return forward_of_operator(*given, window_size_left=-1, **more)

    def wrong(*given, **more):
        query, *others = backward_of_operator(*given, **more)
        return (query * 1.1, *others)

    def missing(*given, **more):
        raise NotImplementedError("the derivative is not implemented")

    for parts in ({"forward": without_window}, {"backward": wrong}, {"backward": missing}):
        operator(**parts)
        assert fastest_kernel("cpu") is not by_operator, parts
    operator()
    assert fastest_kernel("cpu") is by_operator
    assert not operator_is_exact("cuda") or torch.cuda.is_available()


# From the file native_functions.yaml of torch 2.11.
OPERATOR_2_11 = (
    "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, "
    "Tensor? cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, "
    "bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None) -> "
    "(Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, "
    "Tensor debug_attn_mask)"
)


def test_torch_2_11_has_the_operator_as_it_is_called(monkeypatch):
    here = torch.ops.aten._flash_attention_forward.default._schema
    for schema in (torch._C.parse_schema(OPERATOR_2_11), here):
        arguments = schema.arguments
        assert [one.name for one in arguments if not one.kwarg_only] == [
            *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
            *("dropout_p", "is_causal", "return_debug_mask"),
        ]
        options = {one.name for one in arguments if one.kwarg_only}
        assert options >= {"scale", "window_size_left", "window_size_right"}


def test_a_compiled_layer_calls_the_operator_in_one_graph(operator):
    heads = [torch.randn(1, count, 9, 8, requires_grad=True) for count in (4, 2, 2)]
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)

    def layer(*heads):
        attention = partial(attend, kernel=by_operator)
        options = {"cu_seq_lens_q": bounds, "max_length_q": 5, "scaling": 0.3}
        return attention(None, *heads, None, **options)[0]

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    grads, expected = (
        torch.autograd.grad(compute(*heads).square().sum(), heads) for compute in (compiled, layer)
    )
    assert all(torch.allclose(*pair) for pair in zip(grads, expected, strict=True))


def test_a_shared_prompt_reaches_torchs_kernel(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    seen = np.zeros_like(LENGTHS)
    seen[[1, 3]] = LENGTHS[[0, 2]] // 2
    for name in MODELS:
        pair = make(MODELS[name], VARLEN), make(MODELS[name], attend_per_document())
        assert_same(*pair, seen=seen)


def test_packages_that_cannot_share_a_prompt_are_passed_over():
    shared = kernels.Conditions((9, 0), True, True, True, shared=True)
    for kernel in PACKAGES:
        assert find_obstacle(kernel, shared)[0] == "cannot share the prompt of a pair"
    assert find_obstacle("torch", shared) is None


def test_one_plain_row_is_one_document_and_padded_rows_are_refused(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    model, other = make(MODELS["qwen3"], VARLEN), make(MODELS["qwen3"], "eager")
    ids = torch.arange(9)[None]
    logits = [one(input_ids=ids, use_cache=False).logits for one in (model, other)]
    assert torch.allclose(*logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(PluginError, match="called with padded rows"):
        model(input_ids=torch.zeros(2, 3, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize("given", [{"softcap": 1.0}, {"dropout": 0.1}, {"s_aux": torch.zeros(1)}])
def test_torchs_kernel_leaves_nothing_out_in_silence(given):
    with pytest.raises(RecipeError, match="no dropout, no soft cap and no sinks"):
        attend(torch.nn.Identity(), *torch.zeros(3, 1, 1, 2, 8), None, **given)


def test_mixed_precision_reaches_the_kernel_in_16_bits():
    heads = torch.zeros(1, 2, 3, 8)
    assert (
        kernel_inputs(heads, heads, heads, None, None, None, None)["query"].dtype == torch.float32
    )
    with torch.autocast("cpu", torch.bfloat16):
        given = kernel_inputs(heads, heads, heads, None, None, None, None)
    assert {given[name].dtype for name in ("query", "key", "value")} == {torch.bfloat16}


def flash_stand_in(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False,
):  # fmt: skip
    """Compute what flash_attn_varlen_func of flash-attn 2.6 and later does, on a CPU."""
    assert causal and cu_seqlens_q.dtype == torch.int32 and isinstance(max_seqlen_q, int)
    window = (window_size[0], 0)
    return plain(q, k, v, cu_seqlens_q, softmax_scale, window, softcap or None)


class Asked(TorchDispatchMode):
    """Counts what a device would have to be waited for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = ("_local_scalar_dense", "nonzero", "masked_select")
        self.count += any(str(func).startswith(f"aten.{name}") for name in names)
        return func(*args, **kwargs or {})


def flash(monkeypatch, config):
    """Return a model whose attention is that of transformers for flash-attn, on a CPU."""
    inside = modeling_flash_attention_utils
    monkeypatch.setattr(inside, "_loaded_implementation", "flash_attention_2", raising=True)
    monkeypatch.setattr(inside, "_flash_varlen_fn", flash_stand_in)
    process = inside._lazy_define_process_function(flash_stand_in)
    monkeypatch.setattr(inside, "_process_flash_kwargs_fn", process)
    model = make(config, "eager")
    # Not through its setter, which refuses a machine without GPU.
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


@pytest.mark.parametrize("config", [*MODELS.values(), GEMMA2], ids=[*MODELS, "gemma2"])
def test_transformers_gives_flash_attn_the_documents_window_and_cap(monkeypatch, config):
    assert_same(flash(monkeypatch, config), make(config, attend_per_document()))


def test_no_layer_waits_for_the_device(monkeypatch):
    """In `plain` the stand-ins do: they read the bounds. So they are given none to read."""
    monkeypatch.setattr(varlen, "varlen_attn", lambda **given: given["query"])
    monkeypatch.setitem(flash_stand_in.__globals__, "plain", lambda q, *_: q)
    counts = {}
    for layers in (2, 5):
        config = Qwen3Config(**SMALL | {"num_hidden_layers": layers})
        for name in ("torch", "fa2"):
            model = make(config, VARLEN) if name == "torch" else flash(monkeypatch, config)
            with Asked() as asked:
                model(**row()).logits.sum().backward()
            counts.setdefault(name, []).append(asked.count)
    # transformers looks once at the places of a micro-batch where a mask might be wanted.
    assert counts == {"torch": [0, 0], "fa2": [1, 1]}


@pytest.mark.parametrize("options", [{}, {"kernel": "sdpa"}], ids=["auto", "sdpa"])
@pytest.mark.parametrize("packed", [{}, {"bfd_packing": {}}], ids=["padded", "packed"])
def test_a_run_learns_the_same(options, packed):
    tables = {"plugins": packed, "train": {"micro_batch": 1 if packed else 2}}
    testing.keeps_gradients("flash_attention", options, tables=tables)


def test_a_run_names_its_kernel_and_stops_without_one(tiny, tmp_path):
    recipe = tiny(train={"micro_batch": 1}, plugins={"flash_attention": {}, "bfd_packing": {}})
    must_succeed(recipe, "train.steps=1")
    plugins = read_record(tmp_path / "run")["plugins"]
    summary = next(plugin["summary"] for plugin in plugins if plugin["name"] == "flash_attention")
    assert summary.startswith("SDPA, document by document; not fa3, fa4, fa2, torch: no NVIDIA GPU")
    for command in ([], ["check"]):
        result = run_plugsft(
            *command, recipe, "plugins.flash_attention.kernel=torch", "output=other"
        )
        assert result.returncode == 2
        assert (
            'plugins.flash_attention: kernel = "torch" cannot run: no NVIDIA GPU' in result.stderr
        )
