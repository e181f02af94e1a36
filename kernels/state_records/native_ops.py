"""Native code for records (native.cpp): folds, and the structures (operands.h) of verifies and extends."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_int
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import contiguous_from, is_contiguous_from, require, struct
from specmamba.kernels.state_records.operands import Buffers, ExtendOperands, Trees, as_stored

SOURCE = Path(__file__).parent / "native.cpp"

_FoldStruct = struct(
    "Fold",
    ["state", "records_k", "records_u", "records_decay", "num_pending", "folded"],
    [
        *("batch", "key_heads", "value_heads", "key_dim", "value_dim", "decay_dim"),
        *("state_batch", "k_batch", "u_batch", "decay_batch", "folded_batch", "is_exact"),
    ],
)

_RowFolds = struct(
    "RowFolds",
    [
        *("states", "conv_inputs", "windows", "records_k", "records_u", "records_decay"),
        *("rows_of_batch", "slots_of_batch", "num_pending", "folds"),
    ],
    [
        *("batch", "layers", "slots", "rows", "capacity", "window", "input_bytes"),
        *("key_heads", "value_heads", "key_dim", "value_dim", "decay_dim", "is_exact"),
    ],
)


def can_take(state: Tensor, *written: Tensor) -> bool:
    """Whether native code computes on these: float32 on the CPU, and every row of what it writes contiguous.

    A fold into a state is in place, so the state cannot be copied into another layout first.
    """
    return (
        all(x.dtype is torch.float32 and x.is_cpu for x in (state, *written))
        and state.numel() > 0
        and all(is_contiguous_from(x, 1) for x in written)
        and code() is not None
    )


def fold(state: Tensor, k: Tensor, u: Tensor, decay: Tensor, num_pending: Tensor, out: Tensor | None = None) -> Tensor:
    """One call for all rows and heads."""
    return _fold(state, k, u, decay, num_pending, out, is_exact=False)


def fold_exactly(
    state: Tensor, k: Tensor, u: Tensor, decay: Tensor, num_pending: Tensor, out: Tensor | None = None
) -> Tensor:
    """One call likewise, one record after the other (exact.h)."""
    return _fold(state, k, u, decay, num_pending, out, is_exact=True)


def _fold(
    state: Tensor, k: Tensor, u: Tensor, decay: Tensor, num_pending: Tensor, out: Tensor | None, is_exact: bool
) -> Tensor:
    native = library.required(code())
    batch, value_heads, key_dim, value_dim = state.shape
    sizes = batch, k.shape[2], value_heads, key_dim, value_dim
    _check_shapes(state, k, u, decay, num_pending, sizes)
    state, num_pending = contiguous_from(state, 1), num_pending.contiguous()
    out = torch.empty(state.shape) if out is None else out
    require(out.shape == state.shape, "out has another shape than the state")
    arguments = _FoldStruct(
        *(x.data_ptr() for x in (state, k, u, decay, num_pending, out)),
        *(*sizes, 1 if decay.dim() == 3 else key_dim),
        *(x.stride(0) for x in (state, k, u, decay, out)),
        is_exact,
    )
    native.fold_records(arguments, torch.get_num_threads())
    return out


def can_fold_rows(x: Buffers) -> bool:
    """Whether native code folds in place: float32 states and contiguous buffers on the CPU."""
    is_float = all(y.dtype is torch.float32 for y in (x.states, x.k, x.u, x.decay))
    return is_float and all(y.is_cpu and y.is_contiguous() for y in _memory(x)) and code() is not None


def fold_rows(buffers: Buffers, rows: Tensor, slots: Tensor, num_pending: Tensor, folds: Tensor | None = None) -> None:
    """One call for all layers and rows. Rows and slots are not checked."""
    native = library.required(code())
    pointers = *(x.data_ptr() for x in _memory(buffers)), *pointers_of_rows(rows, slots, num_pending, folds)
    native.fold_rows(_RowFolds(*pointers, len(rows), *_sizes(buffers)), torch.get_num_threads())


def pointers_of_rows(
    rows: Tensor, slots: Tensor, num_pending: Tensor, folds: Tensor | None
) -> tuple[int, int, int, int | None]:
    """Addresses of what a fold of rows knows of the batch, after checks; rows and slots themselves are not checked.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    batch, places = len(rows), (rows, slots, num_pending)
    are_places = all(x.dtype is torch.int64 and x.is_cpu and x.is_contiguous() for x in places)
    require(are_places, "places need contiguous int64 on the CPU")
    require(all(x.shape == (batch,) for x in places), "rows, slots and num_pending need one entry per row")
    is_mask = folds is None or (folds.dtype is torch.bool and folds.shape == (batch,))
    require(is_mask and (folds is None or (folds.is_cpu and folds.is_contiguous())), "folds needs [B] bool on the CPU")
    return rows.data_ptr(), slots.data_ptr(), num_pending.data_ptr(), None if folds is None else folds.data_ptr()


