"""State space duality, the recurrence of Mamba2: chunked prefill and tree verification from records."""

import torch
from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.ssd import torch_ops
from specmamba.kernels.ssd.torch_ops import extend, tree_verify
from specmamba.kernels.state_records import as_stored

__all__ = ["extend", "extend_in_place", "tree_verify", "tree_verify_snapshots"]


def extend_in_place(
    c: Tensor, b: Tensor, u: Tensor, g: Tensor, states: Tensor, slots: Tensor, lengths: Tensor
) -> Tensor:
    """Run known tokens through the recurrence, from the states in their slots to the states that they leave there.

    Args:
        c, b: [B, L, G, N] float32.
        u: [B, L, H, P] float32, dt x; H a multiple of G.
        g: [B, L, H] float32, log decay dt A <= 0.
        states: [slots, H, N, P], any float dtype; rows of length 0 and rows of slot 0 leave theirs as it is. What
            float16 cannot hold becomes its largest finite number.
        slots: [B] int64, distinct but for 0.
        lengths: [B] int64; tokens from lengths[b] on are padding.

    Returns:
        Output [B, L, H, P] float32; zeros on padding and for rows of slot 0.
    """
    if gpu.can_launch(u, states):
        from specmamba.kernels.ssd import triton_ops

        return triton_ops.extend_in_place(c, b, u, g, states, slots, lengths)
    lengths = lengths.masked_fill(slots == 0, 0)
    before = states[slots]
    out, after = torch_ops.extend(c, b, u, g, before.float(), lengths)
    states[slots] = torch.where((lengths > 0)[:, None, None, None], as_stored(after, states.dtype), before)
    is_padding = torch.arange(u.shape[1], device=u.device) >= lengths[:, None]
    return out.masked_fill_(is_padding[..., None, None], 0)


def tree_verify_snapshots(
    c: Tensor, b: Tensor, u: Tensor, g: Tensor, state: Tensor, snapshots: Tensor, parents: Tensor | None
) -> Tensor:
    """See ``torch_ops.tree_verify_snapshots``."""
    if gpu.can_launch(u, state, snapshots):
        from specmamba.kernels.ssd import triton_ops

        return triton_ops.tree_verify_snapshots(c, b, u, g, state, snapshots, parents)
    return torch_ops.tree_verify_snapshots(c, b, u, g, state, snapshots, parents)
