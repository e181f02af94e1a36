"""DFlash heads (arXiv 2602.06036): a small transformer that drafts a whole block of tokens in one pass.

The input is a block of b tokens: the root at its own position p, and masks at p + 1 .. p + b - 1. The output at the
position of a mask is the distribution of the token at that same position, so one pass drafts b - 1 tokens, none of
which knows the others: these are marginals, not conditionals. The output at the root is not used.

What came before the root enters as *context*. At every position t < p the residual streams behind some of the target's
layers are concatenated, projected by ``fc`` and normed by ``hidden_norm``: c[t]. Each layer of the head makes keys and
values of c[t] as it does of its own normed input, with the same matrices, key norm and rotary embedding at position t;
c[t] itself runs through no layer. Every token of the block sees the whole context and the whole block, in both
directions. So keys and values of the context depend on nothing but the target's features there: they are stored once,
where the target has run a token. Those of a block are overwritten when its accepted tokens become context.

Embedding and output head are the target's: the embedding without its multiplier, the logits with theirs. The head may
have been trained on longer blocks than it is asked for: a shorter block has fewer masks.

Sources: z-lab/dflash (``dflash/model.py``: layers, context, positions, what is predicted where, target layer i read
behind it, drafts sampled from the marginals), SGLang (``models/dflash.py`` and ``speculative/dflash_worker.py``: keys
and values of the context stored ahead of a block), vLLM (``models/qwen3_dflash.py``: likewise; settings of variants).
Variants that compute something else are refused by the names of their tensors or settings: DSpark (``markov_head``,
``confidence_head``), DFlash2 (``candidate_selector``, ``attention_conv``, ``mlp_conv``), causal blocks, sliding
windows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels import paged_attention
from specmamba.layers.attention import Attention
from specmamba.layers.context import ForwardContext, LayerContext
from specmamba.layers.primitives import Linear, RMSNorm
from specmamba.models.common_layers import Heads, head_norms, one_product
from specmamba.models.dflash.block_settings import BlockSettings
from specmamba.models.eagle import HeadWeights, take_fc
from specmamba.models.hybrid import Block, HybridTarget, run_blocks


class BlockAttention(Attention):
    """Attention whose keys and values are made of two kinds of inputs: of a block, and of the context before it."""

    def __init__(
        self,
        kv_layer: int,
        queries: Linear,
        keys_and_values: Linear,
        out: Linear,
        form: paged_attention.AttentionConfig,
    ) -> None:
        """Make the layer from its projections.

        Args:
            kv_layer: where keys and values live in the KV pool.
            queries: H -> Hq D.
            keys_and_values: H -> 2 Hkv D, keys first.
            out: Hq D -> H.
            form: the operations between them.
        """
        super().__init__(kv_layer, self._project, out, form)
        self._queries, self._keys_and_values = queries, keys_and_values
        self._query_width = form.num_query_heads * form.head_dim

    def remember(self, vectors: Tensor, context: LayerContext) -> None:
        """Store keys and values of context vectors [B, L, H]; what the queries of ``context`` see is not used."""
        stored = self._keys_and_values(vectors)
        nothing = stored.new_zeros((*stored.shape[:-1], self._query_width))
        self.attend(torch.cat([nothing, stored], -1), context)

    def _project(self, x: Tensor) -> Tensor:
        return torch.cat([self._queries(x), self._keys_and_values(x)], -1)


class DFlashHead:
    """A DFlash head on a target."""

    def __init__(self, weights: HeadWeights, target: HybridTarget, num_target_layers: int) -> None:
        """Load the head.

        Raises:
            CheckpointError: it is incomplete or inconsistent.
            UnsupportedModelError: a variant that is not supported.
            ConfigError: it was made for another target.
        """
        c = weights.config
        settings = BlockSettings.of(weights, num_target_layers, target.vocab_size)
        weights.require_width(c.hidden_size, target.hidden_size)
        self.width, self._target = c.hidden_size, target
        self.target_layers, self.block_size = settings.target_layers, settings.block_size
        self._mask = settings.mask_token_id
        fc = take_fc(weights, len(self.target_layers), target.hidden_size)
        assert fc is not None  # there are layers to read
        self._fc, self._context_norm = fc, weights.rms_norm("hidden_norm.weight")
        self._attentions = [block_attention(weights, layer) for layer in range(c.num_hidden_layers)]
        self._blocks = tuple(_block(weights, i, attention) for i, attention in enumerate(self._attentions))
        self._norm = weights.rms_norm("norm.weight")
        self._rotary = weights.rotary()

    def combine(self, features: Tensor) -> Tensor:
        """Turn the target's features [..., F] into context vectors [..., H]."""
        return self._context_norm(self._fc(features))

    def remember(self, vectors: Tensor, context: ForwardContext) -> None:
        """Store keys and values of context vectors [B, L, H] in all layers, at the positions of ``context``."""
        angles = self._rotary.angles(context.positions, vectors.dtype)
        layer_context = LayerContext(context.kv, None, angles)
        for attention in self._attentions:
            attention.remember(vectors, layer_context)

    def forward(self, roots: Tensor, context: ForwardContext) -> Tensor:
        """Run a block on every root.

        Args:
            roots: [B] int64.
            context: positions [B, L] of the block, L - 1 masks behind the root, and its KV.

        Returns:
            [B, L - 1, H], hidden states at the masks.
        """
        masks = roots.new_full((len(roots), context.positions.shape[1] - 1), self._mask)
        x = self._target.embedding(torch.cat([roots[:, None], masks], 1))
        layer_context = LayerContext(context.kv, None, self._rotary.angles(context.positions, x.dtype))
        return self._norm(run_blocks(self._blocks, x, layer_context)[:, 1:].contiguous())

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the target's output head to [..., H]: [..., V]."""
        return self._target.logits(hidden)


def block_attention(weights: HeadWeights, layer: int) -> BlockAttention:
    """Make the attention of one layer. Raises CheckpointError: a tensor is missing or misshapen."""
    c, heads, prefix = weights.config, Heads.of(weights.config), f"layers.{layer}.self_attn."
    own, has_bias = heads.of_rank(weights.share), weights.reader.has(f"{prefix}q_proj.bias")
    queries = one_product(weights, prefix, {"q_proj": (heads.query_segment, 1.0)}, c.hidden_size, has_bias)
    pair = dict.fromkeys(("k_proj", "v_proj"), (heads.key_segment, 1.0))
    keys_and_values = one_product(weights, prefix, pair, c.hidden_size, has_bias)
    out = weights.take_linear(
        f"{prefix}o_proj",
        c.hidden_size,
        heads.width,
        weights.reader.has(f"{prefix}o_proj.bias"),
        inputs=[heads.query_segment],
    )
    norm, dim = head_norms(weights, prefix, own), heads.head_dim
    form = paged_attention.AttentionConfig(own.num_query_heads, own.num_key_heads, dim, dim**-0.5, norm, c.rms_norm_eps)
    return BlockAttention(weights.first_kv_layer + layer, queries, keys_and_values, out, form)


def _block(weights: HeadWeights, layer: int, attention: BlockAttention) -> Block:
    norm: RMSNorm = weights.rms_norm(f"layers.{layer}.input_layernorm.weight")
    return Block(((norm, attention), weights.feed_forward(layer)))
