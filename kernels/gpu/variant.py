"""One way in which a Triton kernel is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A kernel with everything that its machine code depends on, as a launch would have it.

    Every operator lists its own in ``tiles.py`` (``variants()``), one at least for each of its tile choices, made by
    the same functions that launches ask. ``specmamba.kernels.aot`` compiles them without a GPU.

    Triton makes other, better code where it finds that a pointer or an integer is a multiple of 16. What is compiled
    ahead of time takes this to be so for every pointer and for every argument with "stride" in its name, as it is at a
    real model's sizes, and for no other. Names in ``unaligned`` are exceptions: a stride over heads or taps, say; and
    so is what a kernel does not specialize, ever: numbers that change from call to call.
    """

    name: str  # unique within the operator: what tells it apart, for example "tree_verify bf16 N=16 K=128 V=128"
    kernel: Any  # the triton.jit function
    signature: Mapping[str, str]  # Triton's type of every argument in order: "*bf16", "*i64", "i32", "constexpr"
    constexprs: Mapping[str, Any]  # values of those that are constexpr
    num_warps: int
    num_stages: int
    unaligned: frozenset[str] = frozenset()

    def is_aligned(self, argument: str) -> bool:
        """Whether an argument is taken to be a multiple of 16 (a pointer: of 16 bytes)."""
        kind = self.signature[argument]
        can_be = kind.startswith("*") or (kind != "constexpr" and "stride" in argument)
        return can_be and argument not in self.unaligned
