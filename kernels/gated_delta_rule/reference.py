"""The gated delta rule, one token and one head at a time: the specification of this op.

    S_t = exp(g_t) S_{t-1} + k_t u_t^T        u_t = beta_t (v_t - (exp(g_t) S_{t-1})^T k_t)        o_t = S_t^T q_t

where g_t is a number, or a vector with a log decay for each key channel, that is, for each row of S.

Sources: Gated DeltaNet (arXiv 2412.06464), section 3.1; Kimi Delta Attention (arXiv 2510.26692), section 3. See
README.md for the tree form and the records.

Shapes: B batch, L padded tokens, N tree nodes, R record capacity, Hk key heads, Hv value heads (a multiple of Hk;
value head h reads key head h // (Hv // Hk)), K and V head widths. Every function keeps the dtype of its inputs,
float32 or float64. Shapes are not checked here: a mismatch surfaces as torch's own IndexError or RuntimeError.
"""

import torch
from torch import Tensor

from specmamba.kernels.state_records.operands import Records, TreePlacement
from specmamba.kernels.state_records.reference import decayed, finite, finite_or_nan, fold, parent_of


def extend(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Run ``lengths[b]`` known tokens of every row through the recurrence.

    q, k [B, L, Hk, K] (k l2-normalised; q l2-normalised and scaled by K**-0.5), v [B, L, Hv, V],
    g [B, L, Hv] or [B, L, Hv, K] log decay <= 0, beta [B, L, Hv], state [B, Hv, K, V], lengths [B] int64 (0 is
    allowed).

    Returns out [B, L, Hv, V] and new_state [B, Hv, K, V], a new tensor. Outputs at and beyond ``lengths[b]`` are
    unspecified; here they are NaN, so that tests detect a read of them. No input is written.
    """
    batch, _, value_heads, _ = v.shape
    group = value_heads // k.shape[2]
    out = torch.full_like(v, float("nan"))
    new_state = state.clone()
    for b in range(batch):
        for h in range(value_heads):
            current = state[b, h]
            for t in range(int(lengths[b])):
                current, _ = _step(current, k[b, t, h // group], v[b, t, h], g[b, t, h], beta[b, t, h])
                out[b, t, h] = current.T @ q[b, t, h // group]
            new_state[b, h] = current
    return out, new_state


def tree_verify(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, records: Records, placement: TreePlacement
) -> Tensor:
    """Outputs of all tree nodes; writes the nodes' records in place, never the checkpoint.

    q, k [B, N, Hk, K], v [B, N, Hv, V], g as in ``extend``, beta [B, N, Hv], state [B, Hv, K, V] the checkpoint,
    records k [B, R, Hk, K], u [B, R, Hv, V] and decay [B, R, Hv] or [B, R, Hv, K], placement num_pending, node_offset
    and ancestors.

    The path of a node is: checkpoint, the first num_pending[b] records, then the node's ancestors from the root.
    A node without a strict ancestor (the root, a padding node) follows the pending records directly. Records
    between num_pending[b] and node_offset are ignored. Record node_offset + i becomes node i's k, u and g, with 0 for
    values that are not finite: these appear in the outputs of the node and its descendants, whose records are
    meaningless.

    Returns out [B, N, Hv, V].
    """
    (records_k, records_u, records_decay), (num_pending, node_offset, ancestors) = records, placement
    batch, nodes, value_heads, _ = v.shape
    group = value_heads // k.shape[2]
    out, g = torch.empty_like(v), finite_or_nan(g)
    if num_pending is None:
        num_pending = torch.full((batch,), node_offset)
    after_pending = fold(state, *records, num_pending)
    for b in range(batch):
        for h in range(value_heads):
            states: list[Tensor] = []
            for i in range(nodes):
                parent = parent_of(ancestors[b], i)
                before = after_pending[b, h] if parent is None else states[parent]
                after, u = _step(before, k[b, i, h // group], v[b, i, h], g[b, i, h], beta[b, i, h])
                states.append(after)
                out[b, i, h] = after.T @ q[b, i, h // group]
                records_u[b, node_offset + i, h] = finite(u)
                records_decay[b, node_offset + i, h] = finite(g[b, i, h])
    records_k[:, node_offset : node_offset + nodes] = finite(k)
    return out


def tree_verify_snapshots(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, snapshots: Tensor, parents: Tensor | None
) -> Tensor:
    """Outputs of all tree nodes by the recurrence itself; writes the state after every node.

    q, k [B, N, Hk, K], v [B, N, Hv, V], g as in ``extend``, beta [B, N, Hv], state [B, Hv, K, V] the checkpoint, not
    written, snapshots [B, N, Hv, K, V] written whole, parents [B, N] int64 in topological order (None: chains). A node
    reads the snapshot of its parent; one with parent -1 (the root, a padding node) reads ``state``.

    Returns out [B, N, Hv, V].
    """
    batch, nodes, value_heads, _ = v.shape
    group = value_heads // k.shape[2]
    out = torch.empty_like(v)
    for b in range(batch):
        for i in range(nodes):
            parent = i - 1 if parents is None else int(parents[b, i])
            for h in range(value_heads):
                before = state[b, h] if parent < 0 else snapshots[b, parent, h]
                after, _ = _step(before, k[b, i, h // group], v[b, i, h], g[b, i, h], beta[b, i, h])
                snapshots[b, i, h] = after
                out[b, i, h] = after.T @ q[b, i, h // group]
    return out


def _step(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token of one head: state [K, V], k [K], v [V], g and beta -> (next state [K, V], u [V])."""
    left = decayed(state, g)
    u = beta * (v - left.T @ k)
    return left + torch.outer(k, u), u
