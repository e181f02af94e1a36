"""Mamba2 layers from the tensors that Hugging Face checkpoints have for them, whatever the family around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmamba.cache.shapes import StateShape
from specmamba.errors import UnsupportedModelError
from specmamba.kernels import mamba2
from specmamba.layers.linear import Linear
from specmamba.layers.mamba2 import Mamba2
from specmamba.models.weights import Weights, scaled

NO_LIMIT = (0.0, float("inf"))


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
