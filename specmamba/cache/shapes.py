"""What a model asks of the cache: shapes, and the bytes that follow from them."""

from dataclasses import dataclass

import torch

MIN_PENDING_CAPACITY = 16


@dataclass(frozen=True, slots=True)
class DeltaStateShape:
    """The recurrent state of one gated-delta-net layer."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a layer's state in one slot: the recurrent state in float32, the window in the model's dtype."""
        return 4 * self.num_value_heads * self.key_dim * self.value_dim + self.window_bytes(dtype)

    def window_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a layer's last W-1 convolution inputs."""
        return (self.conv_width - 1) * self.conv_channels * dtype.itemsize

    def record_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a layer's records of one token: k, u and the path decay in float32, the convolution's input."""
        floats = self.num_key_heads * self.key_dim + self.num_value_heads * (self.value_dim + 1)
        return 4 * floats + self.conv_channels * dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Layers that keep something per token or per request. A draft head's attention layers count as KV layers."""

    num_kv_layers: int
    num_kv_heads: int
    head_dim: int
    num_state_layers: int
    state: DeltaStateShape
    dtype: torch.dtype
    draft_features: int = 0  # numbers that a draft head needs of the last token, beside the target's state

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_kv_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def state_bytes_per_slot(self) -> int:
        return self.num_state_layers * self.state.state_bytes(self.dtype) + self.draft_features * self.dtype.itemsize

    @property
    def record_bytes_per_token(self) -> int:
        return self.num_state_layers * self.state.record_bytes(self.dtype)

    def record_bytes(self, max_nodes: int) -> int:
        """Bytes of the records of one running request: a full pending list and the window in front of it."""
        records = pending_capacity(max_nodes) * self.record_bytes_per_token
        return records + self.num_state_layers * self.state.window_bytes(self.dtype)

    def snapshot_bytes(self, max_nodes: int) -> int:
        """Bytes of the snapshots of one running request: a state and a window per node."""
        return max_nodes * self.state_bytes_per_slot


def pending_capacity(max_nodes: int) -> int:
    """Records that may be pending: room for two deepest trees, so that a fold is rare even when all is accepted."""
    return max(MIN_PENDING_CAPACITY, 2 * max_nodes)
