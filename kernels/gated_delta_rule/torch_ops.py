"""Gated delta rule in vectorised PyTorch, on any device. See README.md for the mathematics."""

import torch
from torch import Tensor

CHUNK_SIZE = 64


def extend(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Run known tokens through the recurrence, 64 at a time.

    The chunked (WY) form of Gated DeltaNet (arXiv 2412.06464, section 3.3): inside a chunk all updates are solved as
    one unit lower triangular system; only the chunk ends are sequential.

    Args:
        q, k: [B, L, Hk, K] float32; k l2-normalised, q l2-normalised and scaled by K**-0.5.
        v: [B, L, Hv, V] float32, Hv a multiple of Hk.
        g: [B, L, Hv] float32, log decay <= 0.
        beta: [B, L, Hv] float32.
        state: [B, Hv, K, V] float32, not modified.
        lengths: [B] int64; tokens from lengths[b] on are padding and do not touch the state.

    Returns:
        Output [B, L, Hv, V] (unspecified on padding) and the new state [B, Hv, K, V].
    """
    length, num_value_heads = g.shape[1:]
    chunk = min(CHUNK_SIZE, length)
    is_token = torch.arange(length, device=g.device) < lengths[:, None]
    g, beta = (x * is_token[..., None] for x in (g, beta))
    q, k = (_expand_heads(x, num_value_heads) for x in (q, k))
    q, k, v, g, beta = (_split_chunks(x, chunk) for x in (q, k, v, g[..., None], beta[..., None]))

    decay = g.squeeze(-1).cumsum(-1)  # [B, H, chunks, C]
    exp_decay = decay.exp()[..., None]
    above = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu(1)
    path_decay = (decay[..., :, None] - decay[..., None, :]).masked_fill(above, -torch.inf).exp()
    system = beta * (k @ k.mT) * path_decay  # the solver reads what is below the diagonal only
    rhs = torch.cat([beta * v, beta * exp_decay * k], -1)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    u_without_state, state_weight = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside = (q @ k.mT) * path_decay
    q = q * exp_decay
    k = k * (decay[..., -1:] - decay).exp()[..., None]
    last_decay = exp_decay[..., -1:, :]

    outputs = []
    for c in range(decay.shape[2]):
        u = u_without_state[:, :, c] - state_weight[:, :, c] @ state
        outputs.append(q[:, :, c] @ state + inside[:, :, c] @ u)
        state = last_decay[:, :, c] * state + k[:, :, c].mT @ u
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2), state


def tree_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    records_k: Tensor,
    records_u: Tensor,
    records_decay: Tensor,
    num_pending: Tensor | None,
    node_offset: int,
    ancestors: Tensor,
) -> Tensor:
    """Outputs of all nodes of a draft tree from one read of the checkpoint; the nodes' records are written in place.

    Args:
        q, k: [B, N, Hk, K] float32; k l2-normalised, q l2-normalised and scaled by K**-0.5.
        v: [B, N, Hv, V] float32.
        g, beta: [B, N, Hv] float32.
        state: [B, Hv, K, V] float32, the checkpoint; not modified.
        records_k: [B, R, Hk, K] float32.
        records_u: [B, R, Hv, V] float32.
        records_decay: [B, R, Hv] float32, log decay of the whole path from the checkpoint to the record.
        num_pending: [B] int64; the first num_pending[b] records of row b are pending and precede the root. None says
            that every row has exactly ``node_offset`` of them.
        node_offset: where the nodes' records go, [node_offset, node_offset + N); >= every num_pending.
        ancestors: [B, N, N] bool, inclusive.

    Returns:
        Output [B, N, Hv, V].
    """
    num_nodes, num_value_heads = g.shape[1:]
    nodes = slice(node_offset, node_offset + num_nodes)
    records_k[:, nodes] = k
    decay = _path_log_decay(g, ancestors, records_decay, num_pending, node_offset)
    records_decay[:, nodes] = decay

    keys = _expand_heads(records_k[:, : nodes.stop], num_value_heads).transpose(1, 2)  # [B, H, R', K]
    q, k = (_expand_heads(x, num_value_heads).transpose(1, 2) for x in (q, k))
    qk = torch.cat([q, k], 2)  # one product reads the checkpoint for both
    both = (2, num_nodes)  # how the joint rows split
    decay = decay.transpose(1, 2)  # [B, H, N]
    read = (qk @ state).unflatten(2, both) * decay.exp()[:, :, None, :, None]
    scores = (qk @ keys.mT).unflatten(2, both)  # [B, H, 2, N, R']
    if node_offset:
        between = _decay_between(decay, records_decay[:, :node_offset], num_pending)
        pending = scores[..., :node_offset] * between[:, :, None]
        read = read + (pending.flatten(2, 3) @ records_u[:, :node_offset].transpose(1, 2)).unflatten(2, both)

    q_read, k_read = read.unbind(2)
    q_scores, k_scores = scores[..., node_offset:].unbind(2)
    beta = beta.transpose(1, 2)[..., None]
    u = beta * (v.transpose(1, 2) - k_read)
    if num_nodes > 1:
        inside = _decay_inside(decay, ancestors)
        u = torch.linalg.solve_triangular(beta * k_scores * inside, u, upper=False, unitriangular=True)
        q_scores = q_scores * inside
    records_u[:, nodes] = u.transpose(1, 2)
    out: Tensor = q_read + q_scores @ u
    return out.transpose(1, 2)


def fold(
    state: Tensor,
    records_k: Tensor,
    records_u: Tensor,
    records_decay: Tensor,
    num_pending: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Advance checkpoints over their pending records by one rank-m update each.

    Args:
        state: [B, Hv, K, V] float32; modified only where it is ``out``.
        records_k, records_u, records_decay: [B, R, Hk, K], [B, R, Hv, V], [B, R, Hv] float32.
        num_pending: [B] int64; rows with 0 keep their state.
        out: [B, Hv, K, V] float32, takes the new states; it is ``state`` or does not overlap it. None: a new tensor.

    Returns:
        New states [B, Hv, K, V].
    """
    num_records = records_decay.shape[1]
    out = torch.empty_like(state) if out is None else out
    if num_records == 0:
        return out.copy_(state)
    is_pending = torch.arange(num_records, device=state.device) < num_pending[:, None]
    last = (num_pending - 1).clamp(min=0)[:, None, None].expand(-1, 1, records_decay.shape[2])
    total = records_decay.gather(1, last) * (num_pending > 0)[:, None, None]  # [B, 1, H]
    weight = (total - records_decay).masked_fill(~is_pending[..., None], -torch.inf).exp()
    keys = _expand_heads(records_k, state.shape[1]) * weight[..., None]
    update = keys.permute(0, 2, 3, 1) @ records_u.masked_fill(~is_pending[..., None, None], 0).transpose(1, 2)
    return torch.mul(state, total.exp().transpose(1, 2)[..., None], out=out).add_(update)


def tree_verify_snapshots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    snapshots: Tensor,
    parents: Tensor | None,
) -> Tensor:
    """Outputs of all nodes of a draft tree, one node after the other; leaves the whole state after each of them.

    Args:
        q, k: [B, N, Hk, K] float32; k l2-normalised, q l2-normalised and scaled by K**-0.5.
        v: [B, N, Hv, V] float32.
        g, beta: [B, N, Hv] float32.
        state: [B, Hv, K, V] float32, the checkpoint; not modified.
        snapshots: [B, N, Hv, K, V] float32, written.
        parents: [B, N] int64, topological order; a node with parent -1 starts from the checkpoint. None: chains.

    Returns:
        Output [B, N, Hv, V].
    """
    num_nodes, num_value_heads = g.shape[1:]
    q, k = (_expand_heads(x, num_value_heads) for x in (q, k))
    qk, q_dot_k = torch.stack([q, k], 3), (q * k).sum(-1, keepdim=True)  # one product reads a state for both
    decay, beta = g.exp()[..., None], beta[..., None]
    out = torch.empty_like(v)
    for i in range(num_nodes):
        before, after = _state_before(state, snapshots, parents, i), snapshots[:, i]
        q_read, k_read = (qk[:, i] @ before * decay[:, i, :, None]).unbind(2)
        u = beta[:, i] * (v[:, i] - k_read)
        torch.mul(before, decay[:, i, :, None], out=after)
        after.addcmul_(k[:, i, :, :, None], u[:, :, None])
        out[:, i] = q_read + q_dot_k[:, i] * u
    return out


