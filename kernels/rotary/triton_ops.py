"""Cosines and sines of rotary position embedding in one Triton launch. See README.md."""

import torch
from torch import Tensor

from specmamba.kernels.rotary.tiles import constexprs, tile_for
from specmamba.kernels.rotary.triton_kernels import angles_kernel


def angles(positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One launch."""
    width = inverse_frequencies.numel()
    shape = (*positions.shape, 1, width)
    cos, sin = (torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))
    if cos.numel() == 0:
        return cos, sin
    tile, num_tokens = tile_for(width), positions.numel()
    angles_kernel[(-(-num_tokens // tile.tokens),)](
        *(positions, inverse_frequencies.contiguous(), cos, sin, scaling, num_tokens, positions.shape[1], width),
        *positions.stride(),
        **constexprs(tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return cos, sin
