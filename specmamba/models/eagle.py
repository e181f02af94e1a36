"""EAGLE heads (arXiv 2401.15077): they guess the target's next hidden state, and its output head makes tokens of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.errors import ConfigError
from specmamba.kernels import paged_attention
from specmamba.layers.attention import Attention
from specmamba.layers.context import ForwardContext, LayerContext
from specmamba.layers.linear import Linear
from specmamba.layers.mlp import GatedMLP
from specmamba.layers.norm import RMSNorm
from specmamba.models.attention_layer import Heads
from specmamba.models.base import LoadOptions
from specmamba.models.checkpoint import TensorReader
from specmamba.models.hybrid import Block, HybridTarget
from specmamba.models.shape_reader import have_same_values
from specmamba.models.weights import Weights

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
Logits = Callable[[Tensor], Tensor]


class EagleHead:
    """fc([embedding, hidden]), then Llama's layers, the first of them without a norm in front; no norm at the end."""

    num_modules = 1

    def __init__(self, weights: HeadWeights, target: HybridTarget) -> None:
        """Raises ConfigError where the head's hidden size is not the target's."""
        self.width = width = weights.config.hidden_size
        weights.require_width(width, target.hidden_size)
        self._embedding = weights.embedding(target)
        self._fc = weights.take_linear("fc", width, 2 * width, has_bias=weights.reader.has("fc.bias"))
        self._attention = weights.attention(0, width)
        self._blocks = weights.blocks_behind_attention()
        self._rotary = weights.rotary()
        self._logits = weights.own_output() or target.logits

    def combine(self, features: Tensor) -> Tensor:
        """See ``DraftHead``."""
        return features

    def forward(self, tokens: Tensor, hidden: Tensor, context: ForwardContext, module: int = 0) -> Tensor:
        """See ``DraftHead``."""
        x = self._fc(torch.cat([F.embedding(tokens, self._embedding), hidden], -1))
        layer_context = LayerContext(context.kv, None, self._rotary.angles(context.positions, x.dtype))
        x = x + self._attention(x, layer_context)
        for block in self._blocks:
            x = block(x, layer_context)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``DraftHead``."""
        return self._logits(hidden)


class HeadWeights(Weights):
    """Makes the layers of draft heads: Llama's, but for what goes into the first of them."""

    def __init__(
        self,
        config: Any,
        reader: TensorReader,
        options: LoadOptions,
        folder: Path,
        first_kv_layer: int,
        shares_embedding: bool,
    ) -> None:
        """Read the head's weights.

        Args:
            config, reader, options, folder: of the head.
            first_kv_layer: where the head's keys and values begin in the pool, behind the target's.
            shares_embedding: whether its embedding is the target's, where that cannot be seen from shapes.
        """
        super().__init__(config, reader, options, options.draft_form)
        self.folder, self._first_kv_layer, self._shares_embedding = folder, first_kv_layer, shares_embedding

    def require_width(self, width: int, target_width: int) -> None:
        """Raises ConfigError where the two are not the same."""
        if width != target_width:
            raise ConfigError(
                f"--speculative-draft-model-path {self.folder}: the head's hidden size is {width}, the target's "
                f"{target_width}: it was trained for another model"
            )

    def embedding(self, target: HybridTarget) -> Tensor:
        """The head's own [V, H]; the target's where it has none, or one that is the same."""
        if not self.reader.has(EMBEDDING):
            self.require_width(self.config.hidden_size, target.hidden_size)
            return target.embedding
        own = self.take(EMBEDDING, target.vocab_size, self.config.hidden_size)
        if not have_same_values(own, target.embedding, guess=self._shares_embedding):
            return own
        self.num_parameters -= own.numel()
        self._replace(0, own)
        return target.embedding

    def own_output(self) -> Linear | None:
        """The head's own output matrix, where it is stored."""
        c = self.config
        return self.take_linear("lm_head", c.vocab_size, c.hidden_size) if self.reader.has(OUTPUT) else None

    def blocks_behind_attention(self) -> list[Block]:
        """Everything behind the attention of the first layer."""
        blocks = [Block((self._feed_forward(0),))]
        for layer in range(1, self.config.num_hidden_layers):
            norm = self.rms_norm(f"layers.{layer}.input_layernorm.weight")
            attention = self.attention(layer, self.config.hidden_size)
            blocks.append(Block(((norm, attention), self._feed_forward(layer))))
        return blocks

    def rms_norm(self, name: str) -> RMSNorm:
        return self.norm(name, self.config.hidden_size, self.config.rms_norm_eps)

    def attention(self, layer: int, width: int) -> Attention:
        """Attention whose queries, keys and values are made of ``width`` numbers."""
        c, prefix = self.config, f"layers.{layer}.self_attn."
        heads = Heads.of(c)
        num_q, num_kv, dim = heads.num_query_heads, heads.num_key_heads, heads.head_dim
        sizes = {"q_proj": num_q * dim, "k_proj": num_kv * dim, "v_proj": num_kv * dim}
        weight = torch.cat([self.take(f"{prefix}{name}.weight", size, width) for name, size in sizes.items()])
        bias = norm = None
        if self.reader.has(f"{prefix}q_proj.bias"):
            bias = torch.cat([self.take(f"{prefix}{name}.bias", size) for name, size in sizes.items()])
        if self.reader.has(f"{prefix}q_norm.weight"):
            norms = [self.take(f"{prefix}{name}_norm.weight", dim, dtype=torch.float32) for name in ("q", "k")]
            norm = self.instead(torch.cat([norms[0].expand(num_q, -1), norms[1].expand(num_kv, -1)]), *norms)
        form = paged_attention.Form(num_q, num_kv, dim, dim**-0.5, norm, c.rms_norm_eps)
        has_bias = self.reader.has(f"{prefix}o_proj.bias")
        out = self.take_linear(f"{prefix}o_proj", c.hidden_size, num_q * dim, has_bias)
        return Attention(self._first_kv_layer + layer, self.linear(weight, bias), out, form)

    def _feed_forward(self, layer: int) -> tuple[RMSNorm, GatedMLP]:
        hidden, inner, prefix = self.config.hidden_size, self.config.intermediate_size, f"layers.{layer}."
        gate_up = [self.take(f"{prefix}mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")]
        down = self.take_linear(f"{prefix}mlp.down_proj", hidden, inner)
        norm = self.rms_norm(f"{prefix}post_attention_layernorm.weight")
        return norm, GatedMLP(self.linear(torch.cat(gate_up)), down)
