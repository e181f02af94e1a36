"""Layers from the tensors that Hugging Face checkpoints name alike in every family: attention and Mamba2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmamba.cache.shapes import StateShape
from specmamba.errors import UnsupportedModelError
from specmamba.kernels import mamba2, paged_attention
from specmamba.layers.attention import Attention
from specmamba.layers.linear import Linear
from specmamba.layers.mamba2 import Mamba2
from specmamba.models.weights import Weights, scaled

NO_LIMIT = (0.0, float("inf"))


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


def mamba2_shape(num_groups: int, state_dim: int, num_heads: int, head_dim: int, conv_width: int) -> StateShape:
    """The state of a Mamba2 layer.

    Raises:
        UnsupportedModelError: heads cannot be shared out among groups, or there are none.
    """
    if min(num_groups, num_heads) < 1 or num_heads % num_groups:
        raise UnsupportedModelError(f"{num_heads} Mamba2 heads are not a multiple of {num_groups} groups")
    return StateShape(num_groups, num_heads, state_dim, head_dim, conv_width)


def mamba2_layer(
    weights: Weights,
    prefix: str,
    state_layer: int,
    shape: StateShape,
    *,
    eps: float,
    has_proj_bias: bool,
    has_out_bias: bool,
    has_conv_bias: bool,
    norm_groups: int,
    has_norm: bool = True,
    norm_before_gate: bool = False,
    dt_limit: Sequence[float] | None = NO_LIMIT,
    in_scale: float = 1.0,
    channel_scale: Tensor | None = None,
    out_scale: float = 1.0,
) -> Mamba2:
    """The layer whose tensors are named ``prefix``in_proj.weight, conv1d, A_log, D, dt_bias, norm and out_proj.

    Args:
        weights: of the model.
        prefix: ends in a dot.
        state_layer: where the layer's state lives in the state pool.
        shape: see ``mamba2_shape``.
        eps: of the gated norm.
        has_proj_bias, has_out_bias, has_conv_bias: whether the input projection, the output projection and the
            convolution have one.
        norm_groups: the inner channels are normed in so many parts.
        has_norm: without a norm there is the gate alone.
        norm_before_gate: the norm comes first.
        dt_limit: time steps are clamped to it, in decoding as in prefill; None: not at all.
        in_scale: multiplies the layer's input.
        channel_scale: [inner + C + heads], multiplies what the input projection gives.
        out_scale: multiplies what the layer gives.

    Raises:
        CheckpointError: a tensor is missing or misshapen.
        UnsupportedModelError: the channels cannot be shared out among ``norm_groups``, or ``dt_limit`` is no range.
    """
    heads, inner = shape.num_value_heads, shape.num_value_heads * shape.value_dim
    if has_norm and inner % norm_groups:
        raise UnsupportedModelError(f"{inner} Mamba2 channels cannot be normed in {norm_groups} groups of one size")
    float32 = torch.float32
    conv = weights.take(f"{prefix}conv1d.weight", shape.conv_channels, 1, shape.conv_width, dtype=float32)
    a_log, dt_bias, skip = (weights.take(f"{prefix}{name}", heads, dtype=float32) for name in ("A_log", "dt_bias", "D"))
    operands = mamba2.Weights(
        conv=conv.squeeze(1).t().contiguous().t(),  # the kernel reads it by tap
        conv_bias=weights.take(f"{prefix}conv1d.bias", shape.conv_channels, dtype=float32) if has_conv_bias else None,
        negative_a=-a_log.exp(),
        dt_bias=dt_bias,
        skip=skip,
        norm=weights.take(f"{prefix}norm.weight", inner, dtype=float32) if has_norm else None,
        norm_eps=eps,
        norm_groups=norm_groups,
        norm_before_gate=norm_before_gate,
        num_groups=shape.num_key_heads,
        state_dim=shape.key_dim,
        head_dim=shape.value_dim,
        dt_limit=_range(NO_LIMIT if dt_limit is None else dt_limit),
    )
    project = _projection(weights, f"{prefix}in_proj", shape, has_proj_bias, in_scale, channel_scale)
    out = weights.take_linear(f"{prefix}out_proj", weights.config.hidden_size, inner, has_out_bias, out_scale)
    return Mamba2(state_layer, shape, project, out, operands)


def _projection(
    weights: Weights, name: str, shape: StateShape, has_bias: bool, in_scale: float, channel_scale: Tensor | None
) -> Linear:
    """The input projection, with both scales in its weights."""
    rows = shape.num_value_heads * (shape.value_dim + 1) + shape.conv_channels
    bias = weights.take(f"{name}.bias", rows) if has_bias else None
    weight = weights.take(f"{name}.weight", rows, weights.config.hidden_size)
    if channel_scale is None:
        return weights.linear(scaled(weight, in_scale), bias)
    factors = channel_scale.to(weight.device)
    bias = None if bias is None else scaled(bias, factors)
    return weights.linear(scaled(weight, (factors * in_scale)[:, None]), bias)


def _range(limit: Sequence[float]) -> tuple[float, float]:
    if len(limit) != 2 or not limit[0] <= limit[1]:
        raise UnsupportedModelError(f"time_step_limit {list(limit)} should be two numbers, the lower one first")
    return float(limit[0]), float(limit[1])
