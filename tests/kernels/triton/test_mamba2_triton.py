"""A Mamba2 layer as Triton launches against its reference: trees, folds, padding, norms, what is not finite."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import gpu, mamba2
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.mamba2 import Inputs, Weights, reference
from specmamba.kernels.state_records import Buffers, RowSet, as_stored
from specmamba.kernels.state_records import reference as records_reference
from specmamba.layers.mamba2 import mix
from tests.kernels.recurrent.layer_case import Watched, copied, moved, operands_of, triton_forms, values
from tests.kernels.recurrent.test_mamba2 import Case
from tests.kernels.rounding import tolerance
from tests.kernels.trees import SHAPES
from tests.pairwise import pairwise

pytest.importorskip("triton")
from specmamba.kernels.mamba2 import triton_kernels as mamba2_kernels
from specmamba.kernels.ssd import triton_kernels as ssd_kernels

pytestmark = pytest.mark.usefixtures("poisoned")

TOLERANCE = {dtype: tolerance(dtype, terms=400) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
ULP = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
ONE, ODD = (1, 1, 8, 8), (1, 3, 7, 5)


class PoolCase(Case):
    """A case whose slot 0 is padding; ``pending`` None is a row of padding."""

    def __init__(
        self,
        heads: tuple[int, int, int, int],
        nodes: int,
        pending: list[int | None],
        *,
        folds: list[bool] | None = None,
        state_dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        super().__init__(heads, nodes, [count or 0 for count in pending], **settings)
        x, t = self.buffers, self.trees
        states = torch.cat([torch.full_like(x.states[:1], 3.0), x.states]).to(state_dtype)
        window = self.weights.conv.shape[1] - 1
        windows = torch.full((len(states), window, x.conv_inputs.shape[2]), torch.nan, dtype=x.conv_inputs.dtype)
        is_padding = torch.tensor([count is None for count in pending])
        self.buffers = replace(x, states=states, windows=windows)
        flags = None if folds is None else torch.tensor(folds)
        self.trees = replace(t, slots=(t.slots + 1).masked_fill(is_padding, 0), folds=flags)

    def launch(self, device: str) -> tuple[Tensor, Buffers]:
        inputs, weights, trees = (moved(x, device) for x in (self.inputs, self.weights, self.trees))
        buffers = moved(copied(self.buffers), device)
        with triton_forms():
            return mix(inputs, weights, operands_of(buffers, trees)).cpu(), moved(buffers, "cpu")

    def check_launch(self, device: str) -> None:
        out, after = self.launch(device)
        want, wanted = self.wanted_of(after.states)
        assert out.dtype is self.inputs.gate.dtype
        torch.testing.assert_close(out.double(), want, **TOLERANCE[out.dtype])
        t, nodes, expected = self.trees, out.shape[1], copied(self.buffers)
        rows, slots = t.rows[t.slots > 0], t.slots[t.slots > 0]
        first = self.weights.conv.shape[1] - 1
        for name, at in (("k", 0), ("u", 0), ("decay", 0), ("conv_inputs", first)):
            written = slice(at + t.node_offset, at + t.node_offset + nodes)
            got, right = getattr(after, name)[rows, written], getattr(wanted, name)[rows, written]
            torch.testing.assert_close(got.double(), right, rtol=5e-5, atol=5e-5)
            getattr(expected, name)[rows, written] = got
        if t.folds is not None:
            folded = t.folds & (t.slots > 0)
            expected.states[t.slots[folded]] = after.states[t.slots[folded]]
            assert t.num_pending is not None
            for row, slot, count in zip(t.rows[folded], t.slots[folded], t.num_pending[folded].tolist(), strict=True):
                window = self.buffers.conv_inputs[row, count : count + first]
                assert expected.windows is not None
                expected.conv_inputs[row, :first] = expected.windows[slot] = window
        for mine, right in zip(values(after), values(expected), strict=True):  # nothing else was written anywhere
            assert torch.equal(mine.nan_to_num(9.0), right.nan_to_num(9.0))
        assert len(slots) == (t.slots > 0).sum()

    def wanted_of(self, states: Tensor) -> tuple[Tensor, Buffers]:
        """By the reference in float64, going on from the states that were left, which are checked."""
        t, buffers = self.trees, copied(self.buffers, torch.float64)
        if t.folds is not None:
            assert t.num_pending is not None
            real, count, dtype = t.slots > 0, torch.where(t.folds, t.num_pending, 0), states.dtype
            records = (x[t.rows] for x in (buffers.k, buffers.u, buffers.decay))
            folded = as_stored(records_reference.fold(buffers.states[t.slots], *records, count)[real], dtype)
            left = states[t.slots[real]]
            torch.testing.assert_close(left.double(), folded.double(), rtol=ULP[dtype], atol=ULP[dtype] / 4)
            t = replace(t, num_pending=t.num_pending - count)
        buffers = replace(buffers, states=states.double())
        inputs, weights = copied(self.inputs, torch.float64), copied(self.weights, torch.float64)
        want = reference.tree_verify(inputs, weights, buffers, t)
        want[t.slots == 0] = 0
        return want, buffers


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_matches_reference(nodes: int, dtype: torch.dtype, gpu_device: str) -> None:
    PoolCase(ODD, nodes, [0, None, 6], dtype=dtype, shapes=("bushy", "chain", "padded")).check_launch(gpu_device)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_trees(shape: str, gpu_device: str) -> None:
    PoolCase(ONE, 17, [3], shapes=(shape,)).check_launch(gpu_device)


def test_many_nodes_and_heads(gpu_device: str) -> None:
    PoolCase(ONE, 33, [2], shapes=("bushy",)).check_launch(gpu_device)
    PoolCase((2, 4, 20, 40), 2, [2], norm_groups=2).check_launch(gpu_device)


@pytest.mark.fast_cases(1)
@pairwise(
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16]),
    pytest.mark.parametrize("norm_groups", [1, 3, 5]),
    pytest.mark.parametrize("norm", ["none", "before", "after"]),
)
def test_norms(norm: str, norm_groups: int, dtype: torch.dtype, gpu_device: str) -> None:
    """Over everything, over a head, over a part of one."""
    PoolCase(ODD, 1, [1], norm=norm, norm_groups=norm_groups, dtype=dtype).check_launch(gpu_device)


@pytest.mark.parametrize("norm", ["none", "before", "after"])
def test_a_norm_over_several_blocks(norm: str, gpu_device: str) -> None:
    """More channels than a program takes at a time, by the form in PyTorch."""
    from specmamba.kernels.mamba2 import torch_ops, triton_ops

    heads, dim = 30, 75
    case = Case((1, heads, 2, dim), 2, [0, 0], norm=norm, norm_groups=1, dtype=torch.float32)
    i, w = case.inputs, case.weights
    recurred, slots = torch.randn(2, 2, heads, dim), RowSet.of([4, 0], torch.device(gpu_device))
    want = torch_ops.gate_and_norm(recurred, i.mixed, i.gate, w, slots)
    on_device = (y.to(gpu_device) for y in (recurred, i.mixed, i.gate))
    out = triton_ops.gate_and_norm(*on_device, moved(w, gpu_device), slots).cpu()
    torch.testing.assert_close(out[0], want[0], **TOLERANCE[torch.float32])
    assert (out[1] == 0).all()


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.3, float("inf")), (0.0, 0.8), (0.4, 0.5)])
def test_step_sizes(limit: tuple[float, float], gpu_device: str) -> None:
    """From so small that 1 + e^x is 1 to so large that e^x overflows."""
    from specmamba.kernels.mamba2 import triton_ops

    case = Case((1, 20, 2, 5), 1, [0], dt_limit=limit)
    dt = torch.linspace(-60, 120, 20)[None, None]
    w = replace(case.weights, dt_bias=torch.zeros(20))
    u, g = (x.cpu() for x in triton_ops.step(dt.to(gpu_device), case.inputs.mixed.to(gpu_device), moved(w, gpu_device)))
    size = torch.nn.functional.softplus(dt.double()).clamp(*limit)
    rtol = 1e-6 if gpu_device == "cpu" else 4e-6  # a GPU's e^x is off by some 2^-24 |x|
    torch.testing.assert_close(g.double(), size * w.negative_a, rtol=rtol, atol=0)
    want = size[..., None] * case.inputs.mixed[..., :100].double().unflatten(-1, (20, 5))
    torch.testing.assert_close(u.double(), want, rtol=rtol, atol=0)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nodes", [1, 3])
def test_folds(nodes: int, state_dtype: torch.dtype, gpu_device: str) -> None:
    """States and windows; also with nothing pending, and where ``folds`` is true for a row of padding."""
    folds, dtype = [True, True, True, False], torch.float32 if state_dtype is torch.float32 else state_dtype
    case = PoolCase(ONE, nodes, [5, 0, None, 2], folds=folds, state_dtype=state_dtype, dtype=dtype)
    case.check_launch(gpu_device)


@pytest.mark.parametrize("conv_bias", [False, True])
def test_convolutions_of_other_widths(conv_bias: bool, gpu_device: str) -> None:
    PoolCase(ONE, 3, [2], width=2, conv_bias=conv_bias).check_launch(gpu_device)


@pytest.mark.fast_cases(1)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("field", "channel"), [("mixed", 0), ("mixed", 16), ("mixed", 31), ("gate", 3), ("dt", 1)])
def test_nan_affects_a_node_and_its_descendants_only(field: str, channel: int, value: float, gpu_device: str) -> None:
    """Channels of x, B and C."""
    hit, nodes = 1, 5
    case = PoolCase((1, 2, 8, 8), nodes, [1], shapes=("binary",), norm_groups=2)
    want, wanted = case.launch(gpu_device)
    getattr(case.inputs, field)[0, hit, channel] = value
    out, after = case.launch(gpu_device)

    below = case.trees.ancestors[0, :, hit]
    affected = below if field != "gate" else torch.arange(nodes) == hit
    if (field, value) == ("dt", -torch.inf):
        affected = torch.zeros(nodes, dtype=torch.bool)  # a step of size 0
    assert torch.equal(~out[0].isfinite().all(-1), affected)
    assert torch.equal(out[0, ~below], want[0, ~below])
    written = slice(case.trees.node_offset, case.trees.node_offset + nodes)
    for name in ("k", "u", "decay"):
        mine, clean = (getattr(x, name)[case.trees.rows[0], written] for x in (after, wanted))
        assert mine.isfinite().all()
        assert torch.equal(mine[~below], clean[~below])


# nodes, heads (G, H, S, P), and records pending: groups of 1 to 4 heads, odd widths, blocks of nodes and of records
SHARED: list[tuple[int, tuple[int, int, int, int], list[int | None]]] = [
    (3, (1, 2, 16, 72), [3, None, 4, 0]),
    (16, (2, 8, 40, 24), [3, None, 18, 0]),
    (7, (1, 1, 33, 80), [16, 5, None, 0]),
    (17, (2, 6, 7, 5), [3, 33, None, 17]),
    (64, (1, 2, 8, 20), [3, None, 4, 0]),
]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("nodes", "heads", "pending"), SHARED)
@pytest.mark.parametrize("folds", [None, [True, True, False, True]])
def test_products_are_made_once_for_a_group(
    nodes: int,
    heads: tuple[int, int, int, int],
    pending: list[int | None],
    folds: list[bool] | None,
    gpu_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the step sizes, in one launch; the recurrence finds them, and the nodes' B in their records."""
    watched = Watched(ssd_kernels.tree_verify, "products")
    monkeypatch.setattr(ssd_kernels, "tree_verify", watched)
    monkeypatch.setattr(mamba2_kernels, "step", None)
    PoolCase(heads, nodes, pending, folds=folds).check_launch(gpu_device)
    assert watched.seen == [True]


