"""The parts of a Mamba2 layer around convolution and recurrence in Triton, and the variants compiled ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.gpu import Variant, Work, dense, launch, next_power_of_2, num_blocks
from specmamba.kernels.mamba2 import triton_kernels
from specmamba.kernels.mamba2.operands import Weights
from specmamba.kernels.ssd import triton_ops as ssd
from specmamba.kernels.state_records import RowSet
from specmamba.kernels.state_records.operands import Buffers, RecordOperands, StateOperands, Trees
from specmamba.kernels.state_records.triton_ops import COUNTED_PENDING, RECORDS, block, parts_of, without_folds


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


def tree_step_tile(num_nodes: int, head_dim: int, is_exact: bool) -> Tile:
    """Choose the tile of ``tree_step``: on tensor cores a warp multiplies 16 nodes with 16; more would repeat that."""
    nodes, columns = block(num_nodes), next_power_of_2(head_dim)
    num_warps = 4 if is_exact else min(4, nodes // 16)
    sizes = {"HEADS": max(1, 128 * num_warps // columns), "COLUMNS": columns}
    return Tile(sizes | {"NODES": nodes, "LANES": 16 if is_exact else 32, "RECORDS": RECORDS}, num_warps)


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


def step_and_advance(dt: Tensor, mixed: Tensor, weights: Weights, state: StateOperands) -> Tensor:
    """Draft trees with records: products of C and B are made beside the step sizes, once for a group."""
    assert isinstance(state, RecordOperands), "products are of trees with records"
    mixed, buffers, trees = dense(mixed), state.buffers, state.trees
    u, g, products = tree_step(dense(dt), mixed, weights, buffers, trees)
    b, c = weights.groups_of(mixed)
    return ssd.tree_verify_in_place(c, b, u, g, buffers, trees, products)


def tree_step(
    dt: Tensor, mixed: Tensor, weights: Weights, buffers: Buffers, trees: Trees
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch for the nodes of trees: step sizes, products of C and B, and nodes' B in their records.

    Args:
        dt, mixed: [B, N, H] and [B, N, C], N <= 64, the last dimension dense.
        weights: of the layer.
        buffers, trees: as in ``ssd.triton_ops.tree_verify_in_place``.

    Returns:
        u [B, N, H, P] and g [B, N, H] as in ``step``, and products [B, G, N', N' + R'] float32 of C of nodes with B of
        nodes and of pending records, N' nodes and R' records rounded up to 16. All unspecified for rows of slot 0.
    """
    w, t, (batch, nodes, heads) = weights, trees, dt.shape
    parts = parts_of(buffers.conv_inputs.dtype, mixed.device)
    tile = tree_step_tile(nodes, w.head_dim, parts == "none")
    rows = tile.constexprs["NODES"]
    columns = rows + num_blocks(t.node_offset, RECORDS) * RECORDS
    g = mixed.new_empty(batch, nodes, heads, dtype=torch.float32)
    u = mixed.new_empty(batch, nodes, heads, w.head_dim, dtype=torch.float32)
    products = mixed.new_empty(batch, w.num_groups, rows, columns, dtype=torch.float32)
    if u.numel() > 0:
        multiplying = w.num_groups * (columns // RECORDS)
        programs = multiplying + nodes * num_blocks(heads, tile.constexprs["HEADS"])
        launch(
            *(triton_kernels.tree_step, (programs, batch), tile, _tree_step_constants(tile, w, parts)),
            *(dt, mixed, w.dt_bias.contiguous(), w.negative_a.contiguous(), u, g, products, buffers.k),
            *(t.rows, t.slots, t.num_pending, t.folds, *map(float, w.dt_limit), nodes, t.node_offset),
            *(*dt.stride()[:2], *mixed.stride()[:2], *buffers.k.stride()[:3], columns),
        )
    return u, g, products


def _tree_step_constants(tile: Tile, weights: Weights, parts: str) -> dict[str, Any]:
    w = weights
    sizes = {"NUM_HEADS": w.num_heads, "HEAD_DIM": w.head_dim, "NUM_GROUPS": w.num_groups, "STATE_DIM": w.state_dim}
    return {**sizes, **tile.constexprs, "PARTS": parts}


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
    in_parts = _tree_step_variant(16, 128, "bf16")
    return [
        _step_variant("fp32", 64),
        _step_variant("bf16", 128),
        in_parts,
        without_folds(in_parts),
        _tree_step_variant(16, 256, "bf16"),
        _tree_step_variant(64, 256, "bf16"),
        _tree_step_variant(16, 128, "none"),
        _tree_step_variant(64, 128, "none"),
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


def _tree_step_variant(nodes: int, state_dim: int, parts: str) -> Variant:
    tile, kernel = tree_step_tile(nodes, 64, parts == "none"), triton_kernels.tree_step
    sizes: dict[str, Any] = {"NUM_HEADS": 64, "HEAD_DIM": 64, "NUM_GROUPS": 8, "STATE_DIM": state_dim}
    sizes |= {**tile.constexprs, "PARTS": parts}
    floats = ("mixed", "dt_bias", "negative_a", "u", "g", "products", "kept_b")
    types = dict.fromkeys(floats, "*fp32") | dict.fromkeys(("rows", "slots", "num_pending"), "*i64")
    types |= {"dt": "*fp32" if parts == "none" else "*bf16", "folds": "*i1", "dt_min": "fp32", "dt_max": "fp32"}
    kind = "exact" if parts == "none" else "split"
    made = _variant(f"tree_step N={nodes} {kind} S={state_dim} P=64", kernel, types, sizes, tile)
    # of one group: both sides of branches are counted, so that step sizes are in every one of these programs
    return replace(made, work=Work(tile.constexprs["NODES"] // RECORDS + (COUNTED_PENDING > 0), {}))


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
