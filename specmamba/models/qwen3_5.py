"""Qwen3.5, dense text model, and its MTP head.

Hybrid of gated-delta-net layers and full attention with a gated output; norms multiply by (1 + w).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.cache.shapes import CacheShape, DeltaStateShape
from specmamba.errors import UnsupportedModelError
from specmamba.layers.attention import GatedAttention
from specmamba.layers.context import ForwardContext, LayerContext
from specmamba.layers.gated_delta_net import DeltaNetWeights, GatedDeltaNet
from specmamba.layers.linear import Linear
from specmamba.layers.mlp import GatedMLP
from specmamba.layers.norm import RMSNorm
from specmamba.layers.rotary import Rotary
from specmamba.models.base import LoadedModel
from specmamba.models.checkpoint import TensorReader

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Qwen3_5ForConditionalGeneration nests the language model beside a vision tower
RENAMES = (("model.language_model.", "model."),)
VISION_PREFIXES = ("model.visual.", "visual.")
MTP_PREFIX = "mtp."


def load(
    config: PretrainedConfig, reader: TensorReader, dtype: torch.dtype, device: torch.device, want_mtp: bool
) -> LoadedModel:
    """Build the model from a checkpoint's text config and tensors.

    Args:
        config: the text part of the config.
        reader: opened with ``RENAMES``.
        dtype: of weights and activations.
        device: where they go.
        want_mtp: load the MTP head too, where there is one.

    Raises:
        CheckpointError: a tensor is missing, left over or misshapen.
        UnsupportedModelError: the config asks for a variant that this class does not compute.
    """
    weights = _Weights(config, reader, dtype, device)
    target = Qwen35(weights)
    head = MTPHead(weights, target) if want_mtp and reader.has(f"{MTP_PREFIX}fc.weight") else None
    reader.finish(ignore=(*VISION_PREFIXES, *(() if head else (MTP_PREFIX,))))
    c = weights.config
    return LoadedModel(
        architecture="Qwen3.5",
        target=target,
        draft_head=head,
        cache_shape=CacheShape(
            num_kv_layers=c.layer_types.count("full_attention") + (1 if head else 0),
            num_kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            num_state_layers=c.layer_types.count("linear_attention"),
            state=weights.state_shape,
            dtype=dtype,
            draft_features=c.hidden_size if head else 0,
        ),
        context_length=c.max_position_embeddings,
        num_parameters=weights.num_parameters,
        num_layers=c.num_hidden_layers,
        attention_width=c.num_attention_heads * c.head_dim * c.layer_types.count("full_attention"),
        eos_token_ids=(),
    )


@dataclass(frozen=True, slots=True)
class Block:
    """Pre-norm residual block: a mixer (attention or delta net), then the MLP."""

    mixer_norm: RMSNorm
    mixer: Callable[[Tensor, LayerContext], Tensor]
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), context)
        return x + self.mlp(self.mlp_norm(x))


class Qwen35:
    """The target."""

    def __init__(self, weights: _Weights) -> None:
        c = weights.config
        self.vocab_size, self.hidden_size = c.vocab_size, c.hidden_size
        self.embedding = weights.take("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        self.rotary = weights.rotary()
        self.blocks = []
        index = {"full_attention": 0, "linear_attention": 0}  # layers of a kind are numbered in the pool of that kind
        for i, kind in enumerate(c.layer_types):
            self.blocks.append(weights.block(f"model.layers.{i}.", kind, index[kind]))
            index[kind] += 1
        self.norm = weights.norm("model.norm.weight")
        self.head = Linear(self._output_head(weights))

    def _output_head(self, weights: _Weights) -> Tensor:
        """The stored head where there is one, even if the config says tied: transformers decides so too."""
        c = weights.config
        if c.tie_word_embeddings and not weights.reader.has("lm_head.weight"):
            return self.embedding
        head = weights.take("lm_head.weight", c.vocab_size, c.hidden_size)
        if not torch.equal(head, self.embedding):
            return head
        weights.num_parameters -= head.numel()  # a second copy of the embedding: one is enough
        return self.embedding

    def forward(self, tokens: Tensor, context: ForwardContext) -> Tensor:
        """See ``Target``."""
        x = F.embedding(tokens, self.embedding)
        rotary = self.rotary.angles(context.positions, x.dtype)
        layer_context = LayerContext(context.kv, context.state, rotary)
        for block in self.blocks:
            x = block(x, layer_context)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Target``."""
        return self.head(hidden)


