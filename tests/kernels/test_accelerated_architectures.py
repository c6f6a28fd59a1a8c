"""A step of a model by `accelerate_model` as other GPUs would run it: compiled, not launched.

The CPU is taken for a GPU. Tensors that kernels would write are zero, so only the choice of kernels
and what they need can be seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("transformers", reason="needs the extra hf")

from compiled import launch_compiler
from hf_families import implementation_of, tiny, tokens
from moe_graphs.integrations.transformers import accelerate_model
from moe_graphs.kernels import gemm
from moe_graphs.kernels.availability import as_on_gpus
from moe_graphs.kernels.gemm import launch
from moe_graphs.kernels.gpu_architectures import LEAST_SHARED, TABLE

UNKNOWN = 130


@pytest.fixture
def compiled(monkeypatch):
    return launch_compiler(monkeypatch)


@contextlib.contextmanager
def cpu_as_gpu() -> Iterator[None]:
    """The ops' kernels take tensors of the CPU; memory that nobody has written is zero."""
    reference = mock.patch.multiple(
        gemm.reference,
        grouped_gemm=lambda x, w, ends: gemm.rows_on_gpu(x, w, ends, True),
        grouped_gemm_dgrad=lambda dy, w, ends: gemm.rows_on_gpu(dy, w.transpose(1, 2), ends, True),
        grouped_gemm_with_lora=lambda x, w, low, b, ends: gemm.rows_on_gpu(
            x, w, ends, False, (low, b)
        ),
        grouped_gemm_wgrad=lambda x, dy, ends: launch.matmul_weights(x, dy.contiguous(), ends),
    )
    makers = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    with contextlib.ExitStack() as stack:
        for place, name in makers:
            stack.enter_context(mock.patch.object(place, name, _zeroed(getattr(place, name))))
        stack.enter_context(reference)
        stack.enter_context(as_on_gpus())
        yield


def _zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **options: Any) -> torch.Tensor:
        tensor = make(*args, **options)
        return tensor if tensor.is_meta else tensor.zero_()

    return made


def launched_by_a_step(compiled, number: int) -> tuple[list, dict[str, int]]:
    """The kernels of a step on this architecture, and the report's count of portable launches."""
    model = tiny("qwen3_moe", implementation_of("qwen3_moe"), moe_intermediate_size=64)
    accelerated = accelerate_model(model.to(torch.bfloat16))
    before = dict(accelerated.graphs.report().portable_launches)

    def step() -> None:
        # Graphs would refuse the compiler, which looks for files.
        with cpu_as_gpu(), accelerated.graphs.paused():
            model(input_ids=tokens(), labels=tokens()).loss.backward()

    # Triton does not know all architectures: an unknown one is compiled for a neighbour.
    kernels = compiled(step, arch=number if number in TABLE else 120, told=number)
    after = accelerated.graphs.report().portable_launches
    return kernels, {name: n - before.get(name, 0) for name, n in after.items()}


@pytest.mark.parametrize(
    "number", [120, *(pytest.param(n, marks=pytest.mark.long) for n in (80, 90, 100))]
)
def test_a_known_architecture_gets_its_variants_and_all_kernels_fit(compiled, number):
    kernels, counted = launched_by_a_step(compiled, number)
    names = {kernel.name for kernel in kernels}
    gluon = number == 90
    kind = "gluon" if gluon else TABLE[number].gemms[0]
    assert {f"rows_{kind}_kernel", f"weights_{kind}_kernel"} <= names
    assert {"choose_kernel", "rms_norm_backward_kernel", "cross_entropy_backward_kernel"} <= names
    assert all(kernel.shared <= TABLE[number].shared for kernel in kernels)
    assert not any(counted.values())


def test_an_unknown_architecture_gets_portable_kernels_that_the_report_counts(compiled):
    with pytest.warns(UserWarning, match=f"sm_{UNKNOWN}, which the table of kernels does not have"):
        kernels, counted = launched_by_a_step(compiled, UNKNOWN)
    names = {kernel.name for kernel in kernels}
    assert {"rows_pointer_kernel", "weights_pointer_kernel"} <= names
    assert all(kernel.shared <= LEAST_SHARED for kernel in kernels)
    assert {name for name, n in counted.items() if n} == {f"{n} on sm_{UNKNOWN}" for n in names}


def test_a_gpu_older_than_the_kernels_is_refused_before_a_launch(compiled):
    with pytest.raises(ValueError, match="compute capability 7.5: they need 8.0 or later"):
        launched_by_a_step(compiled, 75)
