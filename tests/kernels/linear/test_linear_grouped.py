"""Products with codes of 4 and 8 bits in groups: the reference, and what rounded inputs explain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from specmamba.kernels import linear, moe
from specmamba.kernels.linear import QuantizedMatrix, native_ops, reference
from specmamba.kernels.linear.grouped import GroupedMatrix, is_kept, packed_bytes, regroup, to_bytes
from specmamba.kernels.linear.rounding import CodeForm, round_matrix
from tests.codes import KINDS, matrix, normal
from tests.kernels.rounding import FLOAT32_EPS, tolerance
from tests.pairwise import pairwise

DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture
def native(needs_native: None) -> None:
    """For tests of native code."""


def pack_native(made: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> native_ops.NativeGroupedWeight:
    product = linear.pack_codes(made, dtype)
    assert isinstance(product, native_ops.NativeGroupedWeight)
    return product


@pairwise(
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.parametrize("group", [16, 32, 64, 128]),
    pytest.mark.parametrize("shape", [(1, 1), (33, 7), (40, 96), (65, 300), (7, 513)]),
)
def test_native_is_the_reference(
    shape: tuple[int, int], group: int, kind: str, dtype: torch.dtype, native: None
) -> None:
    """But for the last bit: totals are added with one rounding instead of two."""
    made, x = matrix(kind, *shape, group=group), normal(2, 3, shape[1], seed=2, dtype=dtype)
    y, want = pack_native(made, dtype)(x), reference.linear_grouped(x, regroup(made))
    assert y.dtype == dtype
    magnitude = float((x.float().abs() @ made.dequantize(torch.float32).abs().T).max())
    torch.testing.assert_close(y, want, **tolerance(dtype, terms=20, magnitude=magnitude))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int4 with minima", "int6", "int8", "e2m1"])
def test_every_number_of_rows(kind: str, dtype: torch.dtype, native: None, set_threads: Callable[[int], None]) -> None:
    """Every height of a pass, splits into passes and numbers of threads: no row knows of the others."""
    product, x = pack_native(matrix(kind, 300, 200), dtype), normal(50, 200, seed=3, dtype=dtype)
    alone = torch.cat([product(row) for row in x.split(1)])
    for threads in (1, 2, 3):
        set_threads(threads)
        for rows in (*range(1, 27), 50):
            assert torch.equal(product(x[:rows]), alone[:rows])
        assert torch.equal(product(x.flip(0)), alone.flip(0))


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_inputs_explain_the_difference(kind: str, native: None) -> None:
    """An input is off by half of 1/127 of the largest of its group; weights are those of the product."""
    made, x = matrix(kind, 48, 320), normal(6, 320, seed=4)
    grouped = regroup(made)
    weight = grouped.dequantize().double()
    y, exact = pack_native(made)(x).double(), x.double() @ weight.T
    padded = torch.nn.functional.pad(x.abs(), (0, -320 % grouped.group)).unflatten(1, (-1, grouped.group))
    largest = padded.amax(2).repeat_interleave(grouped.group, 1)[:, :320]
    bound = (largest.double() / 254 + FLOAT32_EPS * x.abs()) @ weight.abs().T + 40 * FLOAT32_EPS * exact.abs().max()
    assert ((y - exact).abs() <= bound * (1 + 1e-5)).all()
    assert not torch.equal(y, exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [16, 48, 100, 256, 320])
def test_regrouped_weights(kind: str, group: int) -> None:
    """Scales are rounded to 11 bits; FP8 and groups of other sizes to bytes, half of 1/127 of the largest of 128."""
    made = matrix(kind, 20, 320, group=group)
    grouped, want = regroup(made), made.dequantize(torch.float32)
    off = (grouped.dequantize() - want).abs()
    if is_kept(made):
        scale, minimum = (
            0 if x is None else x.abs().repeat_interleave(group, 1)[:, :320] for x in (made.scale, made.minimum)
        )
        values = (want if made.minimum is None else want - made.minimum.repeat_interleave(group, 1)[:, :320]).abs()
        assert (off <= 2**-11 * (values + 16 * scale + minimum) + 1e-6).all()
    else:
        largest = torch.nn.functional.pad(want, (0, 64)).abs().unflatten(1, (-1, 128)).amax(2)
        assert (off <= largest.repeat_interleave(128, 1)[:, :320] * (1 / 254 + 2**-11) + 1e-6).all()
    assert is_kept(made) == (kind != "fp8" and group in (16, 48, 256, 320))
    assert grouped.nbytes == packed_bytes(made)
    assert grouped.group in (16, 32, 64, 128)


@pytest.mark.parametrize("kind", ["fp8", "iq4", "int8", "bytes with minima"])
@pytest.mark.parametrize(("shape", "group"), [((1, 1), 1), ((33, 300), 100), ((2, 5, 257), 32), ((3000, 130), 130)])
def test_native_rounding_to_bytes(
    shape: tuple[int, ...], group: int, kind: str, native: None, set_threads: Callable[[int], None]
) -> None:
    """PyTorch's, bit for bit: zeros, infinities, NaN and subnormal numbers too."""
    made = matrix(kind, *shape, group=group)
    if len(made.scale) > 20:
        made.scale[1:9, 0] = torch.tensor([0, float("inf"), float("nan"), 1e-40, 1e-45, 3e38, -1.0, 2e-44])
        made.codes[1:4, :40] = 0
    for threads in (1, 2):
        set_threads(threads)
        found, want = native_ops.to_bytes(made), to_bytes(made)
        assert torch.equal(found.codes, want.codes)
        torch.testing.assert_close(found.scale, want.scale, rtol=0, atol=0, equal_nan=True)
        assert found.group == want.group


