"""Mamba2: recurrent layers and nothing else (arXiv 2405.21060). There is no attention, so nothing is kept per token.

``residual_in_fp32`` is not followed: it says how the residual stream is rounded, and here its dtype is the model's, as
in every family. With bfloat16 weights the logits are nearer to those of float32 than what transformers gives with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specmamba.cache.shapes import CacheShape, StateShape
from specmamba.errors import UnsupportedModelError
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import mamba2_layer, mamba2_shape
from specmamba.models.hybrid import Block, HybridTarget
from specmamba.models.tensors import TensorReader
from specmamba.models.weights import Weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# as the first conversions named it
RENAMES = (("backbone.embedding.", "backbone.embeddings."),)

# Configs name no length, and no layer minds one. Longer texts than this are not worth a row of the request table.
CONTEXT_LENGTH = 1 << 17


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build the model from a checkpoint's config and tensors; see ``registry.Loader``.

    Raises:
        CheckpointError: a tensor is missing, left over or misshapen.
        UnsupportedModelError: the config asks for a variant that this class does not compute.
    """
    c: Any = config
    if c.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {c.hidden_act!r} is not supported: only silu is")
    if not getattr(c, "rms_norm", True):
        raise UnsupportedModelError("rms_norm false is not supported: Mamba2 models have RMS norms here")
    weights = Weights(c, reader, options)
    shape = mamba2_shape(c.n_groups, c.state_size, c.num_heads, c.head_dim, c.conv_kernel)
    embedding = weights.take("backbone.embeddings.weight", c.vocab_size, c.hidden_size)
    blocks = [_block(weights, i, shape) for i in range(c.num_hidden_layers)]
    norm = weights.norm("backbone.norm_f.weight", c.hidden_size, c.layer_norm_epsilon)
    head = weights.output_head("lm_head.weight", embedding, c.tie_word_embeddings)
    reader.finish()
    target = HybridTarget(embedding, blocks, norm, weights.linear(head), rotary=None)
    cache_shape = CacheShape(kv=(), num_state_layers=c.num_hidden_layers, state=shape, dtype=options.dtype)
    return LoadedModel(
        architecture="",
        target=target,
        draft_head=None,
        cache_shape=cache_shape,
        context_length=CONTEXT_LENGTH,
        num_parameters=weights.num_parameters,
        weight_bytes=weights.num_bytes,
        num_layers=c.num_hidden_layers,
        attention_width=0,
    )


def _block(weights: Weights, layer: int, shape: StateShape) -> Block:
    c, prefix = weights.config, f"backbone.layers.{layer}."
    norm = weights.norm(f"{prefix}norm.weight", c.hidden_size, c.layer_norm_epsilon)
    mixer = mamba2_layer(
        weights,
        f"{prefix}mixer.",
        layer,
        shape,
        eps=c.layer_norm_epsilon,
        has_proj_bias=c.use_bias,
        has_out_bias=c.use_bias,
        has_conv_bias=c.use_conv_bias,
        norm_groups=c.n_groups,
        dt_limit=c.time_step_limit,
    )
    return Block(((norm, mixer),))
