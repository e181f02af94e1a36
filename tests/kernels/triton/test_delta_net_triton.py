"""A gated delta net layer in Triton against its reference: trees in pools, folds of states and windows, padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specmamba.kernels import delta_net, gpu
from specmamba.kernels.delta_net import Inputs, Weights, reference
from specmamba.kernels.delta_net import torch_ops as delta_net_in_torch
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.rowwise import torch_ops as rowwise_in_torch
from specmamba.kernels.state_records import Buffers, Trees
from specmamba.kernels.state_records import reference as records_reference
from specmamba.layers.gated_delta_net import mix
from tests.kernels.recurrent import test_kda_layer
from tests.kernels.recurrent.layer_case import (
    RECORDS,
    TOLERANCE,
    LayerCase,
    Watched,
    copied,
    moved,
    operands_of,
    part_of_rows,
    triton_forms,
    values,
)
from tests.kernels.recurrent.test_delta_net import Case

pytest.importorskip("triton")
from specmamba.kernels.delta_net import triton_ops as delta_net_in_triton
from specmamba.kernels.gated_delta_rule import triton_kernels as delta_kernels

pytestmark = pytest.mark.usefixtures("poisoned")

HEADS = (1, 2, 16, 24)
PENDING, FOLDS, PADDING = [3, 5, 4, 0], [True, False, True, True], 2  # of the rows of the batch; one is padding


def run_triton(inputs: Inputs, weights: Weights, buffers: Buffers, trees: Trees) -> Tensor:
    """The layer between its projections in four launches."""
    with triton_forms():
        return mix(inputs, weights, operands_of(buffers, trees))


class OnPools(LayerCase):
    """With slot 0 as padding, and windows of checkpoints."""

    pending = PENDING

    def place(self, dtype: torch.dtype, state_dtype: torch.dtype, folds: bool, width: int = 4) -> None:
        """Move the states and windows to pools."""
        states = torch.cat([torch.full_like(self.buffers.states[:1], torch.nan), self.buffers.states]).to(state_dtype)
        windows = torch.full((len(states), width - 1, self.inputs.mixed.shape[2]), torch.nan, dtype=dtype)
        slots = self.trees.slots + 1
        slots[PADDING] = 0
        for row, slot in zip(self.trees.rows, slots, strict=True):
            windows[slot] = self.buffers.conv_inputs[row, : width - 1] if slot else torch.nan
        self.buffers = replace(self.buffers, states=states, windows=windows)
        self.trees = replace(self.trees, slots=slots, folds=torch.tensor(FOLDS) if folds else None)

    def run_triton(self, device: str) -> tuple[Tensor, Buffers]:
        buffers, weights = moved(copied(self.buffers), device), moved(self.weights, device)
        out = run_triton(moved(self.inputs, device), weights, buffers, moved(self.trees, device))
        return out.cpu(), moved(buffers, "cpu")

    def wanted_row(self, row: int, buffers: Buffers) -> Tensor:
        """One row by the reference, folded before where it folds; ``buffers`` are float64."""
        t = part_of_rows(replace(self.trees, folds=None), slice(row, row + 1))
        count, window = self.pending[row], self.weights.conv.shape[1] - 1
        if self.trees.folds is not None and FOLDS[row]:
            records = buffers.k[t.rows], buffers.u[t.rows], buffers.decay[t.rows]
            buffers.states[t.slots] = records_reference.fold(buffers.states[t.slots], *records, torch.tensor([count]))
            last = buffers.conv_inputs[t.rows, count : count + window].clone()
            buffers.conv_inputs[t.rows, :window] = last
            assert buffers.windows is not None
            buffers.windows[t.slots] = last
            index = torch.where(t.conv_index >= window + t.node_offset, t.conv_index, t.conv_index - count)
            t = replace(t, conv_index=index, num_pending=torch.tensor([0]))
        inputs = copied(self.inputs, torch.float64)
        of_row = replace(inputs, **{name: getattr(inputs, name)[row : row + 1] for name in ("mixed", "gate", "b", "a")})
        return reference.tree_verify(of_row, copied(self.weights, torch.float64), buffers, t)[0]

    def check_triton(self, device: str) -> None:
        out, buffers = self.run_triton(device)
        assert out.dtype is self.inputs.gate.dtype
        wanted = copied(self.buffers, torch.float64)
        for row in (row for row in range(len(PENDING)) if row != PADDING):
            torch.testing.assert_close(out[row].double(), self.wanted_row(row, wanted), **TOLERANCE[out.dtype])
        assert torch.equal(out[PADDING], torch.zeros_like(out[PADDING]))
        for mine, right, before in zip(values(buffers), values(wanted), values(self.buffers), strict=True):
            tolerance = RECORDS if mine is not buffers.states else self.state_tolerance()
            torch.testing.assert_close(mine.double(), right, equal_nan=True, **tolerance)
            is_kept = (right == before.double()) | right.isnan()
            assert torch.equal(mine[is_kept].nan_to_num(9.0), before[is_kept].nan_to_num(9.0))

    def state_tolerance(self) -> dict[str, float]:
        rounding = max(RECORDS["rtol"], torch.finfo(self.buffers.states.dtype).eps)
        return {"rtol": rounding, "atol": rounding}


class PoolCase(OnPools, Case):
    """Decays by head."""

    def __init__(
        self,
        nodes: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        folds: bool,
        width: int = 4,
        heads: tuple[int, int, int, int] = HEADS,
        pending: list[int] = PENDING,
    ) -> None:
        torch.manual_seed(nodes)
        self.pending = pending
        super().__init__(heads, nodes, pending, width=width, shapes=("bushy", "star", "chain"), dtype=dtype)
        self.place(dtype, state_dtype, folds, width)


class ChannelCase(OnPools, test_kda_layer.Case):
    """Kimi Delta Attention."""

    def __init__(self, nodes: int, dtype: torch.dtype, bound: float | None, folds: bool) -> None:
        torch.manual_seed(nodes)
        super().__init__(HEADS, nodes, PENDING, shapes=("bushy", "star", "chain"), dtype=dtype, bound=bound)
        self.place(dtype, torch.float32, folds)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("nodes", [1, 2, 7])
@pytest.mark.parametrize("folds", [False, True])
def test_matches_reference(nodes: int, folds: bool, gpu_device: str) -> None:
    PoolCase(nodes, torch.float32, torch.float32, folds).check_triton(gpu_device)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
def test_activations_in_bfloat16(nodes: int, state_dtype: torch.dtype, gpu_device: str) -> None:
    PoolCase(nodes, torch.bfloat16, state_dtype, folds=False).check_triton(gpu_device)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("nodes", "bound", "folds"), [(1, None, False), (7, -5.0, True), (4, None, True)])
def test_decays_by_channel(
    nodes: int, bound: float | None, folds: bool, dtype: torch.dtype, gpu_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kimi Delta Attention: four launches too, with gates in the second and the last."""
    monkeypatch.setattr(rowwise_in_torch, "delta_inputs", None)
    monkeypatch.setattr(rowwise_in_torch, "gated_rms_norm", None)
    ChannelCase(nodes, dtype, bound, folds).check_triton(gpu_device)


