"""The Qwen family and its MTP heads: Qwen3.5 dense, Qwen3.5 with mixtures of experts, Qwen3-Next.

Gated-delta-net layers and full attention with a gated output take turns; norms multiply by (1 + w).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specmamba.cache.shapes import StateShape
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import UnsupportedModelError
from specmamba.kernels import delta_net, paged_attention
from specmamba.kernels.linear import Matrix
from specmamba.layers.attention import Attention
from specmamba.layers.feed_forward import MoE, SoftmaxRouter
from specmamba.layers.gated_delta_net import GatedDeltaNet
from specmamba.layers.primitives import Linear, RMSNorm
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import (
    ATTENTION,
    RECURRENT,
    Heads,
    gated_experts,
    gated_mlp,
    head_norms,
    number_layers,
    require_experts,
    require_layer_types,
    require_silu,
)
from specmamba.models.hybrid import Block, HybridTarget, Layer, MTPHead, MTPModule
from specmamba.models.rank_shapes import StateSegments
from specmamba.models.weights import Weights, halves, loaded_model
from specmamba.parallel.share import Segment

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Qwen3_5ForConditionalGeneration nests the language model beside a vision tower
RENAMES = (("model.language_model.", "model."),)
VISION_PREFIXES = ("model.visual.", "visual.")
MTP_PREFIX = "mtp."


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build Qwen3.5, the dense text model; see ``_load``."""
    return _load(QwenWeights, config, reader, options)


