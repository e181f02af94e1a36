"""Kimi-Linear: Kimi Delta Attention and latent attention without rotation, mixtures of experts (arXiv 2510.26692)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from specmamba.cache.shapes import KVShape, StateShape
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import CheckpointError, UnsupportedModelError
from specmamba.kernels import delta_net, rowwise
from specmamba.kernels.linear import Matrix
from specmamba.layers.feed_forward import Activation, MoE, SigmoidRouter
from specmamba.layers.gated_delta_net import KimiDeltaAttention
from specmamba.layers.latent_attention import HeadProducts, LatentAttention, LatentHeads
from specmamba.layers.primitives import Linear, RMSNorm
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import (
    ATTENTION,
    RECURRENT,
    convolution_by_tap,
    gated_mlp,
    number_layers,
    require_experts,
    require_layer_types,
    require_silu,
)
from specmamba.models.hybrid import Block, HybridTarget, Layer, MTPHead
from specmamba.models.matrices.expert_matrices import ExpertMatrices
from specmamba.models.rank_shapes import StateSegments
from specmamba.models.weights import Weights, loaded_model, reordered
from specmamba.parallel.share import Segment

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES = ()
LATENT_NORM_EPS = 1e-6  # of the norms of latents, whatever the config says of the others
DENSE, SPARSE = "dense", "sparse"


class Names(NamedTuple):
    """What a family calls parts of a block, behind the block's prefix, and their tensors."""

    embedding: str = "model.embed_tokens.weight"
    mixer: str = "self_attn."
    out: str = "o_proj"  # of a mixer
    experts: str = "block_sparse_moe."
    router_bias: str = "gate.e_score_correction_bias"
    of_expert: tuple[str, str, str] = ("w1", "w3", "w2")  # gate, up, down


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build Kimi-Linear from a checkpoint's config and tensors; errors as for ``registry.load_model``."""
    if not getattr(config, "mla_use_nope", True):
        raise UnsupportedModelError("mla_use_nope false is not supported: Kimi-Linear does not rotate")
    weights = KimiWeights(config, reader, options)
    target, _ = target_of(weights)
    reader.finish()
    return finished(weights, target)


def target_of(weights: KimiWeights) -> tuple[HybridTarget, Matrix]:
    """The target whose layers ``weights`` makes, and the matrix of its output head."""
    c = weights.config
    embedding = weights.take_embedding(weights.names.embedding)
    numbered = enumerate(number_layers(c.layer_types))
    blocks = [weights.block(i, f"model.layers.{i}.", kind, index) for i, (kind, index) in numbered]
    norm = weights.norm("model.norm.weight", c.hidden_size, c.rms_norm_eps)
    return weights.target(embedding, blocks, norm, weights.rotary() if weights.has_rotary else None)


def finished(
    weights: KimiWeights, target: HybridTarget, head: MTPHead | None = None, draft_weights: Weights | None = None
) -> LoadedModel:
    """The loaded model of a target and perhaps its head, every module of which has one layer of latent attention."""
    c, heads = weights.config, weights.latent_heads
    num_attention = c.layer_types.count(ATTENTION)
    num_layers = num_attention + (head.num_modules if head else 0)
    return loaded_model(
        target,
        weights,
        c.layer_types.count(RECURRENT),
        weights.state_shape,
        kv=(KVShape(num_layers, 1, heads.row_dim, heads.latent_dim),) if num_layers else (),
        attention_width=heads.num_heads * heads.row_dim * num_attention,
        head=head,
        draft_weights=draft_weights,
    )


