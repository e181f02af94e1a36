"""What the two ways to verify are timed on; see state_timing.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specmamba.errors import ConfigError
from specmamba.kernels import delta_net
from specmamba.kernels import tree as tree_ops

if TYPE_CHECKING:
    from specmamba.bench.state_bytes import LayerShape, StateBytesConfig

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Workload:
    """One cycle of verifies up to a fold: the trees, the nodes' inputs per layer, and the states at the start."""

    def __init__(self, config: StateBytesConfig, shape: LayerShape, is_chain: bool) -> None:
        from specmamba.bench.state_bytes import capacity, verifies_per_fold

        s, self.num_nodes = shape, config.timed_nodes
        self.batch_size, self.num_layers = config.batch_size, config.layers
        self.accept_length = min(config.accept_length, self.num_nodes)
        self.num_verifies = verifies_per_fold(self.num_nodes, self.accept_length)
        self.capacity, self.is_chain, self.shape = capacity(self.num_nodes), is_chain, shape
        # a comb: the accepted path is every other node, so that its records have to move
        parents = [i - 1 if is_chain or i % 2 else i - 2 for i in range(self.num_nodes)]
        self.path = [i if is_chain else 2 * i for i in range(self.accept_length)]
        if self.path[-1] >= self.num_nodes:
            raise ConfigError(f"--accept-length {self.accept_length}: a tree needs two nodes for each: --timed-nodes")
        self.parents = torch.tensor([[max(-1, parent) for parent in parents]] * self.batch_size)
        self.ancestors = tree_ops.ancestors(self.parents)
        self.conv_index = tree_ops.conv_index(self.parents, s.conv_width) + s.conv_width - 1  # into window, nodes
        self.dtype = DTYPES[config.dtype]
        torch.manual_seed(0)
        self.layers = [(self._inputs(), self._weights()) for _ in range(self.num_layers)]
        states = (self.num_layers, self.batch_size, s.value_heads, s.key_dim, s.value_dim)
        self.states = torch.randn(states)

    def _inputs(self) -> delta_net.Inputs:
        """One projection, as layers have it."""
        s, values = self.shape, self.shape.value_heads * self.shape.value_dim
        sizes = [s.channels, values, s.value_heads, s.value_heads]
        projected = torch.randn(self.batch_size, self.num_nodes, sum(sizes)).to(self.dtype)
        mixed, gate, b, a = projected.split(sizes, -1)
        return delta_net.Inputs(mixed, gate.unflatten(-1, (s.value_heads, s.value_dim)), b, a)

    def _weights(self) -> delta_net.Weights:
        s = self.shape
        return delta_net.Weights(
            conv=(torch.randn(s.conv_width, s.channels) * 0.5).t(),
            negative_a=-torch.rand(s.value_heads),
            dt_bias=torch.randn(s.value_heads),
            norm=torch.ones(s.value_dim),
            norm_eps=1e-6,
            num_key_heads=s.key_heads,
            key_dim=s.key_dim,
        )