def load_moe(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build Qwen3.5 with mixtures of experts; see ``_load``."""
    if not getattr(config, "norm_topk_prob", True):  # in no published config; other programs disagree about it
        raise UnsupportedModelError("norm_topk_prob false is not supported for Qwen3.5")
    return _load(QwenMoEWeights, config, reader, options)


def load_next(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build Qwen3-Next; see ``_load``."""
    return _load(QwenNextWeights, config, reader, options)


def _load(kind: type[QwenWeights], config: Any, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build a model from a checkpoint's text config and tensors, with the layers that ``kind`` makes.

    Raises:
        CheckpointError: a tensor is missing, left over or misshapen.
        UnsupportedModelError: the config asks for a variant that this class does not compute.
    """
    c, weights, draft_weights = config, kind(config, reader, options), kind(config, reader, options, options.draft_form)
    target, output = _target(weights)
    has_head = options.want_draft_head and reader.has(f"{MTP_PREFIX}fc.weight")
    head = _mtp_head(draft_weights, target, output) if has_head else None
    reader.finish(ignore=(*VISION_PREFIXES, *(() if head else (MTP_PREFIX,))))
    num_attention = c.layer_types.count(ATTENTION)
    return loaded_model(
        target,
        weights,
        c.layer_types.count(RECURRENT),
        weights.state_shape,
        kv=weights.heads.kv_shapes(num_attention + (head.num_modules if head else 0)),
        attention_width=weights.heads.width * num_attention,
        head=head,
        draft_weights=draft_weights,
    )


def _target(weights: QwenWeights) -> tuple[HybridTarget, Matrix]:
    """The target, and the matrix of its output head."""
    c = weights.config
    embedding = weights.take_embedding("model.embed_tokens.weight")
    numbered = enumerate(number_layers(c.layer_types))
    blocks = [weights.block(i, f"model.layers.{i}.", kind, index) for i, (kind, index) in numbered]
    return weights.target(embedding, blocks, weights.one_plus_norm("model.norm.weight"), weights.rotary())


def _mtp_head(weights: QwenWeights, target: HybridTarget, output: Matrix) -> MTPHead:
    """Modules of one attention block each, with all else in common; embedding and output head are the target's.

    ``output`` [V, H] is the matrix of that output head.
    """
    c = weights.config
    if getattr(c, "mtp_use_dedicated_embeddings", False):
        raise UnsupportedModelError(
            "this MTP head has embeddings of its own; only the target's are supported: "
            "serve with --speculative-algorithm none"
        )
    norms = [weights.one_plus_norm(f"mtp.pre_fc_norm_{name}.weight").weight for name in ("embedding", "hidden")]
    input_norm = RMSNorm(torch.stack(norms), c.rms_norm_eps)
    fc = weights.take_linear("mtp.fc", c.hidden_size, 2 * c.hidden_size)
    norm, kind = weights.one_plus_norm("mtp.norm.weight"), ATTENTION
    blocks = [
        weights.block(c.num_hidden_layers + d, f"mtp.layers.{d}.", kind, c.layer_types.count(kind) + d)
        for d in range(_count_modules(c, weights.reader))
    ]
    modules = [MTPModule(input_norm, fc, (block,), norm) for block in blocks]
    return MTPHead(target, modules, weights.share_linear(output, target))


class QwenWeights(Weights):
    """Makes the layers of dense Qwen3.5."""

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions, form: Any = None) -> None:
        super().__init__(config, reader, options, form)
        _refuse_variants(config)
        self.heads = Heads.of(config)
        self.state_shape = StateShape(
            num_key_heads=config.linear_num_key_heads,
            num_value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            conv_width=config.linear_conv_kernel_dim,
        )
        self.segments = StateSegments.of(self.state_shape, "linear key heads", "linear value heads")

    def one_plus_norm(self, name: str) -> RMSNorm:
        """The norm over the whole width whose stored weight is w - 1."""
        return self.norm(name, self.config.hidden_size, self.config.rms_norm_eps, offset=1.0)

    def block(self, layer: int, prefix: str, kind: str, index: int) -> Block:
        """A mixer, then a feed-forward layer. ``index``: the mixer's place in the pool of its kind."""
        mixer: Layer
        if kind == ATTENTION:
            mixer = self.attention(f"{prefix}self_attn.", index)
        else:
            mixer = self.delta_net(f"{prefix}linear_attn.", index)
        norms = [self.one_plus_norm(f"{prefix}{name}_layernorm.weight") for name in ("input", "post_attention")]
        return Block(((norms[0], mixer), (norms[1], self.feed_forward(layer, f"{prefix}mlp."))))

    def feed_forward(self, layer: int, prefix: str) -> Layer:
        """The second half of a block."""
        return gated_mlp(self, prefix, self.config.intermediate_size)

    def attention(self, prefix: str, kv_layer: int) -> Attention:
        """Attention with normed queries and keys, whose output is multiplied by a gate."""
        c = self.config
        num_q, num_kv, dim = self.heads.num_query_heads, self.heads.num_key_heads, self.heads.head_dim
        # the checkpoint interleaves each head's query with its gate
        rows = [x.flatten() for x in torch.arange(2 * num_q * dim).view(num_q, 2, dim).unbind(1)]
        queries, keys, own = self.heads.query_segment, self.heads.key_segment, self.heads.of_rank(self.share)
        both, order = [queries, queries], torch.cat(rows)
        taken = self.take_matrix(f"{prefix}q_proj.weight", len(order), c.hidden_size, outputs=both, order=order)
        q, gate = halves(taken)
        k, v = (
            self.take_matrix(f"{prefix}{name}_proj.weight", num_kv * dim, c.hidden_size, outputs=[keys])
            for name in ("k", "v")
        )
        norm = head_norms(self, prefix, own, offset=1.0)
        sizes = own.num_query_heads, own.num_key_heads, dim
        form = paged_attention.AttentionConfig(*sizes, dim**-0.5, norm, c.rms_norm_eps, has_gate=True)
        out = self.take_linear(f"{prefix}o_proj", c.hidden_size, num_q * dim, c.attention_bias, inputs=[queries])
        bias = self.attention_bias(prefix, rows) if c.attention_bias else None
        return Attention(kv_layer, self.linear([q, k, v, gate], bias), out, form)

    def attention_bias(self, prefix: str, rows: Sequence[Tensor]) -> Tensor:
        """Biases of queries, keys, values and gates; ``rows``: where those of queries and of gates are stored."""
        num_kv, dim = self.heads.num_key_heads, self.heads.head_dim
        q_and_gate = self.take(f"{prefix}q_proj.bias", 2 * self.heads.width)
        k, v = (self.take(f"{prefix}{name}_proj.bias", num_kv * dim) for name in ("k", "v"))
        q, gate = (q_and_gate[of_part.to(q_and_gate.device)] for of_part in rows)
        queries, keys = self.heads.query_segment, self.heads.key_segment
        return self.part(torch.cat([q, k, v, gate]), queries, keys, keys, queries)

    def delta_net(self, prefix: str, state_layer: int) -> GatedDeltaNet:
        """The recurrent layer."""
        s, segments = self.state_shape, self.segments
        own = segments.own(s, self.share)
        conv = self.take(f"{prefix}conv1d.weight", s.conv_channels, 1, s.conv_width, dtype=torch.float32)
        conv = self.part(conv, *segments.convolved)
        of_heads = (
            self.take(f"{prefix}{name}", s.num_value_heads, dtype=torch.float32) for name in ("A_log", "dt_bias")
        )
        a_log, dt_bias = (self.part(x, segments.heads) for x in of_heads)
        weights = delta_net.Weights(
            conv=conv.squeeze(1).t().contiguous().t(),  # the kernel reads it by tap
            negative_a=-a_log.exp(),
            dt_bias=dt_bias,
            norm=self.take(f"{prefix}norm.weight", s.value_dim, dtype=torch.float32),
            norm_eps=self.config.rms_norm_eps,
            num_key_heads=own.num_key_heads,
            key_dim=s.key_dim,
        )
        values = segments.values
        out = self.take_linear(f"{prefix}out_proj", self.config.hidden_size, values.size, inputs=[values])
        return GatedDeltaNet(state_layer, own, self.delta_projection(prefix), out, weights)

    def delta_projection(self, prefix: str) -> Linear:
        """The input projection, in the order q, k, v, output gate, beta, decay."""
        s, hidden = self.segments, self.config.hidden_size
        outputs = {"qkv": s.convolved, "z": (s.values,), "b": (s.heads,), "a": (s.heads,)}
        parts = []
        for name, of_part in outputs.items():
            size = sum(segment.size for segment in of_part)
            parts.append(self.take_matrix(f"{prefix}in_proj_{name}.weight", size, hidden, outputs=of_part))
        return self.linear(parts[:2], gates=parts[2:])


class QwenMoEWeights(QwenWeights):
    """Makes the layers of Qwen3.5 with mixtures of experts, each with a gated shared expert."""

    renormalise = True  # the weights of a token's experts

    def feed_forward(self, layer: int, prefix: str) -> Layer:
        """The second half of a block: experts in every layer."""
        return self.mixture(prefix)

    def mixture(self, prefix: str) -> MoE:
        """Experts and the shared expert. Raises UnsupportedModelError for more experts per token than experts."""
        c = self.config
        require_experts(c.num_experts_per_tok, c.num_experts)
        gate = self.take_router(f"{prefix}gate.weight", c.num_experts)
        return MoE(
            SoftmaxRouter(gate, c.num_experts_per_tok, self.renormalise),
            gated_experts(self, f"{prefix}experts.", c.num_experts, c.moe_intermediate_size),
            gated_mlp(self, f"{prefix}shared_expert.", c.shared_expert_intermediate_size),
            Linear(self.take(f"{prefix}shared_expert_gate.weight", 1, c.hidden_size)),
        )


class QwenNextWeights(QwenMoEWeights):
    """Makes the layers of Qwen3-Next: delta nets with fused projections, and experts in some of the layers."""

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions, form: Any = None) -> None:
        super().__init__(config, reader, options, form)
        self.renormalise = config.norm_topk_prob

    def feed_forward(self, layer: int, prefix: str) -> Layer:
        """Experts or a dense layer, as the config says; in an MTP head, as the checkpoint says."""
        c = self.config
        if layer < c.num_hidden_layers:
            is_turn = (layer + 1) % c.decoder_sparse_step == 0
            has_experts = is_turn and layer not in c.mlp_only_layers and c.num_experts > 0
        else:
            has_experts = self.reader.has(f"{prefix}gate.weight")
        return self.mixture(prefix) if has_experts else gated_mlp(self, prefix, c.intermediate_size)

    def delta_projection(self, prefix: str) -> Linear:
        """The input projection; the checkpoint stores all parts of one key head, then those of the next."""
        s = self.state_shape
        values_of_key = s.num_value_heads // s.num_key_heads
        sizes = [s.key_dim, s.key_dim, values_of_key * s.value_dim, values_of_key * s.value_dim]
        of = self.segments
        parts = self._by_parts(f"{prefix}in_proj_qkvz.weight", sizes, (*of.convolved, of.values))
        gates = self._by_parts(f"{prefix}in_proj_ba.weight", [values_of_key, values_of_key], (of.heads, of.heads))
        return self.linear(parts, gates=[gates])

    def _by_parts(self, name: str, sizes: Sequence[int], outputs: Sequence[Segment]) -> Matrix:
        """The projection ``name``, whose outputs are stored by key heads, with those of each part side by side."""
        num_heads, width = self.state_shape.num_key_heads, sum(sizes)
        rows = torch.arange(num_heads * width).view(num_heads, width).split(list(sizes), 1)
        order = torch.cat([part.flatten() for part in rows])
        return self.take_matrix(name, num_heads * width, self.config.hidden_size, outputs=outputs, order=order)


def _count_modules(config: Any, reader: TensorReader) -> int:
    """The number of modules of the MTP head: those that are stored, and at least as many as the config names."""
    stored = {name.split(".")[2] for name in reader.names() if name.startswith(f"{MTP_PREFIX}layers.")}
    return max(len(stored), getattr(config, "mtp_num_hidden_layers", None) or 1)


def _refuse_variants(config: Any) -> None:
    """Refuse what would be computed wrongly."""
    require_silu(config)
    require_layer_types(config)
    if not getattr(config, "attn_output_gate", True):
        raise UnsupportedModelError("attn_output_gate false is not supported for Qwen models")
    gate = getattr(config, "output_gate_type", None)
    if gate not in (None, "silu", "swish"):
        raise UnsupportedModelError(f"output_gate_type {gate!r} is not supported: only silu is")
    value_heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    if value_heads % key_heads:
        raise UnsupportedModelError(f"{value_heads} value heads are not a multiple of {key_heads} key heads")
