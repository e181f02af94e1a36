"""Mamba2 (arXiv 2405.21060): the layers that several families have, and the model that has no others.

The model has no attention, so it keeps nothing per token. Its ``residual_in_fp32`` is not followed: the residual stream
has the model's dtype, as in every family. With bfloat16 weights the logits are nearer to those of float32 than the
logits that transformers computes with ``residual_in_fp32``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specmamba.cache.shapes import StateShape
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import ConfigError, UnsupportedModelError
from specmamba.kernels import mamba2
from specmamba.layers.mamba2 import Mamba2
from specmamba.layers.primitives import DividedRMSNorm, Linear
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import require_silu
from specmamba.models.hybrid import Block
from specmamba.models.rank_shapes import StateSegments
from specmamba.models.weights import Weights, loaded_model, scaled
from specmamba.parallel.share import Segment, Share

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# the name in the first converted checkpoints
RENAMES = (("backbone.embedding.", "backbone.embeddings."),)

# Configs name no length, and no layer has a limit. Longer texts than this are not worth a row of the request table.
CONTEXT_LENGTH = 1 << 17


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build a model of Mamba2 layers from a checkpoint's config and tensors; errors as for ``registry.load_model``."""
    c: Any = config
    require_silu(c)
    if not getattr(c, "rms_norm", True):
        raise UnsupportedModelError("rms_norm false is not supported: Mamba2 models have RMS norms here")
    weights = Weights(c, reader, options)
    layers = Mamba2Config.mamba(c, c.state_size, c.num_heads, c.head_dim)
    embedding = weights.take_embedding("backbone.embeddings.weight")
    blocks = [_block(weights, i, layers) for i in range(c.num_hidden_layers)]
    norm = weights.norm("backbone.norm_f.weight", c.hidden_size, c.layer_norm_epsilon)
    target, _ = weights.target(embedding, blocks, norm)
    reader.finish()
    return loaded_model(target, weights, c.num_hidden_layers, layers.shape, context_length=CONTEXT_LENGTH)


def _block(weights: Weights, layer: int, layers: Mamba2Config) -> Block:
    c, prefix = weights.config, f"backbone.layers.{layer}."
    norm = weights.norm(f"{prefix}norm.weight", c.hidden_size, c.layer_norm_epsilon)
    mixer = mamba2_layer(weights, f"{prefix}mixer.", layer, layers)
    return Block(((norm, mixer),))


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """What the config of a model says about its Mamba2 layers."""

    shape: StateShape  # groups and state size as keys, heads and head size as values
    norm_eps: float
    norm_groups: int  # equal parts of the inner channels, each normed on its own
    has_in_bias: bool
    has_out_bias: bool
    has_conv_bias: bool
    dt_limit: Sequence[float] | None  # time steps are clamped to it, in decoding as in prefill; None: not at all
    has_norm: bool = True  # False: there is the gate alone
    norm_before_gate: bool = False

    @property
    def segments(self) -> StateSegments:
        """What the tensors of a layer consist of."""
        return StateSegments.of(self.shape, "Mamba2 groups", "Mamba2 heads")

    @property
    def inputs(self) -> tuple[Segment, ...]:
        """The outputs of the input projection: gate, x, B, C, time steps."""
        s = self.segments
        return s.values, s.values, s.keys, s.keys, s.heads

    @classmethod
    def mamba(cls, config: Any, state_dim: int, num_heads: int, head_dim: int) -> Mamba2Config:
        """Read a config with the field names of Mamba2 itself; the sizes differ in name and are arguments.

        Raises:
            UnsupportedModelError: the number of heads is not a multiple of the number of groups.
        """
        c = config
        return cls(
            shape=mamba2_shape(c.n_groups, state_dim, num_heads, head_dim, c.conv_kernel),
            norm_eps=c.layer_norm_epsilon,
            norm_groups=c.n_groups,
            has_in_bias=c.use_bias,
            has_out_bias=c.use_bias,
            has_conv_bias=c.use_conv_bias,
            dt_limit=c.time_step_limit,  # time_step_min and time_step_max say how dt_bias was drawn before training
        )

    @classmethod
    def bamba(cls, config: Any) -> Mamba2Config:
        """Read a config with the field names of Bamba, which Falcon-H1 and Granite share (``mamba_n_heads``, ...).

        Raises:
            UnsupportedModelError: the number of heads is not a multiple of the number of groups.
        """
        c = config
        return cls(
            shape=mamba2_shape(c.mamba_n_groups, c.mamba_d_state, c.mamba_n_heads, c.mamba_d_head, c.mamba_d_conv),
            norm_eps=c.rms_norm_eps,
            norm_groups=c.mamba_n_groups,
            **dict.fromkeys(("has_in_bias", "has_out_bias"), c.mamba_proj_bias),
            has_conv_bias=c.mamba_conv_bias,
            dt_limit=c.time_step_limit,
        )


def mamba2_shape(num_groups: int, state_dim: int, num_heads: int, head_dim: int, conv_width: int) -> StateShape:
    """The state of a Mamba2 layer.

    Raises:
        UnsupportedModelError: the number of heads is not a multiple of the number of groups.
    """
    if num_heads % num_groups:
        raise UnsupportedModelError(f"{num_heads} Mamba2 heads are not a multiple of {num_groups} groups")
    return StateShape(num_groups, num_heads, state_dim, head_dim, conv_width)


