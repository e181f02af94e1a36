"""Angles of rotary position embedding in Triton against the reference."""

from typing import Any

import pytest
import torch

from specmamba.kernels import rowwise
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.rowwise import reference, torch_ops
from tests.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("poisoned")

# to bfloat16 the interpreter rounds towards zero
TOLERANCE = {torch.float32: (1e-6, 1e-6), torch.bfloat16: (2**-7, 1e-6), torch.float16: (2**-10, 1e-6)}


@pytest.fixture
def triton_ops(gpu_device: str) -> Any:
    from specmamba.kernels.rowwise import triton_ops

    return triton_ops


@pairwise(
    pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16", "fp16"]),
    pytest.mark.parametrize("half", [1, 3, 32, 300]),
    pytest.mark.parametrize("scaling", [1.0, 1.25]),
)
def test_angles_match_reference(
    triton_ops: Any, gpu_device: str, half: int, scaling: float, dtype: torch.dtype
) -> None:
    frequencies = (10000.0 ** -(torch.arange(half) / half)).repeat(2)
    positions = torch.tensor([[0, 1, 2, 77], [5, 262_143, 131_072, 0], [9, 0, 40_000, 1]])[:, ::2]
    got = triton_ops.rotary_angles(positions.to(gpu_device), frequencies.to(gpu_device), scaling, dtype)
    rtol, atol = TOLERANCE[dtype]
    for x, y in zip(got, reference.rotary_angles(positions, frequencies, scaling, torch.float64), strict=True):
        assert (x.shape, x.dtype) == ((3, 2, 1, 2 * half), dtype)
        torch.testing.assert_close(x.cpu().double(), y, rtol=rtol, atol=atol)


def test_halves_of_frequencies_may_differ(triton_ops: Any, gpu_device: str) -> None:
    frequencies, positions = torch.rand(10), torch.arange(70).view(2, 35)
    got = triton_ops.rotary_angles(positions.to(gpu_device), frequencies.to(gpu_device), 1.0, torch.float32)
    for x, y in zip(got, torch_ops.rotary_angles(positions, frequencies, 1.0, torch.float32), strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-5, atol=1e-5)


def test_no_positions(triton_ops: Any, gpu_device: str) -> None:
    positions, frequencies = torch.empty(0, 4, dtype=torch.int64, device=gpu_device), torch.ones(6, device=gpu_device)
    assert [x.shape for x in triton_ops.rotary_angles(positions, frequencies, 1.0, torch.float32)] == [(0, 4, 1, 6)] * 2


@pytest.mark.usefixtures("launchable")
def test_triton_is_chosen_where_it_runs() -> None:
    given = torch.zeros(1, 2, dtype=torch.int64), torch.ones(4), 1.0, torch.float32
    assert operator_of(rowwise.rotary_angles).choose(*given) == "triton"
