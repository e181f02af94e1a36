"""Rounding of weights and inputs for the int8 form, what the reference makes of it, and PyTorch's products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specmamba.kernels import linear
from specmamba.kernels.linear import native_ops, reference, torch_ops

DTYPES = [torch.bfloat16, torch.float32]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int8_product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The exact product [M, N] with the int8 weight, and the sums of |x w| that it has."""
    q, scale = reference.quantize(weight)
    dequantized = q.double() * scale.double()[:, None]
    return x.double() @ dequantized.T, x.double().abs() @ dequantized.abs().T


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (33, 70)])
def test_weights_are_rounded_as_specified(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_ops, "_ROWS_AT_ONCE", 4)
    weight = normal(*shape, seed=1, dtype=dtype)
    q, scale = torch_ops.quantize(weight)
    want_q, want_scale = reference.quantize(weight)
    assert (q.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert torch.equal(q, want_q)
    assert torch.equal(scale, want_scale)
    assert ((q * scale[:, None] - weight.float()).abs() <= scale[:, None] * 0.5001).all()
    assert torch.equal(q.abs().amax(-1), torch.full((shape[0],), 127, dtype=torch.int8))


def test_weights_without_a_ratio_become_zero() -> None:
    weight = torch.ones(5, 4)
    weight[1] = 0
    weight[2, 1], weight[3, 1] = float("nan"), float("-inf")
    weight[4] = 2.0**-149  # the scale is 0
    for quantize in (torch_ops.quantize, reference.quantize):
        q, scale = quantize(weight)
        assert q.tolist() == [[127] * 4, [0] * 4, [0] * 4, [0] * 4, [0] * 4]
        assert scale[1] == 0
        assert scale[2].isnan()
        assert scale[3].isinf()


def test_rows_of_bf16_keep_their_bits() -> None:
    """Whatever is not smaller than 1/128 of the largest of its row is exact; the rest is off by half a step at most."""
    x = normal(400, seed=2)
    q, scale = reference.quantize_row(x)
    kept = x.abs() >= x.abs().max() / 128
    assert 300 < kept.sum() < 400
    assert torch.equal((q * scale)[kept], x.float()[kept])
    assert ((q * scale - x.float()).abs() <= scale / 2).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (33, 7), (9, 1025)])
def test_the_reference_is_near_the_product(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Within one rounding of the result, half a step of each input, and the error of a float32 sum."""
    weight, x = normal(*shape, seed=3, dtype=dtype), normal(3, shape[1], seed=4, dtype=dtype)
    y = reference.linear_int8(x, *reference.quantize(weight))
    want, size = int8_product(x, weight)
    half_step = x.double().abs().amax(-1, keepdim=True) * 2**-15
    bound = want.abs() * 2**-8 * (dtype is torch.bfloat16) + half_step * int8_product(torch.ones_like(x), weight)[1]
    assert ((y.double() - want).abs() <= bound + size * 2**-20).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (1, 32), (33, 64), (100, 65)])
def test_pytorch_multiplies_too(shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_ops, "code", lambda: None)
    weight, x = normal(*shape, seed=20, dtype=dtype), normal(2, 3, shape[1], seed=21, dtype=dtype)
    product = linear.pack(weight, "int8")
    assert isinstance(product, torch_ops.Int8Weight)
    want, size = int8_product(x.view(6, -1), weight)
    # two roundings of bf16; float16 rounds the widened weight and the result
    of_result, of_weight = {torch.bfloat16: (2**-7, 0), torch.float16: (2**-11, 2**-11)}.get(dtype, (0, 0))
    y = product(x)
    assert y.dtype == dtype
    assert ((y.double().view(6, -1) - want).abs() <= of_result * want.abs() + (of_weight + 2**-20) * size).all()
    strided = torch.cat([x, x], -1)[..., : shape[1]]
    torch.testing.assert_close(product(strided), y)
    assert product(x[:0]).shape == (0, 3, shape[0])
    assert product(x[0, 0]).shape == (shape[0],)


def test_sums_of_float16_do_not_overflow() -> None:
    weight, x = torch.full((3, 64), 0.01).half(), torch.full((1, 64), 100.0).half()  # sum of x q: 812,800
    torch.testing.assert_close(torch_ops.Int8Weight(weight)(x), torch.full((1, 3), 64.0).half(), rtol=2**-8, atol=0)
