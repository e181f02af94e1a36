"""Records of a state S = sum of decayed outer products, in vectorised PyTorch. See README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.state_records.operands import Buffers, as_stored


def fold(state: Tensor, k: Tensor, u: Tensor, decay: Tensor, num_pending: Tensor, out: Tensor | None = None) -> Tensor:
    """One matrix product of weighted keys and updates per head."""
    num_records = decay.shape[1]
    out = torch.empty_like(state) if out is None else out
    if num_records == 0 or state.numel() == 0:
        return out.copy_(state)
    is_pending = torch.arange(num_records, device=state.device) < num_pending[:, None]
    behind, total = decay_behind(by_channel(decay), num_pending)
    weight = behind.exp() * is_pending[..., None, None]
    keys = expand_heads(k, state.shape[1]) * weight
    update = keys.permute(0, 2, 3, 1) @ u.masked_fill(~is_pending[..., None, None], 0).transpose(1, 2)
    return torch.mul(state, total.exp().transpose(1, 2).mT, out=out).add_(update)


def fold_rows(buffers: Buffers, rows: Tensor, slots: Tensor, num_pending: Tensor, folds: Tensor | None = None) -> None:
    """A fold per layer; the rows are found on the host."""
    assert buffers.windows is not None
    is_folded = num_pending > 0 if folds is None else folds & (num_pending > 0)
    row, slot, count = rows[is_folded], slots[is_folded], num_pending[is_folded]
    window = buffers.windows.shape[2]
    for states, k, u, decay in zip(buffers.states, buffers.k, buffers.u, buffers.decay, strict=True):
        folded = fold(states[slot].float(), k[row], u[row], decay[row], count)
        states[slot] = as_stored(folded, states.dtype)
    newest = count[:, None] + torch.arange(window, device=count.device)
    moved = buffers.conv_inputs[:, row[:, None], newest]
    buffers.windows[:, slot] = moved
    buffers.conv_inputs[:, row, :window] = moved
    num_pending.masked_fill_(is_folded, 0)


def state_before(state: Tensor, snapshots: Tensor, parents: Tensor | None, node: int) -> Tensor:
    """The state that a node of each row continues, [B, Hv, K, V]: its parent's snapshot or the checkpoint."""
    if node == 0:
        return state
    if parents is None:
        return snapshots[:, node - 1]
    parent = parents[:, node]
    rows = torch.arange(len(parent), device=parent.device)
    return torch.where(parent[:, None, None, None] < 0, state, snapshots[rows, parent.clamp(min=0)])


def decay_along(g: Tensor) -> Tensor:
    """Decay from token j of a run to token i >= j, 0 above the diagonal: log decays [..., L] -> [..., L, L].

    What lies between the two is summed up, and is no difference of sums since the start: behind a strong decay these
    have lost the digits of weak ones.
    """
    length = g.shape[-1]
    on_or_above = torch.ones(length, length, dtype=torch.bool, device=g.device).triu()
    sums = g[..., None].masked_fill(on_or_above, 0).cumsum(-2)
    return sums.masked_fill_(on_or_above.triu(1), -torch.inf).exp_()


def path_log_decay(g: Tensor, ancestors: Tensor) -> Tensor:
    """Log decay of the path root -> node, both inclusive: [B, N, H]."""
    return g if g.shape[1] == 1 else ancestors.to(g.dtype) @ g


def decay_behind(decay: Tensor, num_pending: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log decay behind each pending record [B, R, H, ...], up to the last one, and of all of them, [B, 1, H, ...].

    ``decay`` are records' own; R > 0. Records from ``num_pending`` on are holes, None: there are none.
    """
    if num_pending is not None:
        is_hole = torch.arange(decay.shape[1], device=decay.device) >= num_pending[:, None]
        decay = decay.masked_fill(is_hole.view(*is_hole.shape, *[1] * (decay.dim() - 2)), 0)
    sums = decay.flip(1).cumsum(1).flip(1)  # from each record on
    return torch.cat([sums[:, 1:], torch.zeros_like(sums[:, :1])], 1), sums[:, :1]


def decay_between(path: Tensor, behind: Tensor, num_pending: Tensor | None) -> Tensor:
    """Decay from each pending record to each node, 0 for holes: [B, H, N, R].

    ``path`` [B, H, N] is ``path_log_decay``, ``behind`` [B, R, H] ``decay_behind``: both sum up what lies between.
    """
    total = path[..., None] + behind.transpose(1, 2)[:, :, None]
    if num_pending is not None:
        is_hole = torch.arange(behind.shape[1], device=behind.device) >= num_pending[:, None]
        total = total.masked_fill(is_hole[:, None, None], -torch.inf)
    return total.exp()


def decay_inside(g: Tensor, ancestors: Tensor) -> Tensor:
    """Decay from ancestor j to node i, 0 elsewhere: [B, H, N, N]. ``g`` [B, N, H] are nodes' own, and finite.

    Summed up over the nodes between the two, as in ``decay_along``.
    """
    sees = ancestors.to(g.dtype)[:, None]
    sums = (sees * g.transpose(1, 2)[:, :, None]) @ sees.tril(-1)
    return sums.masked_fill(~ancestors[:, None], -torch.inf).exp()


def finite(x: Tensor) -> Tensor:
    """x with 0 for values that are not finite: masked weights are 0 but still multiplied, and 0 times NaN is NaN."""
    return x.nan_to_num(0.0, 0.0, 0.0)


def flaw(x: Tensor) -> Tensor:
    """0 where all of the last dimension is finite, else NaN: [..., D] -> [...]."""
    return (x * 0).sum(-1)


def flaws_inside(flaws: Tensor, ancestors: Tensor) -> Tensor:
    """Terms to add to the weights of node j in node i: NaN where j is i or its ancestor and has a flaw, else 0.

    So values are made ``finite`` for all nodes, and a flaw still reaches the node and its descendants. ``flaws``
    [B, H, N] are 0 or NaN. Returns a tensor that broadcasts to [B, H, N, N].
    """
    weights = flaws[..., None, :]
    return weights if flaws.shape[2] == 1 else weights.masked_fill(~ancestors[:, None], 0.0)


def by_channel(decay: Tensor) -> Tensor:
    """Log decays [B, L, H] or [B, L, H, K], for products with keys [B, L, H, K]: [B, L, H, 1 or K]."""
    return decay if decay.dim() == 4 else decay[..., None]


def expand_heads(x: Tensor, num_value_heads: int) -> Tensor:
    """[B, L, Hk, ...] -> [B, L, Hv, ...]: each key head serves consecutive value heads."""
    group = num_value_heads // x.shape[2]
    return x if group == 1 else x.repeat_interleave(group, 2)
