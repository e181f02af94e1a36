"""The native tree convolution against its reference."""

from __future__ import annotations

import pytest
import torch

from specmamba.kernels import causal_conv1d
from specmamba.kernels.causal_conv1d import native_ops, reference, torch_ops
from specmamba.kernels.tree import reference as tree
from tests.kernels.test_causal_conv1d import DTYPES, normal
from tests.kernels.trees import SHAPES, batch_of_parents

pytestmark = pytest.mark.usefixtures("needs_native")


@DTYPES
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("nodes", "channels", "width"), [(1, 1, 2), (5, 37, 4), (17, 64, 3), (9, 2060, 4)])
def test_tree_verify_matches_reference(nodes: int, channels: int, width: int, threads: int, dtype: torch.dtype) -> None:
    parents = batch_of_parents(SHAPES, nodes, seed=nodes)
    batch, before = len(SHAPES), width - 1
    index = tree.conv_index(parents, width) + before
    inputs = normal(batch, before + nodes, channels, seed=1, dtype=dtype)
    weight = normal(channels, width, seed=2)
    buffer = torch.full((batch + 2, before + nodes + 3, channels), float("nan"), dtype=dtype)
    buffer[1:-1, : before + nodes] = inputs
    want = reference.tree_verify(inputs, index, weight)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    y = native_ops.tree_verify(buffer[1:-1, : before + nodes], index, weight)
    taps_first = native_ops.tree_verify(inputs, index, weight.t().contiguous().t())
    torch.set_num_threads(threads_before)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(taps_first, y)


def test_what_is_no_number_stays_on_its_path() -> None:
    parents = torch.tensor([[-1, 0, 0, 1]])
    inputs, weight = normal(1, 7, 20, seed=3), normal(20, 4, seed=4)
    inputs[0, 3 + 1, 11] = float("nan")  # node 1
    y = native_ops.tree_verify(inputs, tree.conv_index(parents, 4) + 3, weight)
    is_hit = torch.zeros(1, 4, 20, dtype=torch.bool)
    is_hit[0, [1, 3], 11] = True
    assert torch.equal(y.isnan(), is_hit)


@pytest.mark.parametrize("value", [-1e30, -104.0, -88.0, -1.0, 0.0, 20.0, 88.5, 1e30])
def test_silu_at_the_ends(value: float) -> None:
    inputs, index = torch.full((1, 1, 16), value), torch.zeros(1, 1, 1, dtype=torch.int64)
    y = native_ops.tree_verify(inputs, index, torch.ones(16, 1))
    torch.testing.assert_close(y, torch.nn.functional.silu(inputs), rtol=1e-6, atol=1e-37)


def test_the_op_takes_native_code_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, index, weight = normal(1, 4, 5, seed=5), torch.arange(4)[None, None], normal(5, 4, seed=6)
    taken = []
    for ops in (native_ops, torch_ops):
        monkeypatch.setattr(ops, "tree_verify", lambda *_, ops=ops: taken.append(ops))
    causal_conv1d.tree_verify(inputs, index, weight)
    causal_conv1d.tree_verify(inputs.bfloat16(), index, weight)
    causal_conv1d.tree_verify(inputs.half(), index, weight)
    causal_conv1d.tree_verify(inputs.double(), index, weight.double())
    monkeypatch.setattr(native_ops, "code", lambda: None)
    causal_conv1d.tree_verify(inputs, index, weight)
    assert taken == [native_ops, native_ops, torch_ops, torch_ops, torch_ops]


def test_shapes_that_do_not_fit_are_refused() -> None:
    inputs, index, weight = normal(1, 4, 5, seed=5), torch.arange(4)[None, None], normal(5, 4, seed=6)
    for wrong in ((inputs[..., :4], index, weight), (inputs, index[..., :3], weight), (inputs[:0], index, weight)):
        with pytest.raises(ValueError, match="do not fit"):
            native_ops.tree_verify(*wrong)
