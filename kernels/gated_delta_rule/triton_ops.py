"""The gated delta rule in Triton, one launch per call; tiles, and the variants compiled ahead of time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.gated_delta_rule import triton_kernels as kernels
from specmamba.kernels.gpu import Variant, Work
from specmamba.kernels.state_records.operands import Buffers, Records, StateOperands, TreePlacement, Trees
from specmamba.kernels.state_records.triton_ops import COUNTED_PENDING, MAX_CHAIN, RECORDS, block, parts_of, variant

PADDING_SLOT, NO_SLOT = 0, -1
MANY_STATES = 512  # heads of all rows from which on fewer programs with more of a state each are faster
MAX_SPLIT = 32  # nodes up to which products of 16-bit models run in parts of bfloat16; beyond, registers do not suffice
EXTENDS_IN_PARTS = True  # products of prompts, for models in 16 bits: see ``extend_in_place``


@dataclass(frozen=True)
class Tile:
    """Block sizes of one program: tokens or nodes, keys, values; and its warps and pipeline stages.

    Chosen from register and shared-memory limits (64 KB of LDS on gfx942), not measured. Narrow blocks of values make
    many programs out of few rows, but every block of a head repeats the products of keys and queries.
    """

    tokens: int
    keys: int
    values: int
    num_warps: int
    num_stages: int = 1


def root_tile(key_dim: int, value_dim: int) -> Tile:
    """Choose the tile for trees of one node: the state is read once and used at once, with many loads in flight."""
    keys = block(key_dim)
    return Tile(1, keys, block(value_dim, 32), num_warps=4 if keys <= 128 else 8)


def chain_tile(key_dim: int, value_dim: int) -> Tile:
    """Choose the tile for short chains: one warp, whose threads have 64 numbers of the state each in registers.

    Sums over keys are then exchanged between lanes, without barriers. On sm_90, of blocks of 8, 16 and 32 values of 128
    keys, 16 need the fewest instructions without spills.
    """
    keys = block(key_dim)
    return Tile(MAX_CHAIN, keys, min(max(4, 2048 // keys), block(value_dim)), num_warps=1)


def tree_tile(num_nodes: int, value_dim: int, is_exact: bool = True, num_states: int = MANY_STATES) -> Tile:
    """Choose the tile for larger trees: nodes stay in registers, 16 keys of the state at a time; with 32 they spill.

    Products that are not exact run on tensor cores, where a warp has 16 nodes: more warps would repeat its products.
    ``num_states``: heads of all rows. On an H200, of blocks of 16, 32 and 64 values and 1, 2 and 4 warps, those of 64
    on one warp took two thirds of the time of the next for 1024 states and more, and 1.1 times that of 32 for 32.
    """
    nodes = block(num_nodes)
    if nodes > 32:
        return Tile(nodes, 16, 16, num_warps=8)
    if is_exact:
        return Tile(nodes, 16, block(value_dim, 32), num_warps=4)
    values = 64 if nodes == 16 and num_states >= MANY_STATES else 32
    return Tile(nodes, 16, block(value_dim, values), num_warps=nodes // 16)


def extend_tile(key_dim: int, value_dim: int) -> Tile:
    """Choose the tile for known tokens: 32 at a time.

    Products in parts spill registers in it, and of 14 tiles on an H200 it was the fastest all the same.
    """
    return Tile(32, block(key_dim, 32), block(value_dim, 32), num_warps=4)


def constexprs(
    kernel: Any, tile: Tile, key_dim: int, value_dim: int, group: int, parts: str = "none"
) -> dict[str, Any]:
    """Constants of a launch: those of all kernels of this operator that ``kernel`` has as parameters."""
    values = {
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "GROUP": group,
        "BLOCK_NODES": tile.tokens,
        "BLOCK_TOKENS": tile.tokens,
        "BLOCK_KEYS": tile.keys,
        "BLOCK_VALUES": tile.values,
        "BLOCK_RECORDS": RECORDS,
        "PARTS": parts,
    }
    return {name: value for name, value in values.items() if name in kernel.arg_names}


def advance(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: StateOperands) -> Tensor:
    """Run the form that the operands ask for, in one launch on the pools in place."""
    return state.launch(sys.modules[__name__], (q, k, v, g, beta))


def tree_verify_in_place(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, buffers: Buffers, trees: Trees
) -> Tensor:
    """Outputs of all nodes of draft trees; the nodes' records, and the checkpoints of rows that fold, are written.

    Checkpoints may be of any float dtype; nodes of a row that folds continue the checkpoint as it is written, rounded.
    Nothing is read or written for rows of slot 0.

    Args:
        q, k: [B, N, Hk, K] float32; k l2-normalised, q l2-normalised and scaled by K**-0.5.
        v: [B, N, Hv, V] float32.
        g, beta: [B, N, Hv] float32.
        buffers: ``windows`` are not read, and of ``conv_inputs`` the dtype alone: it is the model's. For models in
            16 bits products of trees run in parts of bfloat16. The last dimension of all others must be dense.
        trees: ``conv_index`` is not read.

    Returns:
        Output [B, N, Hv, V]: zeros for rows of slot 0. What is not finite in a node is NaN for it and its descendants,
        in every block of values that depends on it.
    """
    return _tree_verify(q, k, v, g, beta, buffers, trees, PADDING_SLOT)


def tree_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    records: Records,
    placement: TreePlacement,
    is_chain: bool = False,
    model_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Verify trees with a checkpoint per row; arguments as in ``torch_ops``, ``state`` in any float dtype.

    ``is_chain`` says that all trees are chains without padding, as in ``Trees``; ``model_dtype`` chooses products.
    """
    rows = torch.arange(len(state), device=state.device)
    buffers = Buffers(state, torch.empty(0, dtype=model_dtype), *records)  # there is no convolution
    return _tree_verify(q, k, v, g, beta, buffers, Trees(rows, rows, rows, *placement, is_chain=is_chain), NO_SLOT)


