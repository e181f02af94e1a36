"""Qwen3-Next: Qwen3.5's layers with fused projections of the delta net, mixtures of experts, and an MTP head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specmamba.layers.linear import Linear
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.checkpoint import TensorReader
from specmamba.models.hybrid import Layer
from specmamba.models.qwen3_5 import load_qwen
from specmamba.models.qwen3_5_moe import QwenMoEWeights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES: tuple[tuple[str, str], ...] = ()


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build the model from a checkpoint's config and tensors; see ``registry.Loader``."""
    weights = QwenNextWeights(config, reader, options)
    return load_qwen(weights, QwenNextWeights(config, reader, options, options.draft_form))


class QwenNextWeights(QwenMoEWeights):
    """Makes this family's layers."""

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions, form: Any = None) -> None:
        super().__init__(config, reader, options, form)
        self.renormalise = config.norm_topk_prob

    def feed_forward(self, layer: int, prefix: str) -> Layer:
        """Experts or a dense layer, as the config says; in an MTP head, as the checkpoint says."""
        c = self.config
        if layer < c.num_hidden_layers:
            is_turn = (layer + 1) % c.decoder_sparse_step == 0
            has_experts = is_turn and layer not in c.mlp_only_layers and c.num_experts > 0
        else:
            has_experts = self.reader.has(f"{prefix}gate.weight")
        return self.mixture(prefix) if has_experts else self.gated_mlp(prefix, c.intermediate_size)

    def delta_projection(self, prefix: str) -> Linear:
        """See ``QwenWeights``. The checkpoint has all parts of one key head side by side, then those of the next."""
        s, hidden = self.state_shape, self.config.hidden_size
        values_of_key = s.num_value_heads // s.num_key_heads
        sizes = [s.key_dim, s.key_dim, values_of_key * s.value_dim, values_of_key * s.value_dim]
        qkvz = self.take(f"{prefix}in_proj_qkvz.weight", s.num_key_heads * sum(sizes), hidden)
        ba = self.take(f"{prefix}in_proj_ba.weight", 2 * s.num_value_heads, hidden)
        parts = [
            *qkvz.unflatten(0, (s.num_key_heads, -1)).split(sizes, 1),
            *ba.unflatten(0, (s.num_key_heads, -1)).chunk(2, 1),
        ]
        return self.linear(torch.cat([part.flatten(0, 1) for part in parts]))
