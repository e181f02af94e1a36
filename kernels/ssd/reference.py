"""State space duality, the recurrence of Mamba2, one token and one head at a time: the specification of this op.

    S_t = exp(g_t) S_{t-1} + b_t u_t^T        u_t = dt_t x_t,  g_t = dt_t A        y_t = S_t^T c_t

Source: Mamba2 (arXiv 2405.21060), section 3. The skip D x belongs to the layer (``mamba2``). See README.md for the tree
form and the records.

Shapes: B batch, L padded tokens, N tree nodes, R record capacity, G groups, H heads (a multiple of G; head h reads B
and C of group h // (H // G)), S state size, P head size. Every function keeps the dtype of its inputs, float32 or
float64. Shapes are not checked here: a mismatch surfaces as torch's own IndexError or RuntimeError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.state_records.operands import Records, TreePlacement
from specmamba.kernels.state_records.reference import finite, finite_or_nan, fold, parent_of


def extend(c: Tensor, b: Tensor, u: Tensor, g: Tensor, state: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Run ``lengths[i]`` known tokens of every row i through the recurrence.

    c, b [B, L, G, S], u [B, L, H, P], g [B, L, H] log decay <= 0, state [B, H, S, P], lengths [B] int64 (0 is allowed).

    Returns out [B, L, H, P] and new_state [B, H, S, P], a new tensor. Outputs at and beyond ``lengths[i]`` are
    unspecified; here they are NaN, so that tests detect a read of them. No input is written.
    """
    batch, _, heads, _ = u.shape
    per_group = heads // b.shape[2]
    out = torch.full_like(u, float("nan"))
    new_state = state.clone()
    for i in range(batch):
        for h in range(heads):
            current = state[i, h]
            for t in range(int(lengths[i])):
                current = _step(current, b[i, t, h // per_group], u[i, t, h], g[i, t, h])
                out[i, t, h] = current.T @ c[i, t, h // per_group]
            new_state[i, h] = current
    return out, new_state


def tree_verify(
    c: Tensor, b: Tensor, u: Tensor, g: Tensor, state: Tensor, records: Records, placement: TreePlacement
) -> Tensor:
    """Outputs of all tree nodes; writes the nodes' records in place, never the checkpoint.

    c, b [B, N, G, S], u [B, N, H, P], g [B, N, H], state [B, H, S, P] the checkpoint, records b [B, R, G, S], u
    [B, R, H, P] and decay [B, R, H], placement num_pending, node_offset and ancestors.

    The path of a node is: checkpoint, the first num_pending[i] records, then the node's ancestors from the root. A node
    without a strict ancestor (the root, a padding node) follows the pending records directly. Records between
    num_pending[i] and node_offset are ignored. Record node_offset + n becomes node n's b, u and g, with 0 for values
    that are not finite: these appear in the outputs of the node and its descendants, whose records are meaningless.

    Returns out [B, N, H, P].
    """
    (records_b, records_u, records_decay), (num_pending, node_offset, ancestors) = records, placement
    batch, nodes, heads, _ = u.shape
    per_group = heads // b.shape[2]
    out, g = torch.empty_like(u), finite_or_nan(g)
    if num_pending is None:
        num_pending = torch.full((batch,), node_offset)
    after_pending = fold(state, *records, num_pending)
    for i in range(batch):
        for h in range(heads):
            states: list[Tensor] = []
            for n in range(nodes):
                parent = parent_of(ancestors[i], n)
                before = after_pending[i, h] if parent is None else states[parent]
                states.append(_step(before, b[i, n, h // per_group], u[i, n, h], g[i, n, h]))
                out[i, n, h] = states[n].T @ c[i, n, h // per_group]
                records_decay[i, node_offset + n, h] = finite(g[i, n, h])
    records_b[:, node_offset : node_offset + nodes] = finite(b)
    records_u[:, node_offset : node_offset + nodes] = finite(u)
    return out


def tree_verify_snapshots(
    c: Tensor, b: Tensor, u: Tensor, g: Tensor, state: Tensor, snapshots: Tensor, parents: Tensor | None
) -> Tensor:
    """Outputs of all tree nodes by the recurrence itself; writes the state after every node.

    c, b [B, N, G, S], u [B, N, H, P], g [B, N, H], state [B, H, S, P] the checkpoint, not written,
    snapshots [B, N, H, S, P] written whole, parents [B, N] int64 in topological order (None: chains). A node reads the
    snapshot of its parent; one with parent -1 (the root, a padding node) reads ``state``.

    Returns out [B, N, H, P].
    """
    batch, nodes, heads, _ = u.shape
    per_group = heads // b.shape[2]
    out = torch.empty_like(u)
    for i in range(batch):
        for n in range(nodes):
            parent = n - 1 if parents is None else int(parents[i, n])
            for h in range(heads):
                before = state[i, h] if parent < 0 else snapshots[i, parent, h]
                snapshots[i, n, h] = _step(before, b[i, n, h // per_group], u[i, n, h], g[i, n, h])
                out[i, n, h] = snapshots[i, n, h].T @ c[i, n, h // per_group]
    return out


def _step(state: Tensor, b: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """One token of one head: state [S, P], b [S], u [P], scalar g -> next state [S, P]."""
    return torch.exp(g) * state + torch.outer(b, u)
