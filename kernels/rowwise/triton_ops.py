"""What is computed for each token on its own, in one Triton launch each. See README.md.

Tensors are read where they lie, if the numbers of a row (``delta_inputs``: of a token) are contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.gpu import Variant, dense, launch, next_power_of_2, num_blocks
from specmamba.kernels.rowwise import triton_kernels as kernels
from specmamba.kernels.rowwise import triton_scan_layer as scan_layer
from specmamba.kernels.rowwise.torch_ops import L2_EPS

SILU_COLUMNS = 1024


@dataclass(frozen=True)
class Tile:
    """Rows (heads, or whole tokens) and their columns in one block. Chosen by register counts, not measured."""

    rows: int
    columns: int
    num_warps: int = 4
    num_stages: int = 1  # no kernel has a loop


def row_tile(width: int, num_rows: int = 1 << 30) -> Tile:
    """For whole rows: a warp has a head, a thread at most 32 numbers of a row of up to 16384."""
    columns = next_power_of_2(width)
    rows = min(max(1, 512 // columns), next_power_of_2(num_rows))
    return Tile(rows, columns, num_warps=min(16, max(1, rows * columns // 512 if rows == 1 else 4)))


def silu_tile(width: int) -> Tile:
    """For parts of one row: a thread has 8 numbers of either half."""
    columns = min(SILU_COLUMNS, next_power_of_2(width))
    return Tile(1, columns, num_warps=max(1, columns // 256))


def angles_tile(rotary_width: int) -> Tile:
    """For angles of tokens: a thread has 4 angles of a head of 64 to 256 components."""
    columns = next_power_of_2(rotary_width)
    return Tile(max(1, 512 // columns), columns)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One launch."""
    return _norm(x, None, weight, eps, x.dtype)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """One launch for sum and norm."""
    assert added.shape == x.shape, "x and added do not fit"
    assert added.dtype is x.dtype, "x and added differ in dtype"
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return total, _norm(x, None, weight, eps, x.dtype, (added.contiguous(), total))


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_sigmoid: bool = False) -> Tensor:
    """One launch for norm and gate."""
    assert gate.shape == x.shape, "x and gate do not fit"
    return _norm(x, gate, weight, eps, gate.dtype, is_sigmoid=is_sigmoid)


def _norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    sums: tuple[Tensor | None, Tensor | None] = (None, None),
    is_sigmoid: bool = False,
) -> Tensor:
    """``sums``: what is added to x before, and where the sum is kept; both dense. ``is_sigmoid``: of the gate."""
    assert weight.shape == x.shape[x.dim() - weight.dim() :], "the weight has another shape"
    y, weight = torch.empty(x.shape, dtype=dtype, device=x.device), dense(weight)
    if y.numel() == 0:
        return y
    x, gate = _heads(x), None if gate is None else _heads(gate)
    _, length, heads, width = x.shape
    rows, tile = y.numel() // width, row_tile(width)
    launch(
        *(kernels.norm_kernel, (num_blocks(rows, tile.rows),), tile, _norm_constants(tile, is_sigmoid)),
        *(x, gate, sums[0], weight, y, sums[1], eps, rows, length, heads, width, *x.stride()[:3]),
        *((0, 0, 0) if gate is None else gate.stride()[:3]),
        weight.stride(0) if weight.dim() == 2 else 0,
    )
    return y


