"""A gated delta net layer, part by part and in one native call, against its reference: trees, records, layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from specmamba.kernels import delta_net
from specmamba.kernels.delta_net import Inputs, Weights, native_ops
from specmamba.kernels.state_records import Buffers, Trees
from specmamba.layers.gated_delta_net import mix
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

# (Hk, Hv, K, V): equal heads, grouped heads, narrow, odd and wide widths; two whose rows registers hold in one pass
HEADS = [(1, 1, 8, 8), (2, 4, 16, 24), (1, 3, 7, 5), (3, 3, 40, 72), (1, 2, 128, 128), (1, 1, 24, 192), (1, 1, 24, 48)]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Case(LayerCase):
    """Random operands of one verify."""

    operators, mix = delta_net, staticmethod(mix)

    def __init__(
        self,
        heads: tuple[int, int, int, int],
        nodes: int,
        pending: list[int],
        *,
        width: int = 4,
        shapes: tuple[str, ...] = SHAPES,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        (hk, hv, key_dim, value_dim), batch = heads, len(pending)
        channels = 2 * hk * key_dim + hv * value_dim
        # one projection, as the layer has it: tokens lie apart, and parts of them are not aligned
        sizes = [channels, hv * value_dim, hv, hv]
        mixed, gate, b, a = torch.split(torch.randn(batch, nodes, sum(sizes)).to(dtype), sizes, -1)
        self.inputs = Inputs(mixed, gate.view(batch, nodes, hv, value_dim), b, a)
        self.weights = Weights(
            conv=(torch.randn(width, channels) * 0.5).t(),
            negative_a=-torch.rand(hv) * 2,
            dt_bias=torch.randn(hv),
            norm=1 + torch.randn(value_dim) * 0.1,
            norm_eps=1e-6,
            num_key_heads=hk,
            key_dim=key_dim,
            step_scale=2.0 if nodes % 2 else 1.0,
        )
        self.buffers, self.trees = make_buffers_and_trees(
            heads, nodes, pending, width=width, shapes=shapes, dtype=dtype
        )


needs_native = pytest.mark.usefixtures("needs_native")


@pairwise(
    each_dtype,
    pytest.mark.parametrize("heads", HEADS),
    pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8]),
)
def test_matches_reference(form: str, nodes: int, heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    Case(heads, nodes, [0, 6, 1, 3, 5], dtype=dtype).check(form)


@pytest.mark.parametrize("heads", HEADS[:3])
def test_many_nodes(form: str, heads: tuple[int, int, int, int]) -> None:
    Case(heads, 33, [2, 17], shapes=("bushy", "padded")).check(form)


@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_convolution_widths(form: str, width: int) -> None:
    Case(HEADS[1], 5, [0, 4, 1, 2, 7], width=width).check(form)


@pytest.mark.parametrize("fill", range(18))
def test_every_fill_of_the_pending_list(form: str, fill: int) -> None:
    Case(HEADS[1], 3, [fill, fill // 2], shapes=("bushy", "chain")).check(form)


@pytest.mark.parametrize("factor", [0.0, 1e3])
def test_stable_at_any_decay(form: str, factor: float) -> None:
    """Nothing decays, or everything at once."""
    case = Case(HEADS[1], 7, [0, 3, 1, 2, 3])
    case.weights.negative_a.mul_(factor)
    case.check(form)


@needs_native
@each_dtype
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_the_others_or_on_threads(
    threads: int, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    case = Case(HEADS[4], 8, [0, 6, 2, 5, 1], dtype=dtype)
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
        return delta_net.can_fuse(operands_of(buffers, case.trees), inputs, weights)

    assert takes()
    assert not takes(inputs=copied(case.inputs, torch.float16))
    assert not takes(inputs=copied(case.inputs, torch.bfloat16))  # the buffers hold float32
    assert not takes(inputs=replace(case.inputs, gate=case.inputs.gate.bfloat16()))
    assert not takes(weights=replace(case.weights, conv=case.weights.conv.contiguous()))
    assert not takes(weights=copied(case.weights, torch.float64))
    for name in ("norm", "dt_bias", "negative_a"):
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
            delta_net.tree_verify(inputs, weights, buffers, trees)

    refuse("one dtype", inputs=replace(i, gate=i.gate.bfloat16()))
    refuse("one dtype", inputs=replace(i, a=i.a.bfloat16()))
    refuse("one dtype", inputs=replace(i, b=i.b.to("meta")))
    refuse("one dtype", inputs=copied(i, torch.float16))
    refuse("one dtype", buffers=replace(x, conv_inputs=x.conv_inputs.bfloat16()))
    refuse("does not take", weights=copied(w, torch.float64))
    refuse("does not take", weights=replace(w, conv=w.conv.contiguous()))
    refuse("does not take", buffers=replace(x, decay=x.decay.double()))
    refuse("does not take", buffers=replace(x, u=x.u.mT.contiguous().mT))
    refuse("other channels than the convolution", inputs=replace(i, mixed=i.mixed[..., 1:]))
    refuse("the gate", inputs=replace(i, gate=i.gate[:, :1]))
    refuse("a and b", inputs=replace(i, a=i.a[..., 1:]))
    refuse("other trees", inputs=Inputs(i.mixed[:1], i.gate[:1], i.b[:1], i.a[:1]))
    refuse("no multiple", weights=replace(w, num_key_heads=3))
    refuse("no multiple", weights=replace(w, num_key_heads=0))
    refuse("other channels than the heads", weights=replace(w, key_dim=15))
    refuse("decays have", weights=replace(w, dt_bias=w.dt_bias[:1]))
    refuse("the states", buffers=replace(x, states=x.states[:, :1]))
    refuse("conv_inputs", buffers=replace(x, conv_inputs=x.conv_inputs[:, 1:]))
    refuse("k has", buffers=replace(x, k=x.k[:, :, :1].contiguous()))
    refuse("u has", buffers=replace(x, u=x.u[:1]))
    refuse("decay has", buffers=replace(x, decay=x.decay[..., :1].contiguous()))
    refuse("no room", trees=replace(t, node_offset=4))
    refuse("another width", trees=replace(t, conv_index=t.conv_index[..., 1:].contiguous()))
    refuse("one entry per tree", trees=replace(t, slots=t.slots[:1]))
    refuse("one entry per tree", trees=replace(t, num_pending=torch.tensor([1])))
    refuse("contiguous int64", trees=replace(t, rows=t.rows.int()))
    refuse("rows of bool", trees=replace(t, ancestors=t.ancestors.float()))