def _memory(x: Buffers) -> tuple[Tensor, ...]:
    require(x.windows is not None, "the fold of rows needs their windows")
    return x.states, x.conv_inputs, x.windows, x.k, x.u, x.decay  # type: ignore[return-value]


def _sizes(x: Buffers) -> tuple[int, ...]:
    """Sizes of the buffers of all layers, in the order of the native structure, after checks of all shapes."""
    layers, num_slots, *state = x.states.shape
    _, num_rows, capacity, key_heads, key_dim = x.k.shape
    _, _, window, channels = x.windows.shape  # type: ignore[union-attr]
    value_heads, _, value_dim = state
    is_grouped = value_heads % key_heads == 0 if key_heads else value_heads == 0  # without heads: a window alone
    require(is_grouped, "value heads are no multiple of key heads")
    require(state[1] == key_dim, "the states have another shape")
    require(x.k.shape[:2] == (layers, num_rows), "k has another shape")
    require(x.u.shape == (layers, num_rows, capacity, value_heads, value_dim), "u has another shape")
    require(_are_decays(x.decay, (layers, num_rows, capacity, value_heads), key_dim), "decay has another shape")
    require(x.windows.shape[:2] == (layers, num_slots), "windows have another shape")  # type: ignore[union-attr]
    require(x.conv_inputs.shape == (layers, num_rows, window + capacity, channels), "conv_inputs have another shape")
    require(x.windows.dtype is x.conv_inputs.dtype, "windows have another dtype")  # type: ignore[union-attr]
    input_bytes = channels * x.conv_inputs.element_size()
    decay_dim = 1 if x.decay.dim() == 4 else key_dim
    of_heads = key_heads, value_heads, key_dim, value_dim, decay_dim
    return layers, num_slots, num_rows, capacity, window, input_bytes, *of_heads, x.is_exact


def _are_decays(decay: Tensor, of_heads: tuple[int, ...], key_dim: int) -> bool:
    """Whether log decays have a number for each head, or for each key channel of it."""
    return decay.shape in (of_heads, (*of_heads, key_dim))


def _check_shapes(
    state: Tensor, k: Tensor, u: Tensor, decay: Tensor, num_pending: Tensor, sizes: tuple[int, int, int, int, int]
) -> None:
    """Native code trusts these: wrong shapes would make it read other memory."""
    batch, key_heads, value_heads, key_dim, value_dim = sizes
    capacity = k.shape[1]
    require(key_heads > 0 and value_heads % key_heads == 0, "value heads are no multiple of key heads")
    require(state.shape == (batch, value_heads, key_dim, value_dim), "the state has another shape")
    require(k.shape == (batch, capacity, key_heads, key_dim), "k has another shape")
    require(u.shape == (batch, capacity, value_heads, value_dim), "u has another shape")
    require(_are_decays(decay, (batch, capacity, value_heads), key_dim), "decay has another shape")
    require(num_pending.shape == (batch,) and num_pending.dtype is torch.int64, "num_pending needs [B] int64")


