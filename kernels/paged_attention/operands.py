"""What an attention layer does between its two products, besides attending."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Form:
    """Of one layer; it stays for several calls, and compares by identity, so that what follows from it is made once."""

    num_query_heads: int
    num_key_heads: int
    head_dim: int
    scale: float  # of the scores
    norm: Tensor | None = None  # [Hq + Hkv, D] float32: RMS norm of queries and keys
    norm_eps: float = 0.0
    has_gate: bool = False  # the output is multiplied by the sigmoid of a gate

    @cached_property
    def projected_width(self) -> int:
        """Of a token's projections: queries, keys, values and, where there is a gate, gates."""
        num_heads = self.num_query_heads * (2 if self.has_gate else 1) + 2 * self.num_key_heads
        return num_heads * self.head_dim

    @cached_property
    def key_shape(self) -> tuple[int, int]:
        """Of a token's keys and of its values."""
        return self.num_key_heads, self.head_dim
