"""The fold of records as one Triton launch, its tiles, and the variants compiled ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.gpu import Variant, next_power_of_2
from specmamba.kernels.state_records import triton_kernels

COUNTED_PENDING = 8  # records before the nodes in counts of instructions: the most that chains of 4 and 8 nodes find
RECORDS = 16  # pending records of one matrix product, which takes no fewer


@dataclass(frozen=True)
class Tile:
    """Block sizes of one program, which has a part of one head's state; and its warps and pipeline stages."""

    keys: int
    values: int
    num_warps: int
    num_stages: int = 1

    @property
    def constexprs(self) -> dict[str, int]:
        return {"BLOCK_KEYS": self.keys, "BLOCK_VALUES": self.values, "BLOCK_RECORDS": RECORDS}


def fold_tile(key_dim: int, value_dim: int) -> Tile:
    """Choose narrow blocks of values, so that a single row fills a GPU too; 16 registers of a thread hold the state.

    Chosen from register and shared-memory limits, not measured.
    """
    return Tile(block(key_dim, 64), block(value_dim, 32), num_warps=4)


def block(size: int, most: int | None = None) -> int:
    """The power of two from ``size`` on, at least 16, as matrix products need, and at most ``most``."""
    enough = max(16, next_power_of_2(size))
    return enough if most is None else min(most, enough)


def parts_of(model_dtype: torch.dtype, device: torch.device) -> str:
    """How products of a model are computed, see ``triton_kernels.product``: those of 16 bits in parts of bfloat16."""
    if model_dtype is torch.float32:
        return "none"
    return "wide" if device.type == "cpu" else "bf16"


def fold(state: Tensor, k: Tensor, u: Tensor, decay: Tensor, num_pending: Tensor, out: Tensor | None = None) -> Tensor:
    """One launch, for operands of any strides; states are computed in float32."""
    batch, heads, key_dim, value_dim = state.shape
    out = torch.empty_like(state) if out is None else out
    if out.numel() == 0:
        return out
    tile = fold_tile(key_dim, value_dim)
    grid = -(-value_dim // tile.values), heads, batch
    of_channels = (None,) if decay.dim() == 3 else ()
    triton_kernels.fold[grid](
        state,
        k,
        u,
        decay,
        num_pending,
        out,
        key_dim,
        value_dim,
        heads // k.shape[2],
        *state.stride(),
        *k.stride(),
        *u.stride(),
        *decay.stride(),
        *of_channels,
        *out.stride(),
        **tile.constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def variant(
    name: str,
    kernel: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int,
) -> Variant:
    """Make a variant; arguments that are neither pointers nor constants (block sizes, strides of 1, None) are i32."""
    kinds = {x: f"*{of}" for x, of in pointers.items()} | dict.fromkeys(constants, "constexpr")
    signature = {x: kinds.get(x, "i32") for x in kernel.arg_names}
    return Variant(name, kernel, signature, constants, num_warps, num_stages)


def without_folds(made: Variant) -> Variant:
    """A variant of a verify as launches have it where no row folds: the code for folds is left out."""
    signature, constants = {**made.signature, "folds": "constexpr"}, {**made.constexprs, "folds": None}
    return replace(made, name=f"{made.name} no folds", signature=signature, constexprs=constants)
