"""The cache as layers use it in one forward: states of known tokens, and paged keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from specmamba.cache.kv_pool import KVPool
from specmamba.cache.pair_writes import PairWrites
from specmamba.cache.request_table import RequestTable
from specmamba.cache.state_pool import StatePool
from specmamba.core import Batch, Packing, PrefillChunk
from specmamba.kernels import paged_attention
from specmamba.kernels.state_records import ExtendOperands, RowSet


def batch_rows(batch: Batch) -> RowSet:
    """Return the rows of a batch in the request table."""
    return RowSet.of(batch.rows, batch.row_index.device, batch.row_index)


@dataclass(frozen=True, slots=True)
class ExtendState:
    """States of an extend: those in ``slots`` are read, advanced over ``lengths`` tokens, and written back."""

    pool: StatePool
    slots: RowSet
    lengths: Tensor  # [B] int64

    def operands(self, layer: int) -> ExtendOperands:
        """Return the states of one layer."""
        pool = self.pool
        return ExtendOperands(pool.recurrent[layer], pool.conv[layer], self.slots, self.lengths, pool.is_exact)


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of one forward: where new ones are written, and which keys each query sees."""

    pool: KVPool
    write_slots: Tensor  # [B * L] int64; 0 for padding
    keys: paged_attention.AttentionMetadata

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.keys.rows)

    @classmethod
    def of_chunk(cls, pool: KVPool, table: RequestTable, chunk: PrefillChunk, first_key: int = 0) -> PagedKV:
        """For known tokens: each query sees the positions from ``first_key`` to its own (``AttentionMetadata``)."""
        keys = paged_attention.AttentionMetadata(
            table.kv_slots, chunk.row_index, chunk.positions, chunk.end, first_key, spans=chunk.spans
        )
        return cls(pool, table.slots_of(chunk).view(-1), keys)

    def attend(
        self,
        layer: int,
        projected: Tensor,
        form: paged_attention.AttentionConfig,
        cos: Tensor | None,
        sin: Tensor | None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Compute and store keys and values of new tokens, attend to all visible keys, apply the output gate if any.

        Args:
            layer: index in the KV pool.
            projected: [B, L, (Hq + 2 Hkv [+ Hq]) D], in the order queries, keys, values, gates; without values in
                latent attention.
            form: norms, rotary embedding, gate and scale of this layer.
            cos, sin: [B, L, 1, rotary_dim]; None without rotary embedding.
            packing: projections and the result are packed, [1, T, ...]; None: they are not.

        Returns:
            [B, L, Hq D], or Hq V in latent attention.
        """
        pool = self.pool
        of_codes = pool.k_scales[layer], pool.v_scales[layer]
        kv = paged_attention.LayerKV(pool.k[layer], pool.v[layer], self.write_slots, *of_codes, pool.is_exact)
        angles = None if cos is None or sin is None else (cos, sin)
        if packing is None or paged_attention.takes_packed(projected, kv, self.keys):
            return paged_attention.attend_layer(projected, form, angles, kv, self.keys)
        unpacked = packing.unpack(projected, self.batch_size)
        return packing.pack(paged_attention.attend_layer(unpacked, form, angles, kv, self.keys))


def causal_keys(
    table: RequestTable,
    batch: Batch,
    positions: Tensor,
    num_keys: int,
    first_key: int = 0,
    sees_all: bool = False,
    packing: Packing | None = None,
) -> paged_attention.AttentionMetadata:
    """Each query, at positions [B, Q], sees its row from position ``first_key`` up to itself.

    Args:
        table: maps positions to KV slots.
        batch: the rows.
        positions: [B, Q] int64.
        num_keys: bound of all keys: every query position is below it.
        first_key: 1 for a draft head, which has no entry for the first token.
        sees_all: every query is the last of all keys, so no mask is needed.
        packing: of the queries; None: they are not packed.
    """
    return paged_attention.AttentionMetadata(
        table.kv_slots,
        batch.row_index,
        positions,
        num_keys,
        first_key,
        first_row=batch.first_row,
        sees_all=sees_all and batch.is_exact,
        firsts=None if packing is None else packing.firsts,
        counts=None if packing is None else packing.counts,
    )


def tree_keys(
    table: RequestTable,
    batch: Batch,
    ancestors: Tensor,
    num_keys: int,
    first_key: int = 0,
    packing: Packing | None = None,
) -> paged_attention.AttentionMetadata:
    """Each query sees its row from ``first_key`` to before the root, and entries of a tree behind that.

    Args:
        table: maps positions to KV slots.
        batch: the rows and their roots; entry m's key stands at position root + m.
        ancestors: [B, Q, M] bool, which of the M entries each query sees, itself included where it is one of them;
            Q may be smaller than M: a draft step queries its newest entries only.
        num_keys: bound of all keys: every entry position is below it.
        first_key: 1 for a draft head, which has no entry for the first token; it does not apply to the tree.
        packing: of the queries; None: they are not packed.
    """
    before_root = (batch.root_positions - 1)[:, None].expand(-1, ancestors.shape[1])
    return paged_attention.AttentionMetadata(
        table.kv_slots,
        batch.row_index,
        before_root,
        num_keys,
        first_key,
        batch.root_positions,
        ancestors,
        batch.first_row,
        firsts=None if packing is None else packing.firsts,
        counts=None if packing is None else packing.counts,
    )


def prefill_chunk(
    rows: Sequence[int],
    starts: Sequence[int],
    known: Sequence[Sequence[int]],
    device: torch.device,
    writes: PairWrites | None = None,
) -> PrefillChunk:
    """Pad runs of ``known`` tokens, which begin at the positions ``starts``, to one length.

    ``writes`` bring the numbers to the device without waiting for it; the chunk is valid until the second write behind
    it then. None: the device is waited for.
    """
    lengths = [len(tokens) for tokens in known]
    size, longest = len(rows), max(lengths)
    padded = [[*tokens, *[0] * (longest - len(tokens))] for tokens in known]
    columns = list(rows), list(starts), lengths, list(chain.from_iterable(padded))
    if writes is None:
        row_index, first, counts, tokens = (torch.tensor(column, device=device) for column in columns)
    else:
        row_index, first, counts, tokens = writes.send_columns(columns)
    spans = tuple((start, start + length) for start, length in zip(starts, lengths, strict=True))
    return PrefillChunk(
        rows=tuple(rows),
        row_index=row_index,
        tokens=tokens.view(size, longest),
        positions=first[:, None] + torch.arange(longest, device=device),
        lengths=counts,
        spans=spans,
        is_padded=min(lengths) < longest,
        end=max(end for _, end in spans),
    )
