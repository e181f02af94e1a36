"""Products with codes in Triton: within one rounding of the weights' own, whatever the codes, sizes and rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import gpu, linear, moe
from specmamba.kernels.linear import QuantizedMatrix, native_ops, torch_ops
from specmamba.kernels.linear.grouped import packed_bytes, regroup
from specmamba.kernels.linear.quantized import e4m3_values
from specmamba.kernels.linear.rounding import round_matrix
from tests.codes import KINDS, matrix, normal
from tests.kernels.linear.same_rows import assert_same_rows
from tests.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("poisoned")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2**-20, torch.bfloat16: 2**-7, torch.float16: 2**-11}  # the interpreter truncates to bf16


@pytest.fixture
def ops(gpu_device: str) -> Any:
    from specmamba.kernels.linear import triton_grouped

    return triton_grouped


@pytest.fixture
def expert_ops(gpu_device: str) -> Any:
    from specmamba.kernels.moe import triton_experts

    return triton_experts


def weights_of(made: QuantizedMatrix) -> Tensor:
    """What the product's codes stand for, in float64: scales are those of the product, rounded to 11 bits."""
    return regroup(made, for_gpu=True).dequantize().double()


def assert_rounded(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Within one rounding, and the error of a float32 sum, of x [M, K] times a weight [N, K] or one for each row.

    Where there are minima, a sum is the difference of two larger ones: at most 32 times as large.
    """
    of_rows = weight if weight.dim() == 3 else weight.expand(len(x), *weight.shape)
    want, size = (
        torch.einsum("mk,mnk->mn", a, w) for a, w in ((x.double(), of_rows), (x.abs().double(), of_rows.abs()))
    )
    assert y.dtype == x.dtype
    assert ((y.double() - want).abs() <= want.abs() * ROUNDING[x.dtype] + size * 2**-18 + 1e-7).all()


@pairwise(
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.parametrize("group", [16, 32, 64, 128]),
    pytest.mark.parametrize("shape", [(1, 1), (33, 70), (20, 256), (5, 513)]),
    pytest.mark.parametrize("rows", [1, 17, 64, 130]),
)
def test_any_codes(
    rows: int, shape: tuple[int, int], group: int, kind: str, dtype: torch.dtype, ops: Any, gpu_device: str
) -> None:
    made, x = matrix(kind, *shape, group=group), normal(rows, shape[1], seed=rows, dtype=dtype)
    y = ops.pack_codes(made.to(torch.device(gpu_device)), dtype)(x.to(gpu_device)).cpu()
    assert_rounded(y, x, weights_of(made))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_outputs", [12288, 151936])
def test_every_tile(
    num_outputs: int, dtype: torch.dtype, ops: Any, gpu_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of wide matrices too, on few outputs."""
    of_wide = ops.codes_tile
    monkeypatch.setattr(ops, "codes_tile", lambda dtype, rows, _, kind: of_wide(dtype, rows, num_outputs, kind))
    made = matrix("int4 with minima", 70, 130)
    product = ops.pack_codes(made.to(torch.device(gpu_device)), dtype)
    for rows in (2, 33):
        x = normal(rows, 130, seed=rows, dtype=dtype)
        assert_rounded(product(x.to(gpu_device)).cpu(), x, weights_of(made))


@pairwise(
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.parametrize("group", [16, 32, 64, 128]),
    pytest.mark.parametrize("shape", [(1, 1), (33, 70), (20, 256), (5, 513)]),
)
def test_rows_are_dequantized(
    shape: tuple[int, int], group: int, kind: str, dtype: torch.dtype, ops: Any, gpu_device: str
) -> None:
    """As an embedding takes them; no row outside is read."""
    made = matrix(kind, *shape, group=group)
    product, want = ops.pack_codes(made.to(torch.device(gpu_device)), dtype), regroup(made, for_gpu=True).dequantize()
    index = torch.arange(shape[0]).flip(0).repeat(3).view(3, -1)
    rows = product.rows(index.to(gpu_device)).cpu()
    assert rows.dtype == dtype
    torch.testing.assert_close(rows.float(), want[index], rtol=ROUNDING[dtype], atol=1e-7)
    assert product.rows(torch.tensor([-1, shape[0]], device=gpu_device)).isnan().all()
    assert product.rows(torch.zeros(2, 0, dtype=torch.int64, device=gpu_device)).shape == (2, 0, shape[1])


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_exact(kind: str, ops: Any, gpu_device: str) -> None:
    """Rows that are one input each give the weights: all codes, in the types that inputs have."""
    bits = 8 if kind in ("int8", "bytes with minima", "fp8") else 4
    count = 1 << bits
    made = matrix(kind, count, count)
    codes = torch.arange(count).expand(count, count) + torch.arange(count)[:, None]
    codes = (codes % count).to(torch.uint8)
    if kind == "fp8":
        codes = codes.where((codes & 127) != 127, 0)
    signed = kind in ("int4", "int8")
    made.codes.copy_((codes.int() - count // 2).to(torch.int8) if signed else codes)
    made.scale.fill_(0.25)
    made = made if made.minimum is None else replace(made, minimum=made.minimum.fill_(-0.75).mul_(1.5))
    want = made.dequantize(torch.float32)
    for dtype in DTYPES:
        product = ops.pack_codes(made.to(torch.device(gpu_device)), dtype)
        y = product(torch.eye(count, dtype=dtype, device=gpu_device)).cpu()
        near = 0.0 if dtype is torch.float32 else ROUNDING[dtype]
        torch.testing.assert_close(y.float().T, want, rtol=near, atol=0)


@pytest.mark.parametrize("group", [200, 32])
def test_fp8_keeps_its_codes(group: int, ops: Any, gpu_device: str) -> None:
    """A byte per weight that is never rounded anew, also in the groups of MXFP8."""
    made = matrix("fp8", 20, 200, group=group)
    scale = made.scale.half().float()
    made = replace(made, scale=scale)
    assert torch.equal(weights_of(made).float(), made.dequantize(torch.float32))
    assert not torch.equal(regroup(made).dequantize(), made.dequantize(torch.float32))
    product = ops.pack_codes(made.to(torch.device(gpu_device)), torch.float32)
    assert product.nbytes == packed_bytes(made, for_gpu=True) == 20 * (200 + 2 * (2 if group == 200 else 7) + 4)
    x = normal(3, 200, seed=1)
    assert_rounded(product(x.to(gpu_device)).cpu(), x, made.dequantize(torch.float32).double())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_code_that_is_no_number_stays_in_its_output(ops: Any, gpu_device: str) -> None:
    made = matrix("fp8", 20, 70)
    made.codes[7, 69], made.codes[9, 0] = 127, 255
    y = ops.pack_codes(made.to(torch.device(gpu_device)), torch.float32)(normal(3, 70, seed=2).to(gpu_device)).cpu()
    assert y[:, [7, 9]].isnan().all()
    assert y[:, [n for n in range(20) if n not in (7, 9)]].isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's, for 0 times infinity
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["int4 with minima", "e2m1", "fp8"])
def test_what_is_no_number_stays_in_its_row(kind: str, value: float, ops: Any, gpu_device: str) -> None:
    for dtype in DTYPES:
        product, x = ops.pack_codes(matrix(kind, 40, 70).to(torch.device(gpu_device)), dtype), normal(5, 70, seed=3)
        x = x.to(gpu_device, dtype)
        clean = product(x)
        assert clean.isfinite().all()
        x[2, 69] = value
        y = product(x)
        assert not y[2].isfinite().any()
        assert_same_rows(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_row_does_not_depend_on_others(kind: str, ops: Any, gpu_device: str) -> None:
    """Of the same number of rows, whose blocks are as high."""
    product, x = (
        ops.pack_codes(matrix(kind, 40, 200).to(torch.device(gpu_device)), torch.float32),
        normal(9, 200, seed=4),
    )
    others = normal(9, 200, seed=5)
    others[4] = x[7]
    assert_same_rows(product(x.to(gpu_device))[7], product(others.to(gpu_device))[4])


def test_sums_of_float16_do_not_overflow(ops: Any, gpu_device: str) -> None:
    made = matrix("int8", 3, 128, group=128)
    made.codes.fill_(127)
    made.scale.fill_(1 / 4096)
    y = ops.pack_codes(made.to(torch.device(gpu_device)), torch.float16)(
        torch.full((1, 128), 100.0).half().to(gpu_device)
    )
    torch.testing.assert_close(y.cpu().float(), torch.full((1, 3), 128 * 127 * 100 / 4096), rtol=2**-10, atol=0)


def test_layouts_and_empty_batches(ops: Any, gpu_device: str) -> None:
    made, x = matrix("int4", 40, 24).to(torch.device(gpu_device)), normal(4, 6, 24, seed=6).to(gpu_device)
    product = ops.pack_codes(made, torch.float32)
    made.codes.fill_(0)
    made.scale.fill_(float("nan"))  # neither is kept
    want = product(x)
    assert want.isfinite().all()
    assert want.count_nonzero() > 900
    assert_same_rows(product(x.transpose(0, 1)), want.transpose(0, 1))
    assert_same_rows(product(torch.cat([x, x], -1)[..., :24]), want)
    assert_same_rows(product(x[0].T.contiguous().T), want[0])
    assert_same_rows(product(x[0, :1]), want[0, :1])
    assert product(x[:0]).shape == (0, 6, 40)
    for bad in (x.half(), x[..., 1:], x.to("meta"), x.sum()):
        with pytest.raises(ValueError, match=r"codes \[40, 24\] of a float32 weight on .* cannot multiply"):
            product(bad)


GROUPS = {
    "one pair": [0, 1, 0],
    "one expert": [5],
    "uneven": [1, 0, 37, 0, 3],
    "whole blocks": [16, 32],
    "many": [50, 0, 60],
}


@pairwise(
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.parametrize("group", [16, 32, 128]),
    pytest.mark.parametrize("counts", GROUPS.values(), ids=GROUPS.keys()),
    pytest.mark.parametrize("shape", [(35, 21), (64, 256), (130, 70)]),
)
def test_experts(
    shape: tuple[int, int],
    counts: list[int],
    group: int,
    kind: str,
    dtype: torch.dtype,
    expert_ops: Any,
    gpu_device: str,
) -> None:
    """Experts without tokens are not read: their scales are no numbers."""
    made = matrix(kind, len(counts), *shape, group=group)
    of_row = weights_of(made)[torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))]
    made.scale[torch.tensor(counts) == 0] = float("nan")
    x, groups = normal(sum(counts), shape[1], seed=7, dtype=dtype), grouped(counts, gpu_device)
    product = expert_ops.pack_codes(made.to(torch.device(gpu_device)), dtype)
    assert product.nbytes <= packed_bytes(made, for_gpu=True)
    assert_rounded(product(x.to(gpu_device), groups).cpu(), x, of_row)


def grouped(counts: list[int], device: str) -> moe.Groups:
    ends = torch.tensor(counts).cumsum(0).int()
    return moe.Groups(torch.arange(sum(counts)).to(device), ends.to(device))


def test_rows_of_experts_stay_apart(expert_ops: Any, gpu_device: str) -> None:
    made, groups = matrix("int4 with minima", 3, 40, 24).to(torch.device(gpu_device)), grouped([4, 0, 6], gpu_device)
    x, product = normal(10, 24, seed=8).to(gpu_device), expert_ops.pack_codes(made, torch.float32)
    clean = product(x, groups)
    x[4, 7] = float("nan")
    y = product(x, groups)
    others = [i for i in range(10) if i != 4]
    assert y[4].isnan().all()
    assert_same_rows(y[others], clean[others])
    assert product(x[:0], grouped([0, 0, 0], gpu_device)).shape == (0, 40)
    for bad in (x.half(), x[:, 1:], x[1:]):
        with pytest.raises(ValueError, match=r"experts \[3, 40, 24\] torch.float32 cannot multiply"):
            product(bad, groups)


class TestWhoTakesWhat:
    @pytest.fixture(autouse=True)
    def _launchable(self, launchable: None) -> None:
        pass

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_codes_go_to_triton(
        self, kind: str, dtype: torch.dtype, ops: Any, expert_ops: Any, gpu_device: str
    ) -> None:
        device = torch.device(gpu_device)
        assert linear.runs_codes(device, dtype)
        assert isinstance(linear.pack_codes(matrix(kind, 20, 64).to(device), dtype), ops.TritonCodes)
        experts = moe.packed(matrix(kind, 2, 20, 64).to(device), dtype=dtype)
        assert isinstance(experts, expert_ops.TritonCodedExperts)

    @pytest.mark.parametrize("form", ["int4-g32", "int4-g64", "int4-g128", "fp8"])
    def test_forms_have_codes(self, form: linear.WeightForm, ops: Any, expert_ops: Any, gpu_device: str) -> None:
        weight, x = normal(2, 40, 160, seed=9), normal(3, 160, seed=10)
        product = linear.pack(weight[0].to(gpu_device), form)
        assert isinstance(product, ops.TritonCodes)
        made = linear.round_to_form(weight[0], form)
        assert_rounded(product(x.to(gpu_device)).cpu(), x, weights_of(made))
        assert product.nbytes == linear.pack(weight[0].to("meta"), form).nbytes
        experts = moe.pack(weight.to(gpu_device), form)
        assert isinstance(experts, expert_ops.TritonCodedExperts)
        assert experts.nbytes == moe.pack(weight.to("meta"), form).nbytes == 2 * product.nbytes

    def test_other_types_are_dequantized(self, gpu_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        made, device = matrix("int4", 20, 64), torch.device(gpu_device)
        assert not linear.runs_codes(device, torch.float64)
        assert isinstance(linear.pack_codes(made.to(device), torch.float64), torch_ops.PlainWeight)
        monkeypatch.setattr(native_ops, "code", lambda: None)
        with gpu.disabled():
            assert not isinstance(linear.pack_codes(made.to(device), torch.bfloat16), torch_ops.ShapeOfCodes)
            assert "Triton" not in type(moe.pack_codes(matrix("int4", 2, 20, 64).to(device), torch.float32)).__name__

    @pytest.mark.parametrize("group", [32, 64, 128, 200])
    @pytest.mark.parametrize("kind", KINDS)
    def test_sizes_without_values(self, kind: str, group: int, gpu_device: str) -> None:
        """As they are on the device whose layout is meant, not on the other one."""
        made, device = matrix(kind, 20, 200, group=group), torch.device(gpu_device)
        shape = made.to(torch.device("meta"))
        shape = replace(shape, table=made.table)
        for each in (shape, made.to(torch.device("meta"))):
            if kind not in ("e2m1", "iq4") or each.table is made.table:  # few values: readers keep these
                assert (
                    linear.packed([each], layout=device).nbytes
                    == linear.pack_codes(made.to(device), torch.float32).nbytes
                )
        stacked = [x.stacked(2) for x in (shape, made)]
        assert moe.packed(stacked[0], layout=device).nbytes == moe.packed(stacked[1].to(device)).nbytes
        is_other = kind.startswith(("int5", "int6")) or (kind == "fp8" and group in (32, 64))
        assert (packed_bytes(made) != packed_bytes(made, for_gpu=True)) == is_other


def test_a_table_of_other_values_is_rounded_anew() -> None:
    """Only e4m3's own values are converted by their bits."""
    made = matrix("fp8", 20, 64)
    other = replace(made, table=e4m3_values() * 2)
    assert not regroup(other, for_gpu=True).is_e4m3
    assert regroup(made, for_gpu=True).is_e4m3
    assert not regroup(made).is_e4m3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_captured(kind: str, ops: Any) -> None:
    product, x = (
        ops.pack_codes(matrix(kind, 40, 96).to(torch.device("cuda")), torch.float32),
        normal(3, 96, seed=11).cuda(),
    )
    torch.use_deterministic_algorithms(False)  # as where graphs are captured for use
    product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product(x)
    x.copy_(normal(3, 96, seed=12))
    graph.replay()
    assert_same_rows(y, product(x))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["int4", "fp8"])
@pytest.mark.parametrize("rows", [1, 16, 64, 300])
def test_sizes_of_a_layer(rows: int, form: Any, ops: Any) -> None:
    """bf16, at the width of a model, where tensor cores multiply."""
    made = round_matrix(normal(4096, 2048, seed=13), form, 128)
    x = normal(rows, 2048, seed=14, dtype=torch.bfloat16)
    y = ops.pack_codes(made.to(torch.device("cuda")), torch.bfloat16)(x.cuda()).cpu()
    want = x.double() @ weights_of(made).T
    size = x.double().abs() @ weights_of(made).abs().T
    assert ((y.double() - want).abs() <= want.abs() * 2**-8 + size * 2**-18).all()
