"""FP8 weights whose inputs are rounded to FP8 too: PyTorch's product, here in its form for CPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specmamba.kernels import linear, moe
from specmamba.kernels.linear import torch_ops
from specmamba.kernels.linear.rounding import round_matrix
from specmamba.models.weights import head_form
from tests.codes import normal

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def multiplies_fp8() -> None:
    """Skip where PyTorch's product for CPUs takes no scale for each row, as in 2.11."""
    codes, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"PyTorch {torch.__version__} on a CPU: {str(error)[:80]}")


def rounded_rows(x: Tensor) -> Tensor:
    """Rows as multiples of the nearest e4m3, the largest of each as 448."""
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    return torch.where(scale > 0, (x.float() / scale).to(torch.float8_e4m3fn).float() * scale, 0.0)


@pytest.mark.usefixtures("multiplies_fp8")
@pytest.mark.parametrize("shape", [(16, 16), (48, 64), (80, 272)])
@pytest.mark.parametrize("rows", [(1,), (17,), (2, 5)])
def test_both_sides_are_rounded(rows: tuple[int, ...], shape: tuple[int, int]) -> None:
    weight, x = normal(*shape, seed=1, dtype=torch.bfloat16), normal(*rows, shape[1], seed=2, dtype=torch.bfloat16)
    product = linear.pack(weight, "fp8-dynamic")
    assert isinstance(product, torch_ops.ScaledWeight)
    y, of_weight = product(x), round_matrix(weight, "fp8").dequantize(torch.float32)
    assert y.dtype is torch.bfloat16
    size = float((x.float().abs() @ of_weight.abs().T).max())
    torch.testing.assert_close(y.float(), rounded_rows(x) @ of_weight.T, rtol=2**-7, atol=size * 2**-12)
    assert product(x[:0]).shape == (0, *rows[1:], shape[0])


@pytest.mark.usefixtures("multiplies_fp8")
def test_what_is_no_number_stays_in_its_row() -> None:
    product, x = (
        linear.pack(normal(32, 64, seed=3, dtype=torch.bfloat16), "fp8-dynamic"),
        normal(4, 64, seed=4, dtype=torch.bfloat16),
    )
    clean = product(x)
    x[0, 5], x[2, 7], x[3] = NAN, INF, 0
    y = product(x)
    assert y[[0, 2]].isnan().all()
    assert torch.equal(y[1], clean[1])
    assert y[3].count_nonzero() == 0


@pytest.mark.usefixtures("multiplies_fp8")
def test_a_weight_that_is_no_number_stays_in_its_output() -> None:
    weight = normal(32, 64, seed=3, dtype=torch.bfloat16)
    weight[7, 9] = NAN
    y = linear.pack(weight, "fp8-dynamic")(normal(4, 64, seed=4, dtype=torch.bfloat16))
    assert y[:, 7].isnan().all()
    assert y[:, [*range(7), *range(8, 32)]].isfinite().all()


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (0, 16)])
def test_sizes_that_the_product_does_not_take(shape: tuple[int, int]) -> None:
    product = linear.pack(torch.ones(shape, dtype=torch.bfloat16), "fp8-dynamic")
    assert not isinstance(product, torch_ops.ScaledWeight)


def test_bytes_without_values() -> None:
    weight = normal(32, 64, seed=3, dtype=torch.bfloat16)
    sizes = [linear.pack(weight.to(device), "fp8-dynamic").nbytes for device in ("cpu", "meta")]
    assert sizes == [32 * 64 + 4 * 32] * 2


def test_experts_and_heads_keep_their_inputs() -> None:
    experts = normal(2, 32, 64, seed=5)
    assert moe.pack(experts, "fp8-dynamic").nbytes == moe.pack(experts, "fp8").nbytes
    assert head_form("fp8-dynamic") == "fp8"


def test_where_it_runs() -> None:
    assert not linear.runs_scaled(torch.device("cpu"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 33])
def test_on_a_gpu(rows: int) -> None:
    device = torch.device("cuda")
    if not linear.runs_scaled(device, torch.bfloat16):
        pytest.skip("needs a GPU of compute capability 8.9 or higher")
    weight, x = normal(512, 1024, seed=1, dtype=torch.bfloat16), normal(rows, 1024, seed=2, dtype=torch.bfloat16)
    weight, x = weight.to(device), x.to(device)
    product = linear.pack(weight, "fp8-dynamic")
    assert isinstance(product, torch_ops.ScaledWeight)
    y = product(x)
    # rounded on the device, which may break ties its own way
    of_weight = round_matrix(weight, "fp8").dequantize(torch.float32)
    codes, scale = product.round_rows(x)
    rounded = codes.float() * scale
    torch.testing.assert_close(rounded, rounded_rows(x), rtol=2**-3, atol=float(x.abs().max()) * 2**-16)
    size = float((x.float().abs() @ of_weight.abs().T).max())
    # tensor cores keep some 14 bits of partial sums of FP8 products (arXiv 2412.19437, section 3.3.2)
    want = rounded.double() @ of_weight.double().T
    torch.testing.assert_close(y.double(), want, rtol=2**-7, atol=size * 2**-11)
