"""The fold of records as one Triton launch. See README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.state_records import triton_kernels
from specmamba.kernels.state_records.tiles import fold_tile


def fold(state: Tensor, k: Tensor, u: Tensor, decay: Tensor, num_pending: Tensor, out: Tensor | None = None) -> Tensor:
    """One launch, for operands of any strides; states are computed in float32."""
    batch, heads, key_dim, value_dim = state.shape
    out = torch.empty_like(state) if out is None else out
    if out.numel() == 0:
        return out
    tile = fold_tile(key_dim, value_dim)
    grid = -(-value_dim // tile.values), heads, batch
    triton_kernels.fold[grid](
        state,
        k,
        u,
        decay,
        num_pending,
        out,
        key_dim,
        value_dim,
        heads // k.shape[2],
        *state.stride(),
        *k.stride(),
        *u.stride(),
        *decay.stride(),
        *out.stride(),
        **tile.constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
