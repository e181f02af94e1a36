"""The selective scan as Triton launches on pools in place; its tile, and the variants compiled ahead of time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.gpu import Variant, Work, dense, launch, next_power_of_2, num_blocks
from specmamba.kernels.selective_scan import triton_kernels as kernels
from specmamba.kernels.selective_scan import triton_scan_chunks as chunks
from specmamba.kernels.state_records.operands import Buffers, StateOperands, Trees
from specmamba.kernels.state_records.tiles import COUNTED_TOKENS

EXTENDS_IN_PARTS = False  # there are no products of matrices
CHUNK = 64  # tokens of a long prompt that run side by side with others
SHORT = 2 * CHUNK  # tokens up to which one launch runs all of them
MANY_PROGRAMS = 2048  # blocks of states that occupy a GPU by themselves: chunks would take two exponentials for one


@dataclass(frozen=True)
class Tile:
    """A program's block of the state: all entries of some channels; and its warps and pipeline stages."""

    lanes: int
    columns: int
    num_warps: int = 1
    num_stages: int = 1

    def constants(self, state_dim: int, channels: int) -> dict[str, int]:
        """Constants of a launch over states [M, C]."""
        return {"STATE_DIM": state_dim, "CHANNELS": channels, "LANES": self.lanes, "COLUMNS": self.columns}