@pytest.mark.fast_cases(2)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize(("nodes", "heads", "pending"), SHARED)
@pytest.mark.parametrize("folds", [None, [True, True, False, True]])
def test_products_of_16_bit_models_are_those_that_the_recurrence_makes(
    nodes: int,
    heads: tuple[int, int, int, int],
    pending: list[int | None],
    folds: list[bool] | None,
    gpu_device: str,
) -> None:
    """In parts, of other blocks of the same sums; also where B is not finite, in a node that others do not see."""
    case = PoolCase(heads, nodes, pending, folds=folds, dtype=torch.bfloat16, shapes=("bushy", "star", "chain"))
    mixed = torch.randn(case.inputs.mixed.shape)
    mixed[0, 2, heads[1] * heads[3]], mixed[3, 1, heads[1] * heads[3] + 1] = torch.nan, torch.inf
    weights, declared, results = moved(case.weights, gpu_device), operator_of(mamba2.step_and_advance), []
    for form in ("triton", "torch"):
        buffers = moved(copied(case.buffers), gpu_device)
        with triton_forms():
            state = operands_of(buffers, moved(case.trees, gpu_device))
            out = declared.load(form)(case.inputs.dt.to(gpu_device), mixed.to(gpu_device), weights, state)
        results.append([x.cpu().double() for x in (out, buffers.states, buffers.k, buffers.u, buffers.decay)])
    assert not results[0][0][0, 2, 0].isfinite().any()
    for mine, right in zip(*results, strict=True):
        largest = right.nan_to_num().abs().max().item()
        torch.testing.assert_close(mine, right, rtol=2**-13, atol=2**-13 * largest, equal_nan=True)