# nodes, heads (Hk, Hv, K, V), and records pending: groups of 1, 2, 3 and 4, odd widths, blocks of nodes and of records
SHARED = [
    (3, (1, 1, 16, 72), [3, 5, 4, 0]),
    (16, (1, 4, 40, 24), [3, 5, 4, 0]),
    (7, (2, 4, 33, 20), [16, 18, 4, 0]),
    (17, (1, 3, 7, 5), [3, 33, 4, 17]),
    (64, (1, 2, 8, 20), [3, 5, 4, 0]),
]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("nodes", "heads", "pending"), SHARED)
@pytest.mark.parametrize("folds", [False, True])
def test_products_are_made_once_for_a_key_head(
    nodes: int,
    heads: tuple[int, int, int, int],
    pending: list[int],
    folds: bool,
    gpu_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the norms, in one launch; the rule finds them, and the keys of nodes in their records."""
    watched = Watched(delta_kernels.tree_kernel, "products")
    monkeypatch.setattr(delta_kernels, "tree_kernel", watched)
    monkeypatch.setattr(rowwise_in_torch, "delta_inputs", None)
    PoolCase(nodes, torch.float32, torch.float32, folds, heads=heads, pending=pending).check_triton(gpu_device)
    assert watched.seen == [True]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("nodes", "heads", "pending"), SHARED)
@pytest.mark.parametrize("folds", [False, True])
def test_products_of_16_bit_models_are_those_that_the_rule_makes(
    nodes: int, heads: tuple[int, int, int, int], pending: list[int], folds: bool, gpu_device: str
) -> None:
    """In parts up to 32 nodes, records among them: the same sums, of other blocks of keys."""
    case = PoolCase(nodes, torch.bfloat16, torch.float32, folds, heads=heads, pending=pending)
    mixed, inputs, weights = (
        torch.randn(case.inputs.mixed.shape, device=gpu_device),
        moved(case.inputs, gpu_device),
        moved(case.weights, gpu_device),
    )
    results = []
    for form in (delta_net_in_triton, delta_net_in_torch):
        buffers = moved(copied(case.buffers), gpu_device)
        with triton_forms():
            state = operands_of(buffers, moved(case.trees, gpu_device))
            out = form.gate_and_advance(mixed, inputs.a, inputs.b, weights, state)
        results.append([x.cpu().double() for x in (out, buffers.states, buffers.k, buffers.u, buffers.decay)])
    for mine, right in zip(*results, strict=True):
        largest = right.nan_to_num().abs().max().item()
        torch.testing.assert_close(mine, right, rtol=2**-13, atol=2**-13 * largest, equal_nan=True)


@pytest.mark.parametrize(
    ("nodes", "is_chain", "heads", "is_shared"),
    [
        (1, True, (1, 2, 16, 128), False),
        (8, True, (1, 2, 16, 128), False),
        (9, True, (1, 2, 16, 128), True),
        (2, False, (1, 2, 16, 16), True),
        (2, False, (2, 2, 16, 128), True),
        (2, False, (2, 2, 16, 64), False),
    ],
)
def test_products_are_made_once_where_several_programs_need_them(
    nodes: int, is_chain: bool, heads: tuple[int, int, int, int], is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(heads, nodes, [0], shapes=("chain",))
    state = operands_of(case.buffers, replace(case.trees, is_chain=is_chain))
    asked = case.inputs.mixed.float(), case.inputs.a, case.inputs.b, case.weights, state
    declared = operator_of(delta_net.gate_and_advance)
    assert declared.choose(*asked) == "torch"
    with triton_forms():
        assert declared.choose(*asked) == ("triton" if is_shared else "torch")
        by_channel = case.inputs.a[..., None].expand(-1, -1, -1, heads[2])
        assert declared.choose(asked[0], by_channel, *asked[2:]) == "torch"
        for off in ("delta_net", "gated_delta_rule"):
            monkeypatch.setattr(gpu, "is_chosen", lambda name, off=off: name != off)
            assert declared.choose(*asked) == "torch"


@pytest.mark.parametrize("width", [2, 3])
def test_convolution_widths(width: int, gpu_device: str) -> None:
    PoolCase(3, torch.float32, torch.float32, folds=True, width=width).check_triton(gpu_device)


def test_17_nodes_and_nothing_known_of_pending(gpu_device: str) -> None:
    case = Case(HEADS, 17, [4], shapes=("bushy",))
    case.trees = replace(case.trees, num_pending=None, slots=torch.tensor([1]))
    case.buffers.states[1].normal_()
    want, wanted = case.wanted()
    buffers, weights = moved(copied(case.buffers), gpu_device), moved(case.weights, gpu_device)
    out = run_triton(moved(case.inputs, gpu_device), weights, buffers, moved(case.trees, gpu_device))
    torch.testing.assert_close(out.cpu().double(), want, **TOLERANCE[torch.float32])
    for mine, right in zip(values(buffers), values(wanted), strict=True):
        torch.testing.assert_close(mine.cpu().double(), right, equal_nan=True, **RECORDS)


def test_what_is_not_finite_stays_in_its_path(gpu_device: str) -> None:
    case = PoolCase(7, torch.float32, torch.float32, folds=True)
    want, clean = case.run_triton(gpu_device)
    case.inputs.mixed[0, 1, 20] = torch.nan  # a channel of the key
    out, left = case.run_triton(gpu_device)
    affected = torch.zeros(4, 7, dtype=torch.bool)
    affected[0] = case.trees.ancestors[0, :, 1]
    assert torch.equal(~out.flatten(2).isfinite().all(-1), affected)
    torch.testing.assert_close(out[~affected], want[~affected])
    at = slice(case.trees.node_offset, case.trees.node_offset + 7)
    for name in ("k", "u", "decay"):
        mine, right = (getattr(x, name)[case.trees.rows, at] for x in (left, clean))
        torch.testing.assert_close(mine[~affected], right[~affected], equal_nan=True)
        assert mine[affected].isfinite().all()
