"""Records of a state S = sum of decayed outer products, one head and one record at a time: the specification.

Shapes: B batch, N tree nodes, R record capacity, Hk key heads, Hv value heads (a multiple of Hk; value head h reads key
head h // (Hv // Hk)), K and V head widths. A log decay is a number of a head, or it is [K]: one for each key channel,
that is, for each row of the state. Everything keeps the dtype of its inputs, float32 or float64. Shapes are not checked
here: a mismatch surfaces as torch's own IndexError or RuntimeError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.state_records.operands import Buffers


def fold(state: Tensor, k: Tensor, u: Tensor, decay: Tensor, num_pending: Tensor, out: Tensor | None = None) -> Tensor:
    """Advance the checkpoint over the first ``num_pending[b]`` records of each row.

    state [B, Hv, K, V], k [B, R, Hk, K], u [B, R, Hv, V], decay [B, R, Hv] or [B, R, Hv, K] (a record's own log decay,
    from the record or checkpoint before it), num_pending [B] int64.

    Returns the new states [B, Hv, K, V], in ``out`` where it is given (it may be ``state``), else in a new tensor; rows
    with nothing pending are copied unchanged.
    """
    batch, value_heads = state.shape[:2]
    group = value_heads // max(1, k.shape[2])
    new_state = state.clone()
    for b in range(batch):
        for h in range(value_heads):
            for j in range(int(num_pending[b])):
                update = torch.outer(k[b, j, h // group], u[b, j, h])
                new_state[b, h] = decayed(new_state[b, h], decay[b, j, h]) + update
    return new_state if out is None else out.copy_(new_state)


def fold_rows(buffers: Buffers, rows: Tensor, slots: Tensor, num_pending: Tensor, folds: Tensor | None = None) -> None:
    """Advance the checkpoints of rows that fold over all their pending records, layer by layer, in place.

    ``buffers`` have [layers, ...] in front. The last W - 1 inputs before the new checkpoint become its window, in
    ``windows`` and at the start of ``conv_inputs``; then nothing is pending.
    """
    assert buffers.windows is not None
    window = buffers.windows.shape[2]
    for b, (row, slot, count) in enumerate(zip(rows.tolist(), slots.tolist(), num_pending.tolist(), strict=True)):
        if count == 0 or not (folds is None or bool(folds[b])):
            continue
        for layer in range(len(buffers.states)):
            state, inputs = buffers.states[layer, slot], buffers.conv_inputs[layer, row]
            k, u, decay = (x[layer, row][None] for x in (buffers.k, buffers.u, buffers.decay))
            state.copy_(fold(state[None], k, u, decay, num_pending[b : b + 1])[0])
            inputs[:window] = inputs[count : count + window].clone()
            buffers.windows[layer, slot] = inputs[:window]
        num_pending[b] = 0


def decayed(state: Tensor, g: Tensor) -> Tensor:
    """A state [K, V] behind a step whose log decay is g, a number or [K]."""
    return torch.exp(g)[..., None] * state


def parent_of(ancestors: Tensor, node: int) -> int | None:
    """The nearest strict ancestor of a node (ancestors [N, N]); topological order makes it the largest index."""
    strict = [j for j in range(node) if bool(ancestors[node, j])]
    return strict[-1] if strict else None


def finite(x: Tensor) -> Tensor:
    """x as it is recorded: 0 in place of values that are not finite."""
    return torch.where(x.isfinite(), x, 0)


def finite_or_nan(g: Tensor) -> Tensor:
    """A log decay with NaN for -inf: no record can express that the whole state is forgotten, so it must show."""
    return torch.where(g.isfinite(), g, torch.nan)


def write_nodes(buffers: tuple[Tensor, ...], records: tuple[Tensor, ...], rows: Tensor, first: int, count: int) -> None:
    """Put records [B, R, ...] of nodes, ``count`` from ``first`` on, into these rows of buffers [rows, R, ...]."""
    written = slice(first, first + count)
    for buffer, of_rows in zip(buffers, records, strict=True):
        buffer[rows, written] = of_rows[:, written]