def test_exact_scales_stay_exact() -> None:
    """bf16 and float16 scales, as most formats store them: the weights are those of the checkpoint."""
    made = matrix("int4", 20, 256)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = replace(made, scale=made.scale.to(dtype).float())
        assert torch.equal(regroup(rounded).dequantize(), rounded.dequantize(torch.float32))


def test_one_zero_point_needs_no_minima() -> None:
    """As of GPTQ without ``sym``: all zero points are the same number."""
    made = matrix("int4 with minima", 20, 256)
    of_one = replace(made, minimum=made.scale * -7)
    grouped = regroup(of_one)
    assert (grouped.offset, grouped.minimum) == (7, None)
    assert grouped.nbytes < packed_bytes(of_one)
    torch.testing.assert_close(grouped.dequantize(), of_one.dequantize(torch.float32), rtol=2**-11, atol=1e-7)
    assert regroup(made).minimum is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_in_its_row(value: float, dtype: torch.dtype, native: None) -> None:
    product, x = pack_native(matrix("int4", 40, 70), dtype), normal(3, 70, seed=5, dtype=dtype)
    clean = product(x)
    x[1, 69] = value
    y = product(x)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    assert reference.linear_grouped(x, regroup(matrix("int4", 40, 70)))[1].isnan().all()


def test_zeros_and_tiny_inputs(native: None) -> None:
    made = matrix("int8", 40, 64)
    made.scale[21] = 0
    x = normal(3, 64, seed=6)
    x[1], x[2] = 0, x[2] * 2.0**-120
    y = pack_native(made)(x)
    assert y[1:].count_nonzero() == 0
    assert y[0, 21] == 0
    assert y[0].count_nonzero() == 39


def test_the_largest_sums_do_not_overflow(native: None) -> None:
    for kind in KINDS:
        made = matrix(kind, 33, 1024, group=128)
        values = made.codes.float() if made.table is None else made.table[made.codes.int()]
        made.codes[:] = made.codes.flatten()[values.abs().argmax()]
        for sign in (1, -1):
            x = torch.full((5, 1024), float(sign))
            torch.testing.assert_close(
                pack_native(made)(x), reference.linear_grouped(x, regroup(made)), rtol=1e-5, atol=1e-3
            )


@pairwise(
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.parametrize("group", [16, 32, 64, 128]),
    pytest.mark.parametrize("shape", [(1, 1), (33, 7), (40, 96), (67, 300), (7, 513)]),
)
def test_rows_are_dequantized(
    shape: tuple[int, int], group: int, kind: str, dtype: torch.dtype, native: None, set_threads: Callable[[int], None]
) -> None:
    """As an embedding takes them, bit for bit, in any order and by any number of threads; no row outside is read."""
    made = matrix(kind, *shape, group=group)
    product, want = pack_native(made, dtype), regroup(made).dequantize().to(dtype)
    for threads in (1, 2):
        set_threads(threads)
        index = torch.arange(shape[0]).flip(0).repeat(500)[:, None]
        assert torch.equal(product.rows(index), want[index])
        assert torch.equal(product.rows(index.expand(-1, 2)[:, 1]), want[index[:, 0]])  # strided
    assert product.rows(torch.tensor([-1, shape[0], 1 << 40])).isnan().all()
    assert product.rows(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, shape[1])


def test_layouts_and_empty_batches(native: None) -> None:
    made, x = matrix("int4", 40, 64), normal(4, 6, 64, seed=7)
    product = pack_native(made)
    made.codes.fill_(0)
    want = product(x)
    assert want.count_nonzero() > 900
    assert torch.equal(product(x.transpose(0, 1)), want.transpose(0, 1))
    assert torch.equal(product(torch.cat([x, x], -1)[..., :64]), want)
    assert product(x[:0]).shape == (0, 6, 40)
    with pytest.raises(ValueError, match=r"a float32 weight \[40, 64\] on the CPU cannot multiply"):
        product(x.bfloat16())
    with pytest.raises(ValueError, match=r"cannot multiply torch.float32 \[2, 63\]"):
        product(x[0, :2, :63])


