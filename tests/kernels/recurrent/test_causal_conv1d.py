"""The causal convolution: torch_ops against the reference, and the tree form against plain runs along each path."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specmamba.kernels import causal_conv1d
from specmamba.kernels.causal_conv1d import native_ops, reference, torch_ops
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.state_records import Buffers, ExtendOperands, RecordOperands, RowSet, Trees
from specmamba.kernels.tree import reference as tree
from tests.kernels.rounding import tolerance
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of, path_to
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


# ---- native code -----------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
needs_native = pytest.mark.usefixtures("needs_native")


def weights_of(channels: int, width: int, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Laid out as layers have them, by tap."""
    return normal(width, channels, seed=3).t(), normal(channels, seed=4) if has_bias else None


def runs_of(windows: Tensor, slots: list[int], lengths: list[int], is_exact: bool = True) -> ExtendOperands:
    states = torch.zeros(len(windows), 1, 2, 3)
    return ExtendOperands(states, windows, RowSet.of(slots, CPU), torch.tensor(lengths), is_exact)


def nodes_of(conv_inputs: Tensor, index: Tensor, parents: Tensor, offset: int, counts: Tensor | None) -> RecordOperands:
    batch, room = len(index), conv_inputs.shape[1]
    empty = torch.zeros(batch, 1, 1, 1)
    k, u, decay = (torch.zeros(batch, room, 1, 1) for _ in "kud")
    buffers = Buffers(empty, conv_inputs, k, u, decay, is_exact=True)
    rows = torch.arange(batch)
    of_packing = {} if counts is None else {"firsts": counts.cumsum(0) - counts, "counts": counts}
    num_packed = None if counts is None else int(counts.sum())
    trees = Trees(rows, rows, index, None, offset, mask_of(parents), **of_packing, num_packed=num_packed)
    of_rows = RowSet.of(range(batch), CPU)
    return RecordOperands(buffers, trees, of_rows, of_rows)


def run_natively(x: Tensor, weights: tuple[Tensor, Tensor | None], state: ExtendOperands | RecordOperands) -> Tensor:
    assert operator_of(causal_conv1d.advance).choose(x, *weights, state) == "native"
    return causal_conv1d.advance(x, *weights, state)


@needs_native
def test_native_runs_leave_states_of_any_dtype_alone() -> None:
    """They are none of its operands: not copied and put back either."""
    state = runs_of(normal(3, 3, 5, seed=2), [2, 1], [4, 2])
    state = replace(state, states=state.states.bfloat16().transpose(2, 3))
    run_natively(normal(2, 4, 5, seed=1), weights_of(5, 4, True), state)
    assert state.states._version == 0


@needs_native
@pairwise(
    DTYPES,
    BIAS,
    pytest.mark.parametrize("width", [2, 3, 4]),
    pytest.mark.parametrize("channels", [1, 5, 300]),
    pytest.mark.parametrize("lengths", [[1], [0, 2], [40, 3]]),
)
def test_native_runs(lengths: list[int], channels: int, width: int, has_bias: bool, dtype: torch.dtype) -> None:
    """Of slices of wider tokens; slots that belong to no row keep what they have."""
    batch, padded = len(lengths), max(lengths) + 1
    x = normal(batch, padded, channels + 7, seed=1, dtype=dtype)[..., 3 : 3 + channels]
    windows, weights = (
        normal(batch + 2, width - 1, channels, seed=2, dtype=dtype),
        weights_of(channels, width, has_bias),
    )
    slots, before = [batch - b for b in range(batch)], windows.clone()
    y = run_natively(x, weights, runs_of(windows, slots, lengths))
    want, want_windows = reference.extend(x, before[slots], weights[0], torch.tensor(lengths), weights[1])
    for b, length in enumerate(lengths):
        torch.testing.assert_close(y[b, :length], want[b, :length], **tolerance(magnitude=0.1))
        assert (y[b, length:] == 0).all()
    assert torch.equal(windows[slots], want_windows)
    assert torch.equal(windows[[0, batch + 1]], before[[0, batch + 1]])


