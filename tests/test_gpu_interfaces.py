"""What a GPU run calls of torch, checked without a GPU: signatures, derivatives, variables.

tools/test --full checks the oldest torch too, whose package has the kernels of CUDA.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plugsft.plugins.flash_attention.varlen import attend
from plugsft.ranks import connect

BOUNDS = torch.tensor([0, 4, 10], dtype=torch.int32, device="meta")
LIBRARIES = Path(torch.__file__).parent / "lib"


class Operators(TorchDispatchMode):
    """Collects the operators that calls reach, and computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return kwargs["out"]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, learns: bool = False) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=learns)


def ensure_cuda_kernel(operator: str) -> None:
    """A torch that was built without CUDA cannot tell."""
    if torch.version.cuda is not None:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CUDA")


def test_attention_within_documents_takes_grouped_heads_a_scale_and_a_window():
    query = meta(1, 4, 10, 64, learns=True)
    key, value = (meta(1, 2, 10, 64, learns=True) for _ in range(2))
    places = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 6}
    output, _ = attend(
        torch.nn.Module(), query, key, value, None, **places, scaling=0.1, sliding_window=3
    )
    assert output.shape == (1, 10, 4, 64)
    output.sum().backward()
    assert [it.grad.shape for it in (query, key, value)] == [it.shape for it in (query, key, value)]


def test_the_operator_of_flash_attention_has_a_derivative():
    query = meta(10, 4, 64, learns=True)
    key, value = (meta(10, 2, 64, learns=True) for _ in range(2))
    settings = {"scale": 0.1, "window_size_left": 2, "window_size_right": 0}
    results = torch.ops.aten._flash_attention_forward(
        query, key, value, BOUNDS, BOUNDS, 6, 6, 0.0, True, False, **settings
    )
    results[0].sum().backward()
    assert [it.grad.shape for it in (query, key, value)] == [it.shape for it in (query, key, value)]
    ensure_cuda_kernel("aten::_flash_attention_forward")
    ensure_cuda_kernel("aten::_flash_attention_backward")


def test_products_of_bfloat16_are_added_in_float32():
    left, right, total = meta(4, 8), meta(8, 6), meta(4, 6, dtype=torch.float32)
    with Operators() as operators:
        torch.mm(left, right, out_dtype=torch.float32, out=total)
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    assert operators.names == ["aten.mm.dtype_out", "aten.addmm.dtype_out"]
    for operator in operators.names:
        ensure_cuda_kernel(operator.replace("aten.", "aten::"))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_optimizer_skips_a_step_that_is_not_finite(kind):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = kind([weight], lr=0.1, fused=True)
    for broken in (1.0, 0.0):
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(broken)
        optimizer.step()
        assert bool((weight == 1).all()) is bool(broken)
    assert optimizer.state[weight].get("step", 1) == 1


def test_the_allocator_reads_all_of_its_variables():
    library = (LIBRARIES / "libc10.so").read_bytes()
    for word in (*connect.ALLOCATOR, "expandable_segments"):
        assert word.encode() + b"\0" in library
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


@pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")
def test_attention_reads_its_variable():
    assert connect.CUDNN_ATTENTION.encode() + b"\0" in (LIBRARIES / "libtorch_cuda.so").read_bytes()
