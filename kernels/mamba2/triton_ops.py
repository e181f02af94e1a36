"""The parts of a Mamba2 layer around convolution and recurrence in Triton, and the variants compiled ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.gpu import Variant, dense, next_power_of_2
from specmamba.kernels.mamba2 import triton_kernels
from specmamba.kernels.mamba2.operands import Weights
from specmamba.kernels.state_records import RowSet


@dataclass(frozen=True)
class Tile:
    """Block sizes of one launch. Chosen so that a thread has 4 to 8 values, not measured."""

    constexprs: Mapping[str, int]
    num_warps: int
    num_stages: int = 1


def step_tile(head_dim: int) -> Tile:
    """Choose the tile of ``step``: some heads of one token, 512 channels or slightly more."""
    columns = next_power_of_2(head_dim)
    return Tile({"HEADS": max(1, 512 // columns), "COLUMNS": columns}, num_warps=4)


def norm_tile(inner: int, norm_groups: int, has_norm: bool) -> tuple[int, Tile]:
    """Choose how many of a token's channels one program has (a divisor of ``inner``), and the tile for them.

    A norm needs a whole group in one program, which reads it twice, the second time from a cache. Without a norm,
    parts are no larger than a block wherever the channels can be divided so.
    """
    part = inner // norm_groups
    while not has_norm and part > 1024 and part % 2 == 0:
        part //= 2
    block = min(2048, max(16, next_power_of_2(part)))
    return part, Tile({"BLOCK": block}, num_warps=8 if block == 2048 else 4 if block > 256 else 1)


def step(dt: Tensor, mixed: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """One launch; a program has some heads of one token."""
    dt, mixed, (batch, nodes, heads) = dense(dt), dense(mixed), dt.shape
    g = torch.empty(batch, nodes, heads, dtype=torch.float32, device=mixed.device)
    u = torch.empty(batch, nodes, heads, weights.head_dim, dtype=torch.float32, device=mixed.device)
    if g.numel() == 0:
        return u, g
    tile, of_heads = step_tile(weights.head_dim), (weights.dt_bias.contiguous(), weights.negative_a.contiguous())
    triton_kernels.step[(batch * nodes, -(-heads // tile.constexprs["HEADS"]))](
        *(dt, mixed, *of_heads, u, g, *map(float, weights.dt_limit)),
        *(*dt.stride()[:2], *mixed.stride()[:2], nodes),
        NUM_HEADS=heads,
        HEAD_DIM=weights.head_dim,
        **tile.constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return u, g


def gate_and_norm(recurred: Tensor, mixed: Tensor, gate: Tensor, weights: Weights, slots: RowSet) -> Tensor:
    """One launch; a program has one norm part of one token. Rows of slot 0 return zeros."""
    w, gate, mixed, (batch, nodes, inner) = weights, dense(gate), dense(mixed), gate.shape
    out = torch.empty(batch, nodes, inner, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    part, tile = norm_tile(inner, w.norm_groups, w.norm is not None)
    norm = None if w.norm is None else w.norm.contiguous()
    triton_kernels.gate_and_norm[(batch * nodes, inner // part)](
        *(recurred, mixed, gate, w.skip.contiguous(), norm, slots.index, out, w.norm_eps),
        *(*mixed.stride()[:2], *gate.stride()[:2], nodes),
        INNER=inner,
        PART=part,
        HEAD_DIM=w.head_dim,
        NORM_BEFORE_GATE=w.norm_before_gate,
        **tile.constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def variants() -> list[Variant]:
    """Variants to compile ahead of time: both dtypes of activations, and every kind of norm."""
    return [
        _step_variant("fp32", 64),
        _step_variant("bf16", 128),
        _norm_variant("fp32", 8192, 8, "after"),
        _norm_variant("bf16", 5120, 1, "after"),
        _norm_variant("bf16", 8192, 8, "before"),
        _norm_variant("bf16", 4096, 1, "none"),
    ]


def _step_variant(dtype: str, head_dim: int) -> Variant:
    tile = step_tile(head_dim)
    sizes = {"NUM_HEADS": 64, "HEAD_DIM": head_dim, **tile.constexprs}
    floats = dict.fromkeys(("mixed", "dt_bias", "negative_a", "u", "g"), "*fp32")
    types = floats | {"dt": f"*{dtype}", "dt_min": "fp32", "dt_max": "fp32"}
    return _variant(f"step {dtype} P={head_dim}", triton_kernels.step, types, sizes, tile)


def _norm_variant(dtype: str, inner: int, groups: int, norm: str) -> Variant:
    part, tile = norm_tile(inner, groups, norm != "none")
    sizes: dict[str, Any] = {"INNER": inner, "PART": part, "HEAD_DIM": 64, **tile.constexprs}
    sizes["NORM_BEFORE_GATE"] = norm == "before"
    if norm == "none":
        sizes["norm"] = None
    types = dict.fromkeys(("recurred", "mixed", "skip", "norm"), "*fp32")
    types |= {"gate": f"*{dtype}", "out": f"*{dtype}", "slots": "*i64", "norm_eps": "fp32"}
    name = f"gate_and_norm {dtype} norm={norm} {groups}x{inner // groups}"
    return _variant(name, triton_kernels.gate_and_norm, types, sizes, tile)


def _variant(name: str, kernel: Any, types: Mapping[str, str], sizes: Mapping[str, Any], tile: Tile) -> Variant:
    """Make a variant; arguments without a type and without a constant are integers."""
    known = dict(types) | dict.fromkeys(sizes, "constexpr")
    signature = {argument: known.get(argument, "i32") for argument in kernel.arg_names}
    return Variant(name, kernel, signature, sizes, tile.num_warps, tile.num_stages)
