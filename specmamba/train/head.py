"""An EAGLE-3 head as it is trained (arXiv 2503.01840).

It is one decoder layer over the next token's embedding and the fused hidden states of three of the target's layers,
applied to its own output for the drafts further down.

Entry t takes the token at t and a hidden state of t - 1, and predicts the token at t + 1. On step 1 that state is the
target's; on step s it is the head's own of step s - 1, as it will be in a draft of s tokens. Everything is run in
parallel over all positions: an entry of step s at t attends to the entries of step 1 up to t - s + 1, the root
of its draft, and to one entry of each later step, those on its own draft (section 3.2, training-time test).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

ROPE_THETA = 10000.0
EPS = 1e-6


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head; by default they follow from the target's."""

    hidden_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    num_features: int  # number of the target's layers that it reads
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int

    @classmethod
    def of(
        cls,
        hidden_size: int,
        vocab_size: int,
        num_features: int,
        draft_vocab_size: int | None = None,
        num_heads: int | None = None,
        intermediate_size: int | None = None,
    ) -> HeadShape:
        heads = num_heads or max(1, hidden_size // 64)
        head_dim = max(16, -(-hidden_size // heads // 2) * 2)
        key_heads = heads // 2 if heads % 2 == 0 else heads
        inner = intermediate_size or 3 * hidden_size
        drafted = draft_vocab_size or vocab_size
        return cls(hidden_size, vocab_size, drafted, num_features, heads, key_heads, head_dim, inner)


class Norm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, EPS)


class Attention(nn.Module):
    """Attention of one step's entries to the entries of all steps so far."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        s, width = shape, 2 * shape.hidden_size
        self.shape = shape
        self.q_proj = nn.Linear(width, s.num_heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(width, s.num_key_value_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(width, s.num_key_value_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.num_heads * s.head_dim, s.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend from x ``[B, L, 2 H]``; append this step's keys and values to ``past``, those of earlier steps."""
        s, (batch, length, _) = self.shape, x.shape
        q, k, v = (
            project(x).view(batch, length, -1, s.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        group = s.num_heads // s.num_key_value_heads
        q, k = rotate(q, *rotary), rotate(k, *rotary).repeat_interleave(group, 1)
        past.append((k, v.repeat_interleave(group, 1)))
        step, scale = len(past), s.head_dim**-0.5
        behind = torch.arange(length, device=x.device)
        hidden = behind > behind[:, None] - (step - 1)
        scores = [(q @ past[0][0].mT * scale).masked_fill(hidden, -torch.inf)]
        # on the same draft, the entry of step d is step - d positions before this one
        own = [[part.roll(step - d, 2) for part in past[d - 1]] for d in range(2, step + 1)]
        scores += [(q * key).sum(-1, keepdim=True) * scale for key, _ in own]
        weights = torch.cat(scores, -1).softmax(-1)
        out = weights[..., :length] @ past[0][1]
        for d, (_, value) in enumerate(own):
            out = out + weights[..., length + d, None] * value
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """The decoder layer; its attention reads embedding and hidden state, concatenated."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = Norm(shape.hidden_size), Norm(shape.hidden_size)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size)
        self.mlp = FeedForward(shape)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        pair = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(pair, rotary, past)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(nn.Module):
    """The EAGLE-3 head. Its parameters have the names of the published layout."""

    def __init__(
        self, shape: HeadShape, output: Tensor, scales: Sequence[float], target_ids: Tensor | None = None
    ) -> None:
        """Make a head whose output matrix starts from the target's.

        Args:
            shape: all sizes.
            output: [V, H], the target's output matrix, which the head's own starts from.
            scales: divisors of the features of each layer, which give all layers the same size in training; powers of
                two, so that ``head_tensors`` removes them without rounding.
            target_ids: [D] int64, the tokens that are drafted, ascending; None: all.
        """
        super().__init__()
        self.shape, self.target_ids = shape, target_ids
        self.fc = nn.Linear(shape.num_features * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Layer(shape)
        self.norm = Norm(shape.hidden_size)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(output if target_ids is None else output[target_ids])
        # a parameter, so that it is saved and a resumed run has the same
        per_feature = torch.tensor(scales).repeat_interleave(shape.hidden_size)
        self.scales = nn.Parameter(per_feature, requires_grad=False)

    @property
    def num_parameters(self) -> int:
        """Number of the trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def states(self, embeddings: Tensor, features: Tensor, num_steps: int) -> list[Tensor]:
        """Compute the inputs of ``lm_head`` for every entry and step.

        Args:
            embeddings: [B, L, H] of the tokens at positions 1 to L.
            features: [B, L, F H] of the target at positions 0 to L - 1.
            num_steps: S, tokens of a draft.

        Returns:
            S tensors [B, L, H]; their first entry is at position 1. The first s entries of step s (from 0) are
                invalid.
        """
        hidden = self.fc(features / self.scales)
        length = embeddings.shape[1]
        rotary = rotary_of(torch.arange(1, length + 1, device=embeddings.device), self.shape.head_dim)
        past: list[tuple[Tensor, Tensor]] = []
        states = []
        for _ in range(num_steps):
            hidden = self.midlayer(embeddings, hidden, rotary, past)
            states.append(self.norm(hidden))
            hidden = hidden.roll(1, 1)  # the entry of the next step at t reads this step's state at t - 1
        return states


def rotary_of(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [L, D] of positions [L]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device) / head_dim
    angles = positions[:, None] * torch.cat([ROPE_THETA**-exponents] * 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., D] by the angles of ``rotary_of``."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def write_head(folder: Path, head: Eagle3Head, layers: tuple[int, ...], max_positions: int) -> None:
    """Write model.safetensors and config.json.

    Args:
        folder: created if it does not exist; a head found there is replaced.
        head: the head.
        layers: layers of the target in front of which it reads.
        max_positions: tokens of the longest text of the target.
    """
    write_folder(folder, head_tensors(head), head_config(head.shape, layers, max_positions))


def write_folder(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write model.safetensors, in one go, and config.json."""
    folder.mkdir(exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, {"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf8")


def head_tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """The tensors by their names in the layout. Draft token i is target token i + d2t[i]; t2d marks drafted tokens."""
    tensors = own_tensors(head)
    if head.target_ids is not None:
        ids = head.target_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(head.shape.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def own_tensors(head: nn.Module) -> dict[str, Tensor]:
    """The parameters of a head by their names, with the divisors of features in its ``fc``."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in head.named_parameters()}
    tensors["fc.weight"] = tensors["fc.weight"] / tensors.pop("scales")
    return tensors


def head_config(shape: HeadShape, layers: tuple[int, ...], max_positions: int) -> dict[str, Any]:
    """The content of config.json.

    It names the target's layers twice, for runtimes that count the inputs of layers and for those that count outputs.
    """
    ids = "eagle_aux_hidden_state_layer_ids"
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **shape_config(shape, max_positions),
        "target_hidden_size": shape.hidden_size,
        "num_hidden_layers": 1,
        "draft_vocab_size": shape.draft_vocab_size,
        ids: list(layers),
        "eagle_config": {ids: [layer - 1 for layer in layers], "use_aux_hidden_state": True},
    }


def shape_config(shape: HeadShape, max_positions: int) -> dict[str, Any]:
    """The fields of config.json that heads of every kind have."""
    return {
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": max_positions,
        "vocab_size": shape.vocab_size,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
