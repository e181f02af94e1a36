"""The causal convolution: torch_ops against the reference, and the tree form against plain runs along each path."""

import pytest
import torch
from torch import Tensor

from specmamba.kernels.causal_conv1d import reference, torch_ops
from specmamba.kernels.tree import reference as tree
from tests.kernels.rounding import tolerance
from tests.kernels.trees import SHAPES, batch_of_parents, path_to
from tests.pairwise import pairwise

BIAS = pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pairwise(
    DTYPES,
    BIAS,
    pytest.mark.parametrize("width", [2, 3, 4]),
    pytest.mark.parametrize("channels", [1, 5, 64]),
    pytest.mark.parametrize("lengths", [[1], [0, 2], [1, 2, 3], [63, 17], [5, 0, 9, 4]]),
)
def test_extend_matches_reference(
    lengths: list[int], channels: int, width: int, has_bias: bool, dtype: torch.dtype
) -> None:
    batch, padded = len(lengths), max(lengths) + 1
    x = normal(batch, padded, channels, seed=1, dtype=dtype)
    counts = torch.tensor(lengths)
    x[torch.arange(padded) >= counts[:, None]] = float("nan")  # padding: must reach neither y nor the window
    window = normal(batch, width - 1, channels, seed=2, dtype=dtype)
    weight = normal(channels, width, seed=3, dtype=dtype)
    bias = normal(channels, seed=4) if has_bias else None
    before = [t.clone() for t in (x, window, weight)]
    y, new_window = torch_ops.extend(x, window, weight, counts, bias)
    want, want_window = reference.extend(x, window, weight, counts, bias)
    for b, length in enumerate(lengths):
        torch.testing.assert_close(y[b, :length], want[b, :length], **tolerance(dtype, magnitude=0.1))
    assert torch.equal(new_window, want_window)
    assert new_window.dtype == dtype
    assert y.dtype == torch.float32
    assert y.shape == x.shape
    assert new_window.data_ptr() != window.data_ptr()
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, (x, window, weight), strict=True))


def test_reference_matches_torch_conv1d() -> None:
    """An independent check of the reference: torch's own grouped convolution, in float64."""
    x, window, weight = normal(2, 11, 6, seed=4), normal(2, 3, 6, seed=5), normal(6, 4, seed=6)
    x, window, weight, bias = x.double(), window.double(), weight.double(), normal(6, seed=7).double()
    y, _ = reference.extend(x, window, weight, torch.tensor([11, 11]), bias)
    padded = torch.cat([window, x], 1).transpose(1, 2)
    want = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=6)).transpose(1, 2)
    torch.testing.assert_close(y, want)
    assert y.dtype == torch.float64


@pytest.mark.parametrize("split", [1, 2, 5, 12])
def test_extend_in_two_parts_equals_one(split: int) -> None:
    x, window, weight = normal(2, 13, 7, seed=7), normal(2, 3, 7, seed=8), normal(7, 4, seed=9)
    whole, whole_window = torch_ops.extend(x, window, weight, torch.full((2,), 13))
    first, middle = torch_ops.extend(x[:, :split], window, weight, torch.full((2,), split))
    second, last = torch_ops.extend(x[:, split:], middle, weight, torch.full((2,), 13 - split))
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **tolerance(magnitude=0.1))
    assert torch.equal(last, whole_window)


@pairwise(
    DTYPES,
    BIAS,
    pytest.mark.parametrize("width", [2, 4]),
    pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (1, 6), (3, 1), (5, 19)]),
)
def test_tree_verify_matches_reference(batch: int, nodes: int, width: int, has_bias: bool, dtype: torch.dtype) -> None:
    channels, rows = 11, width + 3 + nodes
    index = torch.randint(rows, (batch, nodes, width), generator=torch.Generator().manual_seed(nodes))
    inputs = normal(batch, rows, channels, seed=10, dtype=dtype)
    unread = torch.ones(batch, rows, dtype=torch.bool).scatter_(1, index.reshape(batch, -1), False)
    inputs[unread] = float("nan")
    weight = normal(channels, width, seed=11, dtype=dtype)
    bias = normal(channels, seed=12) if has_bias else None
    y = torch_ops.tree_verify(inputs, index, weight, bias)
    torch.testing.assert_close(y, reference.tree_verify(inputs, index, weight, bias), **tolerance(dtype, magnitude=0.1))
    assert y.dtype == torch.float32


@pytest.mark.parametrize("nodes", [1, 6, 16])
def test_tree_verify_equals_extend_along_every_path(nodes: int) -> None:
    """Nodes after a stored window and ragged pending inputs see what a plain run along their path sees."""
    width, channels, most_pending = 4, 3, 5
    num_pending = torch.tensor([0, 5, 2, 1, 4])
    parents = batch_of_parents(SHAPES, nodes, seed=nodes)
    window = normal(5, width - 1, channels, seed=12)
    pending, x = normal(5, most_pending, channels, seed=13), normal(5, nodes, channels, seed=14)
    weight = normal(channels, width, seed=15)
    first_node = width - 1 + most_pending
    walked = tree.conv_index(parents, width)
    before_root = (width - 1 + num_pending)[:, None, None] + walked  # -1 is the newest input before the root
    index = torch.where(walked >= 0, first_node + walked, before_root)
    y = torch_ops.tree_verify(torch.cat([window, pending, x], 1), index, weight)
    for b in range(5):
        for i in range(nodes):
            history = torch.cat([pending[b, : num_pending[b]], x[b, path_to(parents[b].tolist(), i)]])
            want, _ = reference.extend(history[None], window[b : b + 1], weight, torch.tensor([len(history)]))
            torch.testing.assert_close(y[b, i], want[0, -1], **tolerance(magnitude=0.1))
