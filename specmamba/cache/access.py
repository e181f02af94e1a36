"""What a layer sees of the cache during one forward: the same call whether it extends or verifies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.cache.rows import RowSet
from specmamba.cache.state_buffers import StateBuffers, VerifyPlan
from specmamba.cache.state_pool import StatePool
from specmamba.core import Batch, Chunk
from specmamba.kernels import causal_conv1d, delta_net, gated_delta_rule, gpu, mamba2, paged_attention, ssd
from specmamba.kernels.state_records import as_stored


class StateAccess(Protocol):
    """Recurrent state, by state layer. Tokens come as [B, L, ...]: padded runs, or the nodes of trees."""

    def delta_net(self, layer: int, inputs: delta_net.Inputs, weights: delta_net.Weights) -> Tensor:
        """A gated delta net layer between its projections, behind what came before: [B, L, Hv, V], the gate's dtype."""

    def mamba2(self, layer: int, inputs: mamba2.Inputs, weights: mamba2.Weights) -> Tensor:
        """A Mamba2 layer between its projections, behind what came before: [B, L, H P], the gate's dtype."""


@dataclass(frozen=True, slots=True)
class ExtendState:
    """Runs of known tokens: slots are read, advanced and written."""

    pool: StatePool
    slots: RowSet
    lengths: Tensor  # [B] int64

    def delta_net(self, layer: int, inputs: delta_net.Inputs, weights: delta_net.Weights) -> Tensor:
        """See ``StateAccess``; leaves the new state and window in the slots."""
        return delta_net.compose(inputs, weights, partial(self._convolve, layer), partial(self._delta_rule, layer))

    def mamba2(self, layer: int, inputs: mamba2.Inputs, weights: mamba2.Weights) -> Tensor:
        """See ``StateAccess``; leaves the new state and window in the slots."""
        return mamba2.compose(inputs, weights, partial(self._convolve, layer), partial(self._ssd, layer))

    def _convolve(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        windows = self.pool.conv[layer]
        if gpu.can_launch(inputs, windows):
            return causal_conv1d.extend_in_place(inputs, windows, self.slots.index, weight, self.lengths, bias)
        y, window = causal_conv1d.extend(inputs, self.slots.take(windows), weight, self.lengths, bias)
        self.slots.put(windows, window)
        return y

    def _delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        states = self.pool.recurrent[layer]
        if gpu.can_launch(q, states):
            return gated_delta_rule.extend_in_place(q, k, v, g, beta, states, self.slots.index, self.lengths)
        out, state = gated_delta_rule.extend(q, k, v, g, beta, self.slots.take(states).float(), self.lengths)
        self.slots.put(states, as_stored(state, states.dtype))
        return out

    def _ssd(self, layer: int, c: Tensor, b: Tensor, u: Tensor, g: Tensor) -> Tensor:
        states = self.pool.recurrent[layer]
        if gpu.can_launch(c, states):
            return ssd.extend_in_place(c, b, u, g, states, self.slots.index, self.lengths)
        out, state = ssd.extend(c, b, u, g, self.slots.take(states).float(), self.lengths)
        self.slots.put(states, as_stored(state, states.dtype))
        return out


@dataclass(frozen=True, slots=True)
class VerifyState:
    """Trees: checkpoints are only read, what a commit needs is written to the buffers."""

    buffers: StateBuffers[Any]
    plan: VerifyPlan

    def delta_net(self, layer: int, inputs: delta_net.Inputs, weights: delta_net.Weights) -> Tensor:
        """See ``StateAccess``."""
        return self.buffers.delta_net(layer, inputs, weights, self.plan)

    def mamba2(self, layer: int, inputs: mamba2.Inputs, weights: mamba2.Weights) -> Tensor:
        """See ``StateAccess``."""
        return self.buffers.mamba2(layer, inputs, weights, self.plan)


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of one forward: where the new ones go, and who sees whom."""

    pool: KVPool
    write_slots: Tensor  # [B * L] int64; 0 for padding
    keys: paged_attention.AttentionMetadata

    @classmethod
    def of_chunk(cls, pool: KVPool, table: RequestTable, chunk: Chunk, first_key: int = 0) -> PagedKV:
        """Known tokens: each sees what came before it, from position ``first_key`` on (see ``AttentionMetadata``)."""
        keys = paged_attention.AttentionMetadata(table.kv_slots, chunk.row_index, chunk.positions, chunk.end, first_key)
        return cls(pool, table.slots_of(chunk).view(-1), keys)

    def attend(
        self,
        layer: int,
        projected: Tensor,
        form: paged_attention.AttentionConfig,
        cos: Tensor | None,
        sin: Tensor | None,
    ) -> Tensor:
        """Make keys and values of new tokens and store them, attend to all that is seen, gate where there is a gate.

        Args:
            layer: of the KV pool.
            projected: [B, L, (Hq + 2 Hkv [+ Hq]) D], in the order queries, keys, values, gates.
            form: what this layer does besides.
            cos, sin: [B, L, 1, rotary_dim]; None without rotary embedding.

        Returns:
            [B, L, Hq D].
        """
        pools = self.pool.k[layer], self.pool.v[layer]
        return paged_attention.attend_layer(projected, form, cos, sin, *pools, self.write_slots, self.keys)


def causal_keys(
    table: RequestTable, batch: Batch, positions: Tensor, num_keys: int, first_key: int = 0, sees_all: bool = False
) -> paged_attention.AttentionMetadata:
    """Each query, at positions [B, Q], sees its row from position ``first_key`` up to itself.

    Args:
        table: has the slots.
        batch: the rows.
        positions: [B, Q] int64.
        num_keys: no query stands behind it.
        first_key: 1 for a draft head, which has no entry for the first token.
        sees_all: every query is the last of all keys, and there are keys from ``first_key`` on.
    """
    return paged_attention.AttentionMetadata(
        table.kv_slots,
        batch.row_index,
        positions,
        num_keys,
        first_key,
        first_row=batch.first_row,
        sees_all=sees_all and batch.is_exact,
    )


def tree_keys(
    table: RequestTable, batch: Batch, ancestors: Tensor, num_keys: int, first_key: int = 0
) -> paged_attention.AttentionMetadata:
    """Each query sees its row from ``first_key`` to before the root, and entries of a tree behind that.

    Args:
        table: has the slots.
        batch: the rows and their roots; entry m's key stands at position root + m.
        ancestors: [B, Q, M] bool, which of the M entries each query sees, itself included where it is one of them;
            Q may be smaller than M: a step of drafting asks for its newest entries only.
        num_keys: no entry stands behind it.
        first_key: 1 for a draft head, which has no entry for the first token; the tree's own entries do not mind.
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
    )