@cache
def code() -> ctypes.CDLL | None:
    """The loaded native library of this operator; None where there is none."""
    return library.load_functions(
        SOURCE, {"fold_records": [POINTER(_FoldStruct), c_int], "fold_rows": [POINTER(_RowFolds), c_int]}
    )


BuffersStruct = struct(
    "Buffers",
    ["states", "conv_inputs", "k", "u", "decay"],
    ["states_slot", "conv_inputs_row", "k_row", "u_row", "decay_row", "is_exact"],
)
TreesStruct = struct(
    "Trees",
    ["rows", "slots", "conv_index", "num_pending", "ancestors", "firsts", "counts"],
    ["batch", "nodes", "node_offset", "ancestors_batch", "tokens"],
)
RunsStruct = struct(
    "Runs",
    ["states", "windows", "states_of_rows", "windows_of_rows", "lengths"],
    ["batch", "tokens", "states_slot", "windows_slot", "is_exact"],
)


class Heads(NamedTuple):
    """Sizes of a layer's heads, in the order of the native structure."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    decay_dim: int = 1  # log decays of a value head; key_dim: one for each key channel

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of a layer's state."""
        return self.value_heads, self.key_dim, self.value_dim

    def check(self, conv: Tensor) -> None:
        """Raise ValueError unless the sizes fit each other and a convolution [C, W]."""
        hk, hv, key_dim, value_dim, _ = self
        require(hk > 0 and hv % hk == 0, "value heads are no multiple of key heads")
        channels = 2 * hk * key_dim + hv * value_dim
        require(conv.shape[0] == channels, "the convolution has other channels than the heads")


_FITTING: WeakKeyDictionary[Buffers, Any] = WeakKeyDictionary()  # the weights that buffers were last checked against


def marshal_buffers(x: Buffers) -> Any:
    """Make the native structure; None unless rows are contiguous, on the CPU and, but for conv_inputs, float32."""
    tensors = x.states, x.conv_inputs, x.k, x.u, x.decay
    is_float = all(y.dtype is torch.float32 for y in (x.states, x.k, x.u, x.decay))
    if not is_float or not all(y.is_cpu and is_contiguous_from(y, 1) for y in tensors):
        return None
    return BuffersStruct(*(y.data_ptr() for y in tensors), *(y.stride(0) for y in tensors), x.is_exact)


def marshal_trees(x: Trees) -> Any:
    """Make the native structure. Indices are not checked.

    Raises:
        ValueError: native code cannot read a dtype, device or layout, or shapes do not fit each other.
    """
    integers = [x.rows, x.slots, x.conv_index, *(y for y in (x.num_pending, x.firsts, x.counts) if y is not None)]
    are_places = all(y.dtype is torch.int64 and y.is_cpu and y.is_contiguous() for y in integers)
    require(are_places, "places need contiguous int64 on the CPU")
    is_mask = x.ancestors.is_cpu and x.ancestors.dtype is torch.bool and is_contiguous_from(x.ancestors, 1)
    require(is_mask, "ancestors need rows of bool on the CPU")
    batch, nodes, _ = x.conv_index.shape
    require(x.rows.shape == x.slots.shape == (batch,), "rows and slots need one entry per tree")
    require(x.num_pending is None or x.num_pending.shape == (batch,), "num_pending needs one entry per tree")
    require(x.ancestors.shape == (batch, nodes, nodes), "ancestors need one row and column per node")
    of_packing = (x.firsts, x.counts)
    require((x.firsts is None) == (x.counts is None) == (x.num_packed is None), "a packing has firsts and counts")
    require(all(y is None or y.shape == (batch,) for y in of_packing), "a packing needs one entry per tree")
    tensors = x.rows, x.slots, x.conv_index, x.num_pending, x.ancestors, *of_packing
    pointers = (None if y is None else y.data_ptr() for y in tensors)
    tokens = batch * nodes if x.num_packed is None else x.num_packed
    return TreesStruct(*pointers, batch, nodes, x.node_offset, x.ancestors.stride(0), tokens)


