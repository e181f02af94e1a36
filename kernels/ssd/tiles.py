"""How the Triton kernels of this op are cut, and which of them are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specmamba.kernels.gpu import Variant, next_power_of_2

MAX_NODES = 64  # of a tree that one program verifies at once
LEAST = 16  # no side of a matrix product may be shorter


@dataclass(frozen=True)
class Tile:
    """Block sizes of one launch; 0 for what a kernel does not have. A program has COLUMNS of a head's P columns.

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


def constexprs(tile: Tile, state_dim: int, head_dim: int) -> dict[str, int]:
    """Of a launch over states [N, P]."""
    blocks = {name.upper(): size for name, size in asdict(tile).items() if size and not name.startswith("num_")}
    return {"STATE_DIM": state_dim, "HEAD_DIM": head_dim, **blocks}


def verify_tile(num_nodes: int, state_dim: int, head_dim: int) -> Tile:
    """Of trees of up to MAX_NODES nodes; one node has a kernel of its own, without products of matrices of nodes."""
    state, head = _at_least(state_dim), _at_least(head_dim)
    if num_nodes == 1:
        return Tile(columns=min(head, 32 if state <= 128 else 16), lanes=state, records=16)
    nodes = _at_least(num_nodes)
    return Tile(columns=min(head, 32), lanes=16, nodes=nodes, records=16, num_warps=4 if nodes == LEAST else 8)


def extend_tile(state_dim: int, head_dim: int) -> Tile:
    """Of known tokens: short chunks, since the scores inside of one are made anew for every head and block."""
    columns = min(_at_least(head_dim), 32)
    return Tile(columns=columns, lanes=16, slices=_at_least(state_dim) // 16, tokens=16, num_warps=8)


def snapshots_tile(state_dim: int, head_dim: int) -> Tile:
    """Of one node after the other."""
    columns = min(_at_least(head_dim), 32 if state_dim <= 128 else 16)
    return Tile(columns=columns, lanes=_at_least(state_dim))


def variants() -> list[Variant]:
    """What is compiled ahead of time: every tile, states in float32 and bfloat16."""
    return [
        _verify("fp32", 1, 128, 64),
        _verify("bf16", 1, 256, 64),
        _verify("fp32", 8, 128, 64),
        _verify("bf16", 16, 256, 64),
        _verify("fp32", 64, 128, 64),
        _extend("fp32", 128, 64),
        _extend("bf16", 256, 64),
        _snapshots(128, 64),
    ]


def _verify(state: str, nodes: int, state_dim: int, head_dim: int) -> Variant:
    from specmamba.kernels.ssd import triton_kernels

    kernel = triton_kernels.root_verify if nodes == 1 else triton_kernels.tree_verify
    types = {"rows": "*i64", "slots": "*i64", "num_pending": "*i64", "folds": "*i1", "ancestors": "*i1"}
    name, tile = f"tree_verify {state} T={nodes} N={state_dim} P={head_dim}", verify_tile(nodes, state_dim, head_dim)
    return _variant(name, kernel, tile, constexprs(tile, state_dim, head_dim), types | {"states": f"*{state}"})


def _extend(state: str, state_dim: int, head_dim: int) -> Variant:
    from specmamba.kernels.ssd import triton_kernels

    types = {"slots": "*i64", "lengths": "*i64", "states": f"*{state}"}
    name, tile = f"extend {state} N={state_dim} P={head_dim}", extend_tile(state_dim, head_dim)
    return _variant(name, triton_kernels.extend, tile, constexprs(tile, state_dim, head_dim), types)


def _snapshots(state_dim: int, head_dim: int) -> Variant:
    from specmamba.kernels.ssd import triton_kernels

    name, tile = f"tree_verify_snapshots N={state_dim} P={head_dim}", snapshots_tile(state_dim, head_dim)
    sizes = constexprs(tile, state_dim, head_dim)
    return _variant(name, triton_kernels.tree_verify_snapshots, tile, sizes, {"parents": "*i64"})


def _variant(name: str, kernel: Any, tile: Tile, sizes: dict[str, int], types: Mapping[str, str]) -> Variant:
    """Arguments without a type are float32 tensors, or integers; strides over heads need not be aligned."""
    floats = ("c", "b", "u", "g", "out", "state", "snapshots", "kept_b", "kept_u", "kept_decay")
    known = dict.fromkeys(floats, "*fp32") | dict(types) | dict.fromkeys(sizes, "constexpr")
    signature = {argument: known.get(argument, "i32") for argument in kernel.arg_names}
    unaligned = frozenset(x for x in signature if x.startswith(("g_", "kept_decay_")))
    return Variant(name, kernel, signature, sizes, tile.num_warps, tile.num_stages, unaligned)


def _at_least(size: int) -> int:
    return max(next_power_of_2(size), LEAST)