def tree_verify_snapshots(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, snapshots: Tensor, parents: Tensor | None
) -> Tensor:
    """Verify trees node after node; arguments as in ``torch_ops``, ``state`` in any float dtype."""
    q, k, v, g, beta = _inputs(q, k, v, g, beta)
    _check_inner(state, snapshots, *(() if parents is None else (parents,)))
    out, (batch, num_nodes, heads, value_dim), key_dim = _empty_outputs(v), v.shape, q.shape[3]
    if out.numel() == 0:
        return out
    kernel, tile = kernels.snapshots_kernel, root_tile(key_dim, value_dim)
    kernel[_grid(tile, batch, heads, value_dim)](
        *(q, k, v, g, beta, out, state, snapshots, parents, num_nodes),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *state.stride()[:3], *snapshots.stride()[:4]),
        0 if parents is None else parents.stride(0),
        **constexprs(kernel, tile, key_dim, value_dim, heads // k.shape[2]),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def extend_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    lengths: Tensor,
    model_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Run known tokens through the recurrence, from the states in slots, which are left advanced.

    Args:
        q, k: [B, L, Hk, K] float32; k l2-normalised, q l2-normalised and scaled by K**-0.5.
        v: [B, L, Hv, V] float32.
        g, beta: [B, L, Hv] float32.
        states: [slots, Hv, K, V] of any float dtype, the last dimension dense; what float16 cannot hold becomes its
            largest finite number.
        slots: [B] int64, distinct but for 0, which is padding: not read, not written.
        lengths: [B] int64; tokens from lengths[b] on are padding.
        model_dtype: of 16 bits, products run in parts of bfloat16.

    Returns:
        Output [B, L, Hv, V]; zeros on padding and for rows of slot 0.
    """
    q, k, v, g, beta = _inputs(q, k, v, g, beta)
    _check_inner(states)
    out, (batch, num_tokens, heads, value_dim), key_dim = _empty_outputs(v), v.shape, q.shape[3]
    if out.numel() == 0:
        return out
    parts = parts_of(model_dtype, v.device)
    kernel, tile = kernels.extend_kernel, extend_tile(key_dim, value_dim)
    is_wide = states.dtype is torch.float32
    work = None if is_wide else torch.empty(batch, *states.shape[1:], dtype=torch.float32, device=v.device)
    kernel[_grid(tile, batch, heads, value_dim)](
        *(q, k, v, g, beta, out, states, work, slots, lengths, num_tokens),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *states.stride()[:3]),
        **constexprs(kernel, tile, key_dim, value_dim, heads // k.shape[2], parts),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _tree_verify(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, buffers: Buffers, trees: Trees, padding_slot: int
) -> Tensor:
    q, k, v, g, beta = _inputs(q, k, v, g, beta)
    records, states, t = (buffers.k, buffers.u, buffers.decay), buffers.states, trees
    _check_inner(states, *records)
    out, (batch, num_nodes, heads, value_dim), key_dim = _empty_outputs(v), v.shape, q.shape[3]
    if out.numel() == 0:
        return out
    operands = q, k, v, g, beta, out, states, *records, t.rows, t.slots, t.num_pending, t.folds
    of_buffers = (*states.stride()[:3], *buffers.k.stride()[:3], *buffers.u.stride()[:3], *buffers.decay.stride()[:2])
    group, parts = heads // k.shape[2], "none"
    if num_nodes == 1:
        kernel, tile = kernels.root_kernel, root_tile(key_dim, value_dim)
        of_tokens = (x.stride(d) for x in (q, k, v) for d in (0, 2))
        arguments = (*operands, t.node_offset, padding_slot, *of_tokens, *of_buffers)
    elif t.is_chain and num_nodes <= MAX_CHAIN:
        kernel, tile = kernels.chain_kernel, chain_tile(key_dim, value_dim)
        of_tokens = (x.stride(d) for x in (q, k, v) for d in range(3))
        arguments = (*operands, num_nodes, t.node_offset, padding_slot, *of_tokens, *of_buffers)
    else:
        if num_nodes <= MAX_SPLIT:
            parts = parts_of(buffers.conv_inputs.dtype, v.device)
        is_exact = parts == "none"
        if t.folds is None and not is_exact:  # a kernel that cannot fold gets more registers, and runs in fewer blocks
            operands = (*operands[:-1], torch.zeros(batch, dtype=torch.bool, device=v.device))
        kernel, tile = kernels.tree_kernel, tree_tile(num_nodes, value_dim, is_exact, batch * heads)
        ancestors = t.ancestors if t.ancestors.stride(2) == 1 else t.ancestors.contiguous()
        of_tokens = (x.stride(d) for x in (q, k, v) for d in range(3))
        sizes = num_nodes, t.node_offset, padding_slot
        arguments = (*operands, ancestors, *sizes, *of_tokens, *of_buffers, *ancestors.stride()[:2])
    kernel[_grid(tile, batch, heads, value_dim)](
        *arguments,
        **constexprs(kernel, tile, key_dim, value_dim, group, parts),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Inputs in the layout of the kernels: heads of q, k, v may be slices of a larger tensor, g and beta are dense."""
    return *(x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v)), g.contiguous(), beta.contiguous()


