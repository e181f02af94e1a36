"""The body that all families share: embedding, blocks with a residual stream, final norm, output head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.errors import UnsupportedModelError
from specmamba.layers.context import ForwardContext, LayerContext
from specmamba.layers.linear import Linear
from specmamba.layers.norm import RMSNorm
from specmamba.layers.rotary import Rotary
from specmamba.models.base import TargetOutput

Layer = Callable[[Tensor, LayerContext], Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """x + scale * layer(norm(x)), once for every one of its layers."""

    layers: tuple[tuple[RMSNorm, Layer], ...]
    residual_scale: float = 1.0

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        for norm, layer in self.layers:
            y = layer(norm(x), context)
            x = x + y if self.residual_scale == 1.0 else torch.add(x, y, alpha=self.residual_scale)
        return x


class HybridTarget:
    """A target of any family."""

    def __init__(
        self,
        embedding: Tensor,
        blocks: Sequence[Block],
        norm: RMSNorm,
        head: Linear,
        rotary: Rotary | None,
        embedding_scale: float = 1.0,
        logits_scale: float = 1.0,
    ) -> None:
        """Make a model from its layers.

        Args:
            embedding: [V, H].
            blocks: in the order in which they run.
            norm: the final one.
            head: H -> V.
            rotary: of the attention layers; None in models that do not rotate.
            embedding_scale, logits_scale: multiply what the embedding and the head give.
        """
        self.vocab_size, self.hidden_size = embedding.shape
        self.embedding, self.rotary, self.head = embedding, rotary, head
        self.blocks, self._norm = tuple(blocks), norm
        self._embedding_scale, self._logits_scale = embedding_scale, logits_scale
        self._feature_layers: tuple[int, ...] = ()
        self.is_watched = False

    def read_features(self, layers: tuple[int, ...]) -> None:
        """See ``Target``."""
        last = len(self.blocks) - 1
        if missing := [layer for layer in layers if not 0 <= layer <= last]:
            read = f"layer{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            raise UnsupportedModelError(f"the head reads in front of {read}, the target has layers 0 to {last}")
        self._feature_layers = layers

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, L] -> [B, L, H]."""
        x = F.embedding(tokens, self.embedding)
        return x if self._embedding_scale == 1.0 else x * self._embedding_scale

    def forward(self, tokens: Tensor, context: ForwardContext) -> TargetOutput:
        """See ``Target``."""
        x = self.embed(tokens)
        rotary = None if self.rotary is None else self.rotary.angles(context.positions, x.dtype)
        layer_context = LayerContext(context.kv, context.state, rotary)
        taken = {}
        for i, block in enumerate(self.blocks):
            if i in self._feature_layers:
                taken[i] = x
            x = block(x, layer_context)
        hidden = self._norm(x)
        features = torch.cat([taken[i] for i in self._feature_layers], -1) if taken else hidden
        return TargetOutput(hidden, features)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Target``."""
        logits = self.head(hidden)
        return logits if self._logits_scale == 1.0 else logits * self._logits_scale