class KimiWeights(Weights):
    """Makes the layers of Kimi-Linear.

    A rank has some of the heads of either mixer. What heads share, all ranks have: latents, the shared part of keys,
    the pool of both, and the few channels that decays and gates go through.
    """

    names = Names()
    has_rotary = False  # the part of keys that heads share is rotated
    has_head_gates = False  # of latent attention
    lower_bound: float | None = None  # of log decays

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions, form: Any = None) -> None:
        super().__init__(config, reader, options, form)
        _refuse_variants(config)
        c = config
        self.latent_heads = LatentHeads(
            num_heads=c.num_attention_heads,
            nope_dim=c.qk_nope_head_dim,
            shared_dim=c.qk_rope_head_dim,
            value_dim=c.v_head_dim,
            latent_dim=c.kv_lora_rank,
        )
        self.state_shape = StateShape(
            num_key_heads=c.linear_num_heads,
            num_value_heads=c.linear_num_heads,
            key_dim=c.linear_head_dim,
            value_dim=c.linear_head_dim,
            conv_width=c.linear_conv_kernel_dim,
            decays_by_channel=True,
        )
        self.segments = StateSegments.of(self.state_shape, "delta attention heads", "delta attention heads")

    def block(self, layer: int, prefix: str, kind: str, index: int) -> Block:
        """A mixer, then a feed-forward layer. ``index``: the mixer's place in the pool of its kind."""
        c, make = self.config, self.attention if kind == ATTENTION else self.delta_attention
        mixer: Layer = make(f"{prefix}{self.names.mixer}", index)
        norms = [
            self.norm(f"{prefix}{name}_layernorm.weight", c.hidden_size, c.rms_norm_eps)
            for name in ("input", "post_attention")
        ]
        return Block(((norms[0], mixer), (norms[1], self.feed_forward(layer, prefix))))

    def feed_forward(self, layer: int, prefix: str) -> Layer:
        """The second half of a block: a dense layer, or experts and a shared layer."""
        names = self.names
        if self.config.mlp_layer_types[layer] == DENSE:
            is_renamed = self.reader.has(f"{prefix}{names.experts}gate_proj.weight")  # as transformers saves it again
            return gated_mlp(self, f"{prefix}{names.experts if is_renamed else 'mlp.'}", self.config.intermediate_size)
        return self.mixture(prefix)

    def mixture(self, prefix: str, routed: Activation = rowwise.silu_mul, shared: Activation = rowwise.silu_mul) -> MoE:
        """Experts and a shared layer of the block ``prefix``, with the activations of the former and of the latter."""
        c, names = self.config, self.names
        prefix, num_experts, inner = f"{prefix}{names.experts}", c.num_local_experts, c.moe_intermediate_size
        router = SigmoidRouter(
            self.take_router(f"{prefix}gate.weight", num_experts),
            self.take(f"{prefix}{names.router_bias}", num_experts, dtype=torch.float32),
            c.num_experts_per_tok,
            c.n_group,
            c.topk_group,
            c.norm_topk_prob,
            c.routed_scaling_factor,
        )
        gate, up, down = names.of_expert
        experts = ExpertMatrices(self, num_experts, c.hidden_size, inner, each=f"{prefix}experts.")
        of_experts, back = experts.up("", (gate, up)), experts.down("", down)
        of_all = gated_mlp(self, f"{prefix}shared_experts.", inner * c.n_shared_experts, activation=shared)
        return MoE(router, experts.layer(of_experts, back, routed), of_all)

    def delta_attention(self, prefix: str, state_layer: int) -> KimiDeltaAttention:
        """The recurrent layer; decays and gates go through few channels, the size of a head."""
        rank, of = self.state_shape.key_dim, self.segments
        decays, gates = (
            self.take_linear(f"{prefix}{name}", segment.size, rank, outputs=[segment])
            for name, segment in (("f_b_proj", of.decays), ("g_b_proj", of.values))
        )
        shared = Segment("channels", rank)
        names = {"f_a_proj": shared, "g_a_proj": shared}
        return self.delta_layer(prefix, state_layer, names, (decays, gates))

    def delta_layer(
        self, prefix: str, state_layer: int, gates: Mapping[str, Segment], expand: tuple[Linear, Linear] | None
    ) -> KimiDeltaAttention:
        """Make a recurrent layer.

        Args:
            prefix: ends in a dot.
            state_layer: index of the layer's state in the state pool.
            gates: the outputs of the projections of decays and of gates, by their names.
            expand: as for the layer; all ranks have all ``gates`` then.

        Raises:
            CheckpointError: a tensor is missing or misshapen.
            ConfigError: the heads cannot be divided among the ranks.
        """
        hidden, s, of = self.config.hidden_size, self.state_shape, self.segments
        own = of.own(s, self.share)
        bias = self.take(f"{prefix}dt_bias", of.decays.size, dtype=torch.float32)
        weights = delta_net.Weights(
            conv=self.part(convolution_by_tap(self, prefix, s), *of.convolved).t().contiguous().t(),
            negative_a=-self.part(self._per_head(f"{prefix}A_log"), of.heads).exp(),
            dt_bias=self.part(bias, of.decays).view(own.decay_shape),
            norm=self.take(f"{prefix}o_norm.weight", s.value_dim, dtype=torch.float32),
            norm_eps=self.config.rms_norm_eps,
            num_key_heads=own.num_key_heads,
            key_dim=s.key_dim,
            lower_bound=self.lower_bound,
            has_sigmoid_gate=True,
        )
        outputs = {"q_proj": of.keys, "k_proj": of.keys, "v_proj": of.values}
        parts = [self._of_heads(f"{prefix}{name}", hidden, segment) for name, segment in outputs.items()]
        if expand is None:
            of_gates = [self._of_heads(f"{prefix}{name}", hidden, segment) for name, segment in gates.items()]
        else:
            of_gates = [self.take_matrix(f"{prefix}{x}.weight", segment.size, hidden) for x, segment in gates.items()]
        beta = self._of_heads(f"{prefix}b_proj", hidden, of.heads)
        out = self.take_linear(f"{prefix}{self.names.out}", hidden, of.values.size, inputs=[of.values])
        widths = of_gates[0].shape[0], of_gates[1].shape[0]
        project = (
            self.linear([*parts, *of_gates], gates=[beta])
            if expand is None
            else self.linear(parts, gates=[*of_gates, beta])  # they are narrow
        )
        return KimiDeltaAttention(state_layer, own, project, out, weights, widths, expand)

    def _of_heads(self, name: str, width: int, segment: Segment) -> Matrix:
        """The matrix ``name``.weight from ``width`` to the heads that this rank has."""
        return self.take_matrix(f"{name}.weight", segment.size, width, outputs=[segment])

    def _per_head(self, name: str) -> Tensor:
        """A number for every head of a recurrent layer, stored as [Hv] or [1, 1, Hv, 1]: [Hv] float32."""
        heads = self.state_shape.num_value_heads
        dims = len(self.reader.stored(name).shape)
        shape = (heads,) if dims == 1 else (1, 1, heads, 1)
        return self.take(name, *shape, dtype=torch.float32).flatten()

    def attention(self, prefix: str, kv_layer: int) -> LatentAttention:
        """The layer of latent attention."""
        c, heads = self.config, self.latent_heads
        own = replace(heads, num_heads=self.share.count(self._latent_segment(1)))
        row = self.take_matrix(f"{prefix}kv_a_proj_with_mqa.weight", heads.row_dim, c.hidden_size)
        row = reordered(row, self._shared_first(torch.arange(heads.row_dim)[None]))
        query, of_query = self._queries(prefix)
        parts = [of_query, row]
        if self.has_head_gates:
            parts.append(self._of_heads(f"{prefix}g_proj", c.hidden_size, self._latent_segment(1)))
        to_latent, from_latent = self._of_latent(f"{prefix}kv_b_proj.weight")
        values = self._latent_segment(heads.value_dim)
        return LatentAttention(
            kv_layer,
            own,
            self.linear(parts),
            query,
            self.norm(f"{prefix}kv_a_layernorm.weight", heads.latent_dim, LATENT_NORM_EPS),
            to_latent,
            from_latent,
            self.take_linear(f"{prefix}{self.names.out}", c.hidden_size, values.size, inputs=[values]),
            self.has_rotary,
            self.has_head_gates,
        )

    def _latent_segment(self, width: int) -> Segment:
        """So many rows or columns for every head of latent attention."""
        return Segment("latent attention heads", self.latent_heads.num_heads, width)

    def _queries(self, prefix: str) -> tuple[tuple[RMSNorm, Linear] | None, Matrix]:
        """Norm and projection behind the latent of queries, if they have one; the matrix of the layer's input."""
        c = self.config
        if c.q_lora_rank is None:
            return None, self._heads_reordered(f"{prefix}q_proj", c.hidden_size)
        norm = self.norm(f"{prefix}q_a_layernorm.weight", c.q_lora_rank, LATENT_NORM_EPS)
        project = self.linear(self._heads_reordered(f"{prefix}q_b_proj", c.q_lora_rank))
        return (norm, project), self.take_matrix(f"{prefix}q_a_proj.weight", c.q_lora_rank, c.hidden_size)

    def _heads_reordered(self, name: str, width: int) -> Matrix:
        """The projection ``name`` from ``width`` to this rank's queries, each with its shared part first."""
        matrix = self._of_heads(name, width, self._latent_segment(self.latent_heads.query_dim))
        rows = torch.arange(matrix.shape[0]).view(-1, self.latent_heads.query_dim)
        return reordered(matrix, self._shared_first(rows))

    def _shared_first(self, rows: Tensor) -> Tensor:
        """Order rows [N, own + R] so that the shared part is in front: [N (R + own)].

        Where that rotates, neighbours that turn together are moved half of it apart, as ``rowwise.rotate`` has them.
        """
        own, shared = rows.split([rows.shape[1] - self.latent_heads.shared_dim, self.latent_heads.shared_dim], 1)
        if self.has_rotary:
            shared = torch.cat([shared[:, 0::2], shared[:, 1::2]], 1)
        return torch.cat([shared, own], 1).flatten()

    def _of_latent(self, name: str) -> tuple[HeadProducts, HeadProducts]:
        """Products from a head's query to the latent and from the latent to its value; never in codes."""
        heads = self.latent_heads
        of = self._latent_segment(heads.nope_dim + heads.value_dim)
        both = self.take_as_numbers(name, of.size, heads.latent_dim, outputs=[of])
        self.reader.note_run_form(name, "")
        of_keys, of_values = both.view(-1, of.width, heads.latent_dim).split([heads.nope_dim, heads.value_dim], 1)
        products = HeadProducts(of_keys.mT.contiguous()), HeadProducts(of_values.contiguous())
        self.replace_bytes(sum(product.nbytes for product in products), both)
        return products


