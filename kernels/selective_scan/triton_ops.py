"""The selective scan as Triton launches on pools in place; its tile, and the variants compiled ahead of time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.gpu import Variant, dense, launch, next_power_of_2, num_blocks
from specmamba.kernels.selective_scan import triton_kernels as kernels
from specmamba.kernels.state_records.operands import Buffers, StateOperands, Trees

EXTENDS_IN_PARTS = False  # there are no products of matrices


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
    strides = *_of_tokens(*given, out), states.stride(0), states.stride(2)
    arguments = *given, rates.contiguous(), out, states, slots, lengths, u.shape[1], *strides
    _launch(kernels.extend, rates, arguments, len(u))
    return out


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


def _launch(kernel: Any, rates: Tensor, arguments: tuple[Any, ...], batch: int) -> None:
    """A program for each block of channels of each row."""
    state_dim, channels = rates.shape[-2:]
    tile = tile_of(state_dim, channels)
    grid = num_blocks(channels, tile.columns), batch
    launch(kernel, grid, tile, tile.constants(state_dim, channels), *arguments)


def _of_tokens(*tensors: Tensor) -> tuple[int, ...]:
    """Strides over rows and over tokens or records."""
    return tuple(x.stride(d) for x in tensors for d in (0, 1))


def _require_dense(*kept: Tensor) -> None:
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in kept):
        raise ValueError("the last dimension of states, records and snapshots must be dense")


FLOATS = ("c", "b", "u", "dt", "rates", "out", "kept_b", "kept_u", "kept_dt", "snapshots")
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
        _variant("extend", kernels.extend, "fp32", 16, 8192),
        _variant("extend", kernels.extend, "bf16", 16, 8192),
        _variant("extend", kernels.extend, "fp32", 256, 4096),
        _variant("tree_verify_snapshots", kernels.tree_verify_snapshots, "fp32", 16, 8192),
        _variant("fold", kernels.fold, "fp32", 16, 8192),
    ]


def _variant(what: str, kernel: Any, state: str, state_dim: int, channels: int) -> Variant:
    """``state``: the type of the states; new ones of a fold have it too."""
    tile, types = tile_of(state_dim, channels), {"states": f"*{state}", "state": f"*{state}"}
    name, constants = f"{what} {state} M={state_dim} C={channels}", tile.constants(state_dim, channels)
    return Variant.of(name, kernel, {**POINTERS, **types}, constants, tile)
