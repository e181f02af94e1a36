"""Block heads (DFlash, arXiv 2602.06036; DSpark; DFlash2): a small transformer that drafts a block in one pass.

The input is a block: the root at its own position p, and masks at the positions behind it. A DFlash head predicts the
token at a position from the mask there, so b positions draft b - 1 tokens and the output at the root is not used. A
DSpark head predicts the token at p + 1 from the root, and each further one from the mask in front of it: b positions
draft b tokens. One pass gives all of them, none of which knows the others: these are marginals, not conditionals.
What a drafted token says about the next one is added by ``token_links.py``.

What came before the root enters as *context*. At every position t < p the residual streams behind some of the target's
layers are concatenated, projected by ``fc`` and normed by ``hidden_norm``: c[t]. Each layer of the head makes keys and
values of c[t] as it does of its own normed input, with the same matrices, key norm and rotary embedding at position t;
c[t] itself runs through no layer. A token of the block sees the context, or the last W positions of it in layers with a
window, and the block in both directions, or in causal layers what is before it. So keys and values of the context
depend on nothing but the target's features there: they are stored once, where the target has run a token. Those of a
block are overwritten when its accepted tokens become context.

Embedding and output head are the target's: the embedding without its multiplier, the logits with theirs. A head that
drafts a part of the vocabulary has an output head of its own. It may have been trained on longer blocks than it is
asked for: a shorter block has fewer masks.

Sources: z-lab/dflash (``dflash/model.py``: layers, context, positions, what is predicted where, windows, DFlash2's
convolutions and selector, target layer i read behind it, drafts sampled from the marginals), DeepSpec
(``modeling/dspark``, ``eval/dspark``: the same of DSpark), SGLang (``models/dflash.py`` and
``speculative/dflash_worker.py``: keys and values of the context stored ahead of a block), vLLM
(``models/qwen3_dflash.py``: likewise; settings of variants).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specmamba.layers.context import ForwardContext, LayerContext
from specmamba.models.base import TokenLinks
from specmamba.models.dflash.block_layers import BlockAttention, BlockContext, block_attention, block_of
from specmamba.models.dflash.block_settings import FIELDS, BlockSettings
from specmamba.models.dflash.confidence_head import ConfidenceHead
from specmamba.models.dflash.token_links import MarkovLinks, SelectorLinks
from specmamba.models.eagle import OUTPUT, HeadWeights, take_fc
from specmamba.models.hybrid import HybridTarget, run_blocks
from specmamba.models.matrices.draft_vocabulary import DraftVocabulary, read_draft_vocabulary

__all__ = ["BlockAttention", "DFlashHead", "is_block_head"]


def is_block_head(architecture: str, config: object) -> bool:
    """Whether a draft head drafts blocks, by its architecture or its config."""
    name = architecture.lower()
    return "dflash" in name or "dspark" in name or any(hasattr(config, field) for field in FIELDS)


class DFlashHead:
    """A block head on a target."""

    def __init__(self, weights: HeadWeights, target: HybridTarget, num_target_layers: int, architecture: str) -> None:
        """Load the head.

        Raises:
            CheckpointError: it is incomplete or inconsistent.
            UnsupportedModelError: a variant that is not supported.
            ConfigError: it was made for another target.
        """
        c = weights.config
        settings = BlockSettings.of(weights, architecture, num_target_layers, target.vocab_size)
        weights.require_width(c.hidden_size, target.hidden_size)
        self.width, self._target = c.hidden_size, target
        self.variant, self.drafts_at_root = settings.variant, settings.drafts_at_root
        self.target_layers, self.block_size = settings.target_layers, settings.block_size
        self._mask = settings.mask_token_id
        fc = take_fc(weights, len(self.target_layers), target.hidden_size)
        assert fc is not None  # there are layers to read
        self._fc, self._context_norm = fc, weights.rms_norm("hidden_norm.weight")
        self.views = tuple(dict.fromkeys(settings.views))
        self._attentions = [
            block_attention(weights, i, self.views.index(view)) for i, view in enumerate(settings.views)
        ]
        blocks = (block_of(weights, i, made, settings.convolution) for i, made in enumerate(self._attentions))
        self._blocks = tuple(blocks)
        self._norm = weights.rms_norm("norm.weight")
        self._rotary = weights.rotary()
        self.has_own_output = settings.has_own_vocabulary
        self._logits = _own_logits(weights, target.vocab_size) if self.has_own_output else target.logits
        self.links = _links(weights, settings)
        table = self.links.table if isinstance(self.links, MarkovLinks) else None
        self.confidence: Callable[[Tensor, Tensor], Tensor] | None = ConfidenceHead.of(
            weights, settings.confidence_knows_tokens, table
        )

    def combine(self, features: Tensor) -> Tensor:
        """Turn the target's features [..., F] into context vectors [..., H]."""
        return self._context_norm(self._fc(features))

    def remember(self, vectors: Tensor, context: ForwardContext) -> None:
        """Store keys and values of context vectors [B, L, H] in all layers, at the positions of ``context``."""
        angles = self._rotary.angles(context.positions, vectors.dtype)
        layer_context = LayerContext(context.kv, None, angles)
        for attention in self._attentions:
            attention.remember(vectors, layer_context)

    def forward(self, roots: Tensor, contexts: Sequence[ForwardContext]) -> Tensor:
        """Run a block on every root; ``BlockHead`` describes arguments and result."""
        positions = contexts[0].positions
        masks = roots.new_full((len(roots), positions.shape[1] - 1), self._mask)
        x = self._target.embedding(torch.cat([roots[:, None], masks], 1))
        angles = self._rotary.angles(positions, x.dtype)
        views = tuple(LayerContext(context.kv, None, angles) for context in contexts)
        hidden = self._norm(run_blocks(self._blocks, x, BlockContext(contexts[0].kv, None, angles, views=views)))
        return hidden if self.drafts_at_root else hidden[:, 1:].contiguous()

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head, the target's or the head's own, to [..., H]: [..., V]."""
        return self._logits(hidden)


def _own_logits(weights: HeadWeights, vocab_size: int) -> DraftVocabulary:
    """The output head over the tokens that the head drafts. Raises CheckpointError and ConfigError."""
    size, ids = read_draft_vocabulary(weights, vocab_size)
    return DraftVocabulary(
        weights.head(weights.take_head(OUTPUT, size, weights.config.hidden_size), size), ids, vocab_size
    )


def _links(weights: HeadWeights, settings: BlockSettings) -> TokenLinks | None:
    if settings.selector is not None:
        return SelectorLinks(weights, *settings.selector)
    return None if settings.markov is None else MarkovLinks(weights, *settings.markov)