def _check_inner(*kept: Tensor) -> None:
    """Raise ValueError unless the last dimension is contiguous, as the kernels assume."""
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in kept):
        raise ValueError("the last dimension of states, records and parents must be dense")


def _empty_outputs(v: Tensor) -> Tensor:
    return torch.empty(v.shape, dtype=torch.float32, device=v.device)


def _grid(tile: Tile, batch: int, heads: int, value_dim: int) -> tuple[int, int, int]:
    return -(-value_dim // tile.values), heads, batch


def variants() -> list[Variant]:
    """Trees of 1, 16 and 64 nodes, chains, known tokens, snapshots; heads of 128, and of others where tiles change."""
    root, chain, tree = kernels.root_kernel, kernels.chain_kernel, kernels.tree_kernel
    return [
        _variant("tree_verify N=1", root, root_tile(128, 128), "fp32", 128),
        _variant("tree_verify N=1", root, root_tile(256, 128), "bf16", 256),
        _variant("tree_verify chain N=4", chain, chain_tile(128, 128), "fp32", 128, nodes=4),
        _variant("tree_verify chain N=4", chain, chain_tile(128, 128), "bf16", 128, nodes=4),
        _variant("tree_verify chain N=8", chain, chain_tile(64, 128), "fp32", 64, nodes=8),
        _variant("tree_verify chain N=8", chain, chain_tile(256, 128), "bf16", 256, nodes=8),
        _variant("tree_verify N=4", tree, tree_tile(4, 128), "fp32", 128, nodes=4),
        _variant("tree_verify N=8", tree, tree_tile(8, 128), "bf16", 128, nodes=8),
        _variant("tree_verify N=16", tree, tree_tile(16, 128), "fp32", 64, nodes=16),
        _variant("tree_verify N=16", tree, tree_tile(16, 128), "fp32", 128, nodes=16),
        _variant("tree_verify N=64", tree, tree_tile(64, 128), "fp32", 128, nodes=64),
        _variant("tree_verify N=8 split", tree, tree_tile(8, 128, False), "bf16", 128, nodes=8, is_exact=False),
        _variant("tree_verify N=16 split", tree, tree_tile(16, 128, False), "fp32", 128, nodes=16, is_exact=False),
        _variant("tree_verify N=16 split", tree, tree_tile(16, 128, False), "fp32", 256, nodes=16, is_exact=False),
        _variant(
            "tree_verify few N=16 split", tree, tree_tile(16, 128, False, 32), "bf16", 128, nodes=16, is_exact=False
        ),
        _variant("tree_verify N=32 split", tree, tree_tile(32, 128, False), "fp32", 128, nodes=32, is_exact=False),
        _variant("extend", kernels.extend_kernel, extend_tile(128, 128), "bf16", 128),
        _variant("extend", kernels.extend_kernel, extend_tile(256, 128), "fp32", 256),
        _variant("extend split", kernels.extend_kernel, extend_tile(128, 128), "fp32", 128, is_exact=False),
        _variant("extend split", kernels.extend_kernel, extend_tile(128, 128), "bf16", 128, is_exact=False),
        _variant("tree_verify_snapshots", kernels.snapshots_kernel, root_tile(128, 128), "fp32", 128),
    ]


POINTERS: Mapping[str, str] = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "out", "work", "snapshots"), "fp32"),
    **dict.fromkeys(("records_k", "records_u", "records_decay"), "fp32"),
    **dict.fromkeys(("rows", "slots", "num_pending", "parents", "lengths"), "i64"),
    **dict.fromkeys(("folds", "ancestors"), "i1"),
}


def _variant(
    what: str, kernel: Any, tile: Tile, state_dtype: str, key_dim: int, nodes: int = 0, is_exact: bool = True
) -> Variant:
    pointers = {name: POINTERS.get(name, state_dtype) for name in (*POINTERS, "state", "states")}
    taken = {name: of for name, of in pointers.items() if name in kernel.arg_names}
    constants: dict[str, Any] = constexprs(kernel, tile, key_dim, 128, 2, "none" if is_exact else "bf16")
    if state_dtype == "fp32" and taken.pop("work", ""):
        constants["work"] = None
    name = f"{what} {state_dtype} K={key_dim} V=128"
    made = variant(name, kernel, taken, constants, tile.num_warps, tile.num_stages)
    if nodes == 0:
        return made
    # split kernels advance states that fold alone, and read what is pending otherwise: counted is a row that does not
    folded = {"count": 0, "num_unfolded": COUNTED_PENDING}
    sizes = {"num_nodes": nodes, "num_steps": nodes - 1, "count": COUNTED_PENDING} | ({} if is_exact else folded)
    return replace(made, work=Work(_grid(tile, 1, 1, 128)[0], sizes))
