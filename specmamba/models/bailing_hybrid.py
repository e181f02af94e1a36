"""Ling-3: as Kimi-Linear, with rotated keys, gates of heads in latent attention, and bounded decays.

The layers of its MTP head, which lie behind the others, are not loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import UnsupportedModelError
from specmamba.layers.gated_delta_net import KimiDeltaAttention
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.kimi_linear import KimiWeights, Names, load_with

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES = ()


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build Ling-3 from a checkpoint's config and tensors; errors as for ``registry.load_model``."""
    weights = LingWeights(config, reader, options)
    last = config.num_hidden_layers
    mtp = tuple(f"model.layers.{last + i}." for i in range(config.num_mtp_layers))
    return load_with(weights, ignore=mtp)


class LingWeights(KimiWeights):
    """Makes the layers of Ling-3."""

    names = Names(
        embedding="model.word_embeddings.weight",
        mixer="attention.",
        out="dense",
        experts="mlp.",
        router_bias="gate.expert_bias",
        of_expert=("gate_proj", "up_proj", "down_proj"),
    )
    has_rotary, has_head_gates = True, True

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions) -> None:
        kind = config.rope_parameters.get("rope_type", "default")
        if kind != "default":  # transformers scales scores too for some of them
            raise UnsupportedModelError(f"rope type {kind!r} is not supported for Ling: only default is")
        super().__init__(config, reader, options)
        self.lower_bound = config.kda_lower_bound if config.kda_safe_gate else None

    def delta_attention(self, prefix: str, state_layer: int) -> KimiDeltaAttention:
        """The recurrent layer, with decays and gates from one projection each."""
        gates = {"f_proj": self.segments.decays, "g_proj": self.segments.values}
        return self.delta_layer(prefix, state_layer, gates, None)
