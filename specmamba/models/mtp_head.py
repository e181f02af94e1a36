"""The form that MTP heads have in every family (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.layers.context import ForwardContext, LayerContext
from specmamba.layers.linear import Linear
from specmamba.layers.norm import RMSNorm
from specmamba.models.hybrid import Block, HybridTarget


@dataclass(frozen=True, slots=True)
class MTPModule:
    """norm(blocks(fc([norm(embedding), norm(hidden)]))); modules of one head may have parts in common."""

    input_norm: RMSNorm  # of the embedding and of the hidden state, in one pass: its weight is [2, H]
    fc: Linear  # 2 H -> H, the embedding first
    blocks: tuple[Block, ...]  # in the order in which they run; none of them may keep a recurrent state
    norm: RMSNorm  # the last one; what it gives is what the next step of a draft takes


class MTPHead:
    """Modules, one for each depth of a draft, or one for all; embedding and rotary are the target's."""

    def __init__(self, target: HybridTarget, modules: Sequence[MTPModule], output: Linear) -> None:
        """Make a head of one or several modules.

        Args:
            target: has the embedding, [V, H].
            modules: the first of them drafts after the root. Attention layers of all are numbered in the KV pool.
            output: H -> V, of every module.
        """
        self.width, self.num_modules = target.hidden_size, len(modules)
        self._target, self._modules, self._output = target, tuple(modules), output

    def combine(self, features: Tensor) -> Tensor:
        """See ``DraftHead``."""
        return features

    def forward(self, tokens: Tensor, hidden: Tensor, context: ForwardContext, module: int = 0) -> Tensor:
        """See ``DraftHead``."""
        parts = self._modules[module]
        inputs = torch.stack([self._target.embed(tokens), hidden], 2)
        x = parts.fc(parts.input_norm(inputs).flatten(2))
        rotary = None if self._target.rotary is None else self._target.rotary.angles(context.positions, x.dtype)
        layer_context = LayerContext(context.kv, None, rotary)
        for block in parts.blocks:
            x = block(x, layer_context)
        return parts.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``DraftHead``."""
        return self._output(hidden)
