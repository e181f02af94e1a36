"""Kimi-Linear: Kimi Delta Attention and latent attention without rotation, mixtures of experts (arXiv 2510.26692)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from specmamba.cache.shapes import KVShape, StateShape
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import CheckpointError, UnsupportedModelError
from specmamba.kernels import delta_net, rowwise
from specmamba.layers.feed_forward import MoE, SigmoidRouter
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
from specmamba.models.hybrid import Block, Layer
from specmamba.models.matrices.expert_matrices import ExpertMatrices
from specmamba.models.weights import Weights, loaded_model, reordered

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
    return load_with(KimiWeights(config, reader, options))


def load_with(weights: KimiWeights, ignore: tuple[str, ...] = ()) -> LoadedModel:
    """Build the model whose layers ``weights`` makes; ``ignore``: prefixes of tensors that belong to no layer."""
    c = weights.config
    embedding = weights.take_embedding(weights.names.embedding)
    numbered = enumerate(number_layers(c.layer_types))
    blocks = [weights.block(i, f"model.layers.{i}.", kind, index) for i, (kind, index) in numbered]
    norm = weights.norm("model.norm.weight", c.hidden_size, c.rms_norm_eps)
    target, _ = weights.target(embedding, blocks, norm, weights.rotary() if weights.has_rotary else None)
    weights.reader.finish(ignore=ignore)
    heads, num_attention = weights.latent_heads, c.layer_types.count(ATTENTION)
    return loaded_model(
        target,
        weights,
        c.layer_types.count(RECURRENT),
        weights.state_shape,
        kv=(KVShape(num_attention, 1, heads.row_dim, heads.latent_dim),) if num_attention else (),
        attention_width=heads.num_heads * heads.row_dim * num_attention,
    )


class KimiWeights(Weights):
    """Makes the layers of Kimi-Linear."""

    names = Names()
    has_rotary = False  # the part of keys that heads share is rotated
    has_head_gates = False  # of latent attention
    lower_bound: float | None = None  # of log decays

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions) -> None:
        super().__init__(config, reader, options)
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
        c, names = self.config, self.names
        if c.mlp_layer_types[layer] == DENSE:
            is_renamed = self.reader.has(f"{prefix}{names.experts}gate_proj.weight")  # as transformers saves it again
            return gated_mlp(self, f"{prefix}{names.experts if is_renamed else 'mlp.'}", c.intermediate_size)
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
        shared = gated_mlp(self, f"{prefix}shared_experts.", inner * c.n_shared_experts)
        return MoE(router, experts.layer(of_experts, back, rowwise.silu_mul), shared)

    def delta_attention(self, prefix: str, state_layer: int) -> KimiDeltaAttention:
        """The recurrent layer; decays and gates go through few channels, the size of a head."""
        s = self.state_shape
        inner, rank = s.num_value_heads * s.value_dim, s.key_dim
        names = "f_a_proj", "g_a_proj"
        expand = tuple(self.take_linear(f"{prefix}{name}", inner, rank) for name in ("f_b_proj", "g_b_proj"))
        return self.delta_layer(prefix, state_layer, names, (rank, rank), (expand[0], expand[1]))

    def delta_layer(
        self,
        prefix: str,
        state_layer: int,
        names: tuple[str, str],
        widths: tuple[int, int],
        expand: tuple[Linear, Linear] | None,
    ) -> KimiDeltaAttention:
        """Make a recurrent layer; ``names``, ``widths``: of the projections of decays and gates, see the layer."""
        hidden, s = self.config.hidden_size, self.state_shape
        inner = s.num_value_heads * s.value_dim
        weights = delta_net.Weights(
            conv=convolution_by_tap(self, prefix, s),
            negative_a=-self._per_head(f"{prefix}A_log").exp(),
            dt_bias=self.take(f"{prefix}dt_bias", inner, dtype=torch.float32).view(s.decay_shape),
            norm=self.take(f"{prefix}o_norm.weight", s.value_dim, dtype=torch.float32),
            norm_eps=self.config.rms_norm_eps,
            num_key_heads=s.num_key_heads,
            key_dim=s.key_dim,
            lower_bound=self.lower_bound,
            has_sigmoid_gate=True,
        )
        parts = [self.take_matrix(f"{prefix}{x}_proj.weight", inner, hidden) for x in "qkv"]
        of_gates = [
            self.take_matrix(f"{prefix}{name}.weight", width, hidden) for name, width in zip(names, widths, strict=True)
        ]
        beta = self.take_matrix(f"{prefix}b_proj.weight", s.num_value_heads, hidden)
        out = self.take_linear(f"{prefix}{self.names.out}", hidden, inner)
        are_narrow = expand is not None
        project = (
            self.linear(parts, gates=[*of_gates, beta])
            if are_narrow
            else self.linear([*parts, *of_gates], gates=[beta])
        )
        return KimiDeltaAttention(state_layer, s, project, out, weights, widths, expand)

    def _per_head(self, name: str) -> Tensor:
        """A number for every head of a recurrent layer, stored as [Hv] or [1, 1, Hv, 1]: [Hv] float32."""
        heads = self.state_shape.num_value_heads
        dims = len(self.reader.stored(name).shape)
        shape = (heads,) if dims == 1 else (1, 1, heads, 1)
        return self.take(name, *shape, dtype=torch.float32).flatten()

    def attention(self, prefix: str, kv_layer: int) -> LatentAttention:
        """The layer of latent attention."""
        c, heads = self.config, self.latent_heads
        row = self.take_matrix(f"{prefix}kv_a_proj_with_mqa.weight", heads.row_dim, c.hidden_size)
        row = reordered(row, self._shared_first(torch.arange(heads.row_dim)[None]))
        query, of_query = self._queries(prefix)
        parts = [of_query, row]
        if self.has_head_gates:
            parts.append(self.take_matrix(f"{prefix}g_proj.weight", heads.num_heads, c.hidden_size))
        to_latent, from_latent = self._of_latent(f"{prefix}kv_b_proj.weight")
        return LatentAttention(
            kv_layer,
            heads,
            self.linear(parts),
            query,
            self.norm(f"{prefix}kv_a_layernorm.weight", heads.latent_dim, LATENT_NORM_EPS),
            to_latent,
            from_latent,
            self.take_linear(f"{prefix}{self.names.out}", c.hidden_size, heads.num_heads * heads.value_dim),
            self.has_rotary,
            self.has_head_gates,
        )

    def _queries(self, prefix: str) -> tuple[tuple[RMSNorm, Linear] | None, Any]:
        """Norm and projection behind the latent of queries, if they have one; the matrix of the layer's input."""
        c, heads = self.config, self.latent_heads
        width = heads.num_heads * heads.query_dim
        rows = self._shared_first(torch.arange(width).view(heads.num_heads, -1))
        if c.q_lora_rank is None:
            return None, reordered(self.take_matrix(f"{prefix}q_proj.weight", width, c.hidden_size), rows)
        norm = self.norm(f"{prefix}q_a_layernorm.weight", c.q_lora_rank, LATENT_NORM_EPS)
        project = self.linear(reordered(self.take_matrix(f"{prefix}q_b_proj.weight", width, c.q_lora_rank), rows))
        return (norm, project), self.take_matrix(f"{prefix}q_a_proj.weight", c.q_lora_rank, c.hidden_size)

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
        both = self.take(name, heads.num_heads * (heads.nope_dim + heads.value_dim), heads.latent_dim)
        self.reader.note_run_form(name, "")
        of_keys, of_values = both.view(heads.num_heads, -1, heads.latent_dim).split(
            [heads.nope_dim, heads.value_dim], 1
        )
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
    if getattr(c, "moe_router_activation_func", "sigmoid") != "sigmoid":
        raise UnsupportedModelError("moe_router_activation_func: only sigmoid is supported")
    if min(c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank, c.qk_rope_head_dim) < 1:
        raise CheckpointError("config.json: latent attention needs sizes of 1 or more")
