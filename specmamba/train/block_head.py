"""DFlash and DSpark heads as they are trained, and their folders. ``specmamba/models/dflash/`` says what they are.

Blocks are drafted behind many anchors of a window at once: each block sees the context before its own anchor, and
itself. Keys and values of the context are the same for all blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmamba.train.head import (
    FeedForward,
    HeadShape,
    Norm,
    own_tensors,
    rotary_of,
    rotate,
    shape_config,
    write_folder,
)

Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class BlockShape(HeadShape):
    """Sizes of a block head; it drafts the whole vocabulary of the target."""

    num_layers: int
    block_size: int  # b, the root included
    mask_token_id: int
    markov_rank: int = 0  # of a DSpark head's links between tokens; 0: a DFlash head

    @property
    def num_drafts(self) -> int:
        """Tokens that a block drafts: a DSpark head predicts the first one at the root."""
        return self.block_size if self.markov_rank else self.block_size - 1


class BlockAttention(nn.Module):
    """Attention of blocks to the context before them and to themselves."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        s, self.shape = shape, shape
        self.q_proj = nn.Linear(s.hidden_size, s.num_heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden_size, s.num_key_value_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden_size, s.num_key_value_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.num_heads * s.head_dim, s.hidden_size, bias=False)
        self.q_norm, self.k_norm = Norm(s.head_dim), Norm(s.head_dim)

    def forward(self, x: Tensor, context: Tensor, own: Angles, of_context: Angles, anchors: Tensor) -> Tensor:
        """Attend from blocks x [B, A, b, H].

        Args:
            x: behind A anchors.
            context: [B, L, H], context vectors.
            own: cosines and sines [A, b, D] at the positions of the blocks.
            of_context: the same [L, D] of the context.
            anchors: [A] int64, positions of the roots; a block sees the context before its own.
        """
        batch, count, length, _ = x.shape
        q = self._heads(self.q_proj(x), self.q_norm, own)
        k, v = self._heads(self.k_proj(x), self.k_norm, own), self._heads(self.v_proj(x))
        seen_k = self._heads(self.k_proj(context), self.k_norm, of_context)
        seen_v = self._heads(self.v_proj(context))
        flat, scale = q.flatten(2, 3), self.shape.head_dim**-0.5
        is_later = torch.arange(context.shape[1], device=x.device) >= anchors[:, None, None]
        scores = (flat @ seen_k.mT).unflatten(2, (count, length)).masked_fill(is_later, -torch.inf)
        weights = (torch.cat([scores, q @ k.mT], -1) * scale).softmax(-1)
        of_seen, of_own = weights.split([context.shape[1], length], -1)
        out = (of_seen.flatten(2, 3) @ seen_v).unflatten(2, (count, length)) + of_own @ v
        projected: Tensor = self.o_proj(out.permute(0, 2, 3, 1, 4).reshape(batch, count, length, -1))
        return projected

    def _heads(self, x: Tensor, norm: Norm | None = None, angles: Angles | None = None) -> Tensor:
        """[B, ..., heads D] -> [B, query heads, ..., D], normed and rotated."""
        x = x.unflatten(-1, (-1, self.shape.head_dim))
        x = (x if norm is None else norm(x)).movedim(-2, 1)
        x = x if angles is None else rotate(x, *angles)
        return x.repeat_interleave(self.shape.num_heads // x.shape[1], 1)


class BlockLayer(nn.Module):
    """A layer of Qwen3 whose attention has a context."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(shape.hidden_size), Norm(shape.hidden_size)
        self.self_attn, self.mlp = BlockAttention(shape), FeedForward(shape)

    def forward(self, x: Tensor, *of_attention: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *of_attention)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """DSpark's links of the kind vanilla: what a token adds to the logits of the next one, by two low-rank matrices."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab_size, rank), nn.Linear(rank, vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)  # a new head begins without links


class BlockHead(nn.Module):
    """The DFlash or DSpark head. Its parameters have the names of the published layout."""

    target_ids: Tensor | None = None  # all tokens are drafted

    def __init__(self, shape: BlockShape, scales: list[float]) -> None:
        """Make a head; ``scales`` are divisors of the features of each layer, as of ``Eagle3Head``."""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.num_features * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm, self.norm = Norm(shape.hidden_size), Norm(shape.hidden_size)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.num_layers))
        rank = shape.markov_rank
        self.markov_head = MarkovHead(shape.vocab_size, rank) if rank else None
        per_feature = torch.tensor(scales).repeat_interleave(shape.hidden_size)
        self.scales = nn.Parameter(per_feature, requires_grad=False)

    @property
    def num_parameters(self) -> int:
        """Number of the trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def states(self, tokens: Tensor, features: Tensor, anchors: Tensor, embedding: Tensor) -> Tensor:
        """Compute the inputs of the target's output head for blocks behind all anchors.

        Args:
            tokens: [B, L] int64.
            features: [B, L, F H] float32 of the target at these tokens.
            anchors: [A] int64, positions of the roots.
            embedding: [V, H], the target's.

        Returns:
            [B, A, D, H] of D drafts; entry i predicts the token i + 1 positions after the root.
        """
        s, device = self.shape, tokens.device
        context = self.hidden_norm(self.fc(features / self.scales))
        block = torch.full((*tokens[:, anchors].shape, s.block_size), s.mask_token_id, device=device)
        block[..., 0] = tokens[:, anchors]
        positions = anchors[:, None] + torch.arange(s.block_size, device=device)
        own = tuple(x.unflatten(0, positions.shape) for x in rotary_of(positions.flatten(), s.head_dim))
        of_context = rotary_of(torch.arange(tokens.shape[1], device=device), s.head_dim)
        x = F.embedding(block, embedding)
        for layer in self.layers:
            x = layer(x, context, own, of_context, anchors)
        out: Tensor = self.norm(x[:, :, s.block_size - s.num_drafts :])
        return out


def write_block_head(folder: Path, head: BlockHead, layers: tuple[int, ...], max_positions: int) -> None:
    """Write model.safetensors and config.json; arguments as for ``write_head``."""
    write_folder(folder, own_tensors(head), block_config(head.shape, layers, max_positions))


def block_config(shape: BlockShape, layers: tuple[int, ...], max_positions: int) -> dict[str, Any]:
    """The content of config.json, which counts layers behind which features are read."""
    of_both = {
        "model_type": "qwen3",
        **shape_config(shape, max_positions),
        "num_hidden_layers": shape.num_layers,
        "block_size": shape.block_size,
    }
    reads = {"mask_token_id": shape.mask_token_id, "target_layer_ids": [layer - 1 for layer in layers]}
    if not shape.markov_rank:
        return {"architectures": ["DFlashDraftModel"], **of_both, "dflash_config": reads}
    links = {"markov_rank": shape.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": False}
    return {"architectures": ["Qwen3DSparkModel"], **of_both, **reads, **links}
