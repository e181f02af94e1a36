"""A Mamba2 layer, part by part and in one native call, against its reference: trees, records, norms, layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from specmamba.kernels import mamba2
from specmamba.kernels.mamba2 import Inputs, Weights, native_ops
from specmamba.kernels.state_records import Buffers, Trees
from specmamba.layers.mamba2 import mix
from tests.kernels.recurrent.layer_case import (
    LayerCase,
    check_nan_stays_in_its_row,
    check_nodes_do_not_depend_on_later_ones,
    check_rows_are_independent,
    copied,
    make_buffers_and_trees,
    operands_of,
)
from tests.kernels.trees import SHAPES
from tests.pairwise import pairwise

# (G, H, S, P): one head, groups of heads, narrow, odd and wide widths, one group, as many groups as heads
HEADS = [(1, 1, 8, 8), (2, 4, 16, 24), (1, 3, 7, 5), (3, 3, 40, 72), (1, 4, 128, 64), (2, 2, 33, 80), (1, 2, 16, 136)]
NORMS = ("none", "before", "after")
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
needs_native = pytest.mark.usefixtures("needs_native")


class Case(LayerCase):
    """Random operands of one verify."""

    operators, mix = mamba2, staticmethod(mix)

    def __init__(
        self,
        heads: tuple[int, int, int, int],
        nodes: int,
        pending: list[int],
        *,
        width: int = 4,
        shapes: tuple[str, ...] = SHAPES,
        dtype: torch.dtype = torch.float32,
        norm: str = "after",
        norm_groups: int | None = None,
        conv_bias: bool = True,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
    ) -> None:
        (groups, num_heads, state_dim, head_dim), batch = heads, len(pending)
        inner = num_heads * head_dim
        channels = inner + 2 * groups * state_dim
        # one projection, as the layer has it: tokens lie apart, and parts of them are not aligned
        projected = torch.randn(batch, nodes, inner + channels + num_heads).to(dtype)
        self.inputs = Inputs(*projected.split([inner, channels, num_heads], -1))
        self.weights = Weights(
            conv=(torch.randn(width, channels) * 0.5).t(),
            conv_bias=torch.randn(channels) if conv_bias else None,
            negative_a=-torch.rand(num_heads) * 2,
            dt_bias=torch.randn(num_heads),
            skip=torch.randn(num_heads),
            norm=None if norm == "none" else 1 + torch.randn(inner) * 0.1,
            norm_eps=1e-5,
            norm_groups=groups if norm_groups is None else norm_groups,
            norm_before_gate=norm == "before",
            num_groups=groups,
            state_dim=state_dim,
            head_dim=head_dim,
            dt_limit=dt_limit,
        )
        self.buffers, self.trees = make_buffers_and_trees(
            heads, nodes, pending, width=width, shapes=shapes, dtype=dtype
        )


@pairwise(
    each_dtype,
    pytest.mark.parametrize("heads", HEADS),
    pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8]),
)
def test_matches_reference(form: str, nodes: int, heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    Case(heads, nodes, [0, 6, 1, 3, 5], dtype=dtype).check(form)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("heads", HEADS)
def test_matches_reference_on_a_gpu(heads: tuple[int, int, int, int], norm: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(heads, 5, [0, 6, 1, 3, 5], norm=norm, dtype=dtype)
        case.leave_slot_0()
        case.check("cuda")


@pytest.mark.parametrize("heads", HEADS[:3])
def test_many_nodes(form: str, heads: tuple[int, int, int, int]) -> None:
    Case(heads, 33, [2, 17], shapes=("bushy", "padded")).check(form)


@pytest.mark.parametrize("width", [1, 2, 3, 6])
@pytest.mark.parametrize("conv_bias", [False, True])
def test_convolutions(form: str, conv_bias: bool, width: int) -> None:
    Case(HEADS[1], 5, [0, 4, 1, 2, 7], width=width, conv_bias=conv_bias).check(form)


@pairwise(
    each_dtype,
    pytest.mark.parametrize("norm", NORMS),
    pytest.mark.parametrize("norm_groups", [1, 2, 4, 8]),
)
def test_norms(form: str, norm_groups: int, norm: str, dtype: torch.dtype) -> None:
    """Over everything, over the heads of a group, over a head, over a part of one."""
    Case(HEADS[1], 3, [0, 4, 1], norm=norm, norm_groups=norm_groups, dtype=dtype).check(form)


@pytest.mark.parametrize("limit", [(0.3, float("inf")), (0.0, 0.8), (0.4, 0.5)])
def test_limits_of_the_step_size(form: str, limit: tuple[float, float]) -> None:
    case = Case(HEADS[1], 4, [0, 4, 1], dt_limit=limit)
    case.check(form)
    free = replace(case.weights, dt_limit=(0.0, float("inf")))
    case.weights, (out, _) = free, case.run(form)
    assert not torch.allclose(out, case.run(form)[0], atol=1e-2)


@pytest.mark.parametrize("fill", range(18))
def test_every_fill_of_the_pending_list(form: str, fill: int) -> None:
    Case(HEADS[1], 3, [fill, fill // 2], shapes=("bushy", "chain")).check(form)


@pytest.mark.parametrize("fill", [0, 5])
def test_no_counts_of_pending_records_mean_all(form: str, fill: int) -> None:
    case = Case(HEADS[1], 4, [fill, fill])
    case.trees = replace(case.trees, num_pending=None)
    case.check(form)


@pytest.mark.parametrize("factor", [0.0, 1e3])
def test_stable_at_any_decay(form: str, factor: float) -> None:
    """Nothing decays, or everything at once."""
    case = Case(HEADS[1], 7, [0, 3, 1, 2, 3])
    case.weights.negative_a.mul_(factor)
    case.check(form)


@needs_native
@pairwise(
    each_dtype,
    pytest.mark.parametrize("threads", [1, 2]),
    pytest.mark.parametrize("heads", [HEADS[4], (2, 6, 16, 32)]),
)
def test_a_row_does_not_depend_on_the_others_or_on_threads(
    heads: tuple[int, int, int, int], threads: int, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    """With two threads, runs of heads begin inside of groups; with this many nodes they share the norm too."""
    case = Case(heads, 24, [0, 6, 2, 5, 1], dtype=dtype)
    check_rows_are_independent(case, threads, set_threads)


@needs_native
def test_nodes_do_not_depend_on_later_ones() -> None:
    check_nodes_do_not_depend_on_later_ones(Case(HEADS[4], 8, [6], shapes=("chain",)))


def test_nan_stays_in_its_row(form: str) -> None:
    check_nan_stays_in_its_row(Case(HEADS[1], 3, [2, 2], shapes=("chain",)), form)


@needs_native
def test_native_code_takes_what_it_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(HEADS[1], 2, [1])

    def takes(inputs: Inputs = case.inputs, weights: Weights = case.weights, buffers: Buffers = case.buffers) -> bool:
        return mamba2.can_fuse(operands_of(buffers, case.trees), inputs, weights)

    assert takes()
    assert takes(weights=replace(case.weights, norm=None, conv_bias=None))
    assert not takes(inputs=copied(case.inputs, torch.float16))
    assert not takes(inputs=copied(case.inputs, torch.bfloat16))  # the buffers hold float32
    assert not takes(inputs=replace(case.inputs, gate=case.inputs.gate.bfloat16()))
    assert not takes(weights=replace(case.weights, conv=case.weights.conv.contiguous()))
    assert not takes(weights=copied(case.weights, torch.float64))
    for name in ("norm", "dt_bias", "negative_a", "skip", "conv_bias"):
        apart = getattr(case.weights, name).repeat_interleave(2)[::2]
        assert not takes(weights=replace(case.weights, **{name: apart}))
    assert not takes(buffers=replace(case.buffers, u=case.buffers.u.mT.contiguous().mT))
    assert not takes(buffers=replace(case.buffers, decay=case.buffers.decay.double()))
    monkeypatch.setitem(native_ops.LAYER.__dict__, "code", None)
    assert not takes()


@needs_native
def test_shapes_that_do_not_fit_are_refused() -> None:
    """Native code would read and write other memory."""
    case = Case(HEADS[1], 2, [1, 0])
    i, w, x, t = case.inputs, case.weights, case.buffers, case.trees

    def refuse(
        complaint: str, *, inputs: Inputs = i, weights: Weights = w, buffers: Buffers = x, trees: Trees = t
    ) -> None:
        with pytest.raises(ValueError, match=complaint):
            mamba2.tree_verify(inputs, weights, buffers, trees)

    refuse("one dtype", inputs=replace(i, gate=i.gate.bfloat16()))
    refuse("one dtype", inputs=replace(i, dt=i.dt.to("meta")))
    refuse("one dtype", inputs=copied(i, torch.float16))
    refuse("one dtype", buffers=replace(x, conv_inputs=x.conv_inputs.bfloat16()))
    refuse("does not take", weights=copied(w, torch.float64))
    refuse("does not take", weights=replace(w, conv=w.conv.contiguous()))
    refuse("does not take", buffers=replace(x, decay=x.decay.double()))
    refuse("other channels than the convolution", inputs=replace(i, mixed=i.mixed[..., 1:]))
    refuse("the gate", inputs=replace(i, gate=i.gate[:, :1]))
    refuse("one value per head", inputs=replace(i, dt=i.dt[..., 1:]))
    refuse("other trees", inputs=Inputs(i.gate[:1], i.mixed[:1], i.dt[:1]))
    refuse("no multiple", weights=replace(w, num_groups=3))
    refuse("no multiple", weights=replace(w, num_groups=0))
    for limit in ((0.5, 0.4), (torch.nan, 1.0)):
        refuse("in no order", weights=replace(w, dt_limit=limit))
    refuse("other channels than the heads", weights=replace(w, state_dim=15))
    refuse("the convolution's bias", weights=replace(w, conv_bias=torch.zeros(3)))
    for name in ("dt_bias", "skip"):
        refuse("one value per head", weights=replace(w, **{name: getattr(w, name)[:1]}))
    refuse("the norm has", weights=replace(w, norm=torch.ones(24)))
    for count in (0, 5):
        refuse("the norm's groups", weights=replace(w, norm_groups=count))
    refuse("the states", buffers=replace(x, states=x.states[:, :1]))
    refuse("conv_inputs", buffers=replace(x, conv_inputs=x.conv_inputs[:, 1:]))
    refuse("k has", buffers=replace(x, k=x.k[:, :, :1].contiguous()))
    refuse("u has", buffers=replace(x, u=x.u[:1]))
    refuse("decay has", buffers=replace(x, decay=x.decay[..., :1].contiguous()))
    refuse("no room", trees=replace(t, node_offset=4))
    refuse("another width", trees=replace(t, conv_index=t.conv_index[..., 1:].contiguous()))
    refuse("one entry per tree", trees=replace(t, slots=t.slots[:1]))
