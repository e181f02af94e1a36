"""A Mamba1 layer around its inner projections in native code, against the float64 formulas; folds of its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels import mamba1
from specmamba.kernels.causal_conv1d import reference as convolution
from specmamba.kernels.mamba1 import Steps, Weights
from specmamba.kernels.selective_scan import reference
from specmamba.kernels.state_records import Buffers, Trees
from tests.kernels.recurrent.layer_case import (
    NUM_ROWS,
    NUM_SLOTS,
    TOLERANCE,
    copied,
    make_buffers_and_trees,
    operands_of,
)
from tests.kernels.trees import SHAPES
from tests.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("needs_native")
SIZES = [(4, 6), (16, 24), (7, 5), (3, 257), (16, 300)]  # state size, channels: a native task has 128 or more
PENDING = [0, 6, 1, 3, 5]
DTYPES = [torch.float32, torch.bfloat16]


class Case:
    """Random operands of one verify; inputs are parts of products, as in the layer."""

    def __init__(
        self,
        sizes: tuple[int, int],
        nodes: int,
        dtype: torch.dtype = torch.float32,
        width: int = 4,
        shapes: tuple[str, ...] = SHAPES,
        conv_bias: bool = True,
    ) -> None:
        (size, channels), batch = sizes, len(PENDING)
        self.mixed, self.gate = torch.randn(batch, nodes, 2 * channels).to(dtype).chunk(2, -1)
        b, c = torch.randn(batch, nodes, 3 + 2 * size).to(dtype)[..., 3:].chunk(2, -1)
        self.steps = Steps(torch.randn(batch, nodes, channels).to(dtype), b, c)
        self.weights = Weights(
            (torch.randn(width, channels) * 0.5).t(),
            torch.randn(channels) if conv_bias else None,
            torch.randn(channels),
            -torch.randn(size, channels).exp(),
            torch.randn(channels),
        )
        self.buffers, self.trees = make_case_buffers(sizes, nodes, dtype, width, shapes)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, x rounded, and outputs."""
        assert mamba1.can_fuse(operands_of(self.buffers, self.trees), self.mixed, self.weights)
        x, rounded = mamba1.convolve(self.mixed, self.weights, self.buffers, self.trees)
        return x, rounded, mamba1.scan(x, self.steps, self.gate, self.weights, self.buffers, self.trees)

    def check(self) -> None:
        """Outputs and all that is written, against the formulas in float64."""
        before, nodes = copied(self.buffers), slice(self.trees.node_offset, None)
        x, rounded, out = self.run()
        want_x, dt, want = self.wanted(before)
        tight, loose = TOLERANCE[torch.float32], TOLERANCE[out.dtype]
        torch.testing.assert_close(x.double(), want_x, **tight)
        assert torch.equal(rounded, x.to(rounded.dtype))
        torch.testing.assert_close(out.double(), want, **loose)
        written = self.buffers
        for kept, value in ((written.k, self.steps.b.double()), (written.u, dt * want_x), (written.decay, dt)):
            got = kept[self.trees.rows, nodes, 0][:, : value.shape[1]].double()
            torch.testing.assert_close(got, value, **tight)
        first = self.weights.conv.shape[1] - 1 + self.trees.node_offset
        end = first + self.mixed.shape[1]
        assert torch.equal(written.conv_inputs[self.trees.rows, first:end], self.mixed)
        assert torch.equal(written.states.nan_to_num(9.0), before.states.nan_to_num(9.0))

    def wanted(self, buffers: Buffers) -> tuple[Tensor, Tensor, Tensor]:
        w, trees, gate = self.weights, self.trees, self.gate.double()
        inputs = buffers.conv_inputs[trees.rows].double()
        first = w.conv.shape[1] - 1 + trees.node_offset
        inputs[:, first : first + self.mixed.shape[1]] = self.mixed.double()
        bias = None if w.conv_bias is None else w.conv_bias.double()
        x = convolution.tree_verify(inputs, trees.conv_index, w.conv.double(), bias)
        dt = F.softplus(self.steps.dt.double() + w.dt_bias.double())
        c, b, u, steps = (y.double().unsqueeze(2) for y in (self.steps.c, self.steps.b, dt * x, dt))
        records = tuple(y[trees.rows].double() for y in (buffers.k, buffers.u, buffers.decay))
        states = buffers.states[trees.slots].double()
        out = reference.tree_verify(c, b, u, steps, w.rates.double(), states, records, trees.placement)
        return x, dt, (out.squeeze(2) + w.skip.double() * x) * F.silu(gate)


