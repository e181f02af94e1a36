"""How the Triton kernels around the recurrence are cut, and which of them are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specmamba.kernels.gpu import Variant, next_power_of_2


@dataclass(frozen=True)
class Tile:
    """Block sizes of one launch. Chosen so that a thread has 4 to 8 values, not measured."""

    constexprs: Mapping[str, int]
    num_warps: int
    num_stages: int = 1


def step_tile(head_dim: int) -> Tile:
    """Some heads of one token, 512 channels or a little more."""
    columns = next_power_of_2(head_dim)
    return Tile({"HEADS": max(1, 512 // columns), "COLUMNS": columns}, num_warps=4)


def norm_tile(inner: int, norm_groups: int, has_norm: bool) -> tuple[int, Tile]:
    """How many of a token's channels one program has, which divides ``inner``, and its tile.

    A norm needs a group in one program: it is read twice, the second time from a cache. Without a norm, parts are
    no larger than a block wherever the channels can be divided so.
    """
    part = inner // norm_groups
    while not has_norm and part > 1024 and part % 2 == 0:
        part //= 2
    block = min(2048, max(16, next_power_of_2(part)))
    return part, Tile({"BLOCK": block}, num_warps=8 if block == 2048 else 4 if block > 256 else 1)


def variants() -> list[Variant]:
    """What is compiled ahead of time: both dtypes of activations, and every way to norm."""
    return [
        _step("fp32", 64),
        _step("bf16", 128),
        _norm("fp32", 8192, 8, "after"),
        _norm("bf16", 5120, 1, "after"),
        _norm("bf16", 8192, 8, "before"),
        _norm("bf16", 4096, 1, "none"),
    ]


def _step(dtype: str, head_dim: int) -> Variant:
    from specmamba.kernels.mamba2 import triton_kernels

    tile = step_tile(head_dim)
    sizes = {"NUM_HEADS": 64, "HEAD_DIM": head_dim, **tile.constexprs}
    floats = dict.fromkeys(("mixed", "dt_bias", "negative_a", "u", "g"), "*fp32")
    types = floats | {"dt": f"*{dtype}", "dt_min": "fp32", "dt_max": "fp32"}
    return _variant(f"step {dtype} P={head_dim}", triton_kernels.step, types, sizes, tile)


def _norm(dtype: str, inner: int, groups: int, norm: str) -> Variant:
    from specmamba.kernels.mamba2 import triton_kernels

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
    """Arguments that are neither of these are integers."""
    known = dict(types) | dict.fromkeys(sizes, "constexpr")
    signature = {argument: known.get(argument, "i32") for argument in kernel.arg_names}
    return Variant(name, kernel, signature, sizes, tile.num_warps, tile.num_stages)
