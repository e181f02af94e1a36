"""Qwen3.5 with mixtures of experts and a gated shared expert in place of dense feed-forward layers; MTP head too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specmamba.errors import UnsupportedModelError
from specmamba.kernels import rowwise
from specmamba.layers.linear import Linear
from specmamba.layers.moe import Experts, MoE, SoftmaxRouter
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.checkpoint import TensorReader
from specmamba.models.hybrid import Layer
from specmamba.models.qwen3_5 import RENAMES, QwenWeights, load_qwen

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["RENAMES", "QwenMoEWeights", "load"]


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build the model from a checkpoint's text config and tensors; see ``registry.Loader``."""
    if not getattr(config, "norm_topk_prob", True):  # no published config has it; readers of one differ over it
        raise UnsupportedModelError("norm_topk_prob false is not supported for Qwen3.5")
    weights = QwenMoEWeights(config, reader, options)
    return load_qwen(weights, QwenMoEWeights(config, reader, options, options.draft_form))


class QwenMoEWeights(QwenWeights):
    """Makes this family's layers; those of Qwen3-Next have the same experts."""

    renormalise = True  # the weights of a token's experts

    def feed_forward(self, layer: int, prefix: str) -> Layer:
        """See ``QwenWeights``: every layer has experts."""
        return self.mixture(prefix)

    def mixture(self, prefix: str) -> MoE:
        """Experts and the shared expert. Raises UnsupportedModelError: a token asks for more experts than there are."""
        c = self.config
        if not 1 <= c.num_experts_per_tok <= c.num_experts:
            raise UnsupportedModelError(f"a token cannot go to {c.num_experts_per_tok} of {c.num_experts} experts")
        gate = self.take_router(f"{prefix}gate.weight", c.num_experts)
        return MoE(
            SoftmaxRouter(gate, c.num_experts_per_tok, self.renormalise),
            self.all_experts(f"{prefix}experts."),
            self.gated_mlp(f"{prefix}shared_expert.", c.shared_expert_intermediate_size),
            Linear(self.take(f"{prefix}shared_expert_gate.weight", 1, c.hidden_size)),
        )

    def all_experts(self, prefix: str) -> Experts:
        """Both layouts: one tensor for all experts, or one for each of them.

        A checkpoint may have one in the target and the other in the MTP head (Qwen3.5-35B-A3B does).
        """
        num_experts, inner, hidden = self.config.num_experts, self.config.moe_intermediate_size, self.config.hidden_size
        if self.reader.has(f"{prefix}gate_up_proj"):
            up = self.take(f"{prefix}gate_up_proj", num_experts, 2 * inner, hidden)
            down = self.take(f"{prefix}down_proj", num_experts, hidden, inner)
        else:
            up = self.take_experts(prefix, ("gate_proj", "up_proj"), num_experts, inner, hidden)
            down = self.take_experts(prefix, ("down_proj",), num_experts, hidden, inner)
        return self.experts(up, down, rowwise.silu_mul)