def mamba2_layer(
    weights: Weights,
    prefix: str,
    state_layer: int,
    config: Mamba2Config,
    *,
    channel_scale: Tensor | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Mamba2:
    """Make the layer whose tensors are named ``prefix``in_proj, conv1d, A_log, D, dt_bias, norm and out_proj.

    Args:
        weights: of the model.
        prefix: ends in a dot.
        state_layer: index of the layer's state in the state pool.
        config: of all Mamba2 layers of the model.
        channel_scale: [inner + C + heads], factors of the input projection's output.
        scales: factors of the layer's input and output.

    Raises:
        CheckpointError: a tensor is missing or misshapen.
        UnsupportedModelError: the inner channels cannot be divided into ``norm_groups``, or ``dt_limit`` is no range.
        ConfigError: the layer cannot be divided among the ranks.
    """
    shape, segments, float32 = config.shape, config.segments, torch.float32
    own, heads, inner = segments.own(shape, weights.share), shape.num_value_heads, segments.values.size
    if config.has_norm and inner % config.norm_groups:
        raise UnsupportedModelError(
            f"{inner} Mamba2 channels cannot be normed in {config.norm_groups} groups of one size"
        )
    conv = weights.take(f"{prefix}conv1d.weight", shape.conv_channels, 1, shape.conv_width, dtype=float32)
    conv_bias = (
        weights.take(f"{prefix}conv1d.bias", shape.conv_channels, dtype=float32) if config.has_conv_bias else None
    )
    channels = segments.values, segments.keys, segments.keys
    conv = weights.part(conv, *channels)
    conv_bias = None if conv_bias is None else weights.part(conv_bias, *channels)
    of_heads = (weights.take(f"{prefix}{name}", heads, dtype=float32) for name in ("A_log", "dt_bias", "D"))
    a_log, dt_bias, skip = (weights.part(x, segments.heads) for x in of_heads)
    norm = weights.take(f"{prefix}norm.weight", inner, dtype=float32) if config.has_norm else None
    norm = None if norm is None else weights.part(norm, segments.values)
    crosses = norm is not None and _crosses_ranks(config, weights.share)
    operands = mamba2.Weights(
        conv=conv.squeeze(1).t().contiguous().t(),  # the kernel reads it by tap
        conv_bias=conv_bias,
        negative_a=-a_log.exp(),
        dt_bias=dt_bias,
        skip=skip,
        norm=None if crosses else norm,
        norm_eps=config.norm_eps,
        norm_groups=_own_norm_groups(config, weights.share, crosses),
        norm_before_gate=config.norm_before_gate,
        num_groups=own.num_key_heads,
        state_dim=shape.key_dim,
        head_dim=shape.value_dim,
        dt_limit=_time_step_range(config.dt_limit),
    )
    project = _mamba2_projection(weights, f"{prefix}in_proj", config, scales[0], channel_scale)
    hidden = weights.config.hidden_size
    values = segments.values
    out: Callable[[Tensor], Tensor] = weights.take_linear(
        f"{prefix}out_proj", hidden, inner, config.has_out_bias, scales[1], inputs=[values]
    )
    if crosses:
        assert norm is not None
        out = NormedInput(_divided_norm(weights, norm, config), out)
    return Mamba2(state_layer, own, project, out, operands)


class NormedInput:
    """A projection whose input is normed."""

    def __init__(self, norm: DividedRMSNorm, project: Callable[[Tensor], Tensor]) -> None:
        self._norm, self._project = norm, project

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self._project(self._norm(x))


def _crosses_ranks(config: Mamba2Config, share: Share) -> bool:
    """Whether groups of the gated norm have channels on several ranks.

    Raises:
        ConfigError: they have, and the gate comes behind the norm, inside of the operator that all ranks would wait in.
    """
    if share.size == 1 or config.norm_groups % share.size == 0:
        return False
    if config.norm_before_gate:
        raise ConfigError(
            f"--tp-size {share.size}: the model norms its Mamba2 channels in {config.norm_groups} groups before the "
            f"gate, and they cannot be divided among {share.size} ranks: choose a number that divides "
            f"{config.norm_groups}"
        )
    return True


def _own_norm_groups(config: Mamba2Config, share: Share, crosses: bool) -> int:
    """Groups that the operator norms this rank's channels in; without a norm it has one."""
    if share.size == 1:
        return config.norm_groups
    return config.norm_groups // share.size if config.has_norm and not crosses else 1


def _divided_norm(weights: Weights, norm: Tensor, config: Mamba2Config) -> DividedRMSNorm:
    """The gated norm, behind the gate, of channels whose groups several ranks have parts of."""
    size = config.segments.values.size // config.norm_groups
    groups = weights.share.index([config.segments.values]) // size
    return DividedRMSNorm(norm, config.norm_eps, groups, config.norm_groups, size, weights.ranks)


def _mamba2_projection(
    weights: Weights, name: str, config: Mamba2Config, in_scale: float, channel_scale: Tensor | None
) -> Linear:
    """The input projection, with both factors multiplied into its weights."""
    shape = config.shape
    rows = shape.num_value_heads * (shape.value_dim + 1) + shape.conv_channels
    bias = weights.take(f"{name}.bias", rows) if config.has_in_bias else None
    weight = weights.take_matrix(f"{name}.weight", rows, weights.config.hidden_size, outputs=config.inputs)
    bias = None if bias is None else weights.part(bias, *config.inputs)
    if channel_scale is None:
        return weights.linear(scaled(weight, in_scale), bias)
    factors = weights.share.cut_tensor(channel_scale, config.inputs).to(weights.options.device)
    bias = None if bias is None else scaled(bias, factors)
    return weights.linear(scaled(weight, (factors * in_scale)[:, None]), bias)


def _time_step_range(limit: Sequence[float] | None) -> tuple[float, float]:
    if limit is None:
        return 0.0, float("inf")
    if len(limit) != 2 or not limit[0] <= limit[1]:
        raise UnsupportedModelError(f"time_step_limit {list(limit)} should be two numbers, the lower one first")
    return float(limit[0]), float(limit[1])
