"""A gated short convolution, in PyTorch and in one native call, against its reference: trees, runs, layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels import short_conv
from specmamba.kernels.short_conv import Inputs, Weights, native_ops, reference, torch_ops
from specmamba.kernels.state_records import Buffers, ExtendOperands, RowSet, SnapshotOperands, Trees
from specmamba.kernels.tree import reference as tree
from tests.kernels.recurrent.layer_case import (
    LayerCase,
    check_nan_stays_in_its_row,
    check_nodes_do_not_depend_on_later_ones,
    check_rows_are_independent,
    copied,
    make_buffers_and_trees,
    operands_of,
)
from tests.kernels.recurrent.run_case import RunCase, check_a_row_alone, check_two_parts
from tests.kernels.rounding import tolerance
from tests.kernels.trees import SHAPES, batch_of_parents
from tests.pairwise import pairwise

CHANNELS = [1, 7, 36, 300, 600]  # beside the native parts of 256, and more than one of them
NO_HEADS = (0, 0, 0, 0)
LENGTHS = [[1], [7, 3], [0, 5, 2], [31, 32, 33], [65, 1]]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
needs_native = pytest.mark.usefixtures("needs_native")


class Case(LayerCase):
    """Random operands of one verify."""

    operators, mix = short_conv, staticmethod(short_conv.advance)

    def __init__(
        self,
        channels: int,
        nodes: int,
        pending: list[int],
        *,
        width: int = 3,
        has_bias: bool = True,
        shapes: tuple[str, ...] = SHAPES,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        # one projection, as the layer has it: tokens lie apart
        self.inputs = Inputs(*torch.randn(len(pending), nodes, 3 * channels).to(dtype).chunk(3, -1))
        bias = torch.randn(channels) if has_bias else None
        self.weights = Weights((torch.randn(width, channels) * 0.5).t(), bias)
        self.buffers, self.trees = make_buffers_and_trees(
            NO_HEADS, nodes, pending, width=width, shapes=shapes, dtype=dtype, plain_channels=channels
        )

    def kept(self) -> Tensor:
        return self.inputs.in_gate * self.inputs.mixed

    @staticmethod
    def exact(inputs: Inputs) -> Inputs:
        """Inputs in float64 whose product is that of the inputs' dtype: it is rounded before it is kept."""
        gated, gate = (inputs.in_gate * inputs.mixed).double(), inputs.gate.double()
        return Inputs(torch.ones_like(gated), gate, gated)


@pairwise(
    each_dtype,
    pytest.mark.parametrize("channels", CHANNELS),
    pytest.mark.parametrize("nodes", [1, 2, 5, 9]),
    pytest.mark.parametrize("width", [1, 2, 3, 6]),
    pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"]),
)
def test_matches_reference(
    form: str, has_bias: bool, width: int, nodes: int, channels: int, dtype: torch.dtype
) -> None:
    Case(channels, nodes, [0, 6, 1, 3, 5], width=width, has_bias=has_bias, dtype=dtype).check(form)


