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

from typing import Any

import torch
from torch import Tensor

from specmamba.errors import CheckpointError, ConfigError, UnsupportedModelError
from specmamba.kernels import paged_attention
from specmamba.layers.attention import Attention
from specmamba.layers.context import ForwardContext, LayerContext
from specmamba.layers.primitives import Linear, RMSNorm
from specmamba.models.common_layers import Heads, head_norms, one_product
from specmamba.models.eagle import HeadWeights, take_fc
from specmamba.models.hybrid import Block, HybridTarget

FIELD = "dflash_config"
VARIANTS = {
    "markov_head": "DSpark",
    "confidence_head": "DSpark",
    "candidate_selector": "DFlash2",
    "attention_conv": "DFlash2",
    "mlp_conv": "DFlash2",
}
# settings that change what is computed, and the values with which they change nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "causal": (None, False),
    "is_causal": (None, False),
    "projector_type": (None, "dflash"),
    "attention_mode": (None, "gqa"),
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "selector_rank": (None, 0),
    "markov_rank": (None, 0),
    "use_swa": (None, False),
    "attention_sink_bias": (None, False),
}
DEFAULT_BLOCK = 16  # of the published heads


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
        settings = read_settings(c)
        refuse_variants(weights, settings)
        weights.require_width(c.hidden_size, target.hidden_size)
        self.width, self._target = c.hidden_size, target
        self.target_layers = read_target_layers(weights, settings, num_target_layers)
        self.block_size = _number(weights, settings, "block_size", DEFAULT_BLOCK)
        self._mask = _number(weights, settings, "mask_token_id", None)
        if self.block_size < 2:
            raise CheckpointError(
                f"{weights.folder}: block_size {self.block_size}: a block has a root and a mask at least"
            )
        if not 0 <= self._mask < target.vocab_size:
            raise ConfigError(
                f"--speculative-draft-model-path {weights.folder}: mask_token_id {self._mask} is not in the target's "
                f"vocabulary of {target.vocab_size} tokens"
            )
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
        for block in self._blocks:
            x = block(x, layer_context)
        return self._norm(x[:, 1:].contiguous())

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


def read_settings(config: Any) -> dict[str, Any]:
    """The head's own settings, which stand in ``dflash_config`` or beside it. Raises CheckpointError."""
    nested = getattr(config, FIELD, None) or {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"{FIELD} should be an object, but is a {type(nested).__name__}")
    names = {"block_size", "mask_token_id", "target_layer_ids", *NEUTRAL}
    outside = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    return outside | {name: value for name, value in nested.items() if value is not None}


def refuse_variants(weights: HeadWeights, settings: dict[str, Any]) -> None:
    """Raise UnsupportedModelError for heads that compute something else."""
    for name in weights.reader.names():
        for part, variant in VARIANTS.items():
            if part in name.split("."):
                raise UnsupportedModelError(
                    f"{weights.folder} has the tensor {name}: it is a {variant} head, which is not supported"
                )
    for name, neutral in NEUTRAL.items():
        if settings.get(name) not in neutral:
            raise UnsupportedModelError(f"{weights.folder}: {name} {settings[name]!r} is not supported in DFlash heads")


def read_target_layers(weights: HeadWeights, settings: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The target's layers in front of which features are read, in the order of the head's inputs.

    The config has the layers *behind* which they are read, counted from 0.

    Raises:
        CheckpointError: the config names none.
        UnsupportedModelError: the target has no such layer, or it is the last one, behind which nothing is read.
    """
    ids = settings.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise CheckpointError(
            f"{weights.folder}: target_layer_ids should be a list of numbers of layers, but is {ids!r}"
        )
    if missing := [i for i in ids if not 0 <= i < num_layers - 1]:
        raise UnsupportedModelError(
            f"{weights.folder}: target_layer_ids {missing}: the head can read behind layers 0 to {num_layers - 2} of "
            f"the target, which has {num_layers}"
        )
    return tuple(i + 1 for i in ids)


def _number(weights: HeadWeights, settings: dict[str, Any], name: str, default: int | None) -> int:
    value = settings.get(name, default)
    if type(value) is not int:
        raise CheckpointError(f"{weights.folder}: {name} should be a whole number, but is {value!r}")
    return value
