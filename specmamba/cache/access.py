"""What a layer sees of the cache during one forward: the same call whether it extends or verifies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.cache.rows import RowSet
from specmamba.cache.state_buffers import StateBuffers, VerifyPlan
from specmamba.cache.state_pool import StatePool, as_stored
from specmamba.core import Chunk, TreeShape
from specmamba.kernels import causal_conv1d, delta_net, gated_delta_rule, mamba2, paged_attention, ssd


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
        y, window = causal_conv1d.extend(inputs, self.slots.take(windows), weight, self.lengths, bias)
        self.slots.put(windows, window)
        return y

    def _delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        states = self.pool.recurrent[layer]
        out, state = gated_delta_rule.extend(q, k, v, g, beta, self.slots.take(states).float(), self.lengths)
        self.slots.put(states, as_stored(state, states.dtype))
        return out

    def _ssd(self, layer: int, c: Tensor, b: Tensor, u: Tensor, g: Tensor) -> Tensor:
        states = self.pool.recurrent[layer]
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
    """Keys and values of one forward: where the new ones go, which ones are read, and who sees whom."""

    pool: KVPool
    write_slots: Tensor  # [B * L] int64; 0 for padding
    read_slots: Tensor  # [B, K] int64
    mask: Tensor | None  # [B, L, K] bool; None: everything is visible

    @classmethod
    def of_chunk(cls, pool: KVPool, table: RequestTable, chunk: Chunk, first_key: int = 0) -> PagedKV:
        """Known tokens: each sees what came before it; ``first_key`` as for ``causal_mask``."""
        read_slots = table.kv_slots[chunk.row_index, : chunk.end]
        mask = causal_mask(chunk.positions, chunk.end, first_key) if pool.k else None
        return cls(pool, table.slots_of(chunk).view(-1), read_slots, mask)

    def attend(
        self, layer: int, projected: Tensor, form: paged_attention.Form, cos: Tensor | None, sin: Tensor | None
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
        return paged_attention.attend_layer(
            projected, form, cos, sin, *pools, self.write_slots, self.read_slots, self.mask
        )


def causal_mask(positions: Tensor, num_keys: int, first_key: int = 0) -> Tensor:
    """Key at position t is visible to a query at position p when first_key <= t <= p; below first_key, when t <= p.

    Args:
        positions: [B, L] int64 positions of the queries.
        num_keys: keys are positions 0..num_keys-1.
        first_key: 1 for a draft head, which has no entry for the first token: what is computed there is nobody's, but
            a query must see something.

    Returns:
        [B, L, num_keys] bool.
    """
    keys = torch.arange(num_keys, device=positions.device)
    mask = keys <= positions[..., None]
    if first_key:
        mask &= (keys >= first_key) | (positions[..., None] < first_key)
    return mask


def ancestor_mask(root_positions: Tensor, ancestors: Tensor, num_keys: int, first_key: int = 0) -> Tensor:
    """Visibility of keys to entries of a tree; entry m's key stands at table position root + m.

    Args:
        root_positions: [B] int64.
        ancestors: [B, Q, M] bool, which of the M entries each query sees, itself included where it is one of them;
            Q may be smaller than M: a step of drafting asks for its newest entries only.
        num_keys: keys are table positions 0..num_keys-1.
        first_key: 1 for a draft head, which has no entry for the first token; the tree's own entries do not mind.

    Returns:
        [B, Q, num_keys] bool: positions first_key..root-1, and the entries that ``ancestors`` says.
    """
    num_entries = ancestors.shape[2]
    keys = torch.arange(num_keys, device=root_positions.device)
    behind_root = keys - root_positions[:, None]
    entry = behind_root.clamp(0, num_entries - 1)[:, None].expand(-1, ancestors.shape[1], -1)
    is_entry = (behind_root >= 0) & (behind_root < num_entries)
    is_before_root = (behind_root < 0) & (keys >= first_key)
    return is_before_root[:, None] | (is_entry[:, None] & ancestors.gather(2, entry))


def tree_mask(root_positions: Tensor, tree: TreeShape, num_keys: int) -> Tensor:
    """Visibility of keys to all nodes of a verify's trees, [B, N, num_keys] bool; see ``ancestor_mask``."""
    if tree.is_chain:
        return causal_mask(root_positions[:, None] + tree.depth, num_keys)
    return ancestor_mask(root_positions, tree.ancestors, num_keys)
