"""Plain attention from the tensors that Hugging Face checkpoints have for it, whatever the family around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specmamba.errors import UnsupportedModelError
from specmamba.kernels import paged_attention
from specmamba.layers.attention import Attention
from specmamba.models.weights import Weights, scaled


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention layer."""

    num_query_heads: int
    num_key_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        """As transformers reads them; the heads share out the hidden size unless ``head_dim`` says otherwise.

        Raises:
            UnsupportedModelError: query heads cannot be shared out among key heads, or there are none.
        """
        num_query_heads, num_key_heads = config.num_attention_heads, config.num_key_value_heads
        if min(num_query_heads, num_key_heads) < 1 or num_query_heads % num_key_heads:
            raise UnsupportedModelError(
                f"{num_query_heads} query heads are not a multiple of {num_key_heads} key heads"
            )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_query_heads
        return cls(num_query_heads, num_key_heads, head_dim)

    @property
    def width(self) -> int:
        """Of all query heads together."""
        return self.num_query_heads * self.head_dim


def attention_layer(
    weights: Weights,
    prefix: str,
    kv_layer: int,
    heads: Heads,
    *,
    has_bias: bool,
    has_rotary: bool,
    score_scale: float | None = None,
    in_scale: float = 1.0,
    key_scale: float = 1.0,
    out_scale: float = 1.0,
) -> Attention:
    """The layer whose tensors are named ``prefix``q_proj, k_proj, v_proj and o_proj.

    Args:
        weights: of the model.
        prefix: ends in a dot.
        kv_layer: where the layer's keys and values live in the KV pool.
        heads: of the layer.
        has_bias: all four projections have one, or none has.
        has_rotary: queries and keys are rotated by their positions.
        score_scale: of the scores; None: one over the root of the head's size.
        in_scale: multiplies the layer's input.
        key_scale: multiplies the keys.
        out_scale: multiplies what the layer gives.

    Raises:
        CheckpointError: a tensor is missing or misshapen.
    """
    hidden, dim = weights.config.hidden_size, heads.head_dim
    parts, biases = [], []
    for name, count, scale in (
        ("q", heads.num_query_heads, 1.0),
        ("k", heads.num_key_heads, key_scale),
        ("v", heads.num_key_heads, 1.0),
    ):
        parts.append(scaled(weights.take(f"{prefix}{name}_proj.weight", count * dim, hidden), in_scale * scale))
        if has_bias:
            biases.append(scaled(weights.take(f"{prefix}{name}_proj.bias", count * dim), scale))
    project = weights.linear(torch.cat(parts), torch.cat(biases) if has_bias else None)
    out = weights.take_linear(f"{prefix}o_proj", hidden, heads.width, has_bias, out_scale)
    scale = dim**-0.5 if score_scale is None else score_scale
    form = paged_attention.Form(heads.num_query_heads, heads.num_key_heads, dim, scale)
    return Attention(kv_layer, project, out, form, has_rotary)
