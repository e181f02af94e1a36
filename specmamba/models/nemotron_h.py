"""Nemotron-H (2 and 3), and its MTP head: arXiv 2504.03624, 2508.14444.

A block is one norm and one mixer: Mamba2, attention, a feed-forward layer with squared ReLU, or a mixture of them.
There is no rotary embedding: the recurrent layers know the order of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import UnsupportedModelError
from specmamba.kernels import rowwise
from specmamba.kernels.linear import Matrix
from specmamba.layers.attention import Attention
from specmamba.layers.feed_forward import MLP, MoE, SigmoidRouter, squared_relu
from specmamba.layers.primitives import RMSNorm
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import (
    ATTENTION,
    RECURRENT,
    Heads,
    attention_layer,
    mlp_segment,
    number_layers,
)
from specmamba.models.hybrid import Block, HybridTarget, Layer, MTPHead, MTPModule
from specmamba.models.mamba2_family import Mamba2Config, mamba2_layer
from specmamba.models.matrices.expert_matrices import ExpertMatrices
from specmamba.models.weights import Weights, loaded_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES = (("backbone.", "model."),)  # the published checkpoints say "backbone"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": squared_relu,
    "relu": F.relu,
    "silu": rowwise.silu,
    "gelu": rowwise.gelu,
    "gelu_pytorch_tanh": rowwise.gelu_tanh,
}
MLP_LAYER, MOE_LAYER = "mlp", "moe"
MTP_PREFIX = "mtp."


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build a Nemotron-H from a checkpoint's config and tensors; errors as for ``registry.load_model``."""
    weights = NemotronWeights(config, reader, options)
    draft_weights = NemotronWeights(config, reader, options, options.draft_form)
    c = weights.config
    target, output = _target(weights)
    has_head = options.want_draft_head and reader.has(f"{MTP_PREFIX}layers.0.eh_proj.weight")
    head = _mtp_head(draft_weights, target, output) if has_head else None
    reader.finish(ignore=() if head else (MTP_PREFIX,))
    heads, num_attention = weights.heads, c.layers_block_type.count(ATTENTION)
    num_head_layers = head.num_modules * c.mtp_layers_block_type.count(ATTENTION) if head else 0
    return loaded_model(
        target,
        weights,
        c.layers_block_type.count(RECURRENT),
        weights.mamba.shape,
        kv=heads.kv_shapes(num_attention + num_head_layers),
        attention_width=heads.width * num_attention,
        head=head,
        draft_weights=draft_weights,
    )


def _target(weights: NemotronWeights) -> tuple[HybridTarget, Matrix]:
    """The target, and the matrix of its output head."""
    c = weights.config
    embedding = weights.take_embedding("model.embeddings.weight")
    blocks = weights.blocks("model.layers.", c.layers_block_type)
    norm = weights.full_norm("model.norm_f.weight")
    return weights.target(embedding, blocks, norm)


def _mtp_head(weights: NemotronWeights, target: HybridTarget, output: Matrix) -> MTPHead:
    """Build the MTP head: modules of the same kinds of blocks, whose layers are numbered consecutively.

    Every published head is one module that is applied again to its own output.
    """
    c = weights.config
    _refuse_mtp_variants(c)
    kinds, kv_layer = c.mtp_layers_block_type, c.layers_block_type.count(ATTENTION)
    modules = [
        _mtp_module(weights, module * len(kinds), kv_layer + module * kinds.count(ATTENTION))
        for module in range(max(1, c.num_nextn_predict_layers))
    ]
    return MTPHead(target, modules, weights.share_linear(output, target))


def _mtp_module(weights: NemotronWeights, first: int, first_kv_layer: int) -> MTPModule:
    """One module: its first block also has the input norms and the projection, its last block the norm at the end."""
    c, prefix = weights.config, f"{MTP_PREFIX}layers."
    kinds = c.mtp_layers_block_type
    input_norms = [weights.full_norm(f"{prefix}{first}.{name}norm.weight").weight for name in ("e", "h")]
    return MTPModule(
        RMSNorm(torch.stack(input_norms), c.layer_norm_epsilon),
        weights.take_linear(f"{prefix}{first}.eh_proj", c.hidden_size, 2 * c.hidden_size),
        tuple(weights.blocks(prefix, kinds, first, first_kv_layer)),
        weights.full_norm(f"{prefix}{first + len(kinds) - 1}.final_layernorm.weight"),
    )