def _refuse_variants(config: Any) -> None:
    """Refuse what would be computed wrongly."""
    c = config
    require_silu(c)
    require_layer_types(c)
    if unknown := set(c.mlp_layer_types) - {DENSE, SPARSE}:
        raise UnsupportedModelError(
            f"mlp_layer_types has {', '.join(sorted(unknown))}: only {DENSE} and {SPARSE} are known"
        )
    if SPARSE in c.mlp_layer_types:
        require_experts(c.num_experts_per_tok, c.num_local_experts)
    if c.num_key_value_heads != c.num_attention_heads:
        raise UnsupportedModelError("num_key_value_heads must be num_attention_heads: latent attention has no groups")
    if c.attention_bias:
        raise UnsupportedModelError("attention_bias true is not supported with latent attention")
    for field in ("attn_res_block_size", "routed_expert_hidden_size"):
        if getattr(c, field, None):
            raise UnsupportedModelError(f"{field} is not supported: models like Kimi-K3 need more than Kimi-Linear has")
    if getattr(c, "moe_router_activation_func", "sigmoid") != "sigmoid":
        raise UnsupportedModelError("moe_router_activation_func: only sigmoid is supported")
    if min(c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank, c.qk_rope_head_dim) < 1:
        raise CheckpointError("config.json: latent attention needs sizes of 1 or more")