def _state_before(state: Tensor, snapshots: Tensor, parents: Tensor | None, node: int) -> Tensor:
    """The state that a node of each row continues, [B, Hv, K, V]: its parent's snapshot or the checkpoint."""
    if node == 0:
        return state
    if parents is None:
        return snapshots[:, node - 1]
    parent = parents[:, node]
    rows = torch.arange(len(parent), device=parent.device)
    return torch.where(parent[:, None, None, None] < 0, state, snapshots[rows, parent.clamp(min=0)])


def _path_log_decay(
    g: Tensor, ancestors: Tensor, records_decay: Tensor, num_pending: Tensor | None, node_offset: int
) -> Tensor:
    """Log decay of the path checkpoint -> pending records -> root -> node, [B, N, H]."""
    decay = g if g.shape[1] == 1 else ancestors.to(g.dtype) @ g
    if node_offset == 0:
        return decay
    if num_pending is None:
        return decay + records_decay[:, node_offset - 1 : node_offset]
    last = (num_pending - 1).clamp(min=0)[:, None, None].expand(-1, 1, g.shape[2])
    return decay + records_decay.gather(1, last) * (num_pending > 0)[:, None, None]


def _decay_between(decay: Tensor, pending_decay: Tensor, num_pending: Tensor | None) -> Tensor:
    """Decay from each pending record to each node [B, H, N], 0 for holes: [B, H, N, node_offset]."""
    difference = decay[..., None] - pending_decay.transpose(1, 2)[:, :, None]
    if num_pending is not None:
        is_hole = torch.arange(pending_decay.shape[1], device=decay.device) >= num_pending[:, None]
        difference = difference.masked_fill(is_hole[:, None, None], -torch.inf)
    return difference.exp()


def _decay_inside(decay: Tensor, ancestors: Tensor) -> Tensor:
    """Decay from ancestor j to node i, 0 elsewhere: [B, H, N, N]. Masked before exp: off-path differences overflow."""
    difference = decay[..., :, None] - decay[..., None, :]
    return difference.masked_fill(~ancestors[:, None], -torch.inf).exp()


def _expand_heads(x: Tensor, num_value_heads: int) -> Tensor:
    """[B, L, Hk, K] -> [B, L, Hv, K]: each key head serves consecutive value heads."""
    group = num_value_heads // x.shape[2]
    return x if group == 1 else x.repeat_interleave(group, 2)


def _split_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, L, H, D] -> [B, H, chunks, C, D], the last chunk padded with zeros."""
    batch, length, heads, dim = x.shape
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -length % chunk))
    return x.view(batch, -1, chunk, heads, dim).permute(0, 3, 1, 2, 4)
