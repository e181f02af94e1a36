"""The int8 form in Triton: by a byte per weight, rounded once; many rows of float32 as PyTorch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import linear
from specmamba.kernels.linear import reference, torch_ops
from tests.kernels.linear.same_rows import assert_same_rows

pytestmark = pytest.mark.usefixtures("poisoned")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2**-20, torch.bfloat16: 2**-7, torch.float16: 2**-11}  # the interpreter truncates to bf16


@pytest.fixture
def ops(gpu_device: str) -> Any:
    from specmamba.kernels.linear import triton_ops

    return triton_ops


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Within one rounding, and the error of a float32 sum, of x times the quantised weight."""
    q, scale = torch_ops.quantize(weight)
    widened = q.double() * scale.double()[:, None]
    want, size = x.double() @ widened.T, x.double().abs() @ widened.abs().T
    assert y.dtype == x.dtype
    assert ((y.double() - want).abs() <= want.abs() * ROUNDING[x.dtype] + size * 2**-20 + 2**-24).all()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 70), (20, 128), (5, 300)])
def test_any_size(n: int, k: int, dtype: torch.dtype, ops: Any, gpu_device: str) -> None:
    """One row, one more than a tile is high, and more than a small tile's: in float32 as many as there may be."""
    weight = normal(n, k, seed=1, dtype=dtype)
    product = ops.TritonInt8Weight(weight.to(gpu_device))
    for rows in (1, 17, ops.MAX_ROWS_FP32 if dtype is torch.float32 else ops.MANY_ROWS + 44):
        x = normal(rows, k, seed=rows, dtype=dtype)
        assert_rounded(product(x.to(gpu_device)).cpu(), x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_outputs", [12288, 151936])
def test_every_tile(
    num_outputs: int, dtype: torch.dtype, ops: Any, gpu_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of wide weights too, on few outputs."""
    of_wide = ops.int8_tile
    monkeypatch.setattr(ops, "int8_tile", lambda dtype, rows, _: of_wide(dtype, rows, num_outputs))
    weight = normal(35, 130, seed=2, dtype=dtype)
    product = ops.TritonInt8Weight(weight.to(gpu_device))
    for rows in (2, 33):
        x = normal(rows, 130, seed=rows, dtype=dtype)
        assert_rounded(product(x.to(gpu_device)).cpu(), x, weight)


def test_it_is_the_reference(ops: Any, gpu_device: str) -> None:
    """Inputs that the reference's 16 bits hold exactly."""
    weight = normal(9, 40, seed=3)
    x = torch.randint(-100, 100, (3, 40), generator=torch.Generator().manual_seed(4)).float()
    want = reference.linear_int8(x, *reference.quantize(weight))
    torch.testing.assert_close(ops.TritonInt8Weight(weight.to(gpu_device))(x.to(gpu_device)).cpu(), want)


def test_layouts_and_empty_batches(ops: Any, gpu_device: str) -> None:
    weight, x = normal(40, 24, seed=5).to(gpu_device), normal(4, 6, 24, seed=6).to(gpu_device)
    product = ops.TritonInt8Weight(weight)
    weight.fill_(float("nan"))  # it is not kept
    want = product(x)
    assert want.isfinite().all()
    assert_same_rows(product(x.transpose(0, 1)), want.transpose(0, 1))
    assert_same_rows(product(torch.cat([x, x], -1)[..., :24]), want)
    assert_same_rows(product(x[0].T.contiguous().T), want[0])
    assert_same_rows(product(x[0, 0]), want[0, 0])
    assert product(x[:0]).shape == (0, 6, 40)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype, ops: Any, gpu_device: str) -> None:
    product, x = ops.TritonInt8Weight(normal(40, 24, seed=7).to(gpu_device)), normal(5, 24, seed=8, dtype=dtype)
    clean = product(x.to(gpu_device))
    x[2, 23] = float("nan")
    y = product(x.to(gpu_device))
    assert y[2].isnan().all()
    assert_same_rows(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's, for 0 times infinity
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_stays_in_its_output(value: float, ops: Any, gpu_device: str) -> None:
    weight = normal(20, 24, seed=9)
    weight[7, 3] = value
    y = ops.TritonInt8Weight(weight.to(gpu_device))(normal(3, 24, seed=10).to(gpu_device))
    assert y[:, 7].isnan().all()
    assert y[:, [n for n in range(20) if n != 7]].isfinite().all()


def test_sums_of_float16_do_not_overflow(ops: Any, gpu_device: str) -> None:
    weight, x = torch.full((3, 64), 0.01).half(), torch.full((1, 64), 100.0).half()  # sum of x q: 812,800
    y = ops.TritonInt8Weight(weight.to(gpu_device))(x.to(gpu_device)).cpu()
    torch.testing.assert_close(y, torch.full((1, 3), 64.0).half(), rtol=2**-8, atol=0)


def test_many_rows_of_float32_and_other_types_are_pytorchs(
    ops: Any, gpu_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = normal(20, 24, seed=11).to(gpu_device)
    product, of_torch = ops.TritonInt8Weight(weight), torch_ops.Int8Weight(weight)
    assert product.nbytes == 20 * 24 + 4 * 20
    monkeypatch.setattr(ops, "multiply", None)
    torch.use_deterministic_algorithms(False)  # cuBLAS would ask for a setting
    for x in (normal(ops.MAX_ROWS_FP32 + 1, 24, seed=12), normal(3, 24, seed=13).double()):
        assert_same_rows(product(x.to(gpu_device)), of_torch(x.to(gpu_device)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_row_of_16_bits_widens_the_weight(
    dtype: torch.dtype, ops: Any, gpu_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's rows have large tiles; the outputs of the weight are one more than such a tile has."""
    weight = normal(129, 40, seed=14, dtype=dtype)
    product = ops.TritonInt8Weight(weight.to(gpu_device))
    monkeypatch.setattr(torch_ops.Int8Weight, "__call__", None)
    for tile in [ops.int8_tile(dtype, 1000, num_outputs) for num_outputs in (1024, 12288)]:
        assert tile.rows > ops.MAX_TILE_ROWS
        monkeypatch.setattr(ops, "int8_tile", lambda *_, tile=tile: tile)
        x = normal(tile.rows + 1, 40, seed=15, dtype=dtype)
        assert_rounded(product(x.to(gpu_device)).cpu(), x, weight)


def test_inputs_that_do_not_fit_are_refused(ops: Any, gpu_device: str) -> None:
    product = ops.TritonInt8Weight(normal(20, 24, seed=14).to(gpu_device))
    for x in (torch.ones(2, 23), torch.tensor(1.0), torch.ones(2, 24, device="meta")):
        with pytest.raises(ValueError, match=r"an int8 weight \[20, 24\] on .* cannot multiply"):
            product(x if x.is_meta else x.to(gpu_device))


@pytest.mark.usefixtures("launchable")
def test_pack_chooses(ops: Any, gpu_device: str) -> None:
    weight = normal(20, 24, seed=15).to(gpu_device)
    assert isinstance(linear.pack(weight, "int8"), ops.TritonInt8Weight)
    if weight.is_cuda:
        assert isinstance(linear.pack(weight), torch_ops.PlainWeight)
    assert isinstance(linear.pack(weight[:0], "int8"), torch_ops.PlainWeight)


@pytest.mark.gpu
def test_it_is_captured(ops: Any) -> None:
    product, x = ops.TritonInt8Weight(normal(40, 24, seed=16).cuda()), normal(3, 24, seed=17).cuda()
    torch.use_deterministic_algorithms(False)  # as where graphs are captured for use
    product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product(x)
    x.copy_(normal(3, 24, seed=18))
    graph.replay()
    assert_same_rows(y, product(x))
