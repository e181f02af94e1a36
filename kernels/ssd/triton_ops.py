"""State space duality as Triton launches on pools in place; tiles, and the variants compiled ahead of time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.gpu import ROOM, Registers, Variant, Work, dense, launch, next_power_of_2, register_options
from specmamba.kernels.ssd import triton_kernels, triton_prompts
from specmamba.kernels.state_records import tiles as prompts
from specmamba.kernels.state_records.operands import MAX_CHAIN, Buffers, Records, StateOperands, TreePlacement, Trees
from specmamba.kernels.state_records.prefill import Chunks, Places, is_long, prefill_in_place
from specmamba.kernels.state_records.triton_ops import COUNTED_PENDING, RECORDS, parts_of, without_folds

MANY_STATES = 512  # heads of all rows from which on smaller programs are faster
MAX_NODES = 64  # of a tree that one program verifies at once
LEAST = 16  # no side of a matrix product may be shorter
# of exact trees of more than LEAST nodes that are given products: untold, ptxas 12.8 and 12.9 take 128 and spill 24 or
# 40 bytes on sm_80 and sm_100
EXACT_WITH_PRODUCTS = Registers(144)
BLOCKS = {"columns", "lanes", "nodes", "records", "tokens", "slices"}  # of a tile that kernels have as constants
EXTENDS_IN_PARTS = True  # products of long prompts, for models in 16 bits; those of short ones are exact for all


@dataclass(frozen=True)
class Tile:
    """Block sizes of one launch; 0 for those that a kernel does not have. A program has COLUMNS of a head's P columns.

    Chosen from registers and shared memory (164 KB on sm_80, 64 KB on gfx942; no spills), not measured. A float32
    product of matrices holds its operands in registers, unrolled, and so must not be deep: a state's rows are taken
    LANES at a time, or cut into SLICES of LANES. More columns read the scores of a group less often, fewer
    make more programs: with 32 of them, 64 heads of 64 columns make 128 programs for a single request.
    """

    columns: int
    lanes: int
    nodes: int = 0
    records: int = 0
    tokens: int = 0
    slices: int = 0
    num_warps: int = 4
    num_stages: int = 1
    registers: Registers | None = None


def constexprs(tile: Tile, state_dim: int, head_dim: int, parts: str = "") -> dict[str, Any]:
    """Constants of a launch over states [S, P]; ``parts`` of products, of kernels that have any."""
    blocks = {name.upper(): size for name, size in asdict(tile).items() if name in BLOCKS and size}
    return {"STATE_DIM": state_dim, "HEAD_DIM": head_dim, **blocks} | ({"PARTS": parts} if parts else {})


def verify_tile(
    num_nodes: int, state_dim: int, head_dim: int, is_exact: bool = True, num_states: int = MANY_STATES
) -> Tile:
    """Choose the tile for trees of up to MAX_NODES nodes; one node has its own kernel, without matrix products.

    ``is_exact``: products are; ``num_states``: heads of all rows. Up to 16 nodes: the fastest of 14 tiles on an H200,
    when they had up to 251 registers of a thread, and that of few states 64 lanes; with the limit, by which none of
    them spills, they were not timed.
    """
    state, head = _at_least(state_dim), _at_least(head_dim)
    if num_nodes == 1:
        return Tile(columns=min(head, 32 if state <= 128 else 16), lanes=state, records=16)
    nodes = _at_least(num_nodes)
    if nodes > LEAST:
        return Tile(columns=min(head, 32), lanes=16, nodes=nodes, records=16, num_warps=8)
    room = Registers(ROOM)
    if is_exact:
        return Tile(columns=min(head, 64), lanes=16, nodes=nodes, records=16, registers=room)
    if num_states < MANY_STATES:
        return Tile(columns=min(head, 32), lanes=16, nodes=nodes, records=16, registers=room)
    return Tile(columns=min(head, 32), lanes=16, nodes=nodes, records=16, num_warps=1, registers=room)


def with_products(registers: Registers | None, nodes: int, parts: str) -> Registers | None:
    """The limit of trees in blocks of so many nodes that are given products; ``registers``: of those that make them."""
    return EXACT_WITH_PRODUCTS if parts == "none" and nodes > LEAST else registers


def chain_tile(state_dim: int, head_dim: int) -> Tile:
    """Choose the tile for chains of up to MAX_CHAIN nodes: one warp, with 64 numbers of the state in each thread."""
    lanes, room = _at_least(state_dim), Registers(ROOM, since=10)
    columns = min(max(4, 2048 // lanes), _at_least(head_dim))
    return Tile(columns=columns, lanes=lanes, nodes=MAX_CHAIN, records=RECORDS, num_warps=1, registers=room)


def extend_tile(state_dim: int, head_dim: int) -> Tile:
    """Choose the tile for known tokens: short chunks, since every head and block computes a chunk's scores again."""
    columns = min(_at_least(head_dim), 32)
    return Tile(columns=columns, lanes=16, slices=_at_least(state_dim) // 16, tokens=16, num_warps=8)


def snapshots_tile(state_dim: int, head_dim: int) -> Tile:
    """Choose the tile for snapshots, which take one node after the other."""
    columns = min(_at_least(head_dim), 32 if state_dim <= 128 else 16)
    return Tile(columns=columns, lanes=_at_least(state_dim))


def advance(c: Tensor, b: Tensor, u: Tensor, g: Tensor, state: StateOperands) -> Tensor:
    """Run the form that the operands ask for, on the pools in place."""
    return state.launch(sys.modules[__name__], (c, b, u, g))


def tree_verify_in_place(
    c: Tensor, b: Tensor, u: Tensor, g: Tensor, buffers: Buffers, trees: Trees, products: Tensor | None = None
) -> Tensor:
    """Compute the outputs of all nodes from one read of the checkpoints; write their records.

    The records of node i go to entry ``node_offset + i`` of its row. A row that ``folds`` reads its checkpoint advanced
    over all its pending records, rounded to the pool's dtype, and writes it back. Nothing is read or written for rows
    of slot 0.

    Args:
        c, b: [B, N, G, S] float32, of N <= 64 nodes.
        u: [B, N, H, P] float32, dt x; H a multiple of G.
        g: [B, N, H] float32, log decay.
        buffers: ``states`` [slots, H, S, P] of any float dtype; k [rows, R, G, S], u [rows, R, H, P] and decay
            [rows, R, H]. Of ``conv_inputs`` the dtype alone: for models in 16 bits products of trees run in parts of
            bfloat16. Others are not read.
        trees: ``conv_index`` is not read.
        products: of C and B, and the nodes' B are in their records already: ``mamba2.triton_ops.tree_step``. For trees
            that are no short chains. None: they are made here.

    Returns:
        Output [B, N, H, P] float32, zeros for rows of slot 0; NaN as in ``torch_ops.tree_verify``.

    Raises:
        ValueError: there are more nodes.
    """
    records = buffers.k, buffers.u, buffers.decay
    dtype = buffers.conv_inputs.dtype
    return _verify((c, b, u, g), buffers.states, records, trees.rows, trees.slots, trees, dtype, products)


def tree_verify(
    c: Tensor,
    b: Tensor,
    u: Tensor,
    g: Tensor,
    state: Tensor,
    records: Records,
    placement: TreePlacement,
    is_chain: bool = False,
    model_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Verify trees with a checkpoint per row; arguments as in ``torch_ops``, N <= 64, the state in any float dtype.

    ``is_chain`` says that all trees are chains without padding, as in ``Trees``; ``model_dtype`` chooses products.

    Raises:
        ValueError: there are more nodes.
    """
    nowhere = torch.empty(0, dtype=torch.int64, device=u.device)
    trees = Trees(nowhere, nowhere, nowhere, *placement, is_chain=is_chain)
    return _verify((c, b, u, g), dense(state), records, None, None, trees, model_dtype)


def extend_in_place(
    c: Tensor,
    b: Tensor,
    u: Tensor,
    g: Tensor,
    states: Tensor,
    slots: Tensor,
    lengths: Tensor,
    model_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Run known tokens through the recurrence, from the states in their slots, which are overwritten.

    Args:
        c, b: [B, L, G, S] float32.
        u: [B, L, H, P] float32, dt x; H a multiple of G.
        g: [B, L, H] float32, log decay dt A <= 0.
        states: [slots, H, S, P], any float dtype; rows of length 0 and rows of slot 0 leave theirs as it is.
        slots: [B] int64, distinct but for 0.
        lengths: [B] int64; tokens from lengths[b] on are padding.
        model_dtype: of 16 bits, long prompts run in several launches, and their products in parts of bfloat16.

    Returns:
        Output [B, L, H, P] float32; zeros on padding and for rows of slot 0.
    """
    c, b, u, g = (dense(x) for x in (c, b, u, g))
    (_, length, heads, head_dim), state_dim = u.shape, b.shape[3]
    out = torch.empty(u.shape, dtype=torch.float32, device=u.device)
    if out.numel() == 0:
        return out
    assert states.stride(3) == 1, "columns of states must be contiguous"
    parts = parts_of(model_dtype, u.device)
    if parts != "none" and is_long(length, state_dim):
        _prefill(c, b, u, g.contiguous(), out, Places(states, slots, lengths), parts)
        return out
    tile = extend_tile(state_dim, head_dim)
    triton_kernels.extend[_grid(tile, out)](
        *(c, b, u, g, out, states, slots, lengths, length, heads // b.shape[2]),
        *(*c.stride()[:3], *b.stride()[:3], *u.stride()[:3], *g.stride()[:2], *out.stride()[:2], *states.stride()[:3]),
        **constexprs(tile, state_dim, head_dim),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _prefill(c: Tensor, b: Tensor, u: Tensor, g: Tensor, out: Tensor, places: Places, parts: str) -> None:
    """Long prompts: scores of chunks side by side, states from chunk to chunk, and outputs side by side again."""
    (batch, num_tokens, heads, head_dim), state_dim, kernel = u.shape, b.shape[3], triton_prompts.scores_kernel
    tile = prompts.chunks_tile(state_dim, head_dim)
    sizes = prompts.chunk_constants(kernel, tile, state_dim, head_dim, heads // b.shape[2], parts)

    def prepare(chunks: Chunks, first: int, now: int) -> None:
        written = chunks.updates, chunks.scores, chunks.decays
        launch(
            *(kernel, (now, heads, batch), tile, sizes),
            *(u, g, chunks.grams, *written, places.slots, places.lengths),
            *(first, num_tokens, chunks.num_chunks, *u.stride()[:3]),
        )

    prefill_in_place(c, b, u, out, places, parts, prepare, has_system=False)


def tree_verify_snapshots(
    c: Tensor, b: Tensor, u: Tensor, g: Tensor, state: Tensor, snapshots: Tensor, parents: Tensor | None
) -> Tensor:
    """Verify trees node after node; arguments as in ``torch_ops``, the state in any float dtype."""
    c, b, u, g, state = (dense(x) for x in (c, b, u, g, state))
    (_, nodes, heads, head_dim), state_dim = u.shape, b.shape[3]
    out = torch.empty(u.shape, dtype=torch.float32, device=u.device)
    if out.numel() == 0:
        return out
    assert snapshots.stride(4) == 1, "columns of snapshots must be contiguous"
    tile = snapshots_tile(state_dim, head_dim)
    triton_kernels.tree_verify_snapshots[_grid(tile, out)](
        *(c, b, u, g, out, state, snapshots, None if parents is None else parents.contiguous()),
        *(nodes, heads // b.shape[2], *c.stride()[:3], *b.stride()[:3], *u.stride()[:3], *g.stride()[:2]),
        *(*out.stride()[:2], *state.stride()[:3], *snapshots.stride()[:4]),
        **constexprs(tile, state_dim, head_dim),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _verify(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor],
    states: Tensor,
    records: tuple[Tensor, Tensor, Tensor],
    rows: Tensor | None,
    slots: Tensor | None,
    trees: Trees,
    model_dtype: torch.dtype,
    products: Tensor | None = None,
) -> Tensor:
    """Launch a verify. Rows and slots None: row b of the batch uses row b of records and states; no padding."""
    c, b, u, g = (dense(x) for x in tokens)
    (_, nodes, heads, head_dim), state_dim = u.shape, b.shape[3]
    if nodes > MAX_NODES:
        raise ValueError(f"a tree of {nodes} nodes; a program has room for {MAX_NODES}")
    out = torch.empty(u.shape, dtype=torch.float32, device=u.device)
    if out.numel() == 0:
        return out
    assert all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (states, *records)), "columns of pools must be contiguous"
    parts, per_group = parts_of(model_dtype, u.device), heads // b.shape[2]
    tile = verify_tile(nodes, state_dim, head_dim, parts == "none", len(u) * heads)
    (kept_b, kept_u, kept_decay), t, of_states = records, trees, states.stride()[:3]
    kept = (*kept_b.stride()[:3], *kept_u.stride()[:3], *kept_decay.stride()[:2])
    sizes = constexprs(tile, state_dim, head_dim) | {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    sizes |= register_options(tile.registers, u.device)
    if nodes == 1:
        triton_kernels.root_verify[_grid(tile, out)](
            *(c, b, u, g, out, states, *records, rows, slots, t.num_pending, t.folds, t.node_offset, per_group),
            *(c.stride(0), c.stride(2), b.stride(0), b.stride(2), u.stride(0), u.stride(2), g.stride(0)),
            *(out.stride(0), *of_states, *kept),
            **sizes,
        )
        return out
    if t.is_short_chain:
        tile = chain_tile(state_dim, head_dim)
        triton_kernels.chain_verify[_grid(tile, out)](
            *(c, b, u, g, out, states, *records, rows, slots, t.num_pending, t.folds, t.node_offset, nodes, per_group),
            *(*c.stride()[:3], *b.stride()[:3], *u.stride()[:3], *g.stride()[:2], *out.stride()[:2], *of_states, *kept),
            **constexprs(tile, state_dim, head_dim),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **register_options(tile.registers, u.device),
        )
        return out
    sizes["PARTS"] = parts
    if products is not None:
        sizes |= register_options(with_products(tile.registers, tile.nodes, parts), u.device)
    triton_kernels.tree_verify[_grid(tile, out)](
        *(c, b, u, g, out, states, *records, t.ancestors.contiguous(), products, rows, slots, t.num_pending, t.folds),
        *(t.node_offset, nodes, per_group, *c.stride()[:3], *b.stride()[:3], *u.stride()[:3], *g.stride()[:2]),
        *(*out.stride()[:2], *of_states, *kept, 0 if products is None else products.stride(2)),
        **sizes,
    )
    return out


def _grid(tile: Tile, out: Tensor) -> tuple[int, int, int]:
    """The grid: a program per block of columns, head and row of out [B, L, H, P]."""
    batch, _, heads, head_dim = out.shape
    return -(-head_dim // tile.columns), heads, batch


def variants() -> list[Variant]:
    """What is compiled ahead of time: every tile, states in float32 and bfloat16."""
    verifies = [
        _verify_variant("fp32", 1, 128, 64),
        _verify_variant("bf16", 1, 256, 64),
        _verify_variant("fp32", 4, 128, 64, is_chain=True),
        _verify_variant("bf16", 8, 256, 64, is_chain=True),
        _verify_variant("fp32", 8, 128, 64),
        _verify_variant("bf16", 16, 256, 64),
        _verify_variant("fp32", 64, 128, 64),
        _verify_variant("fp32", 8, 128, 64, parts="bf16"),
        _verify_variant("fp32", 16, 128, 64, parts="bf16", num_states=32),
        _verify_variant("fp32", 64, 256, 64, parts="bf16"),
    ]
    trees = [made for made in verifies if made.kernel is triton_kernels.tree_verify]
    given = [_with_products(made) for made in trees]
    return [
        *verifies,
        *given,
        *(without_folds(made) for made in verifies if "split" in made.name or "chain" in made.name),
        *(without_folds(made) for made in given if "split" in made.name),
        _extend_variant("fp32", 128, 64),
        _extend_variant("bf16", 256, 64),
        _prompt_variant(128, 64),
        _snapshots_variant(128, 64),
    ]


def _verify_variant(
    state: str,
    nodes: int,
    state_dim: int,
    head_dim: int,
    is_chain: bool = False,
    parts: str = "none",
    num_states: int = MANY_STATES,
) -> Variant:
    kernel = triton_kernels.root_verify if nodes == 1 else triton_kernels.tree_verify
    types = {"rows": "*i64", "slots": "*i64", "num_pending": "*i64", "folds": "*i1", "ancestors": "*i1"}
    name, tile = (
        f"tree_verify {state} N={nodes} S={state_dim} P={head_dim}",
        verify_tile(nodes, state_dim, head_dim, parts == "none", num_states),
    )
    kind = "few split" if num_states < MANY_STATES else "split"
    name = name if parts == "none" else name.replace("tree_verify", f"tree_verify {kind}")
    if is_chain:
        kernel, tile = triton_kernels.chain_verify, chain_tile(state_dim, head_dim)
        name = name.replace("tree_verify", "tree_verify chain")
    sizes = constexprs(tile, state_dim, head_dim)
    if kernel is triton_kernels.tree_verify:
        sizes |= {"PARTS": parts, "products": None}
    made = _variant(name, kernel, tile, sizes, types | {"states": f"*{state}"})
    if nodes == 1:
        return made
    # count and BLOCK_RECORDS: names in functions of state_records. Of trees a row is counted that does not fold
    pending = COUNTED_PENDING if is_chain else 0
    trips = {"num_nodes": nodes, "pending": pending, "count": pending, "num_beside": COUNTED_PENDING}
    return replace(made, work=Work(head_dim // tile.columns, trips | {"BLOCK_RECORDS": tile.records}))


def _with_products(made: Variant) -> Variant:
    """A variant of ``tree_verify`` that is given products of C and B."""
    constants = {name: value for name, value in made.constexprs.items() if name != "products"}
    sizes = made.constexprs
    return replace(
        made,
        name=f"{made.name} products",
        signature={**made.signature, "products": "*fp32"},
        constexprs=constants,
        registers=with_products(made.registers, sizes["NODES"], sizes["PARTS"]),
    )


def _extend_variant(state: str, state_dim: int, head_dim: int) -> Variant:
    types = {"slots": "*i64", "lengths": "*i64", "states": f"*{state}"}
    name, tile = f"extend {state} S={state_dim} P={head_dim}", extend_tile(state_dim, head_dim)
    return _variant(name, triton_kernels.extend, tile, constexprs(tile, state_dim, head_dim), types)


def _prompt_variant(state_dim: int, head_dim: int) -> Variant:
    kernel, tile = triton_prompts.scores_kernel, prompts.chunks_tile(state_dim, head_dim)
    sizes = prompts.chunk_constants(kernel, tile, state_dim, head_dim, prompts.GROUP, "bf16")
    made = prompts.chunk_variant(f"prefill scores S={state_dim} P={head_dim}", kernel, tile, sizes)
    return replace(made, work=Work(prompts.COUNTED_TOKENS // prompts.CHUNK, {}))


def _snapshots_variant(state_dim: int, head_dim: int) -> Variant:
    name, tile = f"tree_verify_snapshots S={state_dim} P={head_dim}", snapshots_tile(state_dim, head_dim)
    sizes = constexprs(tile, state_dim, head_dim)
    return _variant(name, triton_kernels.tree_verify_snapshots, tile, sizes, {"parents": "*i64"})


def _variant(name: str, kernel: Any, tile: Tile, sizes: dict[str, Any], types: Mapping[str, str]) -> Variant:
    """Arguments without a type are float32 tensors, or integers; strides over heads need not be aligned."""
    floats = ("c", "b", "u", "g", "out", "state", "snapshots", "kept_b", "kept_u", "kept_decay")
    known = dict.fromkeys(floats, "*fp32") | dict(types) | dict.fromkeys(sizes, "constexpr")
    signature = {argument: known.get(argument, "i32") for argument in kernel.arg_names}
    unaligned = frozenset(x for x in signature if x.startswith(("g_", "kept_decay_")))
    return Variant(name, kernel, signature, sizes, tile.num_warps, tile.num_stages, unaligned, registers=tile.registers)


def _at_least(size: int) -> int:
    return max(next_power_of_2(size), LEAST)
