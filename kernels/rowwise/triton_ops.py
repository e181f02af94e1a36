"""What is done to each token on its own, in one Triton launch each. See README.md.

Tensors are read where they lie, as long as the numbers of a row (``delta_inputs``: of a token) lie side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.gpu import next_power_of_2
from specmamba.kernels.rowwise import triton_kernels as kernels
from specmamba.kernels.rowwise.tiles import Tile, row_tile, silu_tile
from specmamba.kernels.rowwise.torch_ops import L2_EPS


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One launch."""
    return _norm(x, None, weight, eps, x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One launch for norm and gate."""
    assert gate.shape == x.shape, "x and gate do not fit"
    return _norm(x, gate, weight, eps, gate.dtype)


def _norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    assert weight.shape == x.shape[x.dim() - weight.dim() :], "the weight has another shape"
    y, weight = torch.empty(x.shape, dtype=dtype, device=x.device), _dense(weight)
    if y.numel() == 0:
        return y
    x, gate = _heads(x), None if gate is None else _heads(gate)
    _, length, heads, width = x.shape
    rows, tile = y.numel() // width, row_tile(width)
    kernels.norm_kernel[(_blocks(rows, tile.rows),)](
        *(x, gate, weight, y, eps, rows, length, heads, width, *x.stride()[:3]),
        *((0, 0, 0) if gate is None else gate.stride()[:3]),
        weight.stride(0) if weight.dim() == 2 else 0,
        **_rows_of(tile),
    )
    return y


def silu_mul(gate_up: Tensor) -> Tensor:
    """One launch; rounded once."""
    width = gate_up.shape[-1] // 2
    assert gate_up.shape[-1] == 2 * width, "gate and up do not have the same width"
    y = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel() == 0:
        return y
    gate_up, tile = _tokens(gate_up, 1), silu_tile(width)
    kernels.silu_mul_kernel[(y.numel() // width, _blocks(width, tile.columns))](
        *(gate_up, y, gate_up.shape[1], width, *gate_up.stride()[:2]),
        BLOCK=tile.columns,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One launch; rounded once."""
    dim = cos.shape[-1]
    assert cos.shape == sin.shape == (*x.shape[:2], 1, dim), "cos and sin have another shape"
    assert dim <= x.shape[-1] and dim % 2 == 0, "so many components cannot rotate"  # noqa: PT018
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, cos, sin = _dense(x), _dense(cos), _dense(sin)
    _, length, heads, width = x.shape
    rows, tile = y.numel() // width, row_tile(width)
    kernels.rotate_kernel[(_blocks(rows, tile.rows),)](
        *(x, cos, sin, y, rows, length, heads, width, dim),
        *(*x.stride()[:3], *cos.stride()[:2], *sin.stride()[:2]),
        **_rows_of(tile),
    )
    return y


def delta_inputs(
    mixed: Tensor, a: Tensor, b: Tensor, negative_a: Tensor, dt_bias: Tensor, num_key_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One launch for all four results."""
    batch, length, value_heads = a.shape
    assert a.shape == b.shape == (*mixed.shape[:2], value_heads), "mixed, a and b do not fit"
    assert mixed.shape[2] >= 2 * num_key_heads * key_dim, "there are fewer channels than queries and keys"
    q, k = (torch.empty(batch, length, num_key_heads, key_dim, device=mixed.device) for _ in range(2))
    g, beta = (torch.empty(batch, length, value_heads, device=mixed.device) for _ in range(2))
    mixed, a, b = _dense(mixed), _dense(a), _dense(b)
    if batch * length > 0:
        tile = row_tile(key_dim, 2 * num_key_heads)
        kernels.delta_inputs_kernel[(batch * length, _blocks(2 * num_key_heads, tile.rows))](
            *(mixed, a, b, _dense(negative_a), _dense(dt_bias), q, k, g, beta, length),
            *(num_key_heads, key_dim, value_heads, key_dim**-0.5, L2_EPS),
            *(*mixed.stride()[:2], *a.stride()[:2], *b.stride()[:2]),
            BLOCK_HEADS=tile.rows,
            BLOCK_K=tile.columns,
            BLOCK_V=next_power_of_2(value_heads),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return q, k, g, beta


def _heads(x: Tensor) -> Tensor:
    """[..., H, D] -> [B, L, H, D]. Of rows without heads, what is in front of them is taken for heads."""
    return _tokens(x if x.dim() > 1 else x[None], 2)


def _tokens(x: Tensor, dims: int) -> Tensor:
    """Tokens of so many dimensions, the last of them dense, behind two of whatever strides."""
    x, lead = _dense(x), x.dim() - dims
    if lead > 2:
        return x.flatten(0, lead - 2)
    return x if lead == 2 else x[None] if lead == 1 else x[None, None]


def _dense(x: Tensor) -> Tensor:
    """x with its last dimension contiguous, as parts of a projection have it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _rows_of(tile: Tile) -> dict[str, int]:
    """What a launch over whole rows is told of its tile."""
    blocks = {"BLOCK_ROWS": tile.rows, "BLOCK_D": tile.columns}
    return {**blocks, "num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _blocks(size: int, block: int) -> int:
    return -(-size // block)