@needs_native
@pairwise(
    DTYPES,
    BIAS,
    pytest.mark.parametrize("width", [2, 4]),
    pytest.mark.parametrize("channels", [5, 300]),
    pytest.mark.parametrize("is_ragged", [False, True]),
)
def test_native_trees(is_ragged: bool, channels: int, width: int, has_bias: bool, dtype: torch.dtype) -> None:
    batch, nodes, offset = len(SHAPES), 6, 4
    counts = torch.tensor([6, 0, 1, 3, 5]) if is_ragged else None
    parents = batch_of_parents(SHAPES, nodes, seed=1)
    walked = tree.conv_index(parents, width)
    index = width - 1 + torch.where(walked >= 0, offset + walked, 2 + walked)  # two inputs are pending
    kept = normal(batch, width - 1 + offset + nodes, channels, seed=5, dtype=dtype)
    x, weights = normal(batch, nodes, channels, seed=6, dtype=dtype), weights_of(channels, width, has_bias)
    inputs = torch.cat([kept[:, : width - 1 + offset], x], 1)
    y = run_natively(x, weights, nodes_of(kept, index, parents, offset, counts))
    want = reference.tree_verify(inputs, index, *weights)
    is_node = torch.arange(nodes) < (torch.full((batch,), nodes) if counts is None else counts)[:, None]
    torch.testing.assert_close(y[is_node], want[is_node], **tolerance(magnitude=0.1))
    assert (y[~is_node] == 0).all()
    assert torch.equal(kept[:, width - 1 + offset :][is_node], x[is_node])
    assert torch.equal(kept[:, : width - 1 + offset], inputs[:, : width - 1 + offset])


@needs_native
@DTYPES
def test_native_bits_do_not_depend_on_how_tokens_are_run(dtype: torch.dtype) -> None:
    """In one run, in two, and as the path of a tree."""
    width, channels, weights = 4, 37, weights_of(37, 4, True)
    x, windows = normal(1, 40, channels, seed=1, dtype=dtype), normal(1, width - 1, channels, seed=2, dtype=dtype)
    whole = run_natively(x, weights, runs_of(windows.clone(), [0], [40]))
    parted = windows.clone()
    parts = [
        run_natively(x[:, part], weights, runs_of(parted, [0], [part.stop - part.start]))
        for part in (slice(0, 33), slice(33, 40))
    ]
    assert torch.equal(torch.cat(parts, 1), whole)
    parents = torch.tensor([[-1, 0, 0, 2]])
    kept = torch.cat([windows, torch.zeros(1, 4, channels, dtype=dtype)], 1)
    index = width - 1 + tree.conv_index(parents, width)
    y = run_natively(x[:, [0, 9, 1, 2]], weights, nodes_of(kept, index, parents, 0, None))
    assert torch.equal(y[:, [0, 2, 3]], whole[:, :3])


@needs_native
def test_what_native_code_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact states are refused then, and shapes that do not fit in any case."""
    x, weights = normal(1, 3, 5, seed=1), weights_of(5, 4, True)
    windows = torch.zeros(2, 3, 5)
    state = runs_of(windows, [0], [3])
    assert not native_ops.can_take(x.double(), *weights, state)
    assert not native_ops.can_take(x, weights[0].contiguous(), weights[1], state)
    assert not native_ops.can_take(x.bfloat16(), *weights, state)
    for complaint, given in (
        ("the weight", (x[..., 1:], *weights)),
        ("the bias", (x, weights[0], torch.zeros(4))),
        ("the windows", (x, *weights_of(5, 3, False))),
    ):
        with pytest.raises(ValueError, match=complaint):
            native_ops.advance(*given, state)
    index, parents = torch.zeros(1, 3, 4, dtype=torch.int64), torch.tensor([[-1, 0, 1]])
    for complaint, kept, of_tree in (
        ("other trees", torch.zeros(1, 9, 5), (index[:, :2], parents[:, :2])),
        ("another shape", torch.zeros(1, 9, 4), (index, parents)),
        ("index has", torch.zeros(1, 9, 5), (index[..., 1:], parents)),
        ("no room", torch.zeros(1, 5, 5), (index, parents)),
    ):
        with pytest.raises(ValueError, match=complaint):
            native_ops.advance(x, *weights, nodes_of(kept, *of_tree, 0, None))
    monkeypatch.setattr(native_ops, "code", lambda: None)
    with pytest.raises(RuntimeError, match="native code"):
        causal_conv1d.advance(x, *weights, state)
