"""Inputs rounded to FP8 in Triton, against PyTorch's conversion, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specmamba.kernels import linear
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.linear import torch_ops
from tests.codes import normal

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def product(gpu_device: str) -> Any:
    from specmamba.kernels.linear.triton_scaled import TritonScaledWeight

    return TritonScaledWeight.rounded(normal(48, 64, seed=1, dtype=torch.bfloat16).to(gpu_device))


def assert_same_codes(product: Any, rows: torch.Tensor) -> None:
    codes, scale = product.round_rows(rows)
    want, want_scale = torch_ops.ScaledWeight.round_rows(product, rows)
    assert torch.equal(scale, want_scale)
    assert torch.equal(codes.view(torch.uint8) & 0x7F, want.view(torch.uint8) & 0x7F)
    assert torch.equal(codes.float(), want.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 16), (3, 64), (2, 4096), (2, 5000)])
def test_codes_are_those_of_pytorch(shape: tuple[int, int], dtype: torch.dtype, product: Any, gpu_device: str) -> None:
    """Of one block and of several; numbers of all sizes, some of them below the least that is normal."""
    rows = normal(*shape, seed=2) * torch.logspace(-9, 0, shape[1])
    assert_same_codes(product, rows.to(gpu_device, dtype))


def test_every_step_between_codes(product: Any, gpu_device: str) -> None:
    """All values of the format, the middles between them, which go to the even one, and both neighbours of these."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    one = torch.cat([values, middles, middles * (1 + 2**-20), middles * (1 - 2**-20)])
    row = torch.cat([one, -one])
    assert row.max() == 448
    assert_same_codes(product, row.to(gpu_device)[None])


def test_rows_lie_apart_and_zeros_stay(product: Any, gpu_device: str) -> None:
    wide = torch.full((3, 90), float("nan"), device=gpu_device)
    wide[:, 7:71] = normal(3, 64, seed=3).to(gpu_device)
    wide[1, 7:71] = 0
    assert_same_codes(product, wide[:, 7:71])
    assert product.round_rows(wide[:, 7:71])[1][1] == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_in_its_row(value: float, product: Any, gpu_device: str) -> None:
    x = normal(3, 64, seed=4, dtype=torch.bfloat16).to(gpu_device)
    clean = product(x)
    x[1, 5] = value
    y = product(x)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], clean[[0, 2]])


def test_a_product(product: Any, gpu_device: str) -> None:
    x = normal(2, 5, 64, seed=5, dtype=torch.bfloat16).to(gpu_device)
    want = torch_ops.ScaledWeight.rounded(normal(48, 64, seed=1, dtype=torch.bfloat16).to(gpu_device))(x)
    assert torch.equal(product(x), want)
    assert product(x[:0]).shape == (0, 5, 48)


@pytest.mark.usefixtures("launchable")
def test_triton_is_chosen_where_sizes_allow() -> None:
    packs = operator_of(linear.pack)
    weight = torch.ones(32, 64, dtype=torch.bfloat16)
    assert packs.choose(weight, "fp8-dynamic") == "triton"
    assert packs.choose(weight[:, :40].contiguous(), "fp8-dynamic") != "triton"
    assert packs.choose(weight[:0], "fp8-dynamic") != "triton"