def check_tokens(shape: Sequence[int], trees: Trees) -> None:
    """Raise ValueError unless inputs [B, N] are the nodes of ``trees``, or [1, T] their packing."""
    batch, nodes, _ = trees.ancestors.shape
    is_whole = trees.num_packed is None and tuple(shape) == (batch, nodes)
    is_packed = trees.num_packed is not None and tuple(shape) == (1, trees.num_packed)
    require(is_whole or is_packed, "there are other trees than inputs")


def check_places(weights: Any, conv: Tensor, heads: Heads, buffers: Buffers, trees: Trees) -> None:
    """Check that trees fit the buffers, and buffers the layer's ``weights``: ``conv`` [C, W] and ``heads``.

    Raises:
        ValueError: they do not. Native code trusts these shapes: wrong ones would make it read other memory.
    """
    capacity = buffers.k.shape[1]
    require(trees.node_offset + trees.ancestors.shape[1] <= capacity, "the records have no room for the nodes")
    require(trees.conv_index.shape[2] == conv.shape[1], "the convolution's index has another width")
    if _FITTING.get(buffers) is weights:
        return
    rows, (channels, width) = buffers.k.shape[0], conv.shape
    require(buffers.states.shape[1:] == heads.state, "the states have another shape")
    require(buffers.conv_inputs.shape == (rows, width - 1 + capacity, channels), "conv_inputs have another shape")
    require(buffers.k.shape[2:] == (heads.key_heads, heads.key_dim), "k has another shape")
    require(buffers.u.shape == (rows, capacity, heads.value_heads, heads.value_dim), "u has another shape")
    of_heads = rows, capacity, heads.value_heads
    by_channel, is_by_head = (*of_heads, heads.decay_dim), heads.decay_dim == 1
    is_fitting = buffers.decay.shape == by_channel or (is_by_head and buffers.decay.shape == of_heads)
    require(is_fitting, "decay has another shape")
    _FITTING[buffers] = weights


def can_extend(state: ExtendOperands, dtype: torch.dtype) -> bool:
    """Whether native code advances these states over activations of a dtype: windows have it too, on the CPU."""
    is_in_reach = state.states.is_cpu and state.windows.is_cpu and state.lengths.is_cpu
    return is_in_reach and state.windows.dtype is dtype and is_contiguous_from(state.windows, 1)


def extend_states(
    run: Callable[[Any], None],
    state: ExtendOperands,
    conv: Tensor | None,
    heads: Heads | None,
    batch: int,
    tokens: int,
) -> None:
    """Call ``run`` with the native structure of known tokens [batch, tokens] and the states that they advance.

    float32 states advance in place, others in a copy that is put back. Slots and lengths are not checked. Without
    ``conv`` the windows are no part of the call, without ``heads`` the states are none, and they are not checked.

    Raises:
        ValueError: states or windows do not fit the ``heads`` and the convolution [C, W], or the slots the batch.
    """
    pool, windows, rows, lengths = state.states, state.windows, state.slots.index, state.lengths
    require(heads is None or pool.shape[1:] == heads.state, "the states have another shape")
    is_fitting = conv is None or windows.shape[1:] == (conv.shape[1] - 1, conv.shape[0])
    require(is_fitting, "the windows have another shape")
    require(rows.shape == lengths.shape == (batch,), "slots and lengths need one entry per row")
    require(rows.dtype is lengths.dtype is torch.int64, "slots and lengths need int64")
    rows, lengths = rows.contiguous(), lengths.contiguous()
    is_in_place = heads is None or (pool.dtype is torch.float32 and is_contiguous_from(pool, 1))
    states = pool if is_in_place else state.slots.take(pool).to(torch.float32, copy=True).contiguous()
    states_of_rows = rows if is_in_place else torch.arange(batch)
    pointers = (x.data_ptr() for x in (states, windows, states_of_rows, rows, lengths))
    run(RunsStruct(*pointers, batch, tokens, states.stride(0), windows.stride(0), state.is_exact))
    if not is_in_place:
        state.slots.put(pool, as_stored(states, pool.dtype))
