"""The int8 form of a packed weight in native code: the reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specmamba.kernels import linear
from specmamba.kernels.linear import native_ops, reference, torch_ops
from tests.pairwise import pairwise

SHAPES = [(1, 1), (5, 3), (32, 2), (33, 7), (64, 32), (100, 65), (40, 511), (7, 512), (9, 1025)]  # N, K
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture
def native(needs_native: None) -> None:
    """For tests of native code."""


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, set_threads: Callable[[int], None]) -> int:
    set_threads(request.param)
    return int(request.param)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pack_native(weight: Tensor) -> native_ops.NativeInt8Weight:
    product = linear.pack(weight, "int8")
    assert isinstance(product, native_ops.NativeInt8Weight)
    return product


def specified(x: Tensor, weight: Tensor) -> Tensor:
    return reference.linear_int8(x, *reference.quantize(weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_is_the_reference(shape: tuple[int, int], dtype: torch.dtype, native: None) -> None:
    weight, x = normal(*shape, seed=3, dtype=dtype), normal(2, 2, shape[1], seed=4, dtype=dtype)
    y = pack_native(weight)(x)
    assert y.dtype == dtype
    assert torch.equal(y, specified(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(33, 7), (160, 301), (1100, 130)])
def test_every_number_of_rows(n: int, k: int, dtype: torch.dtype, native: None, threads: int) -> None:
    """1 to 25 rows: every height of a pass and splits into passes; and no row knows of the others."""
    weight, x = normal(n, k, seed=5, dtype=dtype), normal(25, k, seed=6, dtype=dtype)
    x *= torch.linspace(-3, 3, 25).exp2()[:, None].to(dtype)  # scales of their own
    product = pack_native(weight)
    alone = torch.cat([product(row) for row in x.split(1)])
    assert torch.equal(alone[:2, -33:], specified(x[:2], weight[-33:]))
    for rows in range(1, 26):
        assert torch.equal(product(x[:rows]), alone[:rows])
    assert torch.equal(product(x.flip(0)), alone.flip(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(33, 7), (160, 514), (300, 1101)])
def test_many_rows_are_those_of_few(n: int, k: int, dtype: torch.dtype, native: None, threads: int) -> None:
    """With many rows, weights are widened once, block by block of inputs, for several panels at a time."""
    weight, x = normal(n, k, seed=15, dtype=dtype), normal(130, k, seed=16, dtype=dtype)
    product = pack_native(weight)
    alone = torch.cat([product(row) for row in x.split(1)])
    for rows in (47, 48, 49, 61, 130):
        assert torch.equal(product(x[:rows]), alone[:rows])


def test_threads_change_nothing(native: None, set_threads: Callable[[int], None]) -> None:
    """Two parts of inputs to round, and many of weight."""
    weight, x = normal(300, 5000, seed=7), normal(9, 5000, seed=8)
    results = []
    for count in (1, 2, 3):
        set_threads(count)
        results.append(pack_native(weight)(x))
    assert torch.equal(results[0][:1, :4], specified(x[:1], weight[:4]))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pairwise(
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("sign", [1, -1]),
    pytest.mark.parametrize("k", [512, 514, 2049, 4608]),
)
def test_the_largest_sums_do_not_overflow(k: int, sign: int, dtype: torch.dtype, native: None) -> None:
    """All weights are 127 and all inputs as large as 16 bits hold; an int32 takes 516 such products."""
    largest = torch.tensor(2 - 2**-7 if dtype is torch.bfloat16 else 2 - 2**-23, dtype=dtype)
    weight = torch.ones(40, k, dtype=dtype)
    for rows in (1, 5):
        y = pack_native(weight)(sign * largest.expand(rows, k))
        torch.testing.assert_close(
            y.double(), torch.full((rows, 40), sign * k * largest.item()).double(), rtol=2**-8, atol=0
        )
        assert torch.equal(y, specified(sign * largest.expand(1, k), weight[:1]).expand(rows, 40))


def test_zeros(native: None) -> None:
    """A row of zeros gives zeros and so does an output of zeros; neighbours keep theirs."""
    weight, x = normal(40, 9, seed=9), normal(3, 9, seed=10)
    clean = pack_native(weight)(x)
    weight[21], x[1] = 0, 0
    y = pack_native(weight)(x)
    assert y[1].count_nonzero() == 0
    assert y[:, 21].count_nonzero() == 0
    others = [n for n in range(40) if n != 21]
    assert torch.equal(y[[0, 2]][:, others], clean[[0, 2]][:, others])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_in_its_row(value: float, dtype: torch.dtype, native: None) -> None:
    weight, x = normal(40, 9, seed=11, dtype=dtype), normal(3, 9, seed=12, dtype=dtype)
    clean = pack_native(weight)(x)
    x[1, 8] = value
    y = pack_native(weight)(x)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    assert specified(x, weight)[1].isnan().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_stays_in_its_output(value: float, native: None) -> None:
    weight, x = normal(40, 32, seed=13), normal(3, 32, seed=14)
    weight[21, 3] = value
    others = [n for n in range(40) if n != 21]
    for product in (pack_native(weight), torch_ops.Int8Weight(weight)):
        y = product(x)
        assert y[:, 21].isnan().all()
        assert y[:, others].isfinite().all()


@pytest.mark.parametrize("exponent", [-100, -118, 60, 127])
def test_the_ends_of_the_range(exponent: int, native: None) -> None:
    """Rows next to overflow, and tiny ones: below 2**-112 the step stays 2**-126."""
    x = (normal(2, 33, seed=15).double().clamp(-1.9, 1.9) * 2.0**exponent).float()
    weight = normal(20, 33, seed=16, dtype=torch.float32) / 64
    y = pack_native(weight)(x)
    assert torch.equal(y, specified(x, weight))
    q, scale = reference.quantize(weight)
    want = x.double() @ (q * scale.double()[:, None]).T
    step = 2.0 ** max(exponent - 14, -126)
    assert ((y.double() - want).abs() <= step * 33 / 2 * weight.abs().max() + want.abs() * 2**-20).all()
    assert y.count_nonzero() > 30


def test_layouts_and_empty_batches(native: None) -> None:
    weight, x = normal(40, 24, seed=17), normal(4, 6, 24, seed=18)
    kept = weight.clone()
    product = pack_native(weight)
    weight.fill_(float("nan"))
    want = product(x)
    assert torch.equal(want, specified(x, kept))
    assert torch.equal(product(x.transpose(0, 1)), want.transpose(0, 1))
    assert torch.equal(product(torch.cat([x, x], -1)[..., :24]), want)
    assert torch.equal(product(x[0, 0]), want[0, 0])
    assert product(x[:0]).shape == (0, 6, 40)
    assert torch.equal(pack_native(kept.T.contiguous().T)(x), want)


@pytest.mark.parametrize("x", [torch.zeros(2, 24), torch.zeros(2, 23).bfloat16(), torch.tensor(1.0).bfloat16()])
def test_inputs_that_do_not_fit_are_refused(x: Tensor, native: None) -> None:
    with pytest.raises(ValueError, match=r"a bfloat16 weight \[40, 24\] on the CPU cannot multiply"):
        pack_native(normal(40, 24, seed=19))(x)
    with pytest.raises(ValueError, match=r"a float32 weight \[40, 24\] on the CPU cannot multiply"):
        pack_native(normal(40, 24, seed=19, dtype=torch.float32))(x.bfloat16())
    with pytest.raises(ValueError, match=r"cannot multiply torch.bfloat16 \[2, 24\] on meta"):
        pack_native(normal(40, 24, seed=19))(torch.zeros(2, 24, dtype=torch.bfloat16, device="meta"))


def test_pack_chooses_by_dtype(native: None) -> None:
    assert isinstance(linear.pack(normal(4, 4, seed=22), "int8"), native_ops.NativeInt8Weight)
    assert isinstance(linear.pack(normal(4, 4, seed=22).float(), "int8"), native_ops.NativeInt8Weight)
    assert isinstance(linear.pack(normal(4, 4, seed=22).half(), "int8"), torch_ops.Int8Weight)
    assert isinstance(linear.pack(normal(4, 4, seed=22), "plain"), native_ops.NativeWeight)
    assert linear.pack(torch.zeros(4, 0), "int8")(torch.zeros(2, 0)).shape == (2, 4)


def test_a_form_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="no form 'int4', only plain, int8"):
        linear.pack(torch.ones(2, 2), "int4")
