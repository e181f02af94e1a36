"""Selective scan in PyTorch, on any device: vectorised over channels and requests. See README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.state_records.operands import Records, TreePlacement
from specmamba.kernels.state_records.torch_ops import finite, state_before

CHUNK_SIZE = 16  # tokens whose decays and updates are in memory at once


def extend(
    c: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, state: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Run known tokens through the recurrence, one after the other.

    Args:
        c, b, u, dt, rates: as for the package's ``advance``.
        state: [B, 1, M, C] float32, not modified.
        lengths: [B] int64; tokens from lengths[b] on are padding and do not touch the state.

    Returns:
        Outputs [B, L, 1, C] (unspecified on padding) and the new states [B, 1, M, C].
    """
    length = u.shape[1]
    is_padding = (torch.arange(length, device=u.device) >= lengths[:, None])[..., None, None]
    b, u, dt = (x.masked_fill(is_padding, 0.0) for x in (b, u, dt))
    outputs = []
    for first in range(0, length, CHUNK_SIZE):
        tokens = slice(first, first + CHUNK_SIZE)
        decay, update = _steps(b[:, tokens], u[:, tokens], dt[:, tokens], rates)
        for t in range(decay.shape[1]):
            state = torch.addcmul(update[:, t], decay[:, t], state)
            outputs.append(_read(c[:, first + t], state))
    return torch.stack(outputs, 1), state


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
    """Outputs of all nodes of a draft tree from one read of the checkpoint; the nodes' records are written in place.

    Args:
        c, b, u, dt, rates: as for the package's ``advance``, of the N nodes.
        state: [B, 1, M, C] float32, the checkpoint; not modified.
        records: b [B, R, 1, M], u and dt [B, R, 1, C], float32.
        placement: which records precede the root, where the nodes' own go, and which node sees which.

    Returns:
        Outputs [B, N, 1, C]. Records are finite.
    """
    num_pending, node_offset, ancestors = placement
    nodes = slice(node_offset, node_offset + u.shape[1])
    for buffer, values in zip(records, (b, u, dt), strict=True):
        buffer[:, nodes] = finite(values)
    root = _after_pending(state, records, rates, num_pending, node_offset)
    after = root.new_empty(len(u), u.shape[1], *root.shape[1:])
    return tree_verify_snapshots(c, b, u, dt, rates, root, after, _parents(ancestors))


def tree_verify_snapshots(
    c: Tensor,
    b: Tensor,
    u: Tensor,
    dt: Tensor,
    rates: Tensor,
    state: Tensor,
    snapshots: Tensor,
    parents: Tensor | None,
) -> Tensor:
    """Outputs of all nodes of a draft tree, one node after the other; leaves the whole state after each of them.

    Args:
        c, b, u, dt, rates: as for the package's ``advance``, of the N nodes.
        state: [B, 1, M, C] float32, the checkpoint; not modified.
        snapshots: [B, N, 1, M, C] float32, written.
        parents: [B, N] int64, topological order; a node with parent -1 starts from the checkpoint. None: chains.

    Returns:
        Outputs [B, N, 1, C].
    """
    out = torch.empty_like(u)
    for i in range(u.shape[1]):
        before, one = state_before(state, snapshots, parents, i), slice(i, i + 1)
        decay, update = _steps(b[:, one], u[:, one], dt[:, one], rates)
        snapshots[:, i] = torch.addcmul(update[:, 0], decay[:, 0], before)
        out[:, i] = _read(c[:, i], snapshots[:, i])
    return out


def fold(state: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, num_pending: Tensor) -> Tensor:
    """Record after record, all rows and channels at once; rows with fewer records than others keep their state."""
    return _after_pending(state, (b, u, dt), rates, num_pending, u.shape[1])


def _after_pending(state: Tensor, records: Records, rates: Tensor, num_pending: Tensor | None, most: int) -> Tensor:
    """The states behind the first ``num_pending`` records of each row; None: ``most`` of them."""
    if most == 0:
        return state
    b, u, dt = (x[:, :most] for x in records)
    if num_pending is not None:
        is_hole = (torch.arange(most, device=u.device) >= num_pending[:, None])[..., None, None]
        b, u, dt = (x.masked_fill(is_hole, 0.0) for x in (b, u, dt))
    for j in range(most):
        decay, update = _steps(b[:, j : j + 1], u[:, j : j + 1], dt[:, j : j + 1], rates)
        state = torch.addcmul(update[:, 0], decay[:, 0], state)
    return state


def _steps(b: Tensor, u: Tensor, dt: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Decays e^(A dt) and updates b u^T of tokens, [B, L, 1, M, C] each; rates [M, C], or [B, M, C]."""
    if rates.dim() == 3:
        rates = rates[:, None, None]
    return (dt[..., None, :] * rates).exp_(), b[..., None] * u[..., None, :]


def _read(c: Tensor, state: Tensor) -> Tensor:
    """What tokens c [B, 1, M] read of states [B, 1, M, C]: [B, 1, C]."""
    return (c[:, :, None] @ state).squeeze(2)


def _parents(ancestors: Tensor) -> Tensor:
    """The parent of every node, -1 for roots: [B, N]; of a node's ancestors it is the last."""
    nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
    return torch.where(ancestors.tril(-1), nodes, -1).amax(-1)
