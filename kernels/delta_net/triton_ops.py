"""Gates and rule of a gated delta net over draft trees in two launches; the first one's tile and variants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specmamba.kernels.delta_net import triton_kernels as kernels
from specmamba.kernels.delta_net.operands import Weights
from specmamba.kernels.delta_net.torch_ops import values_of
from specmamba.kernels.gated_delta_rule import triton_ops as delta_rule
from specmamba.kernels.gpu import Variant, Work, dense, launch, next_power_of_2, num_blocks
from specmamba.kernels.rowwise.torch_ops import L2_EPS
from specmamba.kernels.state_records.operands import Buffers, RecordOperands, StateOperands, Trees
from specmamba.kernels.state_records.tiles import GROUP
from specmamba.kernels.state_records.triton_ops import COUNTED_PENDING, RECORDS, block, variant, without_folds


class Tile(NamedTuple):
    """Block sizes of a program. Chosen by instructions and registers, not measured."""

    nodes: int
    keys: int
    num_warps: int
    num_stages: int = 1


def inputs_tile(num_nodes: int, key_dim: int, is_exact: bool) -> Tile:
    """Choose the tile: on tensor cores a warp multiplies 16 nodes with 16, and more warps would repeat that."""
    nodes = block(num_nodes)
    return Tile(nodes, block(key_dim, 16), num_warps=4 if is_exact else min(4, nodes // 16))


def gate_and_advance(mixed: Tensor, a: Tensor, b: Tensor, weights: Weights, state: StateOperands) -> Tensor:
    """Draft trees with records: products of keys and queries are made with their norms, once for a key head."""
    assert isinstance(state, RecordOperands), "products are of trees with records"
    mixed, buffers, trees = dense(mixed), state.buffers, state.trees
    parts = delta_rule.parts_of_trees(trees.num_nodes, buffers.conv_inputs.dtype, mixed.device)
    q, k, g, beta, products = tree_inputs(mixed, dense(a), dense(b), weights, buffers, trees, parts)
    v = values_of(mixed, weights)
    return delta_rule.tree_verify_in_place(q, k, v, g, beta, buffers, trees, products)


def tree_inputs(
    mixed: Tensor, a: Tensor, b: Tensor, weights: Weights, buffers: Buffers, trees: Trees, parts: str
) -> tuple[Tensor, ...]:
    """Make the rule's inputs for the nodes of trees; leave their keys in their records.

    Args:
        mixed, a, b: [B, N, C], [B, N, Hv], [B, N, Hv], the last dimension dense.
        weights: of the layer.
        buffers, trees: as in ``gated_delta_rule.triton_ops.tree_verify_in_place``.
        parts: of products. Where they are exact, records go into the state, and are not multiplied with.

    Returns:
        q, k, g, beta as in ``rowwise.delta_inputs``, and products [B, Hk, 2, N', N' + R'] float32: of queries, then
        of keys, with the keys of nodes and of pending records. All unspecified for rows of slot 0.
    """
    w, (batch, nodes, _), t = weights, mixed.shape, trees
    tile = inputs_tile(nodes, w.key_dim, parts == "none")
    columns = tile.nodes + (0 if parts == "none" else num_blocks(t.node_offset, RECORDS) * RECORDS)
    q, k = (mixed.new_empty(batch, nodes, w.num_key_heads, w.key_dim, dtype=torch.float32) for _ in range(2))
    g, beta = (mixed.new_empty(batch, nodes, w.num_value_heads, dtype=torch.float32) for _ in range(2))
    products = mixed.new_empty(batch, w.num_key_heads, 2, tile.nodes, columns, dtype=torch.float32)
    if q.numel() > 0:
        group, has_bound = w.num_value_heads // w.num_key_heads, w.lower_bound is not None
        launch(
            *(kernels.tree_inputs_kernel, (columns // RECORDS, w.num_key_heads, batch), tile),
            constexprs(tile, w.key_dim, group, has_bound, parts),
            *(mixed, a, b, w.negative_a.contiguous(), w.dt_bias.contiguous(), q, k, g, beta, products, buffers.k),
            *(t.rows, t.slots, t.num_pending, t.folds, nodes, t.node_offset),
            *(w.key_dim**-0.5, L2_EPS, w.step_scale, w.lower_bound or 0.0),
            *(*mixed.stride()[:2], *a.stride()[:2], *b.stride()[:2], *buffers.k.stride()[:3], columns),
        )
    return q, k, g, beta, products


def constexprs(tile: Tile, key_dim: int, group: int, has_bound: bool, parts: str) -> dict[str, Any]:
    """Constants of a launch."""
    blocks = {"BLOCK_NODES": tile.nodes, "BLOCK_KEYS": tile.keys, "BLOCK_RECORDS": RECORDS}
    sizes = {"KEY_DIM": key_dim, "GROUP": group, "BLOCK_GROUP": next_power_of_2(group)}
    return {**sizes, **blocks, "HAS_BOUND": has_bound, "PARTS": parts}


def variants() -> list[Variant]:
    """Up to 16, 32 and 64 nodes; exact products, and in parts; other sizes of heads."""
    in_parts = _variant(16, 128, "bf16")
    return [
        in_parts,
        without_folds(in_parts),
        _variant(16, 64, "bf16"),
        _variant(16, 256, "bf16", has_bound=True),
        _variant(32, 128, "bf16"),
        _variant(16, 128, "none"),
        _variant(64, 128, "none"),
    ]


def _variant(nodes: int, key_dim: int, parts: str, has_bound: bool = False) -> Variant:
    tile, kernel = inputs_tile(nodes, key_dim, parts == "none"), kernels.tree_inputs_kernel
    floats = ("mixed", "negative_a", "dt_bias", "q", "k", "g", "beta", "products", "records_k")
    pointers = dict.fromkeys(floats, "fp32") | dict.fromkeys(("rows", "slots", "num_pending"), "i64")
    pointers |= {"a": "bf16", "b": "bf16", "folds": "i1"}
    constants = constexprs(tile, key_dim, GROUP, has_bound, parts)
    kind = "exact" if parts == "none" else "split"
    name = f"tree_inputs N={nodes} {kind} K={key_dim}" + " bound" * has_bound
    made = variant(name, kernel, pointers, constants, tile.num_warps, tile.num_stages)
    scalars = dict.fromkeys(("query_scale", "eps", "step_scale", "bound"), "fp32")
    # of one key head: both sides of branches are counted, of nodes and of records, so that one program has all of it
    programs = tile.nodes // RECORDS + (parts != "none" and COUNTED_PENDING > 0)
    return replace(made, signature={**made.signature, **scalars}, work=Work(programs, {}))
