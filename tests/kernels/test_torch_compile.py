"""torch.compile(fullgraph=True) through every public op, forward and backward.

On the CPU through plain torch; through the same calls with kernels, which Triton's interpreter
runs; and, without a backward, as for a GPU. On a GPU, through the kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_graphs import kernels
from moe_graphs.kernels.availability import has_triton
from op_cases import OpCase, op_cases

NAMES = list(op_cases())
# The heads of a rank with a norm are both of these and the slowest to trace. Gaps and FP8 are in
# others, too.
LIKE_OTHERS = (
    "unpermute with gaps",
    "routed_experts, recomputed",
    "routed_experts in FP8",
    "split_heads, norm per head",
    "split_heads, norm of all",
    "split_heads_by_rank",
)
# Interpreted or not, these run plain torch here; the others take the way with kernels, and "all"
# takes both.
PLAIN = ("apply_rotary", "gather_gemm", "grouped_gemm", "rotate")
WITH_KERNELS = (
    "choose_experts",
    "cross_entropy",
    "fp8",
    "heads",
    "permute",
    "rms_norm",
    "routed_experts",
    "swiglu",
)


def few(is_few: Callable[[str], bool]) -> list[Any]:
    """All names, of which `long` marks those that another case or the other way has as well."""
    return [
        pytest.param(
            name, marks=() if is_few(name) and name not in LIKE_OTHERS else pytest.mark.long
        )
        for name in NAMES
    ]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(function: Callable) -> Callable:
    """Forward and backward are traced and run as graphs; what cannot be traced raises."""
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def check(case: OpCase, expected: list[Tensor], **tolerance: float) -> None:
    for got, want in zip(case.results(whole(case.run)), expected, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # dynamo does that


@pytest.mark.parametrize("name", few(lambda name: name in (*PLAIN, "all")))
def test_plain_torch(name):
    case = op_cases()[name]
    check(case, case.results(case.run))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: log(0)
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", few(lambda name: name not in PLAIN))
def test_interpreted_kernels(monkeypatch, name):
    """The traced graph is what a GPU runs, except for the kernels; plain torch is right."""
    case = op_cases()[name]
    expected = case.results(case.run)
    for module in WITH_KERNELS:
        # The package exports functions of some modules' names.
        module = importlib.import_module(f"moe_graphs.kernels.{module}")
        monkeypatch.setattr(module, "has_kernel", lambda x: True)
    check(case, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "rotate"])
def test_as_for_a_gpu(name):
    """Fake CUDA tensors: the choice of kernels is traced. Without a GPU they have no autograd."""
    with torch.no_grad():
        mode = FakeTensorMode()

        def place(x: Tensor) -> Tensor:
            with mode:
                return torch.empty(x.shape, dtype=x.dtype, device="cuda")

        case = op_cases(place, torch.bfloat16)[name]
    with mode, torch.no_grad():
        leaves = [leaf.detach() for leaf in case.leaves]
        found, expected = whole(case.run)(*leaves), case.run(*leaves)
        assert [x.shape for x in found] == [x.shape for x in expected]
        assert {x.device.type for x in found} == {"cuda"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name):
    """Results have the same bits by the same kernels; plain torch rounds a rotation otherwise."""
    case = op_cases(Tensor.cuda, torch.bfloat16)[name]
    tolerance = {} if name == "rotate" else {"rtol": 0, "atol": 0}
    check(case, case.results(case.run), **tolerance)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_are_added_to_a_buffer(device):
    """The sum that the backward adds to `main_grad` in place is a part of its graph."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, w = (torch.randn(s).to(device, dtype).requires_grad_() for s in ((6, 16), (2, 16, 8)))
    offsets = torch.tensor([2, 6], dtype=torch.int32, device=device)
    found, expected = torch.ones(2, 2, 16, 8, device=device)

    def loss(x: Tensor, w: Tensor, main_grad: Tensor) -> Tensor:
        return kernels.grouped_gemm(x, w, offsets, main_grad_EKN=main_grad).square().sum()

    gradients = []
    for function, main_grad in ((whole(loss), found), (loss, expected)):
        for _ in range(2):
            function(x, w, main_grad).backward()
        gradients.append(x.grad)
        x.grad = None
    assert w.grad is None
    assert torch.equal(found, expected)
    assert torch.equal(*gradients)


def test_whether_there_is_triton():
    found = whole(lambda x: x + has_triton())(torch.zeros(1))
    assert bool(found) == has_triton()
