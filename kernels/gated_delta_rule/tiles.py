"""Block sizes of the gated delta rule's Triton kernels, and the variants compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specmamba.kernels.gated_delta_rule import triton_channel_chunks as channel_chunks
from specmamba.kernels.gated_delta_rule import triton_channels as channels
from specmamba.kernels.gated_delta_rule import triton_chunks as chunks
from specmamba.kernels.gated_delta_rule import triton_kernels as kernels
from specmamba.kernels.gpu import ROOM, Registers, Variant, Work
from specmamba.kernels.state_records import triton_ops as tiles
from specmamba.kernels.state_records.operands import MAX_CHAIN
from specmamba.kernels.state_records.tiles import (
    CHUNK,
    COUNTED_TOKENS,
    GROUP,
    chunk_constants,
    chunk_variant,
    chunks_tile,
)
from specmamba.kernels.state_records.triton_ops import (
    COUNTED_PENDING,
    RECORDS,
    block,
    variant,
    without_folds,
)

ROWS = 32  # of a long prompt's chunk in one program that multiplies with the solution of its system
MANY_STATES = 512  # heads of all rows from which on fewer programs with more of a state each are faster

# of trees in parts that find products of keys: with 168 registers ptxas 13.4 spills 8 bytes on sm_100
ROOM_WITH_PRODUCTS = Registers(ROOM, most_of_10=160)


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
    registers: Registers | None = None


def root_tile(key_dim: int, value_dim: int) -> Tile:
    """Choose the tile for trees of one node: the state is read once and used at once, with many loads in flight."""
    keys = block(key_dim)
    return Tile(1, keys, block(value_dim, 32), num_warps=4 if keys <= 128 else 8)


def chain_tile(key_dim: int, value_dim: int) -> Tile:
    """Choose the tile for short chains: one warp, whose threads have 64 numbers of the state each in registers.

    Sums over keys are then exchanged between lanes, without barriers. On sm_90, of blocks of 8, 16 and 32 values of 128
    keys, 16 need the fewest instructions without spills. On sm_100 ptxas takes 192 registers where it is not told.
    """
    keys = block(key_dim)
    values, limit = min(max(4, 2048 // keys), block(value_dim)), Registers(ROOM, since=10 if keys <= 128 else 0)
    return Tile(MAX_CHAIN, keys, values, num_warps=1, registers=limit)


def tree_tile(num_nodes: int, value_dim: int, is_exact: bool = True, num_states: int = MANY_STATES) -> Tile:
    """Choose the tile for larger trees: nodes stay in registers, 16 keys of the state at a time; with 32 they spill.

    Products that are not exact run on tensor cores, where a warp has 16 nodes: more warps repeat its products, but for
    64 values one warp takes up to 240 registers, and with fewer it spills. On sm_90 two need 31,000 instructions for a
    head of 128 values and 16 nodes, one warp with 32 values 37,400. ``num_states``: heads of all rows.
    """
    nodes = block(num_nodes)
    if nodes > 32:
        return Tile(nodes, 16, 16, num_warps=8)
    if is_exact:
        return Tile(nodes, 16, block(value_dim, 32), num_warps=4)
    if nodes > 16:
        return Tile(nodes, 16, block(value_dim, 32), num_warps=2)
    values = block(value_dim, 64 if num_states >= MANY_STATES else 32)
    return Tile(nodes, 16, values, num_warps=max(1, values // 32), registers=Registers(ROOM))


def channel_tile(key_dim: int, value_dim: int, num_nodes: int = 1) -> Tile:
    """Choose the tile for decays by channel: half of that for short chains, with room for more nodes.

    A thread has decays of its keys beside queries and keys: with whole blocks it needs 218 registers on sm_90, so 148.
    """
    tile = chain_tile(key_dim, value_dim)
    return replace(tile, tokens=block(num_nodes), values=max(4, tile.values // 2), registers=None)


def channel_products_tile(key_dim: int) -> tiles.Tile:
    """Choose the tile for products of half of a chunk's tokens with decays by channel: with 32 keys registers spill."""
    return replace(chunks_tile(key_dim, key_dim), keys=16, num_warps=2)


def extend_tile(key_dim: int, value_dim: int, is_exact: bool = True) -> Tile:
    """Choose the tile for known tokens: 32 at a time.

    With 32 keys products in parts spill registers. On an H200 that was the fastest of 14 tiles all the same, when keys
    were multiplied with each other where the state is read; 16 keys, and a loop of their own, were not timed.
    """
    return Tile(32, block(key_dim, 32 if is_exact else 16), block(value_dim, 32), num_warps=4)


def constexprs(
    kernel: Any, tile: Tile, key_dim: int, value_dim: int, group: int, parts: str = "none", by_channel: bool = False
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
        "BY_CHANNEL": by_channel,
    }
    return {name: value for name, value in values.items() if name in kernel.arg_names}