class NemotronWeights(Weights):
    """Makes the layers of Nemotron-H."""

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions, form: Any = None) -> None:
        super().__init__(config, reader, options, form)
        _refuse_variants(config)
        self.activation = ACTIVATIONS[config.mlp_hidden_act]
        self.heads = Heads.of(config)
        self.mamba = Mamba2Config.mamba(config, config.ssm_state_size, config.mamba_num_heads, config.mamba_head_dim)

    def full_norm(self, name: str) -> RMSNorm:
        """The norm over the whole width."""
        return self.norm(name, self.config.hidden_size, self.config.layer_norm_epsilon)

    def blocks(self, prefix: str, kinds: list[str], first: int = 0, first_kv_layer: int = 0) -> list[Block]:
        """Blocks of these kinds, from layer ``first`` on.

        Blocks with KV or states are numbered in the pool of their kind.
        """
        blocks = []
        for i, (kind, index) in enumerate(number_layers(kinds, {ATTENTION: first_kv_layer}), start=first):
            norm = self.full_norm(f"{prefix}{i}.norm.weight")
            blocks.append(Block(((norm, self.mixer(kind, f"{prefix}{i}.mixer.", index)),)))
        return blocks

    def mixer(self, kind: str, prefix: str, index: int) -> Layer:
        """The layer of a block. ``index``: its place in the pool of its kind."""
        if kind == RECURRENT:
            return mamba2_layer(self, prefix, index, self.mamba)
        if kind == ATTENTION:
            return self.attention(prefix, index)
        return self.moe(prefix) if kind == MOE_LAYER else self.mlp(prefix, self.config.intermediate_size)

    def attention(self, prefix: str, kv_layer: int) -> Attention:
        has_bias = self.config.attention_bias  # transformers ignores it, the original code does not
        return attention_layer(self, prefix, kv_layer, self.heads, has_bias=has_bias, has_rotary=False)

    def mlp(self, prefix: str, inner: int) -> MLP:
        c, channels = self.config, [mlp_segment(inner)]
        up = self.take_linear(f"{prefix}up_proj", inner, c.hidden_size, c.mlp_bias, outputs=channels)
        down = self.take_linear(f"{prefix}down_proj", c.hidden_size, inner, c.mlp_bias, inputs=channels)
        return MLP(up, down, self.activation)

    def moe(self, prefix: str) -> MoE:
        c, num_experts, inner = self.config, self.config.n_routed_experts, self.config.moe_intermediate_size
        _refuse_routing(c)
        router = SigmoidRouter(
            self.take_router(f"{prefix}gate.weight", num_experts),
            self.take(f"{prefix}gate.e_score_correction_bias", num_experts, dtype=torch.float32),
            c.num_experts_per_tok,
            c.n_group,
            c.topk_group,
            c.norm_topk_prob,
            c.routed_scaling_factor,
        )
        latent, width = None, c.hidden_size
        if c.moe_latent_size is not None:
            width = c.moe_latent_size
            into = self.take_linear(f"{prefix}fc1_latent_proj", width, c.hidden_size, c.mlp_bias)
            latent = into, self.take_linear(f"{prefix}fc2_latent_proj", c.hidden_size, width, c.mlp_bias)
        experts = ExpertMatrices(self, num_experts, width, inner, each=f"{prefix}experts.")
        up = experts.up(f"{prefix}experts.up_proj", ("up_proj",))
        down = experts.down(f"{prefix}experts.down_proj", "down_proj")
        shared = self.mlp(f"{prefix}shared_experts.", self.shared_size(f"{prefix}shared_experts.up_proj.weight"))
        return MoE(router, experts.layer(up, down, self.activation), shared, latent=latent)

    def shared_size(self, name: str) -> int:
        """The width of the shared experts, which are one MLP; the config's width is of all of them, or of each.

        Programs disagree about which of the two it is: the tensor ``name`` says so.
        """
        size, count = self.config.moe_shared_expert_intermediate_size, self.config.n_shared_experts
        is_each = self.reader.has(name) and self.reader.stored(name).shape[0] == count * size
        return int(count * size if is_each else size)


def _refuse_variants(config: Any) -> None:
    """Refuse what would be computed wrongly."""
    c = config
    if c.mlp_hidden_act not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"mlp_hidden_act {c.mlp_hidden_act!r} is not supported ({', '.join(ACTIVATIONS)} are)"
        )
    if c.mamba_hidden_act != "silu":
        raise UnsupportedModelError(f"mamba_hidden_act {c.mamba_hidden_act!r} is not supported: only silu is")
    if c.sliding_window is not None and c.sliding_window < c.max_position_embeddings:
        raise UnsupportedModelError(
            f"sliding_window {c.sliding_window} is not supported: attention sees all tokens, up to "
            f"{c.max_position_embeddings}"
        )


def _refuse_routing(config: Any) -> None:
    """Refuse groups and numbers of experts from which no choice is possible."""
    c = config
    if not c.n_shared_experts:
        raise UnsupportedModelError(f"n_shared_experts {c.n_shared_experts} is not supported: one or more are")
    group, rest = divmod(c.n_routed_experts, c.n_group)
    is_possible = 1 <= c.topk_group <= c.n_group and 1 <= c.num_experts_per_tok <= c.topk_group * group
    if rest or group < 2 or not is_possible:  # a group is judged by its two best experts
        raise UnsupportedModelError(
            f"{c.n_routed_experts} experts in {c.n_group} groups: a token cannot choose {c.topk_group} groups and "
            f"{c.num_experts_per_tok} of their experts"
        )


def _refuse_mtp_variants(config: Any) -> None:
    """Refuse heads with layers that a ``DraftHead`` cannot have."""
    kinds = config.mtp_layers_block_type
    if not kinds or set(kinds) - {ATTENTION, MLP_LAYER, MOE_LAYER}:
        raise UnsupportedModelError(
            f"mtp_layers_block_type {kinds}: an MTP head keeps no recurrent state, so its layers must be "
            f"{ATTENTION}, {MLP_LAYER} or {MOE_LAYER}: serve with --speculative-algorithm none"
        )