@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
def test_rounding(form: CodeForm) -> None:
    """Within half of a step; int4's scales have at most the error of the largest weight's."""
    weight = normal(30, 96, seed=8)
    made = round_matrix(weight, form, 32)
    off = (made.dequantize(torch.float32) - weight).abs()
    if form == "int4":
        largest = weight.unflatten(1, (-1, 32)).abs().amax(2, keepdim=True) / 7
        plain = (weight.unflatten(1, (-1, 32)) / largest).round().clamp(-8, 7) * largest
        assert off.square().sum() < (plain.flatten(1) - weight).square().sum() * 0.95
    step = {"int4": 1 / 7, "int8": 1 / 254, "fp8": 1 / 16}[form]
    assert (off <= weight.abs().amax(1, keepdim=True) * step).all()
    odd = round_matrix(weight[:, :50], form, 32)
    assert odd.codes.shape == (30, 50)
    assert round_matrix(torch.zeros(3, 64), form, 32).dequantize(torch.float32).count_nonzero() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
def test_a_weight_that_is_no_number_is_seen(form: CodeForm, value: float) -> None:
    """Its group, or its output, is NaN; the others are what they were."""
    weight = normal(6, 64, seed=8)
    clean = round_matrix(weight, form, 32).dequantize(torch.float32)
    weight[2, 40] = value
    found = round_matrix(weight, form, 32).dequantize(torch.float32)
    assert not bool(found[2, 40].isfinite())
    others = [n for n in range(6) if n != 2]
    assert torch.equal(found[others], clean[others])


def test_bytes_of_groups() -> None:
    made = to_bytes(matrix("fp8", 20, 200, group=200))
    assert made.codes.dtype is torch.int8
    assert made.scale.shape == (20, 2)


def test_matrices_side_by_side(native: None) -> None:
    """Neighbours that are alike are one product; the outputs are in order."""
    parts: list[linear.Matrix] = [
        matrix("int4", 20, 64, seed=1),
        matrix("int4", 12, 64, seed=2),
        normal(5, 64, seed=3),
        normal(3, 64, seed=4),
    ]
    parts += [matrix("int8", 6, 64, seed=5)]
    x = normal(4, 64, seed=9)
    product = linear.packed(parts)
    each = [linear.packed([part])(x) for part in parts]
    torch.testing.assert_close(product(x), torch.cat(each, -1))
    assert product.nbytes == sum(linear.packed([part]).nbytes for part in parts)
    assert not isinstance(linear.packed(parts[:2]), type(product))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int4 with minima", "int6", "e2m1", "fp8"])
def test_experts(kind: str, dtype: torch.dtype, native: None, set_threads: Callable[[int], None]) -> None:
    """Of each expert the product with its own matrix, bit for bit; experts without tokens are left out."""
    made, x = matrix(kind, 5, 40, 96), normal(23, 96, seed=10, dtype=dtype)
    sizes = [4, 0, 15, 1, 3]
    groups = moe.Groups(torch.arange(23), torch.tensor(sizes).cumsum(0).int())
    product = moe.packed(made, dtype=dtype)
    own = [made.flat().with_rows(torch.arange(e * 40, e * 40 + 40)) for e in range(5)]
    alone = [linear.pack_codes(each, dtype) for each in own]
    want = torch.cat([alone[e](rows) for e, rows in enumerate(x.split(sizes))])
    for threads in (1, 2):
        set_threads(threads)
        assert torch.equal(product(x, groups), want)
    with pytest.raises(ValueError, match="do not part the rows"):
        product(x, moe.Groups(groups.places, groups.ends - 1))


def test_without_native_code_weights_are_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = matrix("int4", 20, 64), normal(3, 64, seed=11)
    monkeypatch.setattr(native_ops, "code", lambda: None)
    torch.testing.assert_close(linear.pack_codes(made, torch.float32)(x), x @ made.dequantize(torch.float32).T)
    assert not linear.runs_codes(torch.device("cpu"), torch.float32)


def test_without_values_only_sizes_are_known() -> None:
    made = matrix("int4", 20, 64)
    shape = replace(made, codes=made.codes.to("meta"), scale=made.scale.to("meta"))
    product = linear.packed_codes(shape, torch.float32)
    assert product.nbytes == packed_bytes(made) == regroup(made).nbytes
    with pytest.raises(ValueError, match="without values"):
        product(torch.zeros(1, 64))
    with pytest.raises(ValueError, match="without values"):
        product.rows(torch.zeros(1, dtype=torch.int64))


def test_grouped_matrix_says_what_it_means() -> None:
    """``dequantize`` is the formula of the class."""
    made = regroup(matrix("e2m1", 4, 32, group=16))
    assert isinstance(made, GroupedMatrix)
    assert made.table is not None
    w = (made.table[int(made.codes[2, 20])].float() - made.offset) * made.scale[2, 1].float() * made.factor[2]
    assert made.dequantize()[2, 20] == w
