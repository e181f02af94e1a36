"""The selective scan (arXiv 2312.00752, section 3.2), one token at a time: the specification.

Shapes: B batch, L tokens or N nodes, R record capacity, M state size, C channels. A state is [1, M, C]: one head with M
keys and C values, as ``state_records`` has it. Everything keeps the dtype of its inputs, float32 or float64. Shapes
are not checked here: a mismatch surfaces as torch's own IndexError or RuntimeError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.state_records.operands import Records, TreePlacement


def step(state: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor) -> Tensor:
    """The state [1, M, C] after a token b [1, M], u = dt x [1, C], dt [1, C]; rates [M, C] are A."""
    return (rates * dt).exp() * state + b[..., None] * u[:, None]


def extend(
    c: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, state: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Run known tokens through the recurrence; arguments as for ``torch_ops.extend``.

    Returns outputs [B, L, 1, C], 0 on padding, and the new states [B, 1, M, C].
    """
    out, after = torch.zeros_like(u), state.clone()
    for i in range(len(u)):
        for t in range(int(lengths[i])):
            after[i] = step(after[i], b[i, t], u[i, t], dt[i, t], rates)
            out[i, t] = (c[i, t, 0, :, None] * after[i, 0]).sum(0)
    return out, after


def tree_verify(
    c: Tensor,
    b: Tensor,
    u: Tensor,
    dt: Tensor,
    rates: Tensor,
    state: Tensor,
    records: Records,
    placement: TreePlacement,
) -> Tensor:
    """Run every path of a tree from its checkpoint, pending records first; arguments as for ``torch_ops.tree_verify``.

    Returns outputs [B, N, 1, C]; the nodes' records are written in place.
    """
    out, num_nodes, first = torch.empty_like(u), u.shape[1], placement.node_offset
    for buffer, values in zip(records, (b, u, dt), strict=True):
        buffer[:, first : first + num_nodes] = values
    for i in range(len(u)):
        num_pending = first if placement.num_pending is None else int(placement.num_pending[i])
        for node in range(num_nodes):
            path = [j for j in range(num_nodes) if placement.ancestors[i, node, j]]
            after = state[i]
            for j in [*range(num_pending), *(first + j for j in path)]:
                b_j, u_j, dt_j = (x[i, j] for x in records)
                after = step(after, b_j, u_j, dt_j, rates)
            out[i, node] = (c[i, node, 0, :, None] * after[0]).sum(0)
    return out


def fold(state: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, num_pending: Tensor) -> Tensor:
    """Advance checkpoints [B, 1, M, C] over the first ``num_pending[b]`` records of each: the new states."""
    after = state.clone()
    for i in range(len(u)):
        for j in range(int(num_pending[i])):
            of_layer = rates[i] if rates.dim() == 3 else rates
            after[i] = step(after[i], b[i, j], u[i, j], dt[i, j], of_layer)
    return after
