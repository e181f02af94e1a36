"""The fold of records as one Triton launch. See README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.state_records import triton_kernels
from specmamba.kernels.state_records.tiles import fold_tile


def fold(
    state: Tensor,
    records_k: Tensor,
    records_u: Tensor,
    records_decay: Tensor,
    num_pending: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """See ``torch_ops.fold``; in whatever layout the operands are.

    ``state`` and ``out`` may be of any float dtype, not necessarily the same: the states are computed in float32. What
    float16 cannot hold becomes its largest finite number. Without ``out``, the new states have the dtype of ``state``.
    """
    batch, heads, key_dim, value_dim = state.shape
    out = torch.empty_like(state) if out is None else out
    if out.numel() == 0:
        return out
    tile = fold_tile(key_dim, value_dim)
    grid = -(-value_dim // tile.values), heads, batch
    triton_kernels.fold[grid](
        state,
        records_k,
        records_u,
        records_decay,
        num_pending,
        out,
        key_dim,
        value_dim,
        heads // records_k.shape[2],
        *state.stride(),
        *records_k.stride(),
        *records_u.stride(),
        *records_decay.stride(),
        *out.stride(),
        **tile.constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