class MTPHead:
    """fc([norm(embedding), norm(hidden)]), one attention block, norm; embedding and output head are the target's."""

    def __init__(self, weights: _Weights, target: Qwen35) -> None:
        c = weights.config
        num_layers = getattr(c, "mtp_num_hidden_layers", 1)
        if num_layers != 1 or getattr(c, "mtp_use_dedicated_embeddings", False):
            raise UnsupportedModelError(
                f"this MTP head has {num_layers} layers or embeddings of its own; only one layer with shared "
                "embeddings is supported: serve with --speculative-algorithm none"
            )
        self._target = target
        norms = [weights.norm(f"mtp.pre_fc_norm_{name}.weight").weight for name in ("embedding", "hidden")]
        self._input_norm = RMSNorm(torch.stack(norms), c.rms_norm_eps)  # of the two side by side, in one pass
        self._fc = Linear(weights.take("mtp.fc.weight", c.hidden_size, 2 * c.hidden_size))
        self._block = weights.block("mtp.layers.0.", "full_attention", c.layer_types.count("full_attention"))
        self._norm = weights.norm("mtp.norm.weight")

    def forward(self, tokens: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        """See ``DraftHead``."""
        inputs = torch.stack([F.embedding(tokens, self._target.embedding), hidden], 2)
        x = self._fc(self._input_norm(inputs).flatten(2))
        rotary = self._target.rotary.angles(context.positions, x.dtype)
        return self._norm(self._block(x, LayerContext(context.kv, None, rotary)))

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``DraftHead``."""
        return self._target.head(hidden)


class _Weights:
    """Takes tensors out of a checkpoint and puts together what this family's layers want."""

    def __init__(
        self, config: PretrainedConfig, reader: TensorReader, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config: Any = config
        self.reader = reader
        self._dtype, self._device = dtype, device
        self.num_parameters = 0
        _refuse_variants(self.config)
        c = self.config
        self.state_shape = DeltaStateShape(
            num_key_heads=c.linear_num_key_heads,
            num_value_heads=c.linear_num_value_heads,
            key_dim=c.linear_key_head_dim,
            value_dim=c.linear_value_head_dim,
            conv_width=c.linear_conv_kernel_dim,
        )

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self.reader.take(name, shape)
        self.num_parameters += tensor.numel()
        return tensor.to(self._device, dtype or self._dtype)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._one_plus(name, self.config.hidden_size), self.config.rms_norm_eps)

    def rotary(self) -> Rotary:
        frequencies, scaling = rotary_frequencies(self.config)
        return Rotary(frequencies.to(self._device), scaling)

    def block(self, prefix: str, kind: str, index: int) -> Block:
        mixer: Callable[[Tensor, LayerContext], Tensor]
        if kind == "full_attention":
            mixer = self._attention(f"{prefix}self_attn.", index)
        else:
            mixer = self._delta_net(f"{prefix}linear_attn.", index)
        return Block(
            mixer_norm=self.norm(f"{prefix}input_layernorm.weight"),
            mixer=mixer,
            mlp_norm=self.norm(f"{prefix}post_attention_layernorm.weight"),
            mlp=self._mlp(f"{prefix}mlp."),
        )

    def _one_plus(self, name: str, size: int) -> Tensor:
        return 1.0 + self.take(name, size, dtype=torch.float32)

    def _mlp(self, prefix: str) -> GatedMLP:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        gate_up = [self.take(f"{prefix}{name}_proj.weight", inner, hidden) for name in ("gate", "up")]
        return GatedMLP(torch.cat(gate_up), self.take(f"{prefix}down_proj.weight", hidden, inner))

    def _attention(self, prefix: str, kv_layer: int) -> GatedAttention:
        c = self.config
        num_q, num_kv, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        # the checkpoint interleaves each head's query with its gate
        q_and_gate = self.take(f"{prefix}q_proj.weight", 2 * num_q * dim, c.hidden_size)
        q, gate = q_and_gate.view(num_q, 2, dim, c.hidden_size).transpose(0, 1).reshape(2, num_q * dim, c.hidden_size)
        k = self.take(f"{prefix}k_proj.weight", num_kv * dim, c.hidden_size)
        v = self.take(f"{prefix}v_proj.weight", num_kv * dim, c.hidden_size)
        return GatedAttention(
            kv_layer,
            qkvg=torch.cat([q, k, v, gate]),
            out=self.take(f"{prefix}o_proj.weight", c.hidden_size, num_q * dim),
            q_norm=self._one_plus(f"{prefix}q_norm.weight", dim),
            k_norm=self._one_plus(f"{prefix}k_norm.weight", dim),
            num_kv_heads=num_kv,
            eps=c.rms_norm_eps,
        )

    def _delta_net(self, prefix: str, state_layer: int) -> GatedDeltaNet:
        s, hidden = self.state_shape, self.config.hidden_size
        value_size = s.num_value_heads * s.value_dim
        rows = {"qkv": s.conv_channels, "z": value_size, "b": s.num_value_heads, "a": s.num_value_heads}
        projections = [self.take(f"{prefix}in_proj_{name}.weight", size, hidden) for name, size in rows.items()]
        conv = self.take(f"{prefix}conv1d.weight", s.conv_channels, 1, s.conv_width)
        weights = DeltaNetWeights(
            projection=torch.cat(projections),
            conv=conv.squeeze(1),
            a_log=self.take(f"{prefix}A_log", s.num_value_heads, dtype=torch.float32),
            dt_bias=self.take(f"{prefix}dt_bias", s.num_value_heads, dtype=torch.float32),
            norm=self.take(f"{prefix}norm.weight", s.value_dim, dtype=torch.float32),
            out=self.take(f"{prefix}out_proj.weight", hidden, value_size),
        )
        return GatedDeltaNet(state_layer, s, weights, self.config.rms_norm_eps)


def rotary_frequencies(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies [rotary_dim / 2] and the scaling of cosines and sines.

    For text the three sections of the multimodal embedding carry the same position, so it is the plain one.

    Raises:
        UnsupportedModelError: a rope type whose frequencies depend on the length of the text.
    """
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        dim = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0
    if kind not in ("linear", "yarn", "llama3"):
        raise UnsupportedModelError(f"rope type {kind!r} is not supported (default, linear, yarn, llama3 are)")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies, float(scaling)


def _refuse_variants(config: Any) -> None:
    """Refuse what would be computed wrongly rather than compute it."""
    if config.hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act {config.hidden_act!r} is not supported: only silu is")
    if config.attention_bias:
        raise UnsupportedModelError("attention_bias is not supported for Qwen3.5")
    unknown = set(config.layer_types) - {"full_attention", "linear_attention"}
    if unknown or len(config.layer_types) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"layer_types must give full_attention or linear_attention to each of {config.num_hidden_layers} layers"
        )
    if config.linear_num_value_heads % config.linear_num_key_heads:
        raise UnsupportedModelError(
            f"{config.linear_num_value_heads} value heads are not a multiple of {config.linear_num_key_heads} key heads"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise UnsupportedModelError(
            f"{config.num_attention_heads} query heads are not a multiple of {config.num_key_value_heads} key heads"
        )