def grid_of(tile: Tile, batch: int, heads: int, value_dim: int) -> tuple[int, int, int]:
    """A program for each block of values of each head of each row."""
    return -(-value_dim // tile.values), heads, batch


def variants() -> list[Variant]:
    """Trees of 1, 16 and 64 nodes, chains, known tokens, snapshots; heads of 128, and of others where tiles change."""
    root, chain, tree = kernels.root_kernel, kernels.chain_kernel, kernels.tree_kernel
    verifies = [
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
    ]
    trees = [
        _variant("tree_verify N=16", tree, tree_tile(16, 128), "fp32", 128, nodes=16),
        _variant("tree_verify N=64", tree, tree_tile(64, 128), "fp32", 128, nodes=64),
        *(made for made in verifies if "split" in made.name),
    ]
    with_products = [_with_products(made) for made in trees]
    return [
        *verifies,
        *with_products,
        *(without_folds(made) for made in verifies if "split" in made.name or "chain" in made.name),
        _variant("tree_verify_snapshots", kernels.snapshots_kernel, root_tile(128, 128), "fp32", 128),
        *_prompt_variants(),
        *_channel_variants(),
    ]


def _prompt_variants() -> list[Variant]:
    """Of known tokens: 32 at a time, and chunks of long prompts."""
    return [
        *(_extend_variant(*of) for of in (("bf16", 128), ("fp32", 256), ("fp32", 128, False), ("bf16", 128, False))),
        *_chunks_variants(128),
        *list(_chunks_variants(64))[1:],
        *_chunks_variants(128, by_channel=True),
        *(_channel_products_variant(key_dim) for key_dim in (128, 64)),
    ]


def _extend_variant(state_dtype: str, key_dim: int, is_exact: bool = True) -> Variant:
    tile, name = extend_tile(key_dim, 128, is_exact), "extend" if is_exact else "extend split"
    made = _variant(name, kernels.extend_kernel, tile, state_dtype, key_dim, is_exact=is_exact)
    sizes = {"length": COUNTED_TOKENS, "num_tokens": COUNTED_TOKENS, "num_keys": key_dim, "num_steps": tile.tokens - 1}
    return replace(made, work=Work(grid_of(tile, 1, 1, 128)[0], sizes))


def _chunks_variants(key_dim: int, by_channel: bool = False) -> Iterator[Variant]:
    tile, group, kind = chunks_tile(key_dim, 128), 1 if by_channel else GROUP, "prefill" + " by channel" * by_channel
    absent = ("g", "decays") if by_channel else ()
    for what, kernel in (("systems", chunks.systems_kernel), ("updates", chunks.updates_kernel)):
        constants = chunk_constants(kernel, tile, key_dim, 128, group, "bf16", BLOCK_ROWS=ROWS)
        is_of_keys = "BLOCK_KEYS" in constants
        constants |= {name: None for name in absent if name in kernel.arg_names}
        made = chunk_variant(f"{kind} {what}" + f" K={key_dim} V=128" * is_of_keys, kernel, tile, constants)
        programs = COUNTED_TOKENS // (ROWS if is_of_keys else CHUNK)
        yield replace(made, work=Work(programs, {}))


def _channel_products_variant(key_dim: int) -> Variant:
    tile, kernel = channel_products_tile(key_dim), channel_chunks.channel_products_kernel
    constants = chunk_constants(kernel, tile, key_dim, key_dim, GROUP, "bf16")
    made = chunk_variant(f"prefill by channel products K={key_dim}", kernel, tile, constants)
    return replace(made, work=Work(2 * COUNTED_TOKENS // CHUNK, {}))


def _channel_variants() -> list[Variant]:
    """Of Kimi Delta Attention."""
    tree, snapshots = channels.channel_tree_kernel, kernels.snapshots_kernel
    of_8 = _variant("by channel tree_verify N=8", tree, channel_tile(128, 128, 8), "bf16", 128)
    return [
        _variant("by channel tree_verify N=1", tree, channel_tile(128, 128), "fp32", 128),
        *(of_8, without_folds(of_8)),
        _variant("by channel tree_verify N=64", tree, channel_tile(64, 128, 64), "fp32", 64),
        _variant("by channel extend", channels.channel_extend_kernel, channel_tile(128, 128), "fp32", 128),
        _variant("by channel extend", channels.channel_extend_kernel, channel_tile(128, 128), "bf16", 128),
        _variant("by channel tree_verify_snapshots", snapshots, root_tile(128, 128), "fp32", 128),
    ]


def _with_products(made: Variant) -> Variant:
    """A variant of ``tree_kernel`` that finds products of keys and queries."""
    signature = {**made.signature, "products": "*fp32"}
    constants = {name: value for name, value in made.constexprs.items() if name != "products"}
    registers = made.registers and ROOM_WITH_PRODUCTS
    return replace(made, name=f"{made.name} products", signature=signature, constexprs=constants, registers=registers)


POINTERS: Mapping[str, str] = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "out", "work", "snapshots", "products"), "fp32"),
    **dict.fromkeys(("records_k", "records_u", "records_decay"), "fp32"),
    **dict.fromkeys(("rows", "slots", "num_pending", "parents", "lengths"), "i64"),
    **dict.fromkeys(("folds", "ancestors"), "i1"),
}


def _variant(
    what: str, kernel: Any, tile: Tile, state_dtype: str, key_dim: int, nodes: int = 0, is_exact: bool = True
) -> Variant:
    pointers = {name: POINTERS.get(name, state_dtype) for name in (*POINTERS, "state", "states")}
    taken = {name: of for name, of in pointers.items() if name in kernel.arg_names}
    parts, by_channel = "none" if is_exact else "bf16", what.startswith("by channel")
    constants: dict[str, Any] = constexprs(kernel, tile, key_dim, 128, GROUP, parts, by_channel)
    absent = ("work", "products") if state_dtype == "fp32" else ("products",)
    constants |= {name: None for name in absent if taken.pop(name, "")}
    name = f"{what} {state_dtype} K={key_dim} V=128"
    made = variant(name, kernel, taken, constants, tile.num_warps, tile.num_stages)
    made = replace(made, registers=tile.registers)
    if nodes == 0:
        return made
    # split kernels advance states that fold alone, and read what is pending otherwise: counted is a row that does not
    folded = {"count": 0, "num_unfolded": COUNTED_PENDING, "num_unread": COUNTED_PENDING}
    sizes = {"num_nodes": nodes, "num_steps": nodes - 1, "count": COUNTED_PENDING} | ({} if is_exact else folded)
    return replace(made, work=Work(grid_of(tile, 1, 1, 128)[0], sizes))
