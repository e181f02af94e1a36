"""State space duality (Mamba2) in vectorised PyTorch, on any device. See README.md for the mathematics."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.state_records.operands import Records, TreePlacement
from specmamba.kernels.state_records.torch_ops import (
    decay_along,
    decay_behind,
    decay_between,
    decay_inside,
    expand_heads,
    finite,
    flaw,
    flaws_inside,
    path_log_decay,
    state_before,
)

CHUNK_SIZE = 64


def extend(c: Tensor, b: Tensor, u: Tensor, g: Tensor, state: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Run known tokens through the recurrence, 64 at a time.

    The block decomposition of Mamba2 (arXiv 2405.21060, section 6). The heads of a group share
    the products of C and B, and one matrix product each for the reads of C and the additions of B to their states.

    Args:
        c, b: [B, L, G, S] float32.
        u: [B, L, H, P] float32, dt x; H a multiple of G.
        g: [B, L, H] float32, log decay dt A <= 0.
        state: [B, H, S, P] float32, not modified.
        lengths: [B] int64; tokens from lengths[b] on are padding and do not touch the state.

    Returns:
        Output [B, L, H, P] (unspecified on padding) and the new state [B, H, S, P].
    """
    length, groups = b.shape[1:3]
    is_padding = torch.arange(length, device=g.device) >= lengths[:, None]
    b, u = (x.masked_fill(is_padding[..., None, None], 0) for x in (b, u))
    g = g.masked_fill(is_padding[..., None], 0)
    side_by_side = state.unflatten(1, (groups, -1)).transpose(2, 3)  # [B, G, S, H / G, P]
    outputs = []
    parts = (x.split(CHUNK_SIZE, 1) for x in (c, b, u, g))
    for c_part, b_part, u_part, g_part in zip(*parts, strict=True):
        out, side_by_side = _extend_chunk(c_part, b_part, u_part, g_part, side_by_side)
        outputs.append(out)
    return torch.cat(outputs, 1), side_by_side.transpose(2, 3).reshape(state.shape)


def _extend_chunk(c: Tensor, b: Tensor, u: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """C tokens: arguments [B, C, ...] as for ``extend``, the state [B, G, S, H / G, P] -> output and next state."""
    batch, length, num_heads = g.shape
    groups, _, per_group, dim = state.shape[1:]
    c, b = c.transpose(1, 2), b.transpose(1, 2)  # [B, G, C, S]
    path_decay = decay_along(g.transpose(1, 2))  # [B, H, C, C]
    weights = path_decay.unflatten(1, (groups, per_group)) * (c @ b.mT)[:, :, None]
    inside = weights.flatten(1, 2) @ u.transpose(1, 2)  # [B, H, C, P]

    left, exp_decay = path_decay[:, :, -1].transpose(1, 2)[..., None], g.cumsum(1).exp()
    read = (c @ state.flatten(3)).view(batch, groups, length, per_group, dim).transpose(1, 2)
    out = (read.reshape(batch, length, num_heads, dim) * exp_decay[..., None]).add_(inside.transpose(1, 2))
    added = b.mT @ (u * left).view(batch, length, groups, -1).transpose(1, 2)  # [B, G, S, H / G * P]
    last = exp_decay[:, -1].view(batch, groups, 1, per_group, 1)
    return out, added.view(state.shape).addcmul_(state, last)


def tree_verify(
    c: Tensor, b: Tensor, u: Tensor, g: Tensor, state: Tensor, records: Records, placement: TreePlacement
) -> Tensor:
    """Outputs of all nodes of a draft tree from one read of the checkpoint; the nodes' records are written in place.

    Args:
        c, b: [B, N, G, S] float32, of N nodes.
        u: [B, N, H, P] float32, dt x.
        g: [B, N, H] float32, log decay.
        state: [B, H, S, P] float32, the checkpoint; not modified.
        records: float32, with b [B, R, G, S] as k; decays are records' own log decays.
        placement: which records precede the root, where the nodes' own go, and which node sees which.

    Returns:
        Output [B, N, H, P], in heads where a node is not finite NaN for it and its descendants. Records are finite.
    """
    (records_b, records_u, records_decay), (num_pending, node_offset, ancestors) = records, placement
    num_nodes, num_heads = g.shape[1:]
    flaws = (expand_heads(flaw(b), num_heads) + flaw(u) + g * 0).transpose(1, 2)  # [B, H, N]
    b, u, g = finite(b), finite(u), finite(g)
    nodes = slice(node_offset, node_offset + num_nodes)
    records_b[:, nodes], records_u[:, nodes] = b, u
    records_decay[:, nodes] = g
    path = path_log_decay(g, ancestors)  # [B, N, H]
    if node_offset:
        behind, before_root = decay_behind(records_decay[:, :node_offset], num_pending)

    of_groups = c.transpose(1, 2) @ records_b[:, : nodes.stop].permute(0, 2, 3, 1)  # [B, G, N, R']
    scores = of_groups.repeat_interleave(num_heads // c.shape[2], 1)  # [B, H, N, R']
    whole = (path + before_root if node_offset else path).transpose(1, 2)  # [B, H, N]
    out = (expand_heads(c, num_heads).transpose(1, 2) @ state) * whole.exp()[..., None]
    if node_offset:
        pending = scores[..., :node_offset] * decay_between(path.transpose(1, 2), behind, num_pending)
        out = out + pending @ records_u[:, :node_offset].transpose(1, 2)
    own = scores[..., node_offset:]
    if num_nodes > 1:
        own = own * decay_inside(g, ancestors)
    own = own + flaws_inside(flaws, ancestors)
    return (out + own @ u.transpose(1, 2)).transpose(1, 2)


def tree_verify_snapshots(
    c: Tensor, b: Tensor, u: Tensor, g: Tensor, state: Tensor, snapshots: Tensor, parents: Tensor | None
) -> Tensor:
    """Outputs of all nodes of a draft tree, one node after the other; leaves the whole state after each of them.

    Args:
        c, b: [B, N, G, S] float32.
        u: [B, N, H, P] float32, dt x.
        g: [B, N, H] float32, log decay.
        state: [B, H, S, P] float32, the checkpoint; not modified.
        snapshots: [B, N, H, S, P] float32, written.
        parents: [B, N] int64, topological order; a node with parent -1 starts from the checkpoint. None: chains.

    Returns:
        Output [B, N, H, P].
    """
    num_nodes, num_heads = g.shape[1:]
    c, b = (expand_heads(x, num_heads) for x in (c, b))
    decay, out = g.exp()[..., None], torch.empty_like(u)
    for i in range(num_nodes):
        before, after = state_before(state, snapshots, parents, i), snapshots[:, i]
        torch.mul(before, decay[:, i, :, None], out=after)
        after.addcmul_(b[:, i, :, :, None], u[:, i, :, None])
        out[:, i] = (c[:, i, :, None] @ after).squeeze(2)
    return out