def tile_of(state_dim: int, channels: int) -> Tile:
    """Choose the tile: with 16 entries, one warp has 32 channels, 16 numbers of the state in each thread.

    A step waits for its loads and exponentials, so many small programs are run. Chosen from registers, not measured.
    """
    lanes = next_power_of_2(state_dim)
    columns = min(max(8, 512 // lanes), next_power_of_2(channels))
    return Tile(lanes, columns, num_warps=min(16, max(1, lanes * columns // 1024)))


def chunk_tile(state_dim: int, channels: int) -> Tile:
    """Choose the tile of chunks, of which there are many: 64 channels to a warp, 32 numbers of the state in a thread.

    Of 32, 64 and 128 channels, 128 need 15 % fewer instructions for outputs, but all registers.
    """
    tile = tile_of(state_dim, channels)
    columns = min(max(8, 1024 // tile.lanes), next_power_of_2(channels))
    return Tile(tile.lanes, columns, num_warps=min(16, max(1, tile.lanes * columns // 1024)))


def advance(c: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, state: StateOperands) -> Tensor:
    """Run the form that the operands ask for, in one launch on the pools in place."""
    return state.launch(sys.modules[__name__], (c, b, u, dt, rates))


def tree_verify_in_place(
    c: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, buffers: Buffers, trees: Trees
) -> Tensor:
    """Compute the outputs of all nodes from one read of the checkpoints; write their records.

    The records of node i go to entry ``node_offset + i`` of its row. A row that ``folds`` reads its checkpoint advanced
    over all its pending records, rounded to the pool's dtype, and writes it back. Nothing is read or written for rows
    of slot 0.

    Args:
        c, b: [B, N, 1, M] float32.
        u, dt: [B, N, 1, C] float32.
        rates: [M, C] float32.
        buffers: ``states`` [slots, 1, M, C] of any float dtype; k [rows, R, 1, M], u and decay [rows, R, 1, C]. Others
            are not read.
        trees: ``conv_index`` is not read.

    Returns:
        Output [B, N, 1, C] float32, zeros for rows of slot 0. What is not finite in a node reaches that node and its
        descendants alone.

    Raises:
        ValueError: the last dimension of a pool is not dense.
    """
    given, states, t = tuple(dense(x) for x in (c, b, u, dt)), buffers.states, trees
    kept, out = (buffers.k, buffers.u, buffers.decay), torch.empty(u.shape, dtype=torch.float32, device=u.device)
    _require_dense(states, *kept)
    if out.numel() == 0:
        return out
    places = t.ancestors.contiguous(), t.rows, t.slots, t.num_pending, t.folds
    strides = (*_of_tokens(*given, out), states.stride(0), states.stride(2), *_of_tokens(*kept))
    _launch(
        kernels.tree_verify,
        rates,
        (*given, rates.contiguous(), out, states, *kept, *places, u.shape[1], t.node_offset, *strides),
        len(u),
    )
    return out


def extend_in_place(
    c: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, states: Tensor, slots: Tensor, lengths: Tensor
) -> Tensor:
    """Run known tokens through the recurrence, from the states in their slots, which are overwritten.

    Prompts of more than ``SHORT`` tokens run in chunks side by side, where rows and channels alone are too few.

    Args:
        c, b: [B, L, 1, M] float32.
        u, dt: [B, L, 1, C] float32.
        rates: [M, C] float32.
        states: [slots, 1, M, C], any float dtype; rows of length 0 and rows of slot 0 leave theirs as it is.
        slots: [B] int64, distinct but for 0.
        lengths: [B] int64; tokens from lengths[b] on are padding.

    Returns:
        Output [B, L, 1, C] float32; zeros on padding and for rows of slot 0.

    Raises:
        ValueError: the last dimension of the pool is not dense.
    """
    given = tuple(dense(x) for x in (c, b, u, dt))
    out = torch.empty(u.shape, dtype=torch.float32, device=u.device)
    _require_dense(states)
    if out.numel() == 0:
        return out
    rates, of_states = rates.contiguous(), (states.stride(0), states.stride(2))
    if is_long(*u.shape[:2], *rates.shape):
        _extend_in_chunks(given, rates, out, states, slots, lengths)
        return out
    arguments = *given, rates, out, states, slots, lengths, u.shape[1], *_of_tokens(*given, out), *of_states
    _launch(kernels.extend, rates, arguments, len(u))
    return out


def is_long(batch: int, num_tokens: int, state_dim: int, channels: int) -> bool:
    """Whether prompts run in chunks: they are long, and there are few blocks of states."""
    blocks = num_blocks(channels, tile_of(state_dim, channels).columns)
    return num_tokens > SHORT and batch * blocks < MANY_PROGRAMS


def _extend_in_chunks(
    given: tuple[Tensor, ...], rates: Tensor, out: Tensor, states: Tensor, slots: Tensor, lengths: Tensor
) -> None:
    """What chunks add to states, states from chunk to chunk, and outputs: three launches.

    Between them there are two states for each chunk: for M = 16, half as many bytes as u has.
    """
    batch, num_tokens = out.shape[:2]
    num_chunks, of_states = num_blocks(num_tokens, CHUNK), (states.stride(0), states.stride(2))
    local, before = (torch.empty(batch, num_chunks, *rates.shape, device=out.device) for _ in range(2))
    totals = torch.empty(batch, num_chunks, rates.shape[1], device=out.device)
    _, *added = given
    places = slots, lengths

    def run(kernel: Any, *arguments: Any) -> None:
        grid = (batch,) if kernel is chunks.join_chunks else (num_chunks, batch)
        _launch(kernel, rates, arguments, *grid, TOKENS=CHUNK)

    run(chunks.chunk_states, *added, rates, local, totals, *places, *_of_tokens(*added))
    run(chunks.join_chunks, local, totals, before, rates, states, *places, num_chunks, *of_states)
    strides = *_of_tokens(*given, out), *of_states
    run(chunks.chunk_outputs, *given, rates, out, before, states, *places, num_tokens, *strides)


def tree_verify_snapshots(
    c: Tensor,
    b: Tensor,
    u: Tensor,
    dt: Tensor,
    rates: Tensor,
    state: Tensor,
    snapshots: Tensor,
    parents: Tensor | None,
) -> Tensor:
    """Verify trees node after node; arguments as in ``torch_ops``, the state in any float dtype.

    Raises:
        ValueError: the last dimension of snapshots is not dense.
    """
    given, state = tuple(dense(x) for x in (c, b, u, dt)), dense(state)
    out = torch.empty(u.shape, dtype=torch.float32, device=u.device)
    _require_dense(snapshots)
    if out.numel() == 0:
        return out
    strides = *_of_tokens(*given, out), state.stride(0), state.stride(2), *snapshots.stride()[:2], snapshots.stride(3)
    _launch(
        kernels.tree_verify_snapshots,
        rates,
        (
            *(*given, rates.contiguous(), out, state, snapshots, None if parents is None else parents.contiguous()),
            *(u.shape[1], *strides),
        ),
        len(u),
    )
    return out


def fold(state: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, num_pending: Tensor) -> Tensor:
    """One launch for all rows; states of any float dtype are computed in float32."""
    state, b, u, dt, rates = (dense(x) for x in (state, b, u, dt, rates))
    out = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    if out.numel() == 0:
        return out
    of_rates = rates.stride() if rates.dim() == 3 else (0, *rates.stride())
    strides = state.stride(0), state.stride(2), *_of_tokens(b, u, dt), *of_rates[:2], out.stride(0), out.stride(2)
    _launch(kernels.fold, rates, (state, b, u, dt, rates, num_pending, out, *strides), len(state))
    return out


def _launch(kernel: Any, rates: Tensor, arguments: tuple[Any, ...], *grid: int, **constants: int) -> None:
    """A program for each block of channels of each row, or chunk of a row."""
    state_dim, channels = rates.shape[-2:]
    tile = _tile_for(kernel, state_dim, channels)
    blocks = num_blocks(channels, tile.columns)
    launch(kernel, (blocks, *grid), tile, tile.constants(state_dim, channels) | constants, *arguments)


def _tile_for(kernel: Any, state_dim: int, channels: int) -> Tile:
    return (chunk_tile if kernel in (chunks.chunk_states, chunks.chunk_outputs) else tile_of)(state_dim, channels)


def _of_tokens(*tensors: Tensor) -> tuple[int, ...]:
    """Strides over rows and over tokens or records."""
    return tuple(x.stride(d) for x in tensors for d in (0, 1))


def _require_dense(*kept: Tensor) -> None:
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in kept):
        raise ValueError("the last dimension of states, records and snapshots must be dense")


FLOATS = ("c", "b", "u", "dt", "rates", "out", "kept_b", "kept_u", "kept_dt", "snapshots", "local", "totals", "before")
POINTERS: Mapping[str, str] = {
    **dict.fromkeys(FLOATS, "*fp32"),
    **dict.fromkeys(("rows", "slots", "num_pending", "lengths", "parents"), "*i64"),
    **dict.fromkeys(("ancestors", "folds"), "*i1"),
}


def variants() -> list[Variant]:
    """What is compiled ahead of time: states of 16 numbers, those of all models there are, and more of them."""
    return [
        _variant("tree_verify", kernels.tree_verify, "fp32", 16, 8192),
        _variant("tree_verify", kernels.tree_verify, "bf16", 16, 8192),
        _variant("tree_verify", kernels.tree_verify, "fp32", 256, 4096),
        *(_prompt_variant("extend", kernels.extend, *of) for of in _OF_PROMPTS),
        *(_prompt_variant("chunk_states", chunks.chunk_states, *of) for of in _OF_PROMPTS if of[0] == "fp32"),
        *(_prompt_variant("join_chunks", chunks.join_chunks, *of) for of in _OF_PROMPTS),
        *(_prompt_variant("chunk_outputs", chunks.chunk_outputs, *of) for of in _OF_PROMPTS),
        _variant("tree_verify_snapshots", kernels.tree_verify_snapshots, "fp32", 16, 8192),
        _variant("fold", kernels.fold, "fp32", 16, 8192),
    ]


_OF_PROMPTS = ("fp32", 16, 8192), ("bf16", 16, 8192), ("fp32", 256, 4096)


def _prompt_variant(what: str, kernel: Any, state: str, state_dim: int, channels: int) -> Variant:
    """Counted are instructions of one block of channels, for ``COUNTED_TOKENS`` tokens."""
    made, num_chunks = _variant(what, kernel, state, state_dim, channels), COUNTED_TOKENS // CHUNK
    if kernel is kernels.extend:
        return replace(made, work=Work(1, {"length": COUNTED_TOKENS, "num_tokens": COUNTED_TOKENS}))
    sizes = {"length": CHUNK, "count": CHUNK, "end": CHUNK, "num_joined": num_chunks - 1}
    programs = {"chunk_states": num_chunks - 1, "join_chunks": 1, "chunk_outputs": num_chunks}[what]
    return replace(made, work=Work(programs, sizes))


def _variant(what: str, kernel: Any, state: str, state_dim: int, channels: int) -> Variant:
    """``state``: the type of the states; new ones of a fold have it too."""
    tile, types = _tile_for(kernel, state_dim, channels), {"states": f"*{state}", "state": f"*{state}"}
    name, constants = f"{what} {state} M={state_dim} C={channels}", tile.constants(state_dim, channels)
    if "TOKENS" in kernel.arg_names:
        constants |= {"TOKENS": CHUNK}
    return Variant.of(name, kernel, {**POINTERS, **types}, constants, tile)
