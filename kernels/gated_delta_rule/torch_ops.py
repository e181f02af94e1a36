"""Gated delta rule in vectorised PyTorch, on any device. See README.md for the mathematics."""

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
    is_padding = torch.arange(length, device=g.device) >= lengths[:, None]
    k, v = (x.masked_fill(is_padding[..., None, None], 0) for x in (k, v))
    g, beta = (x.masked_fill(is_padding[..., None], 0) for x in (g, beta))
    q, k = (expand_heads(x, num_value_heads) for x in (q, k))
    q, k, v, g, beta = (_split_chunks(x, chunk) for x in (q, k, v, g[..., None], beta[..., None]))

    exp_decay = g.cumsum(-2).exp()  # [B, H, chunks, C, 1]
    path_decay = decay_along(g.squeeze(-1))
    system = beta * (k @ k.mT) * path_decay  # the solver reads what is below the diagonal only
    rhs = torch.cat([beta * v, beta * exp_decay * k], -1)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    u_without_state, state_weight = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside = (q @ k.mT) * path_decay
    q = q * exp_decay
    k = k * path_decay[..., -1, :, None]
    last_decay = exp_decay[..., -1:, :]

    outputs = []
    for c in range(q.shape[2]):
        u = u_without_state[:, :, c] - state_weight[:, :, c] @ state
        outputs.append(q[:, :, c] @ state + inside[:, :, c] @ u)
        state = last_decay[:, :, c] * state + k[:, :, c].mT @ u
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2), state


def tree_verify(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, records: Records, placement: TreePlacement
) -> Tensor:
    """Outputs of all nodes of a draft tree from one read of the checkpoint; the nodes' records are written in place.

    Args:
        q, k: [B, N, Hk, K] float32; k l2-normalised, q l2-normalised and scaled by K**-0.5.
        v: [B, N, Hv, V] float32.
        g, beta: [B, N, Hv] float32.
        state: [B, Hv, K, V] float32, the checkpoint; not modified.
        records: float32; decays are records' own log decays.
        placement: which records precede the root, where the nodes' own go, and which node sees which.

    Returns:
        Output [B, N, Hv, V], in heads where a node is not finite NaN for it and its descendants. Records are finite.
    """
    (records_k, records_u, records_decay), (num_pending, node_offset, ancestors) = records, placement
    num_nodes, num_value_heads = g.shape[1:]
    flaws = (expand_heads(flaw(k), num_value_heads) + g * 0 + beta * 0).transpose(1, 2)  # [B, H, N]
    k, g, beta = finite(k), finite(g), finite(beta)
    nodes = slice(node_offset, node_offset + num_nodes)
    records_k[:, nodes] = k
    records_decay[:, nodes] = g
    path = path_log_decay(g, ancestors)  # [B, N, H]
    if node_offset:
        behind, before_root = decay_behind(records_decay[:, :node_offset], num_pending)

    keys = expand_heads(records_k[:, : nodes.stop], num_value_heads).transpose(1, 2)  # [B, H, R', K]
    q, k = (expand_heads(x, num_value_heads).transpose(1, 2) for x in (q, k))
    qk = torch.cat([q, k], 2)  # one product reads the checkpoint for both
    both = (2, num_nodes)  # how the joint rows split
    whole = (path + before_root if node_offset else path).transpose(1, 2)  # [B, H, N]
    read = (qk @ state).unflatten(2, both) * whole.exp()[:, :, None, :, None]
    scores = (qk @ keys.mT).unflatten(2, both)  # [B, H, 2, N, R']
    if node_offset:
        between = decay_between(path.transpose(1, 2), behind, num_pending)
        pending = scores[..., :node_offset] * between[:, :, None]
        read = read + (pending.flatten(2, 3) @ records_u[:, :node_offset].transpose(1, 2)).unflatten(2, both)

    q_read, k_read = read.unbind(2)
    q_scores, k_scores = scores[..., node_offset:].unbind(2)
    beta = beta.transpose(1, 2)[..., None]
    u = beta * (v.transpose(1, 2) - k_read)
    flaws, u = flaws + flaw(u), finite(u)
    if num_nodes > 1:
        inside = decay_inside(g, ancestors)
        u = torch.linalg.solve_triangular(beta * k_scores * inside, u, upper=False, unitriangular=True)
        q_scores = q_scores * inside
    records_u[:, nodes] = finite(u).transpose(1, 2)
    out: Tensor = q_read + (q_scores + flaws_inside(flaws, ancestors)) @ u
    return out.transpose(1, 2)


def tree_verify_snapshots(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, snapshots: Tensor, parents: Tensor | None
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
    q, k = (expand_heads(x, num_value_heads) for x in (q, k))
    qk, q_dot_k = torch.stack([q, k], 3), (q * k).sum(-1, keepdim=True)  # one product reads a state for both
    decay, beta = g.exp()[..., None], beta[..., None]
    out = torch.empty_like(v)
    for i in range(num_nodes):
        before, after = state_before(state, snapshots, parents, i), snapshots[:, i]
        q_read, k_read = (qk[:, i] @ before * decay[:, i, :, None]).unbind(2)
        u = beta[:, i] * (v[:, i] - k_read)
        torch.mul(before, decay[:, i, :, None], out=after)
        after.addcmul_(k[:, i, :, :, None], u[:, :, None])
        out[:, i] = q_read + q_dot_k[:, i] * u
    return out


def _split_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, L, H, D] -> [B, H, chunks, C, D], the last chunk padded with zeros."""
    batch, length, heads, dim = x.shape
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -length % chunk))
    return x.view(batch, -1, chunk, heads, dim).permute(0, 3, 1, 2, 4)