def gate_heads(x: Tensor, gates: Tensor) -> Tensor:
    """One launch; gate and product are rounded one after the other."""
    assert gates.shape == x.shape[:3], "x and gates do not fit"
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    _, length, heads, width = x.shape
    rows, tile = y.numel() // width, row_tile(width)
    launch(
        *(kernels.gate_heads_kernel, (num_blocks(rows, tile.rows),), tile, _row_constants(tile)),
        *(x.contiguous(), gates, y, rows, length, heads, width, *gates.stride()),
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
    grid = y.numel() // width, num_blocks(width, tile.columns)
    arguments = gate_up, y, gate_up.shape[1], width, *gate_up.stride()[:2]
    launch(kernels.silu_mul_kernel, grid, tile, {"BLOCK": tile.columns}, *arguments)
    return y


def rotary_angles(
    positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One launch; the two halves of the frequencies may differ."""
    width, num_tokens = inverse_frequencies.numel(), positions.numel()
    shape = *positions.shape, 1, width
    cos, sin = (torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))
    if cos.numel() == 0:
        return cos, sin
    tile = angles_tile(width)
    launch(
        *(kernels.angles_kernel, (num_blocks(num_tokens, tile.rows),), tile, _angles_constants(tile)),
        *(positions, inverse_frequencies.contiguous(), cos, sin, scaling, num_tokens, positions.shape[1], width),
        *positions.stride(),
    )
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One launch; rounded once."""
    dim = cos.shape[-1]
    assert cos.shape == sin.shape == (*x.shape[:2], 1, dim), "cos and sin have another shape"
    assert dim <= x.shape[-1] and dim % 2 == 0, "so many components cannot rotate"  # noqa: PT018
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, cos, sin = dense(x), dense(cos), dense(sin)
    _, length, heads, width = x.shape
    rows, tile = y.numel() // width, row_tile(width)
    launch(
        *(kernels.rotate_kernel, (num_blocks(rows, tile.rows),), tile, _row_constants(tile)),
        *(x, cos, sin, y, rows, length, heads, width, dim),
        *(*x.stride()[:3], *cos.stride()[:2], *sin.stride()[:2]),
    )
    return y


def delta_inputs(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    negative_a: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    key_dim: int,
    step_scale: float = 1.0,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One launch for all four results."""
    batch, length, value_heads = b.shape
    by_channel = a.dim() == 4
    decays = (value_heads, key_dim) if by_channel else (value_heads,)
    assert b.shape[:2] == mixed.shape[:2], "mixed and b do not fit"
    assert a.shape == (batch, length, *decays), "a and b do not fit"
    assert dt_bias.shape == decays, "a and its bias do not fit"
    assert mixed.shape[2] >= 2 * num_key_heads * key_dim, "there are fewer channels than queries and keys"
    q, k = (torch.empty(batch, length, num_key_heads, key_dim, device=mixed.device) for _ in range(2))
    g, beta = (torch.empty(x.shape, device=mixed.device) for x in (a, b))
    mixed, a, b = dense(mixed), dense(a), dense(b)
    if batch * length > 0:
        tile = row_tile(key_dim, 2 * num_key_heads)
        num_heads = max(2 * num_key_heads, value_heads if by_channel else 0)
        launch(
            *(kernels.delta_inputs_kernel, (batch * length, num_blocks(num_heads, tile.rows)), tile),
            _delta_constants(tile, value_heads, by_channel, lower_bound is not None),
            *(mixed, a, b, dense(negative_a), dt_bias.contiguous(), q, k, g, beta, length),
            *(num_key_heads, key_dim, value_heads, key_dim**-0.5, L2_EPS, step_scale, lower_bound or 0.0),
            *(*mixed.stride()[:2], *a.stride()[:2], a.stride(2) if by_channel else 0, *b.stride()[:2]),
        )
    return q, k, g, beta


def time_steps(raw: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """One launch for both results."""
    assert raw.shape == x.shape, "raw and x do not fit"
    assert bias.shape == x.shape[-1:], "the bias has another shape"
    steps, weighted = (torch.empty(x.shape, device=x.device) for _ in range(2))
    if steps.numel() > 0:
        (raw, x), (grid, tile) = (_tokens(z, 1) for z in (raw, x)), _channel_grid(steps)
        launch(
            *(scan_layer.time_steps_kernel, grid, tile, {"BLOCK": tile.columns}),
            *(raw, dense(bias), x, steps, weighted, *x.shape[1:], *raw.stride()[:2], *x.stride()[:2]),
        )
    return steps, weighted


def skip_gate(y: Tensor, x: Tensor, skip: Tensor, gate: Tensor) -> Tensor:
    """One launch for sum and gate; rounded once."""
    assert y.shape == x.shape == gate.shape, "y, x and gate do not fit"
    assert skip.shape == x.shape[-1:], "the skip has another shape"
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    if out.numel() > 0:
        (y, x, gate), (grid, tile) = (_tokens(z, 1) for z in (y, x, gate)), _channel_grid(out)
        launch(
            *(scan_layer.skip_gate_kernel, grid, tile, {"BLOCK": tile.columns}),
            *(y, x, dense(skip), gate, out, *x.shape[1:]),
            *(*y.stride()[:2], *x.stride()[:2], *gate.stride()[:2]),
        )
    return out


def _channel_grid(out: Tensor) -> tuple[tuple[int, int], Tile]:
    """A program for each token and block of channels of ``out`` [..., C]."""
    channels = out.shape[-1]
    tile = silu_tile(channels)
    return (out.numel() // channels, num_blocks(channels, tile.columns)), tile


def _heads(x: Tensor) -> Tensor:
    """[..., H, D] -> [B, L, H, D]. Of rows without heads, the dimension in front of them is used as heads."""
    return _tokens(x if x.dim() > 1 else x[None], 2)


def _tokens(x: Tensor, dims: int) -> Tensor:
    """Tokens of so many dimensions, the last of them dense, behind two dimensions of any strides."""
    x, lead = dense(x), x.dim() - dims
    if lead > 2:
        return x.flatten(0, lead - 2)
    return x if lead == 2 else x[None] if lead == 1 else x[None, None]


def _row_constants(tile: Tile) -> dict[str, int]:
    return {"BLOCK_ROWS": tile.rows, "BLOCK_D": tile.columns}


def _norm_constants(tile: Tile, is_sigmoid: bool) -> dict[str, int]:
    return {**_row_constants(tile), "IS_SIGMOID": is_sigmoid}


def _angles_constants(tile: Tile) -> dict[str, int]:
    return {"BLOCK_T": tile.rows, "BLOCK_R": tile.columns}


def _delta_constants(tile: Tile, num_value_heads: int, by_channel: bool, has_bound: bool) -> dict[str, int]:
    blocks = {"BLOCK_HEADS": tile.rows, "BLOCK_K": tile.columns, "BLOCK_V": next_power_of_2(num_value_heads)}
    return {**blocks, "BY_CHANNEL": by_channel, "HAS_BOUND": has_bound}


def variants() -> list[Variant]:
    """Norms of hidden states, heads and states, and one of each of the others, at the sizes of a 4096-wide model."""
    delta = {"mixed": "fp32", "a": "bf16", "b": "bf16", **dict.fromkeys(("negative_a", "dt_bias"), "fp32")}
    delta |= dict.fromkeys(("q", "k", "g", "beta"), "fp32")
    turned = dict.fromkeys(("x", "cos", "sin", "y"), "bf16")
    return [
        _norm_of("rms_norm bf16 D=4096", {"x": "bf16", "y": "bf16"}, 4096),
        _norm_of("rms_norm bf16 D=128", {"x": "bf16", "y": "bf16"}, 128),
        _norm_of("rms_norm fp32 D=4096", {"x": "fp32", "y": "fp32"}, 4096),
        _norm_of("add_rms_norm bf16 D=4096", dict.fromkeys(("x", "added", "total", "y"), "bf16"), 4096),
        _norm_of("gated_rms_norm bf16 D=128", {"x": "fp32", "gate": "bf16", "y": "bf16"}, 128),
        _norm_of("gated_rms_norm sigmoid bf16 D=128", {"x": "fp32", "gate": "bf16", "y": "bf16"}, 128, True),
        _variant(
            *("silu_mul bf16", kernels.silu_mul_kernel, {"gate_up": "bf16", "y": "bf16"}, silu_tile(12288)),
            {"BLOCK": silu_tile(12288).columns},
        ),
        _variant(
            "gate_heads bf16 D=128",
            kernels.gate_heads_kernel,
            dict.fromkeys(("x", "gates", "y"), "bf16"),
            row_tile(128),
        ),
        _variant("rotate bf16 D=256", kernels.rotate_kernel, turned, row_tile(256)),
        _delta("bf16 K=128", delta, 32),
        _delta("channels bf16 K=128", delta, 64, by_channel=True),
        _delta("channels bound bf16 K=128", delta, 64, by_channel=True, has_bound=True),
        _angles("bf16", 64),
        _angles("fp32", 128),
        _around_scan("time_steps", scan_layer.time_steps_kernel, {"raw": "bf16"}),
        _around_scan("skip_gate", scan_layer.skip_gate_kernel, {"gate": "bf16", "out": "bf16"}),
    ]


def _norm_of(name: str, pointers: Mapping[str, str], width: int, is_sigmoid: bool = False) -> Variant:
    tile = row_tile(width)
    return _variant(name, kernels.norm_kernel, pointers, tile, _norm_constants(tile, is_sigmoid))


def _delta(
    name: str, pointers: Mapping[str, str], num_heads: int, by_channel: bool = False, has_bound: bool = False
) -> Variant:
    """Of so many query and key heads, and of 32 value heads."""
    tile = row_tile(128, num_heads)
    constants = _delta_constants(tile, 32, by_channel, has_bound)
    return _variant(f"delta_inputs {name}", kernels.delta_inputs_kernel, pointers, tile, constants)


def _around_scan(name: str, kernel: Any, pointers: Mapping[str, str]) -> Variant:
    """Of 8192 channels; all other tensors are float32."""
    tile, tensors = silu_tile(8192), ("raw", "bias", "x", "steps", "weighted", "y", "skip", "gate", "out")
    types = {x: "fp32" for x in tensors if x in kernel.arg_names} | dict(pointers)
    return _variant(f"{name} bf16", kernel, types, tile, {"BLOCK": tile.columns})


def _angles(dtype: str, width: int) -> Variant:
    pointers = {"positions": "i64", "frequencies": "fp32", "cos": dtype, "sin": dtype}
    tile = angles_tile(width)
    name = f"rotary_angles {dtype} R={width}"
    return _variant(name, kernels.angles_kernel, pointers, tile, _angles_constants(tile))


def _variant(
    name: str, kernel: Any, pointers: Mapping[str, str], tile: Tile, constants: Mapping[str, Any] | None = None
) -> Variant:
    constants = dict(_row_constants(tile) if constants is None else constants)
    constants |= {x: None for x in ("gate", "added", "total") if x in kernel.arg_names and x not in pointers}
    types = {x: f"*{dtype}" for x, dtype in {"weight": "fp32", **pointers}.items()}
    types |= dict.fromkeys(("eps", "query_scale", "scaling", "step_scale", "bound"), "fp32")
    return Variant.of(name, kernel, types, constants, tile)