def make_case_buffers(
    sizes: tuple[int, int], nodes: int, dtype: torch.dtype, width: int, shapes: tuple[str, ...]
) -> tuple[Buffers, Trees]:
    """Buffers and trees; memory that must not be read holds NaN."""
    size, channels = sizes
    heads = 1, 1, size, channels
    buffers, trees = make_buffers_and_trees(heads, nodes, PENDING, width=width, shapes=shapes, dtype=dtype)
    inputs, dt = buffers.conv_inputs[..., :channels].contiguous(), torch.full_like(buffers.u, torch.nan)
    for row, count in zip(trees.rows.tolist(), PENDING, strict=True):
        dt[row, :count] = F.softplus(torch.randn(count, 1, channels))
    return replace(buffers, conv_inputs=inputs, decay=dt), trees


@pairwise(
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize("sizes", SIZES, ids=str),
    pytest.mark.parametrize("nodes", [1, 2, 5, 17]),
    pytest.mark.parametrize("shapes", [SHAPES, ("chain",)], ids=["trees", "chains"]),
)
def test_trees(shapes: tuple[str, ...], nodes: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    Case(sizes, nodes, dtype, shapes=shapes).check()


@pytest.mark.parametrize("width", [1, 2, 3, 6])
@pytest.mark.parametrize("conv_bias", [False, True])
def test_convolutions(conv_bias: bool, width: int) -> None:
    Case(SIZES[1], 5, width=width, conv_bias=conv_bias).check()


def test_packed_trees() -> None:
    case = Case(SIZES[4], 5, torch.bfloat16)
    own = copied(case.buffers)
    *_, want = case.run()
    counts = torch.tensor([5, 2, 0, 3, 1])
    live = torch.arange(5) < counts[:, None]

    def packed(x: Tensor) -> Tensor:
        return torch.cat([x[live], torch.full_like(x[0, :2], 7.0)])[None]  # two rows of padding

    trees = replace(case.trees, firsts=counts.cumsum(0) - counts, counts=counts, num_packed=13)
    mixed, gate, steps = packed(case.mixed), packed(case.gate), Steps(*map(packed, case.steps))
    x, _ = mamba1.convolve(mixed, case.weights, own, trees)
    out = mamba1.scan(x, steps, gate, case.weights, own, trees)
    assert torch.equal(out[0, :11], want[live])
    assert not out[0, 11:].any()
    offset, window = trees.node_offset, case.weights.conv.shape[1] - 1
    for first, name in ((offset, "k"), (offset, "u"), (offset, "decay"), (window + offset, "conv_inputs")):
        got, kept = (getattr(x, name)[trees.rows, first : first + 5] for x in (own, case.buffers))
        assert torch.equal(got[live], kept[live]), name
        assert kept[live].isfinite().all(), name


@pytest.mark.parametrize("place", ["mixed", "dt", "b"])
def test_what_is_not_finite_reaches_descendants_alone(place: str) -> None:
    case = Case(SIZES[1], 4, shapes=("chain",))
    clean = copied(case.buffers)
    *_, want = case.run()
    case.buffers = clean
    for x in (case.mixed, case.steps.dt, case.steps.b):
        if x is getattr(case, place, getattr(case.steps, place, None)):
            x[1, 2] = torch.nan
    *_, out = case.run()
    is_hit = torch.zeros(len(PENDING), 4, dtype=torch.bool)
    is_hit[1, 2:] = True
    assert torch.equal(out[~is_hit], want[~is_hit])
    assert not out[is_hit].isfinite().any()
    written = slice(case.trees.node_offset, case.trees.node_offset + 4)
    for x in (case.buffers.k, case.buffers.u, case.buffers.decay):
        assert x[case.trees.rows, written].isfinite().all()


def test_wrong_shapes_are_refused() -> None:
    case = Case(SIZES[1], 3)
    x, *_ = case.run()
    steps = case.steps._replace(b=case.steps.b[..., :-1])
    with pytest.raises(ValueError, match="b and c"):
        mamba1.scan(x, steps, case.gate, case.weights, case.buffers, case.trees)
    with pytest.raises(ValueError, match="other channels"):
        mamba1.convolve(case.mixed[..., 1:], case.weights, case.buffers, case.trees)
    with pytest.raises(ValueError, match="other trees"):
        mamba1.convolve(case.mixed[:, 1:], case.weights, case.buffers, case.trees)


class Folds:
    """Random records of all rows of two layers, and three rows of which one has none."""

    layers, window, capacity = 2, 3, 7

    def __init__(self, sizes: tuple[int, int]) -> None:
        size, channels = sizes
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return torch.randn(self.layers, *shape, generator=generator)

        of_row = NUM_ROWS, self.capacity, 1
        self.records = random(*of_row, size), random(*of_row, channels), F.softplus(random(*of_row, channels))
        self.rates = -random(size, channels).exp()
        inputs = random(NUM_ROWS, self.window + self.capacity, channels).bfloat16()
        windows = random(NUM_SLOTS, self.window, channels).bfloat16()
        self.buffers = Buffers(random(NUM_SLOTS, 1, size, channels), inputs, *self.records, windows)
        self.rows, self.slots = torch.tensor([4, 1, 7]), torch.tensor([2, 6, 3])
        self.counts = torch.tensor([5, 0, 2])

    def run(self, folds: Tensor | None = None) -> None:
        mamba1.fold_rows(self.buffers, self.rates, self.rows, self.slots, self.counts, folds)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_folds_of_rows(sizes: tuple[int, int], is_masked: bool) -> None:
    case = Folds(sizes)
    window, rates, layers = case.window, case.rates.double(), case.layers
    before = copied(case.buffers)
    want, want_windows = before.states.double(), before.windows.clone()
    for row, slot, count in [(4, 2, 5), (1, 6, 0), *([] if is_masked else [(7, 3, 2)])]:
        given = (x[:, row].double() for x in case.records)
        want[:, slot] = reference.fold(want[:, slot], *given, rates, torch.full((layers,), count))
        want_windows[:, slot] = before.conv_inputs[:, row, count : count + window] if count else want_windows[:, slot]
    case.run(torch.tensor([True, True, False]) if is_masked else None)
    buffers = case.buffers
    assert case.counts.tolist() == [0, 0, 2 if is_masked else 0]
    torch.testing.assert_close(buffers.states.double(), want, **TOLERANCE[torch.float32])
    assert torch.equal(buffers.windows, want_windows)
    assert torch.equal(buffers.conv_inputs[:, 4, :window], before.conv_inputs[:, 4, 5 : 5 + window])
    assert torch.equal(buffers.conv_inputs[:, 4, window:], before.conv_inputs[:, 4, window:])


@pytest.mark.parametrize(
    "folds", [torch.ones(3), torch.ones(2, dtype=torch.bool), torch.ones(6, dtype=torch.bool)[::2]], ids=range(3)
)
def test_folds_refuse_masks_that_do_not_fit(folds: Tensor) -> None:
    case = Folds(SIZES[0])
    before = case.buffers.states.clone()
    with pytest.raises(ValueError, match=r"folds needs \[B\] bool on the CPU"):
        case.run(folds)
    assert torch.equal(case.buffers.states, before)


def test_folds_refuse_buffers_that_do_not_fit() -> None:
    """Windows are copied byte by byte, so that those of another dtype would be no inputs."""
    case = Folds(SIZES[0])
    given, windows = case.buffers, case.buffers.windows
    assert windows is not None
    for name, changed, message in (
        ("windows", windows.half(), "one dtype"),
        ("windows", windows.float(), "one dtype"),
        ("windows", windows[:, :, 1:].contiguous(), "conv_inputs do not fit"),
        ("windows", windows[:, 1:].contiguous(), "the windows have another shape"),
        ("k", given.k[:, 1:].contiguous(), "the records of b"),
        ("states", given.states.bfloat16(), "native code does not take"),
    ):
        changes: dict[str, Any] = {name: changed}
        case.buffers = replace(given, **changes)
        with pytest.raises(ValueError, match=message):
            case.run()
