"""The packed product against its reference, bit for bit between batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specmamba.kernels import linear
from specmamba.kernels.linear import native_ops, reference, torch_ops

SHAPES = [(1, 1), (5, 3), (32, 2), (33, 7), (64, 32), (100, 65), (200, 130)]  # N, K: blocks of 16 and 32, and odd


@pytest.fixture
def native(needs_native: None) -> type[native_ops.NativeWeight]:
    return native_ops.NativeWeight


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, set_threads: Callable[[int], None]) -> int:
    set_threads(request.param)
    return int(request.param)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pack_native(weight: Tensor) -> native_ops.NativeWeight:
    code = native_ops.code()
    assert code is not None
    return native_ops.NativeWeight(weight, code)


def assert_rounded(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Within one rounding to the dtype, and the error of a float32 sum, of the exact product."""
    want = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().T.abs()
    assert y.dtype == x.dtype
    assert y.shape == want.shape
    rounding = 2**-8 if y.dtype is torch.bfloat16 else 2**-23
    assert ((y.double() - want).abs() <= want.abs() * rounding + size * 2**-20).all()


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (17, 6)])
def test_reference_is_the_product(shape: tuple[int, int]) -> None:
    weight, x = normal(*shape, seed=1), normal(2, 3, shape[1], seed=2)
    assert_rounded(reference.linear(x, weight), x, weight)
    torch.testing.assert_close(reference.linear(x.double(), weight.double()), x.double() @ weight.double().T)


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_ops_match_reference(shape: tuple[int, int]) -> None:
    weight, x = normal(*shape, seed=1), normal(2, 3, shape[1], seed=2)
    for product in (torch_ops.pack(weight), torch_ops.PlainWeight(weight)):
        assert_rounded(product(x), x, weight)


@pytest.mark.parametrize("shape", SHAPES)
def test_native_matches_reference(shape: tuple[int, int], native: type, dtype: torch.dtype) -> None:
    weight, x = normal(*shape, seed=1, dtype=dtype), normal(4, shape[1], seed=2, dtype=dtype)
    y = pack_native(weight)(x)
    torch.testing.assert_close(y, reference.linear(x[:, :], weight), rtol=2**-7, atol=1e-5)
    assert_rounded(y, x, weight)


@pytest.mark.parametrize(("n", "k"), [(33, 7), (160, 301), (1100, 264)])
def test_every_number_of_rows(n: int, k: int, native: type, dtype: torch.dtype, threads: int) -> None:
    """1 to 70 rows: every height of a pass and every split into passes; and no row knows of the others."""
    weight, x = normal(n, k, seed=3, dtype=dtype), normal(70, k, seed=4, dtype=dtype)
    product = pack_native(weight)
    alone = torch.cat([product(row) for row in x.split(1)])
    assert_rounded(alone, x, weight)
    for rows in range(1, 71):
        assert torch.equal(product(x[:rows]), alone[:rows])
    assert torch.equal(product(x.flip(0)), alone.flip(0))


def test_threads_change_nothing(native: type, dtype: torch.dtype, set_threads: Callable[[int], None]) -> None:
    product, x = pack_native(normal(1100, 264, seed=5, dtype=dtype)), normal(9, 264, seed=6, dtype=dtype)
    results = []
    for count in (1, 2, 3):
        set_threads(count)
        results.append(product(x))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_nothing_is_written_beside_the_result(native: type, dtype: torch.dtype) -> None:
    """Tails of rows and panels are stored by mask; the plain weight is free to change after packing."""
    weight, x = normal(37, 11, seed=7, dtype=dtype), normal(5, 11, seed=8, dtype=dtype)
    kept, inputs = weight.clone(), x.clone()
    product = pack_native(weight)
    weight.fill_(float("nan"))
    assert_rounded(product(x), x, kept)
    assert torch.equal(x, inputs)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("k", [8, 9])
def test_what_is_no_number_stays_in_its_row(value: float, k: int, native: type, dtype: torch.dtype) -> None:
    weight, x = normal(40, k, seed=9, dtype=dtype).abs() + 0.5, normal(3, k, seed=10, dtype=dtype)
    clean = pack_native(weight)(x)
    x[1, k - 1] = value
    y = pack_native(weight)(x)
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    assert torch.equal(y[1], torch.full_like(y[1], value)) or (value != value and y[1].isnan().all())


def test_a_weight_that_is_no_number_stays_in_its_output(native: type, dtype: torch.dtype) -> None:
    weight, x = normal(40, 8, seed=11, dtype=dtype), normal(3, 8, seed=12, dtype=dtype)
    weight[21, 3] = float("nan")
    y = pack_native(weight)(x)
    assert y[:, 21].isnan().all()
    assert y[:, [i for i in range(40) if i != 21]].isfinite().all()


def test_layouts_and_empty_batches(native: type, dtype: torch.dtype) -> None:
    weight, x = normal(40, 24, seed=13, dtype=dtype), normal(4, 6, 24, seed=14, dtype=dtype)
    product = pack_native(weight)
    want = product(x)
    assert want.shape == (4, 6, 40)
    assert torch.equal(product(x.transpose(0, 1)), want.transpose(0, 1))
    assert torch.equal(product(torch.cat([x, x], -1)[..., :24]), want)
    assert torch.equal(product(x[0, 0]), want[0, 0])
    assert product(x[:0]).shape == (0, 6, 40)
    assert torch.equal(pack_native(weight.T.contiguous().T)(x), want)


@pytest.mark.parametrize("x", [torch.zeros(2, 24), torch.zeros(2, 23).bfloat16(), torch.tensor(1.0).bfloat16()])
def test_inputs_that_do_not_fit_are_refused(x: Tensor, native: type) -> None:
    with pytest.raises(ValueError, match=r"bfloat16 weight \[40, 24\] .* cannot multiply"):
        pack_native(normal(40, 24, seed=15))(x)


def test_pack_chooses_by_dtype(native: type) -> None:
    assert isinstance(linear.pack(normal(4, 4, seed=16)), native)
    assert isinstance(linear.pack(normal(4, 4, seed=16).float()), native)
    assert isinstance(linear.pack(normal(4, 4, seed=16).double()), torch_ops.PlainWeight)
    assert isinstance(linear.pack(normal(4, 4, seed=16).half()), torch_ops.PlainWeight)


def test_without_native_code_pytorch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_ops, "code", lambda: None)
    weight, x = normal(40, 24, seed=17), normal(3, 24, seed=18)
    product = linear.pack(weight)
    assert not isinstance(product, native_ops.NativeWeight)
    assert_rounded(product(x), x, weight)
