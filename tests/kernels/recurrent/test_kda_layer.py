"""A layer of Kimi Delta Attention, part by part and in one native call, against its reference: trees and runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specmamba.kernels import delta_net
from specmamba.kernels.delta_net import Inputs, Weights
from specmamba.layers.gated_delta_net import mix
from tests.kernels.recurrent.layer_case import (
    LayerCase,
    check_nan_stays_in_its_row,
    check_nodes_do_not_depend_on_later_ones,
    check_rows_are_independent,
    make_buffers_and_trees,
)
from tests.kernels.recurrent.run_case import RunCase, check_a_row_alone, check_two_parts
from tests.kernels.recurrent.strong_decay import DECAYS, mixed
from tests.kernels.trees import SHAPES
from tests.pairwise import pairwise

HEADS = [(1, 1, 8, 8), (2, 4, 16, 24), (1, 3, 7, 5), (1, 2, 128, 128)]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
each_bound = pytest.mark.parametrize("bound", [None, -5.0])
needs_native = pytest.mark.usefixtures("needs_native")


class Case(LayerCase):
    """Random operands of one verify."""

    operators, mix = delta_net, staticmethod(mix)

    def __init__(
        self,
        heads: tuple[int, int, int, int],
        nodes: int,
        pending: list[int],
        *,
        shapes: tuple[str, ...] = SHAPES,
        dtype: torch.dtype = torch.float32,
        bound: float | None = None,
    ) -> None:
        (hk, hv, key_dim, value_dim), batch = heads, len(pending)
        channels = 2 * hk * key_dim + hv * value_dim
        # parts of one projection, as the layer may have them: tokens lie apart, and parts of them are not aligned
        sizes = [channels, hv * value_dim, hv, hv * key_dim]
        mixed, gate, b, a = torch.split(torch.randn(batch, nodes, sum(sizes)).to(dtype), sizes, -1)
        self.inputs = Inputs(mixed, gate.unflatten(-1, (hv, -1)), b, a.unflatten(-1, (hv, -1)))
        self.weights = Weights(
            conv=(torch.randn(4, channels) * 0.5).t(),
            negative_a=-torch.rand(hv) * 2,
            dt_bias=torch.randn(hv, key_dim),
            norm=1 + torch.randn(value_dim) * 0.1,
            norm_eps=1e-5,
            num_key_heads=hk,
            key_dim=key_dim,
            lower_bound=bound,
            has_sigmoid_gate=True,
        )
        self.buffers, self.trees = make_buffers_and_trees(
            heads, nodes, pending, shapes=shapes, dtype=dtype, has_channels=True
        )


@pairwise(each_dtype, each_bound, pytest.mark.parametrize("heads", HEADS), pytest.mark.parametrize("nodes", [1, 3, 8]))
def test_trees(
    form: str, nodes: int, heads: tuple[int, int, int, int], bound: float | None, dtype: torch.dtype
) -> None:
    Case(heads, nodes, [0, 6, 1, 3, 17], dtype=dtype, bound=bound).check(form)


@pairwise(
    each_dtype, each_bound, pytest.mark.parametrize("heads", HEADS), pytest.mark.parametrize("length", [1, 9, 131])
)
def test_runs(
    form: str, length: int, heads: tuple[int, int, int, int], bound: float | None, dtype: torch.dtype
) -> None:
    RunCase(Case(heads, length, [0, 0], shapes=("chain",), dtype=dtype, bound=bound), [length, length // 2]).check(form)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", HEADS)
def test_decays_of_0_to_3000_mixed(form: str, heads: tuple[int, int, int, int], seed: int) -> None:
    """Log decays of -8e-4 to -3000 from channel to channel and token to token; of records from 0 on."""
    inputs = torch.tensor([-14.0, -11.0, -8.0, -6.0, 0.0, 3.0])  # of softplus, for a rate of -1000
    for case in (Case(heads, 9, [0, 6, 1, 3, 17]), Case(heads, 70, [0, 0], shapes=("chain",))):
        case.weights.negative_a.fill_(-1000.0)
        case.weights.dt_bias.zero_()
        case.inputs.a.copy_(mixed(inputs, case.inputs.a.shape, seed))
        decay = case.buffers.decay
        decay.copy_(torch.where(decay.isnan(), decay, mixed(DECAYS, decay.shape, seed)))
        case.check(form) if case.trees.num_nodes == 9 else RunCase(case, [70, 35]).check(form)


@needs_native
@each_dtype
def test_a_row_does_not_depend_on_the_others_or_on_threads(
    dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    check_rows_are_independent(Case(HEADS[3], 8, [0, 6, 2, 5, 1], dtype=dtype), 2, set_threads)
    check_a_row_alone(RunCase(Case(HEADS[1], 70, [0, 0, 0], shapes=("chain",), dtype=dtype), [70, 3, 41]))
    check_two_parts(RunCase(Case(HEADS[1], 70, [0], shapes=("chain",), dtype=dtype), [70]), 31, 70)
    check_nodes_do_not_depend_on_later_ones(Case(HEADS[1], 6, [4], shapes=("chain",), dtype=dtype))


def test_what_is_not_finite_stays_in_its_row(form: str) -> None:
    check_nan_stays_in_its_row(Case(HEADS[1], 4, [2, 3], shapes=("chain",)), form)
    case = Case(HEADS[1], 4, [2, 3], shapes=("chain",))
    case.inputs.a[0, 1, 0, 2] = torch.inf  # a log decay of -inf
    out, buffers = case.run(form)
    assert out[0, 1:, 0].isnan().all()
    assert out[1].isfinite().all()
    assert buffers.decay[case.trees.rows[0], 3 : 3 + 4].isfinite().all()


@needs_native
def test_shapes_that_do_not_fit_are_refused() -> None:
    case = Case(HEADS[1], 2, [0])
    inputs = Inputs(case.inputs.mixed, case.inputs.gate, case.inputs.b, case.inputs.a[..., 0])
    with pytest.raises(ValueError, match="per key channel"):
        delta_net.tree_verify(inputs, case.weights, case.buffers, case.trees)
    case.buffers.decay.resize_(*case.buffers.decay.shape[:3])
    with pytest.raises(ValueError, match="decay has another shape"):
        delta_net.tree_verify(case.inputs, case.weights, case.buffers, case.trees)
