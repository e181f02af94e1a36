"""The gated delta rule in Triton, one launch per call but for long prompts."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from specmamba.kernels.gated_delta_rule import triton_channel_chunks as channel_chunks
from specmamba.kernels.gated_delta_rule import triton_channels as channels
from specmamba.kernels.gated_delta_rule import triton_chunks as c
from specmamba.kernels.gated_delta_rule import triton_kernels as kernels
from specmamba.kernels.gated_delta_rule.tiles import (
    ROOM_WITH_PRODUCTS,
    ROWS,
    chain_tile,
    channel_products_tile,
    channel_tile,
    constexprs,
    extend_tile,
    grid_of,
    root_tile,
    tree_tile,
)
from specmamba.kernels.gpu import launch, register_options
from specmamba.kernels.state_records.operands import Buffers, Records, StateOperands, TreePlacement, Trees
from specmamba.kernels.state_records.prefill import Chunks, Places, is_long, prefill_in_place
from specmamba.kernels.state_records.tiles import CHUNK, chunk_constants, chunks_tile
from specmamba.kernels.state_records.triton_ops import parts_of

PADDING_SLOT, NO_SLOT = 0, -1
MAX_SPLIT = 32  # nodes up to which products of 16-bit models run in parts of bfloat16; beyond, registers do not suffice
EXTENDS_IN_PARTS = True  # products of prompts, for models in 16 bits: see ``extend_in_place``


def advance(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: StateOperands) -> Tensor:
    """Run the form that the operands ask for, on the pools in place."""
    return state.launch(sys.modules[__name__], (q, k, v, g, beta))


def parts_of_trees(num_nodes: int, model_dtype: torch.dtype, device: torch.device) -> str:
    """How products of trees of several nodes are computed: see ``triton_kernels.product``."""
    return parts_of(model_dtype, device) if num_nodes <= MAX_SPLIT else "none"


def tree_verify_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    buffers: Buffers,
    trees: Trees,
    products: Tensor | None = None,
) -> Tensor:
    """Outputs of all nodes of draft trees; the nodes' records, and the checkpoints of rows that fold, are written.

    Checkpoints may be of any float dtype; nodes of a row that folds continue the checkpoint as it is written, rounded.
    Nothing is read or written for rows of slot 0.

    Args:
        q, k: [B, N, Hk, K] float32; k l2-normalised, q l2-normalised and scaled by K**-0.5.
        v: [B, N, Hv, V] float32.
        g: [B, N, Hv] or [B, N, Hv, K] float32.
        beta: [B, N, Hv] float32.
        buffers: ``windows`` are not read, and of ``conv_inputs`` the dtype alone: it is the model's. For models in
            16 bits products of trees run in parts of bfloat16, with decays by head. The last dimension of all
            others must be dense.
        trees: ``conv_index`` is not read.
        products: of queries and keys, and the nodes' keys are in their records already: ``delta_net.triton_ops``. For
            trees that are no short chains, with decays by head. None: they are made here.

    Returns:
        Output [B, N, Hv, V]: zeros for rows of slot 0. What is not finite in a node is NaN for it and its descendants,
        in every block of values that depends on it.
    """
    return _tree_verify(q, k, v, g, beta, buffers, trees, PADDING_SLOT, products)


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
    kernel, tile, by_channel = kernels.snapshots_kernel, root_tile(key_dim, value_dim), g.dim() == 4
    kernel[grid_of(tile, batch, heads, value_dim)](
        *(q, k, v, g, beta, out, state, snapshots, parents, num_nodes),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *state.stride()[:3], *snapshots.stride()[:4]),
        0 if parents is None else parents.stride(0),
        **constexprs(kernel, tile, key_dim, value_dim, heads // k.shape[2], by_channel=by_channel),
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
        g: [B, L, Hv] or [B, L, Hv, K] float32.
        beta: [B, L, Hv] float32.
        states: [slots, Hv, K, V] of any float dtype, the last dimension dense; what float16 cannot hold becomes its
            largest finite number.
        slots: [B] int64, distinct but for 0, which is padding: not read, not written.
        lengths: [B] int64; tokens from lengths[b] on are padding.
        model_dtype: of 16 bits, products run in parts of bfloat16, and long prompts run in several launches.

    Returns:
        Output [B, L, Hv, V]; zeros on padding and for rows of slot 0.
    """
    q, k, v, g, beta = _inputs(q, k, v, g, beta)
    _check_inner(states)
    out, (batch, num_tokens, heads, value_dim), key_dim = _empty_outputs(v), v.shape, q.shape[3]
    if out.numel() == 0:
        return out
    parts = parts_of(model_dtype, v.device)
    if parts != "none" and is_long(num_tokens, key_dim):
        _prefill(q, k, v, g, beta, out, Places(states, slots, lengths), parts)
        return out
    work: tuple[Tensor | None, ...] = ()
    if g.dim() == 4:
        kernel, tile = channels.channel_extend_kernel, channel_tile(key_dim, value_dim)
    else:
        kernel, tile = kernels.extend_kernel, extend_tile(key_dim, value_dim, parts == "none")
        work = (_work_of(states, batch),)
    kernel[grid_of(tile, batch, heads, value_dim)](
        *(q, k, v, g, beta, out, states, *work, slots, lengths, num_tokens),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *states.stride()[:3]),
        **constexprs(kernel, tile, key_dim, value_dim, heads // k.shape[2], parts),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _prefill(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, out: Tensor, places: Places, parts: str) -> None:
    """Long prompts: chunks side by side, states from chunk to chunk, and outputs side by side again."""
    (batch, num_tokens, heads, value_dim), key_dim, tile = v.shape, k.shape[3], chunks_tile(k.shape[3], v.shape[3])
    by_channel, systems, updates = g.dim() == 4, c.systems_kernel, c.updates_kernel
    sizes = key_dim, value_dim, 1 if by_channel else heads // k.shape[2], parts
    of_systems = chunk_constants(systems, tile, *sizes)
    of_updates = chunk_constants(updates, tile, *sizes, BLOCK_ROWS=ROWS)

    def prepare(chunks: Chunks, first: int, now: int) -> None:
        if by_channel:
            _multiply_by_channel(q, k, g, chunks, places, first, now, parts)
        of_head, keys = (None, chunks.state_keys) if by_channel else (g, chunks.keys)
        where = None if by_channel else chunks.decays, places.slots, places.lengths
        num_chunks = chunks.num_chunks
        launch(
            *(systems, (now, heads, batch), tile, of_systems),
            *(of_head, beta, chunks.grams, chunks.solutions, chunks.scores, *where, first, num_tokens, num_chunks),
        )
        launch(
            *(updates, (now * (CHUNK // ROWS), heads, batch), tile, of_updates),
            *(v, keys, chunks.solutions, chunks.weights, chunks.updates, *where),
            *(first, num_chunks, *v.stride()[:3]),
        )

    prefill_in_place(q, k, v, out, places, parts, prepare, True, by_channel)


def _multiply_by_channel(
    q: Tensor, k: Tensor, g: Tensor, chunks: Chunks, places: Places, first: int, now: int, parts: str
) -> None:
    """Products of ``now`` chunks with decays by channel, and keys and queries with their decays."""
    (batch, num_tokens, heads, key_dim), kernel = g.shape, channel_chunks.channel_products_kernel
    tile = channel_products_tile(key_dim)
    constants = chunk_constants(kernel, tile, key_dim, key_dim, heads // k.shape[2], parts)
    launch(
        *(kernel, (2 * now, heads, batch), tile, constants),
        *(q, k, g, chunks.keys, chunks.state_queries, chunks.state_keys, chunks.grams, chunks.decays),
        *(places.slots, places.lengths, first, num_tokens, chunks.num_chunks, *q.stride()[:3], *k.stride()[:3]),
    )


def _tree_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    buffers: Buffers,
    trees: Trees,
    padding_slot: int,
    products: Tensor | None = None,
) -> Tensor:
    q, k, v, g, beta = _inputs(q, k, v, g, beta)
    records, states, t = (buffers.k, buffers.u, buffers.decay), buffers.states, trees
    _check_inner(states, *records)
    out, (batch, num_nodes, heads, value_dim), key_dim = _empty_outputs(v), v.shape, q.shape[3]
    if out.numel() == 0:
        return out
    folds = t.folds
    if products is not None and folds is None:  # without the code for folds ptxas spills on sm_100: see README.md
        folds = torch.zeros(batch, dtype=torch.bool, device=v.device)
    operands = q, k, v, g, beta, out, states, *records, t.rows, t.slots, t.num_pending, folds
    of_buffers = (*states.stride()[:3], *buffers.k.stride()[:3], *buffers.u.stride()[:3], *buffers.decay.stride()[:2])
    group, parts = heads // k.shape[2], "none"
    ancestors = t.ancestors if t.ancestors.stride(2) == 1 else t.ancestors.contiguous()
    if g.dim() == 4:
        kernel, tile = channels.channel_tree_kernel, channel_tile(key_dim, value_dim, num_nodes)
        of_tokens = (x.stride(d) for x in (q, k, v) for d in range(3))
        sizes = num_nodes, t.node_offset, padding_slot
        of_decay = buffers.decay.stride(2), *ancestors.stride()[:2]
        arguments = (*operands, ancestors, *sizes, *of_tokens, *of_buffers, *of_decay)
    elif num_nodes == 1:
        kernel, tile = kernels.root_kernel, root_tile(key_dim, value_dim)
        of_tokens = (x.stride(d) for x in (q, k, v) for d in (0, 2))
        arguments = (*operands, t.node_offset, padding_slot, *of_tokens, *of_buffers)
    elif t.is_short_chain:
        kernel, tile = kernels.chain_kernel, chain_tile(key_dim, value_dim)
        of_tokens = (x.stride(d) for x in (q, k, v) for d in range(3))
        arguments = (*operands, num_nodes, t.node_offset, padding_slot, *of_tokens, *of_buffers)
    else:
        parts = parts_of_trees(num_nodes, buffers.conv_inputs.dtype, v.device)
        kernel, tile = kernels.tree_kernel, tree_tile(num_nodes, value_dim, parts == "none", batch * heads)
        of_tokens = (x.stride(d) for x in (q, k, v) for d in range(3))
        sizes = num_nodes, t.node_offset, padding_slot
        of_trees = *ancestors.stride()[:2], 0 if products is None else products.stride(3)
        arguments = (*operands, ancestors, products, *sizes, *of_tokens, *of_buffers, *of_trees)
    registers = tile.registers if products is None else tile.registers and ROOM_WITH_PRODUCTS
    kernel[grid_of(tile, batch, heads, value_dim)](
        *arguments,
        **constexprs(kernel, tile, key_dim, value_dim, group, parts),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **register_options(registers, v.device),
    )
    return out


def _inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Inputs in the layout of the kernels: heads of q, k, v may be slices of a larger tensor, g and beta are dense."""
    return *(x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v)), g.contiguous(), beta.contiguous()


def _check_inner(*kept: Tensor) -> None:
    """Raise ValueError unless the last dimension is contiguous, as the kernels assume."""
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in kept):
        raise ValueError("the last dimension of states, records and parents must be dense")


def _work_of(states: Tensor, batch: int) -> Tensor | None:
    """Memory for the states of a call where the pool's are narrower than float32."""
    if states.dtype is torch.float32:
        return None
    return torch.empty(batch, *states.shape[1:], dtype=torch.float32, device=states.device)


def _empty_outputs(v: Tensor) -> Tensor:
    return torch.empty(v.shape, dtype=torch.float32, device=v.device)
