"""EAGLE heads (arXiv 2401.15077) and EAGLE-3 heads (arXiv 2503.01840): Llama's layers on the target's hidden states.

An EAGLE head predicts the target's next hidden state, and the target's output head turns that into tokens. An EAGLE-3
head reads several layers of the target, and has an output head of its own over a part of the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.checkpoints.tensor_reader import TensorReader, have_same_values
from specmamba.errors import CheckpointError, ConfigError, UnsupportedModelError
from specmamba.layers.attention import Attention
from specmamba.layers.context import ForwardContext, LayerContext
from specmamba.layers.feed_forward import GatedMLP
from specmamba.layers.primitives import Embedding, Linear, RMSNorm, Rotary
from specmamba.models.base import LoadOptions
from specmamba.models.common_layers import Heads, attention_layer, gated_mlp
from specmamba.models.hybrid import Block, HybridTarget, run_blocks
from specmamba.models.matrices.draft_vocabulary import DraftVocabulary, read_draft_vocabulary
from specmamba.models.weights import Weights

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
Logits = Callable[[Tensor], Tensor]


class EagleHead:
    """EAGLE: fc([embedding, hidden]), then Llama's layers, without a norm in front of the first and at the end."""

    num_modules = 1

    def __init__(self, weights: HeadWeights, target: HybridTarget) -> None:
        """Load the head. Raises ConfigError where its hidden size is not the target's."""
        self.width = width = weights.config.hidden_size
        weights.require_width(width, target.hidden_size)
        self._embedding = weights.embedding(target)
        self._fc = weights.take_linear("fc", width, 2 * width, has_bias=weights.reader.has("fc.bias"))
        self._attention = weights.attention(0, width)
        self._blocks = weights.blocks_behind_attention()
        self._rotary = weights.rotary()
        self._logits = weights.own_output() or target.logits

    def combine(self, features: Tensor) -> Tensor:
        """Give the target's last hidden states [..., H] back unchanged."""
        return features

    def forward(self, tokens: Tensor, hidden: Tensor, context: ForwardContext, module: int = 0) -> Tensor:
        """Run the head over tokens [B, L] and hidden states [B, L, H'] of the positions before: [B, L, H']."""
        angles = self._rotary.angles(context.positions, hidden.dtype)
        layer_context = LayerContext(context.kv, None, angles, context.packing)
        tokens, hidden = layer_context.pack(tokens), layer_context.pack(hidden)
        x = self._fc(torch.cat([self._embedding(tokens), hidden], -1))
        x = x + self._attention(x, layer_context)
        return layer_context.unpack(run_blocks(self._blocks, x, layer_context))

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head, the head's own or the target's, to [..., H']: [..., V]."""
        return self._logits(hidden)


class HeadWeights(Weights):
    """Makes the layers of draft heads: Llama's, except the input of the first one."""

    def __init__(
        self,
        config: Any,
        reader: TensorReader,
        options: LoadOptions,
        folder: Path,
        first_kv_layer: int,
        shares_embedding: bool,
    ) -> None:
        """Read the head's weights.

        Args:
            config, reader, options, folder: of the head.
            first_kv_layer: index of the head's first KV layer in the pool, behind the target's.
            shares_embedding: whether its embedding equals the target's, for tensors without values.
        """
        super().__init__(config, reader, options, options.draft_form)
        self.folder, self.first_kv_layer, self._shares_embedding = folder, first_kv_layer, shares_embedding

    def rotary(self, kind: str | None = None) -> Rotary:
        """As of every model, but for all texts of the target. Raises UnsupportedModelError."""
        rope_type = self.config.rope_parameters.get("rope_type", "default")
        if rope_type in ("dynamic", "longrope"):
            raise UnsupportedModelError(f"rope type {rope_type!r} is not supported for draft heads")
        return super().rotary(kind)

    def require_width(self, width: int, target_width: int) -> None:
        """Raise ConfigError where the two differ."""
        if width != target_width:
            raise ConfigError(
                f"--speculative-draft-model-path {self.folder}: the head's hidden size is {width}, the target's "
                f"{target_width}: it was trained for another model"
            )

    def embedding(self, target: HybridTarget) -> Embedding:
        """The head's own embedding; the target's where the head has none or an equal one."""
        if not self.reader.has(EMBEDDING):
            self.require_width(self.config.hidden_size, target.hidden_size)
            return target.embedding
        own, theirs = self.take(EMBEDDING, target.vocab_size, self.config.hidden_size), target.embedding.table
        if theirs is None or not have_same_values(own, theirs, guess=self._shares_embedding):
            return Embedding(own.shape, own)
        self.num_parameters -= own.numel()
        self.replace_bytes(0, own)
        return target.embedding

    def own_output(self) -> Linear | None:
        """The head's own output matrix, or None where none is stored."""
        c = self.config
        if not self.reader.has(OUTPUT):
            return None
        return self.head(self.take_head(OUTPUT, c.vocab_size, c.hidden_size), c.vocab_size)

    def blocks_behind_attention(self) -> list[Block]:
        """All blocks behind the attention of the first layer."""
        blocks = [Block((self.feed_forward(0),))]
        for layer in range(1, self.config.num_hidden_layers):
            norm = self.rms_norm(f"layers.{layer}.input_layernorm.weight")
            attention = self.attention(layer, self.config.hidden_size)
            blocks.append(Block(((norm, attention), self.feed_forward(layer))))
        return blocks

    def rms_norm(self, name: str) -> RMSNorm:
        """The norm over the whole width whose weight has this name."""
        return self.norm(name, self.config.hidden_size, self.config.rms_norm_eps)

    def attention(self, layer: int, width: int) -> Attention:
        """Attention whose input has ``width`` numbers per token."""
        prefix = f"layers.{layer}.self_attn."
        return attention_layer(
            self,
            prefix,
            self.first_kv_layer + layer,
            Heads.of(self.config),
            width=width,
            has_bias=self.reader.has(f"{prefix}q_proj.bias"),
            has_out_bias=self.reader.has(f"{prefix}o_proj.bias"),
            norm_eps=self.config.rms_norm_eps if self.reader.has(f"{prefix}q_norm.weight") else None,
        )

    def feed_forward(self, layer: int) -> tuple[RMSNorm, GatedMLP]:
        """The norm and the MLP behind the attention of a layer."""
        prefix = f"layers.{layer}."
        mlp = gated_mlp(self, f"{prefix}mlp.", self.config.intermediate_size)
        return self.rms_norm(f"{prefix}post_attention_layernorm.weight"), mlp


class Eagle3Head:
    """EAGLE-3: Llama's layers, the first with the input [norm(embedding), norm(hidden)]; a norm and an output head.

    In the first step of a draft ``hidden`` is fc of the residual streams of some of the target's layers, perhaps behind
    a norm of all of them. In later steps it is the head's own output in front of its last norm, without fc.
    """

    num_modules = 1

    def __init__(self, weights: HeadWeights, target: HybridTarget, num_target_layers: int) -> None:
        """Load the head. Raises ConfigError where it reads layers or drafts tokens that the target does not have."""
        c = weights.config
        self.width = width = c.hidden_size
        self.target_layers = read_layer_ids(c, num_target_layers)
        self._fc = take_fc(weights, len(self.target_layers), target.hidden_size)
        self._feature_norm = _feature_norm(weights, len(self.target_layers) * target.hidden_size)
        self._embedding = weights.embedding(target)
        norms = [weights.rms_norm(f"layers.0.{name}.weight").weight for name in ("input_layernorm", "hidden_norm")]
        self._input_norm = RMSNorm(torch.stack(norms), c.rms_norm_eps)  # of both in one pass
        self._adds_normed = bool(getattr(c, "norm_before_residual", False))
        self._attention = weights.attention(0, 2 * width)
        self._blocks = weights.blocks_behind_attention()
        self._norm = weights.rms_norm("norm.weight")
        self._rotary = weights.rotary()
        own, target_ids = _output(weights, self._embedding, target.vocab_size)
        if own is None:
            weights.require_width(width, target.hidden_size)
        self._logits = DraftVocabulary(own or target.logits, target_ids, target.vocab_size)

    def combine(self, features: Tensor) -> Tensor:
        """Apply fc to the target's features: [..., F] -> [..., H']."""
        if self._feature_norm is not None:
            features = self._feature_norm(features)
        return features if self._fc is None else self._fc(features)

    def forward(self, tokens: Tensor, hidden: Tensor, context: ForwardContext, module: int = 0) -> Tensor:
        """Run the head over tokens [B, L] and hidden states [B, L, H'] of the positions before: [B, L, H']."""
        angles = self._rotary.angles(context.positions, hidden.dtype)
        layer_context = LayerContext(context.kv, None, angles, context.packing)
        tokens, hidden = layer_context.pack(tokens), layer_context.pack(hidden)
        pair = self._input_norm(torch.stack([self._embedding(tokens), hidden], 2))
        residual = pair[:, :, 1] if self._adds_normed else hidden
        x = residual + self._attention(pair.flatten(2), layer_context)
        return layer_context.unpack(run_blocks(self._blocks, x, layer_context))

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply norm and output head to [..., H']: [..., V], -inf for tokens outside of the draft vocabulary."""
        return self._logits(self._norm(hidden))


def read_layer_ids(config: Any, num_layers: int) -> tuple[int, ...]:
    """The target's layers in front of which its residual stream is read; (): its last hidden state is read.

    There are two conventions for one name. In the config itself (vLLM, speculators) i means the input of layer i;
    within ``eagle_config`` (SGLang, ModelOpt) it means the output of layer i. Features are in the order of the layers.

    Raises:
        CheckpointError: the field is not a list of integers.
    """
    nested = getattr(config, "eagle_config", {})
    if not nested.get("use_aux_hidden_state", True):
        return ()
    inside, outside = nested.get(LAYER_IDS), getattr(config, LAYER_IDS, None)
    ids = outside or inside or [2, num_layers // 2, num_layers - 3]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise CheckpointError(f"the head's {LAYER_IDS} should be a list of numbers of layers, but is {ids!r}")
    return tuple(sorted(i + 1 if ids is inside else i for i in ids))


def take_fc(weights: HeadWeights, num_layers: int, target_width: int) -> Linear | None:
    """The projection of so many layers' features; None where ``num_layers`` is 0. Raises ConfigError."""
    c, name = weights.config, "fc.weight"
    if not num_layers:
        weights.require_width(c.hidden_size, target_width)
        return None
    weights.require_width(getattr(c, "target_hidden_size", target_width), target_width)
    shape = weights.reader.stored(name).shape
    if len(shape) == 2 and shape[1] != num_layers * target_width:
        raise ConfigError(
            f"--speculative-draft-model-path {weights.folder}: the head reads {shape[1]} numbers per token, but "
            f"{num_layers} layers of the target give {num_layers * target_width}: it was trained for another model"
        )
    has_bias = weights.reader.has("fc.bias")
    return weights.take_linear("fc", c.hidden_size, num_layers * target_width, has_bias)


def _feature_norm(weights: HeadWeights, width: int) -> RMSNorm | None:
    """The norm of all features in front of fc; None: there is none. Raises CheckpointError."""
    c, name = weights.config, "input_norm.weight"
    if not (getattr(c, "norm_before_fc", False) or weights.reader.has(name)):
        return None
    return weights.norm(name, width, c.rms_norm_eps)


def _output(weights: HeadWeights, embedding: Embedding, vocab_size: int) -> tuple[Linear | None, Tensor | None]:
    """The head's own output matrix, and for each of its rows the target's token: [draft vocabulary] int64.

    None as matrix: the target's is used. None as tokens: row i is token i.
    """
    c, reader = weights.config, weights.reader
    size, ids = read_draft_vocabulary(weights, vocab_size)
    if reader.has(OUTPUT):
        return weights.head(weights.take_head(OUTPUT, size, c.hidden_size), size), ids
    if size != vocab_size:
        raise CheckpointError(f"{weights.folder} drafts {size} of {vocab_size} tokens, but has no {OUTPUT}")
    if not (c.tie_word_embeddings and reader.has(EMBEDDING)):
        return None, None
    assert embedding.table is not None  # the head has one, and the target's only where it is equal
    return weights.head(weights.as_head(embedding.table), vocab_size), None