@pytest.mark.parametrize("fill", range(18))
def test_every_fill_of_the_pending_list(form: str, fill: int) -> None:
    Case(36, 3, [fill, fill // 2], shapes=("bushy", "chain")).check(form)


@pairwise(
    each_dtype,
    pytest.mark.parametrize("channels", CHANNELS),
    pytest.mark.parametrize("lengths", LENGTHS),
    pytest.mark.parametrize("width", [1, 2, 3, 6]),
    pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"]),
)
def test_runs_match_reference(
    form: str, has_bias: bool, width: int, lengths: list[int], channels: int, dtype: torch.dtype
) -> None:
    make_run(channels, lengths, dtype, width=width, has_bias=has_bias).check(form)


def make_run(channels: int, lengths: list[int], dtype: torch.dtype = torch.float32, **layer: Any) -> RunCase:
    """Runs of these lengths, with two tokens of padding at the end."""
    case = Case(channels, max(lengths) + 2, [0] * len(lengths), shapes=("chain",), dtype=dtype, **layer)
    return RunCase(case, lengths)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
def test_states_without_heads_may_have_any_dtype(form: str, state_dtype: torch.dtype) -> None:
    case = make_run(36, [5, 3])
    case.state = replace(case.state, states=case.state.states.to(state_dtype))
    case.check(form)


def test_reference_matches_torch_conv1d() -> None:
    """An independent check of the reference, in float64: products around torch's own grouped convolution."""
    case = make_run(6, [11, 11])
    x, w = (copied(operand, torch.float64) for operand in (case.inputs, case.weights))
    windows, slots = case.state.windows.double(), case.state.slots
    seen = torch.cat([windows[slots.index], (x.in_gate * x.mixed)[:, :11]], 1).transpose(1, 2)
    want = x.gate[:, :11] * F.conv1d(seen, w.conv[:, None], w.conv_bias, groups=6).transpose(1, 2)
    state = replace(case.state, states=case.state.states.double(), windows=windows)
    torch.testing.assert_close(reference.extend(x, w, state)[:, :11], want)
    assert torch.equal(state.windows[slots.index], seen[..., -2:].transpose(1, 2))


@pytest.mark.parametrize("nodes", [1, 8])
def test_snapshots_are_the_windows_after_every_node(nodes: int) -> None:
    """Each is what a run along the node's path leaves; rows and slots are no ranges."""
    batch, channels, width = 3, 5, 3
    parents = batch_of_parents(SHAPES[:batch], nodes, seed=nodes)
    inputs = Inputs(*torch.randn(batch, nodes, 3 * channels).chunk(3, -1))
    weights = Weights(torch.randn(width, channels).t(), torch.randn(channels))
    windows, after = torch.randn(7, width - 1, channels), torch.full((6, nodes, width - 1, channels), torch.nan)
    slots, rows = [5, 1, 3], [4, 0, 2]
    none, on = torch.empty(7, 0, 0, 0), torch.device("cpu")
    index = tree.conv_index(parents, width) + width - 1
    state = SnapshotOperands(
        none, windows, torch.empty(6, nodes, 0, 0, 0), after, RowSet.of(rows, on), RowSet.of(slots, on), index, parents
    )
    out = short_conv.advance(inputs, weights, state)
    for b, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        for node in range(nodes):
            path = [node]
            while (parent := int(parents[b, path[0]])) >= 0:
                path.insert(0, parent)
            along = Inputs(*(x[b : b + 1, path] for x in (inputs.in_gate, inputs.gate, inputs.mixed)))
            own = windows.clone()
            run = ExtendOperands(none, own, RowSet.of([slot], on), torch.tensor([len(path)]))
            want = reference.extend(along, weights, run)
            torch.testing.assert_close(out[b, node], want[0, -1], **tolerance())
            assert torch.equal(after[row, node], own[slot])


@needs_native
@each_dtype
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_the_others_or_on_threads(
    threads: int, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    check_rows_are_independent(Case(600, 20, [0, 6, 2, 5, 1], dtype=dtype), threads, set_threads)


@needs_native
@each_dtype
@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_does_not_depend_on_the_others(
    threads: int, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    set_threads(threads)
    check_a_row_alone(make_run(600, [70, 0, 133, 5], dtype))


@needs_native
@pytest.mark.parametrize("at", [1, 31, 32, 64, 99])
def test_two_parts_of_a_run_equal_one(at: int) -> None:
    check_two_parts(make_run(36, [100]), at, 100)


@needs_native
def test_nodes_do_not_depend_on_later_ones() -> None:
    check_nodes_do_not_depend_on_later_ones(Case(36, 8, [6], shapes=("chain",)))


def test_nan_stays_in_its_row(form: str) -> None:
    check_nan_stays_in_its_row(Case(36, 3, [2, 2], shapes=("chain",)), form)


@needs_native
def test_packed_trees(set_threads: Callable[[int], None]) -> None:
    """Nodes of trees of several sizes, one behind the other, and padding, whose outputs are 0."""
    set_threads(2)
    whole, counts = Case(300, 4, [0, 3, 1]), torch.tensor([4, 0, 2])
    nodes = [(b, i) for b, count in enumerate(counts.tolist()) for i in range(count)]
    rows, places = (torch.tensor(x) for x in zip(*nodes, strict=True))
    packed = [torch.cat([x[rows, places], x[0, :3]])[None] for x in (whole.inputs.in_gate, whole.inputs.gate)]
    mixed = torch.cat([whole.inputs.mixed[rows, places], whole.inputs.mixed[0, :3]])[None]
    trees = replace(whole.trees, firsts=torch.tensor([0, 4, 4]), counts=counts, num_packed=9)
    buffers = copied(whole.buffers)
    out = short_conv.tree_verify(Inputs(packed[0], packed[1], mixed), whole.weights, buffers, trees)
    want, wanted = whole.run()
    assert torch.equal(out[0, :6], want[rows, places])
    assert (out[0, 6:] == 0).all()
    first = 2 + trees.node_offset
    kept = buffers.conv_inputs[trees.rows[rows], first + places]
    assert torch.equal(kept, wanted.conv_inputs[trees.rows[rows], first + places])


@needs_native
def test_native_code_takes_what_it_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(8, 2, [1])

    def takes(inputs: Inputs = case.inputs, weights: Weights = case.weights, buffers: Buffers = case.buffers) -> bool:
        return short_conv.can_fuse(operands_of(buffers, case.trees), inputs, weights)

    assert takes()
    assert not takes(inputs=copied(case.inputs, torch.float16))
    assert not takes(inputs=copied(case.inputs, torch.bfloat16))  # the buffers hold float32
    assert not takes(inputs=replace(case.inputs, in_gate=case.inputs.in_gate.bfloat16()))
    assert not takes(weights=replace(case.weights, conv=case.weights.conv.contiguous()))
    assert not takes(weights=copied(case.weights, torch.float64))
    monkeypatch.setitem(native_ops.LAYER.__dict__, "code", None)
    assert not takes()


@needs_native
def test_shapes_that_do_not_fit_are_refused() -> None:
    """Native code would read and write other memory."""
    case = Case(8, 2, [1, 0])
    i, w, x, t = case.inputs, case.weights, case.buffers, case.trees

    def refuse(
        complaint: str, *, inputs: Inputs = i, weights: Weights = w, buffers: Buffers = x, trees: Trees = t
    ) -> None:
        with pytest.raises(ValueError, match=complaint):
            short_conv.tree_verify(inputs, weights, buffers, trees)

    refuse("one dtype", inputs=replace(i, gate=i.gate.bfloat16()))
    refuse("one dtype", inputs=replace(i, in_gate=i.in_gate.to("meta")))
    refuse("one dtype", buffers=replace(x, conv_inputs=x.conv_inputs.bfloat16()))
    refuse("does not take", weights=copied(w, torch.float64))
    refuse("other channels than the convolution", inputs=replace(i, mixed=i.mixed[..., 1:]))
    refuse("another shape than the inputs", inputs=replace(i, gate=i.gate[:, :1]))
    refuse("the bias", weights=replace(w, conv_bias=torch.zeros(7)))
    refuse("other trees", inputs=Inputs(i.in_gate[:1], i.gate[:1], i.mixed[:1]))
    refuse("conv_inputs", buffers=replace(x, conv_inputs=x.conv_inputs[:, 1:]))
    refuse("the states", buffers=replace(x, states=torch.zeros(7, 1, 2, 2)))
    refuse("no room", trees=replace(t, node_offset=4))
    refuse("another width", trees=replace(t, conv_index=t.conv_index[..., 1:].contiguous()))
    run = make_run(8, [5, 3])
    with pytest.raises(ValueError, match="windows have another shape"):
        short_conv.extend(run.inputs, run.weights, replace(run.state, windows=run.state.windows[:, 1:]))
    with pytest.raises(ValueError, match="one entry per row"):
        short_conv.extend(run.inputs, run.weights, replace(run.state, lengths=torch.tensor([5])))


def test_torch_form_keeps_the_inputs() -> None:
    """What it reads is a layer's projection, which others may still need."""
    case = make_run(8, [5])
    before = copied(case.inputs)
    torch_ops.advance(case.inputs, case.weights, case.state)
    for name in ("in_gate", "gate", "mixed"):
        assert torch.equal(getattr(case.inputs, name).nan_to_num(), getattr(before, name).nan_to_num())