@pytest.mark.parametrize(
    ("nodes", "is_chain", "heads", "is_shared"),
    [
        (1, True, (1, 2, 8, 16), False),
        (8, True, (1, 2, 8, 16), False),
        (9, True, (1, 2, 8, 16), True),
        (2, False, (1, 2, 8, 16), True),
        (2, False, (2, 2, 8, 72), True),
        (2, False, (2, 2, 8, 64), False),
        (65, False, (1, 2, 8, 16), False),
    ],
)
def test_products_are_made_once_where_several_programs_need_them(
    nodes: int, is_chain: bool, heads: tuple[int, int, int, int], is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(heads, nodes, [0], shapes=("chain",))
    state = operands_of(case.buffers, replace(case.trees, is_chain=is_chain))
    asked = case.inputs.dt, case.inputs.mixed.float(), case.weights, state
    declared = operator_of(mamba2.step_and_advance)
    assert declared.choose(*asked) == "torch"
    with triton_forms():
        assert declared.choose(*asked) == ("triton" if is_shared else "torch")
        for off in ("mamba2", "ssd"):
            monkeypatch.setattr(gpu, "is_chosen", lambda name, off=off: name != off)
            assert declared.choose(*asked) == "torch"


def test_operands_that_lie_apart(gpu_device: str) -> None:
    case = PoolCase(ONE, 3, [2])
    apart = (torch.stack([getattr(case.inputs, field.name)] * 2, -1)[..., 0] for field in fields(Inputs))
    case.inputs = Inputs(*apart)
    w = case.weights
    spread = {name: getattr(w, name).repeat_interleave(2)[::2] for name in ("skip", "norm", "dt_bias", "negative_a")}
    case.weights = replace(w, **spread)
    assert isinstance(case.weights, Weights)
    case.check_launch(gpu_device)
