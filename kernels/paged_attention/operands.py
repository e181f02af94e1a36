"""What attention is given besides projections: a layer's configuration and pools, and the metadata of a forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]  # cosines and sines by which queries and keys are rotated, each [B, N, 1, R], R <= D


class LayerKV(NamedTuple):
    """Stored keys and values of one layer, and where those of a forward's tokens are stored.

    Pools have the model's dtype, or hold codes (``codes.py``) and have scales. Values of latent attention are a view
    on their keys, [slots, Hkv, V], with the same scales.
    """

    k_pool: Tensor  # [slots, Hkv, D]
    v_pool: Tensor  # [slots, Hkv, V]; V = D, but for latents
    write_slots: Tensor  # [B * N] int64. Slots are trusted; tokens may share one that is never read (padding)
    k_scales: Tensor | None = None  # [slots, Hkv] float32, of codes; None: pools hold the numbers themselves
    v_scales: Tensor | None = None  # [slots, Hkv] float32, where k_scales are
    is_exact: bool = False  # a query's result has the same bits whatever other queries there are: native code alone


@dataclass(frozen=True, eq=False)
class AttentionConfig:
    """One attention layer. Compares by identity: what native code needs of it is marshalled once and kept."""

    num_query_heads: int
    num_key_heads: int
    head_dim: int
    scale: float  # of the scores
    norm: Tensor | None = None  # [Hq + Hkv, D] float32: RMS norm of queries and keys
    norm_eps: float = 0.0
    has_gate: bool = False  # the output is multiplied by the sigmoid of a gate
    latent_dim: int | None = None  # V: values are the last V numbers of their keys (MLA); None: they are projected
    # W: of the keys that the metadata shows to a query, it sees only the last W, text before the entries of a tree and
    # these in their order; 0: all.
    window: int = 0

    @property
    def value_dim(self) -> int:
        """Size of a value and of a query head's output."""
        return self.head_dim if self.latent_dim is None else self.latent_dim

    @cached_property
    def projected_width(self) -> int:
        """Width of a token's projections: queries, keys, values that are no part of keys and, with a gate, gates."""
        values = self.num_key_heads * self.head_dim if self.latent_dim is None else 0
        gates = self.num_query_heads * self.value_dim if self.has_gate else 0
        return (self.num_query_heads + self.num_key_heads) * self.head_dim + values + gates

    @cached_property
    def key_shape(self) -> tuple[int, int]:
        """Shape of a token's keys, and of its values."""
        return self.num_key_heads, self.head_dim


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Which keys each query of a forward sees; the same for all layers.

    Query q of row b sees the keys at positions first..last[b, q] of the row. A query whose ``last`` is below ``first``
    sees all positions up to ``last``: it is a query without a token (a draft head has no entry for the first tokens),
    but must see some key. With ``roots``, a query also sees entry m of a draft tree, at position roots[b] + m, where
    seen[b, q, m] is set; then ``last`` is below the roots, and may be below ``first``, since the query sees its own
    entry.

    Positions from ``num_keys`` on are never seen: it is an upper bound for all queries, and need not be tight.
    """

    table: Tensor  # [rows, T] int64, the pool's slot of every position of a row
    rows: Tensor  # [B] int64, rows of the table; 0 is padding, all of whose slots are 0
    last: Tensor  # [B, Q] int64
    num_keys: int
    first: int = 0
    roots: Tensor | None = None  # [B] int64
    seen: Tensor | None = None  # [B, Q, M] bool
    first_row: int | None = None  # the rows are consecutive and begin with this one; None: unknown
    sees_all: bool = False  # every query sees first..num_keys - 1, all of it
    # Of a prefill, in which no row is padding, what the host knows: the position of each row's first query, and the one
    # behind its last; further queries are padding, whose results mean nothing. None: the device alone knows.
    spans: tuple[tuple[int, int], ...] | None = None
    # The native form takes the queries of ragged trees packed, [1, T, ...]: row b's begin at firsts[b].
    firsts: Tensor | None = None  # [B] int64
    counts: Tensor | None = (
        None  # [B] int64, queries of each row, their sum not above T; None: projections are [B, Q, ...]
    )

    @cached_property
    def indices(self) -> Tensor:
        """[B, L] int64: slots of positions 0..num_keys - 1, or first..num_keys - 1 where the mask is None."""
        begin = self.first if self.sees_all else 0
        if self.first_row is not None:
            return self.table[self.first_row : self.first_row + len(self.rows), begin : self.num_keys]
        return self.table[self.rows, begin : self.num_keys]

    @cached_property
    def mask(self) -> Tensor | None:
        """[B, Q, num_keys] bool; None: all of ``indices`` is visible."""
        if self.sees_all:
            return None
        keys = torch.arange(self.num_keys, device=self.rows.device)
        mask = keys <= self.last[..., None]
        if self.roots is None or self.seen is None:
            if self.first:
                mask &= (keys >= self.first) | (self.last[..., None] < self.first)
            return mask
        if self.first:
            mask &= keys >= self.first
        behind_root = keys - self.roots[:, None]
        num_entries = self.seen.shape[2]
        entry = behind_root.clamp(0, num_entries - 1)[:, None].expand(-1, self.seen.shape[1], -1)
        is_entry = (behind_root >= 0) & (behind_root < num_entries)
        return mask | (is_entry[:, None] & self.seen.gather(2, entry))

    def within(self, window: int) -> tuple[Tensor, Tensor | None]:
        """``indices`` and ``mask`` of a layer with this window (``AttentionConfig.window``)."""
        if window == 0:
            return self.indices, self.mask
        if self.mask is None:
            return self.indices[:, -window:], None
        if window not in self._masks:
            behind = self.mask.flip(-1).cumsum(-1).flip(-1)  # keys that a query sees from each on
            self._masks[window] = self.mask & (behind <= window)
        return self.indices, self._masks[window]

    @cached_property
    def _masks(self) -> dict[int, Tensor]:
        """Masks by window."""
        return {}
