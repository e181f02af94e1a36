"""Shapes of a model's KV and recurrent states, and their sizes in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

MIN_PENDING_CAPACITY = 16
# of a request, whose states are kept for a draft head that had no part in their steps: 64 are enough to draft as well
MISSED_TOKENS = 96
SCALE_DTYPE = torch.float32  # of stored codes


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of one layer: a recurrent state S = sum of decayed outer products k u^T, and a convolution window.

    A gated delta net has Hk key heads of size K and Hv value heads of size V. For Mamba2 the keys are B (groups and
    state size) and the values dt x (heads and head size). A short convolution has no heads: its state is the window.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    plain_channels: int = 0  # that are convolved and enter no recurrence
    decays_by_channel: bool = False  # a head has a decay for each of its K key channels, not one
    is_selective: bool = False  # Mamba1: records have the V time steps, which ``CacheShape.rates`` makes decays of

    @classmethod
    def window(cls, channels: int, conv_width: int) -> StateShape:
        """The state of a layer without recurrence: the last ``conv_width`` - 1 inputs of its convolution."""
        return cls(0, 0, 0, 0, conv_width, channels)

    @classmethod
    def selective(cls, channels: int, state_dim: int, conv_width: int) -> StateShape:
        """The state of a Mamba1 layer: one head with B as its key and the channels as values; these are convolved."""
        return cls(1, 1, state_dim, channels, conv_width, is_selective=True)

    @property
    def conv_channels(self) -> int:
        if self.is_selective:
            return self.value_dim
        of_heads = 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim
        return of_heads + self.plain_channels

    @property
    def decay_shape(self) -> tuple[int, ...]:
        """Shape of a token's log decays: [Hv], or [Hv, K] by key channel; of a Mamba1 layer's time steps, [Hv, V]."""
        heads = self.num_value_heads
        if self.is_selective:
            return heads, self.value_dim
        return (heads, self.key_dim) if self.decays_by_channel else (heads,)

    @property
    def num_values(self) -> int:
        """Number of values in a layer's state: recurrent state and convolution window."""
        return self.num_recurrent_values + (self.conv_width - 1) * self.conv_channels

    @property
    def num_recurrent_values(self) -> int:
        return self.num_value_heads * self.key_dim * self.value_dim

    def state_bytes(self, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32) -> int:
        """Bytes of a layer's state: the recurrent state in ``state_dtype``, the window in the model's dtype."""
        return self.num_recurrent_values * state_dtype.itemsize + self.window_bytes(dtype)

    def window_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a layer's last W-1 convolution inputs."""
        return (self.conv_width - 1) * self.conv_channels * dtype.itemsize

    def record_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a layer's records of one token: k, u and log decays in float32, the convolution's input."""
        floats = self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim + math.prod(self.decay_shape)
        return 4 * floats + self.conv_channels * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVShape:
    """Attention layers of one shape.

    Those of latent attention keep one row for a token, its key, whose last ``latent_dim`` numbers are its value too.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    latent_dim: int | None = None

    def bytes_per_token(self, dtype: torch.dtype, has_scales: bool) -> int:
        """Bytes of a token's keys and values, with a float32 scale for each head of either where there are scales."""
        per_head = self.head_dim * dtype.itemsize + (SCALE_DTYPE.itemsize if has_scales else 0)
        return (2 if self.latent_dim is None else 1) * self.num_layers * self.num_heads * per_head


@dataclass(frozen=True, slots=True)
class CacheShape:
    """All layers that keep KV per token or a state per request.

    KV layers are numbered through all of ``kv``: the target's first, then a draft's, whose heads may have another
    shape. A model without attention has none, one without recurrent layers has ``num_state_layers`` 0.
    """

    kv: tuple[KVShape, ...]
    num_state_layers: int
    state: StateShape
    dtype: torch.dtype
    draft_features: int = 0  # values per slot that a drafter resumes from, beside the target's state
    draft_context: int = 0  # values per token of steps without drafts that a drafter keeps until it drafts again
    state_dtype: torch.dtype = torch.float32  # of recurrent states in slots; computation is float32
    draft_model: CacheShape | None = None  # of a draft model; ``kv`` has its layers already
    kv_dtype: torch.dtype | None = None  # of codes for keys and values, with scales; None: they are stored in ``dtype``
    folds_in_verify: bool = False  # kernels fold full rows while they read states; else folds run before
    is_exact: bool = False  # bits of a text do not depend on how its tokens are run (--deterministic)
    # A of all Mamba1 layers, [layers, K, V] float32: weights, which folds need
    rates: torch.Tensor | None = field(default=None, compare=False, repr=False)

    def with_draft_model(self, draft: CacheShape) -> CacheShape:
        """Return this shape with a draft model's KV layers, and its state stored beside every cached state."""
        values = draft.num_state_layers * draft.state.num_values
        return replace(self, kv=(*self.kv, *draft.kv), draft_features=values, draft_model=draft)

    @property
    def features_dtype(self) -> torch.dtype:
        """Dtype of stored drafter features; a draft model's state is float32, as it is computed."""
        return self.dtype if self.draft_model is None else torch.float32

    @property
    def num_kv_layers(self) -> int:
        return sum(group.num_layers for group in self.kv)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(group.bytes_per_token(self.stored_kv_dtype, self.kv_dtype is not None) for group in self.kv)

    @property
    def stored_kv_dtype(self) -> torch.dtype:
        """Dtype of the pool's keys and values."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def state_bytes_per_slot(self) -> int:
        states = self.num_state_layers * self.state.state_bytes(self.dtype, self.state_dtype)
        return states + self.draft_features * self.features_dtype.itemsize

    @property
    def record_bytes_per_token(self) -> int:
        return self.num_state_layers * self.state.record_bytes(self.dtype)

    def record_bytes(self, max_nodes: int) -> int:
        """Bytes of the records of one running request: a full pending list and the window in front of it.

        A state that is not kept in float32 also needs room to be widened, one layer at a time, for native code.
        """
        records = pending_capacity(max_nodes, self.folds_in_verify) * self.record_bytes_per_token
        is_read_as_it_is = self.state_dtype is torch.float32 or self.folds_in_verify
        widened = 0 if is_read_as_it_is else 4 * self.state.num_recurrent_values
        return records + self.num_state_layers * self.state.window_bytes(self.dtype) + widened

    def snapshot_bytes(self, max_nodes: int) -> int:
        """Bytes of the snapshots of one running request: a state, in float32, and a window per node."""
        per_node = self.num_state_layers * self.state.state_bytes(self.dtype)
        return max_nodes * per_node


def missed_room(max_nodes: int) -> int:
    """Return the tokens of a request that there is room for while a draft head skips steps: a power of two.

    A step of ``max_nodes`` nodes writes behind the tokens that are kept.
    """
    return 1 << (MISSED_TOKENS + max_nodes - 1).bit_length()


def pending_token_capacity(max_nodes: int) -> int:
    """Return the number of pending tokens of a row: those of steps that defer them, and a largest tree behind them."""
    return max(MIN_PENDING_CAPACITY, 2 * max_nodes) + max_nodes


def pending_capacity(max_nodes: int, folds_in_verify: bool = False) -> int:
    """Return the number of records of a row: two largest trees, so that folds are rare even if all is accepted.

    A verify that folds writes the records of its nodes while other threads still read the pending ones, so these must
    not overlap, which takes room for a third tree.
    """
    return max(MIN_PENDING_CAPACITY, (3 if folds_in_verify else 2) * max_nodes)
