"""Gated delta rule in vectorised PyTorch, on any device. See README.md for the mathematics."""

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels.state_records.operands import Records, TreePlacement
from specmamba.kernels.state_records.torch_ops import (
    by_channel,
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

CHUNK_SIZE, CHANNEL_CHUNK_SIZE = 64, 16  # tokens; of decays by channel, whose products of keys are made token by token


def extend(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Run known tokens through the recurrence, a chunk at a time.

    The chunked (WY) form of Gated DeltaNet (arXiv 2412.06464, section 3.3): inside a chunk all updates are solved as
    one unit lower triangular system; only the chunk ends are sequential.

    Args:
        q, k: [B, L, Hk, K] float32; k l2-normalised, q l2-normalised and scaled by K**-0.5.
        v: [B, L, Hv, V] float32, Hv a multiple of Hk.
        g: [B, L, Hv] or [B, L, Hv, K] float32, log decay <= 0.
        beta: [B, L, Hv] float32.
        state: [B, Hv, K, V] float32, not modified.
        lengths: [B] int64; tokens from lengths[b] on are padding and do not touch the state.

    Returns:
        Output [B, L, Hv, V] (unspecified on padding) and the new state [B, Hv, K, V].
    """
    length, num_value_heads = beta.shape[1:]
    has_channels, g = g.dim() == 4, by_channel(g)
    chunk = min(CHANNEL_CHUNK_SIZE if has_channels else CHUNK_SIZE, length)
    is_padding = torch.arange(length, device=g.device) >= lengths[:, None]
    k, v, g = (x.masked_fill(is_padding[..., None, None], 0) for x in (k, v, g))
    beta = beta.masked_fill(is_padding[..., None], 0)
    q, k = (expand_heads(x, num_value_heads) for x in (q, k))
    q, k, v, g, beta = (_split_chunks(x, chunk) for x in (q, k, v, g, beta[..., None]))

    exp_decay = g.cumsum(-2).exp()  # [B, H, chunks, C, 1 or K]
    of_q, of_k = (_products_by_channel if has_channels else _products)(q, k, g)
    system = beta * of_k  # the solver reads what is below the diagonal only
    rhs = torch.cat([beta * v, beta * exp_decay * k], -1)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    u_without_state, state_weight = solved.split([v.shape[-1], k.shape[-1]], -1)
    q = q * exp_decay
    until_end = F.pad(g.flip(-2).cumsum(-2).flip(-2)[..., 1:, :], (0, 0, 0, 1))
    k = k * until_end.exp()
    last_decay = exp_decay[..., -1:, :].mT

    outputs = []
    for c in range(q.shape[2]):
        u = u_without_state[:, :, c] - state_weight[:, :, c] @ state
        outputs.append(q[:, :, c] @ state + of_q[:, :, c] @ u)
        state = last_decay[:, :, c] * state + k[:, :, c].mT @ u
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2), state


def tree_verify(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, records: Records, placement: TreePlacement
) -> Tensor:
    """Outputs of all nodes of a draft tree from one read of the checkpoint; the nodes' records are written in place.

    Args:
        q, k: [B, N, Hk, K] float32; k l2-normalised, q l2-normalised and scaled by K**-0.5.
        v: [B, N, Hv, V] float32.
        g: [B, N, Hv] or [B, N, Hv, K] float32.
        beta: [B, N, Hv] float32.
        state: [B, Hv, K, V] float32, the checkpoint; not modified.
        records: float32; decays are records' own log decays, in the form of g.
        placement: which records precede the root, where the nodes' own go, and which node sees which.

    Returns:
        Output [B, N, Hv, V], in heads where a node is not finite NaN for it and its descendants. Records are finite.
    """
    (records_k, records_u, records_decay), (_, node_offset, ancestors) = records, placement
    num_nodes, num_value_heads = beta.shape[1:]
    flaws = (expand_heads(flaw(k), num_value_heads) + flaw(by_channel(g)) + beta * 0).transpose(1, 2)  # [B, H, N]
    k, g, beta = finite(k), finite(g), finite(beta)
    nodes = slice(node_offset, node_offset + num_nodes)
    records_k[:, nodes] = k
    records_decay[:, nodes] = g

    keys = expand_heads(records_k[:, : nodes.stop], num_value_heads).transpose(1, 2)  # [B, H, R', K]
    qk = torch.stack([expand_heads(x, num_value_heads).transpose(1, 2) for x in (q, k)], 2)  # [B, H, 2, N, K]
    weigh = _weigh if g.dim() == 3 else _weigh_by_channel
    of_state, of_updates = weigh(qk, keys, g, records_decay[:, :node_offset], placement)
    both = (2, num_nodes)  # how the joint rows split: one product reads the checkpoint for queries and keys
    read = (of_state.flatten(2, 3) @ state).unflatten(2, both)
    if node_offset:
        pending = of_updates[..., :node_offset].flatten(2, 3)
        read = read + (pending @ records_u[:, :node_offset].transpose(1, 2)).unflatten(2, both)

    q_read, k_read = read.unbind(2)
    q_weights, k_weights = of_updates[..., node_offset:].unbind(2)
    beta = beta.transpose(1, 2)[..., None]
    u = beta * (v.transpose(1, 2) - k_read)
    flaws, u = flaws + flaw(u), finite(u)
    if num_nodes > 1:
        u = torch.linalg.solve_triangular(beta * k_weights, u, upper=False, unitriangular=True)
    records_u[:, nodes] = finite(u).transpose(1, 2)
    out: Tensor = q_read + (q_weights + flaws_inside(flaws, ancestors)) @ u
    return out.transpose(1, 2)


def tree_verify_snapshots(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, snapshots: Tensor, parents: Tensor | None
) -> Tensor:
    """Outputs of all nodes of a draft tree, one node after the other; leaves the whole state after each of them.

    Args:
        q, k: [B, N, Hk, K] float32; k l2-normalised, q l2-normalised and scaled by K**-0.5.
        v: [B, N, Hv, V] float32.
        g: [B, N, Hv] or [B, N, Hv, K] float32.
        beta: [B, N, Hv] float32.
        state: [B, Hv, K, V] float32, the checkpoint; not modified.
        snapshots: [B, N, Hv, K, V] float32, written.
        parents: [B, N] int64, topological order; a node with parent -1 starts from the checkpoint. None: chains.

    Returns:
        Output [B, N, Hv, V].
    """
    num_nodes, num_value_heads = beta.shape[1:]
    q, k = (expand_heads(x, num_value_heads) for x in (q, k))
    qk, q_dot_k = torch.stack([q, k], 3), (q * k).sum(-1, keepdim=True)  # one product reads a state for both
    decay, beta = by_channel(g).exp(), beta[..., None]  # [B, N, H, 1 or K]
    out = torch.empty_like(v)
    for i in range(num_nodes):
        before, after = state_before(state, snapshots, parents, i), snapshots[:, i]
        q_read, k_read = (qk[:, i] * decay[:, i, :, None] @ before).unbind(2)
        u = beta[:, i] * (v[:, i] - k_read)
        torch.mul(before, decay[:, i, :, :, None], out=after)
        after.addcmul_(k[:, i, :, :, None], u[:, :, None])
        out[:, i] = q_read + q_dot_k[:, i] * u
    return out


def _products(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """q_i . k_j and k_i . k_j of tokens j <= i of a chunk, times the decay from j to i: [..., C, C] each.

    q, k [..., C, K], g [..., C, 1].
    """
    decay = decay_along(g.squeeze(-1))
    return (q @ k.mT) * decay, (k @ k.mT) * decay


def _products_by_channel(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """As ``_products``, with g [..., C, K].

    The decay is in the sum over channels. Its sums of log decays would leave the range of numbers as factors of q
    and k each (arXiv 2312.06635, section 4.3), so earlier keys are decayed for every token.
    """
    size, sums = g.shape[-2], torch.zeros_like(g)
    of_q = q.new_zeros(*q.shape[:-1], size)
    of_k = torch.zeros_like(of_q)
    for i in range(size):
        sums[..., :i, :] += g[..., i : i + 1, :]
        decayed = k[..., : i + 1, :] * _decay_of(sums[..., : i + 1, :])
        rows = decayed @ torch.stack([q[..., i, :], k[..., i, :]], -1)
        of_q[..., i, : i + 1], of_k[..., i, : i + 1] = rows.unbind(-1)
    return of_q, of_k


def _decay_of(total: Tensor) -> Tensor:
    """e^x, but 0 below e^-58: on CPUs exponentials and products of so small numbers take a hundred times as long."""
    return total.clamp(min=-58.0).exp().masked_fill_(total < -58.0, 0.0)


def _weigh(
    qk: Tensor, keys: Tensor, g: Tensor, pending_decay: Tensor, placement: TreePlacement
) -> tuple[Tensor, Tensor]:
    """What queries and keys [B, H, 2, N, K] of nodes read of the state and of updates, decays included.

    ``keys`` [B, H, R + N, K] are those of R pending records and of the nodes, g [B, N, H], pending_decay [B, R, H].

    Returns factors of the checkpoint [B, H, 2, N, K], and of updates [B, H, 2, N, R + N].
    """
    num_pending, node_offset, ancestors = placement
    path, decay = path_log_decay(g, ancestors), decay_inside(g, ancestors)
    if node_offset:
        behind, before_root = decay_behind(pending_decay, num_pending)
        decay = torch.cat([decay_between(path.transpose(1, 2), behind, num_pending), decay], -1)
        path = path + before_root
    scores = (qk.flatten(2, 3) @ keys.mT).unflatten(2, qk.shape[2:4])
    return qk * path.transpose(1, 2).exp()[:, :, None, :, None], scores * decay[:, :, None]


def _weigh_by_channel(
    qk: Tensor, keys: Tensor, g: Tensor, pending_decay: Tensor, placement: TreePlacement
) -> tuple[Tensor, Tensor]:
    """As ``_weigh``, with g [B, N, H, K] and pending_decay [B, R, H, K], node by node: decays are inside products."""
    num_pending, node_offset, ancestors = placement
    num_nodes, of_nodes, sees = g.shape[1], g.flatten(2), ancestors.to(g.dtype)
    path = (sees @ of_nodes).view_as(g)
    is_hidden, behind, whole = ~ancestors, None, path
    if node_offset:
        behind, before_root = decay_behind(pending_decay, num_pending)
        whole = path + before_root
        is_hole = ancestors.new_zeros(len(g), node_offset)
        if num_pending is not None:
            is_hole = torch.arange(node_offset, device=g.device) >= num_pending[:, None]
        is_hidden = torch.cat([is_hole[:, None].expand(-1, num_nodes, -1), is_hidden], -1)
    is_later = sees.tril(-1).mT  # [B, j, l]: node l is behind j
    weights = []
    for i in range(num_nodes):
        total = ((is_later * sees[:, i : i + 1]) @ of_nodes).view_as(g)
        if behind is not None:
            total = torch.cat([behind + path[:, i : i + 1], total], 1)
        total = total.masked_fill(is_hidden[:, i, :, None, None], -torch.inf)
        weights.append(keys * _decay_of(total).transpose(1, 2) @ qk[:, :, :, i].mT)
    return qk * whole.transpose(1, 2).exp()[:, :, None], torch.stack(weights, 2).permute(0, 1, 4, 2, 3)


def _split_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, L, H, D] -> [B, H, chunks, C, D], the last chunk padded with zeros."""
    batch, length, heads, dim = x.shape
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -length % chunk))
    return x.view(batch, -1, chunk, heads, dim).permute(0, 3, 1, 2, 4)
