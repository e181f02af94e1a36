"""Random DFlash heads in their published layout, and what they compute, from the formulas alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.heads import RandomTensors

EPS, THETA = 1e-5, 500.0
NUM_LAYERS, HEADS, DIM = 2, (4, 2), 10
BLOCK, READS = 6, (2, 0)  # the target has 4 layers; features are in the order of the config


@dataclass(frozen=True)
class BlockFiles:
    """A written head."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def write_block_head(folder: Path, target: Path, seed: int, reads: tuple[int, ...] = READS) -> BlockFiles:
    """A random head for the checkpoint in ``target``."""
    text = json.loads((target / "config.json").read_text("utf8"))
    width, vocab = text["hidden_size"], text["vocab_size"]
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 2 * width + 6,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": HEADS[0],
        "num_key_value_heads": HEADS[1],
        "head_dim": DIM,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * NUM_LAYERS,
        "num_target_layers": 4,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": list(reads)},
    }
    head = BlockFiles(folder, config, block_tensors(width, len(reads), seed))
    save_block_head(head)
    return head


def block_tensors(width: int, num_reads: int, seed: int) -> dict[str, Tensor]:
    random, inner = RandomTensors(seed), 2 * width + 6
    num_q, num_kv = HEADS[0] * DIM, HEADS[1] * DIM
    tensors = {"fc.weight": random.matrix(width, num_reads * width)}
    tensors |= {f"{name}.weight": random.scales(width) for name in ("hidden_norm", "norm")}
    for layer in range(NUM_LAYERS):
        name = f"layers.{layer}."
        sizes = {"q": (num_q, width), "k": (num_kv, width), "v": (num_kv, width), "o": (width, num_q)}
        tensors |= {f"{name}self_attn.{part}_proj.weight": random.matrix(*size) for part, size in sizes.items()}
        tensors |= {f"{name}self_attn.{part}_norm.weight": random.scales(DIM) for part in "qk"}
        sizes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        tensors |= {f"{name}mlp.{part}_proj.weight": random.matrix(*size) for part, size in sizes.items()}
        norms = "input_layernorm", "post_attention_layernorm"
        tensors |= {f"{name}{norm}.weight": random.scales(width) for norm in norms}
    return tensors


def save_block_head(head: BlockFiles, **changes: Any) -> None:
    """Write a head, perhaps with another config; fields that are None are left out."""
    head.folder.mkdir(parents=True, exist_ok=True)
    save_file(head.tensors, head.folder / "model.safetensors", {"format": "pt"})
    config = {name: value for name, value in {**head.config, **changes}.items() if value is not None}
    (head.folder / "config.json").write_text(json.dumps(config), "utf8")


class BlockReference:
    """A head's formula, over context and block at once and without any cache, in float64."""

    def __init__(self, head: BlockFiles, embedding: Tensor, output: Tensor) -> None:
        """embedding, output: [V, H], the target's."""
        self.tensors = {name: tensor.double() for name, tensor in head.tensors.items()}
        self._embedding, self._output = embedding.double(), output.double()
        self._mask = head.config["dflash_config"]["mask_token_id"]

    def __call__(self, features: Tensor, root: int, num_steps: int) -> Tensor:
        """Logits [num_steps, V] behind a root, with the target's features [T, F] at all positions before it."""
        context = self._norm("hidden_norm", self._linear("fc", features.double()))
        x = self._embedding[[root] + [self._mask] * num_steps]
        num_context, length = len(context), num_steps + 1
        positions = torch.arange(num_context + length)
        sees = torch.ones(length, num_context + length, dtype=torch.bool)  # all of the context and of the block
        for layer in range(NUM_LAYERS):
            name = f"layers.{layer}."
            inputs = self._norm(f"{name}input_layernorm", x)
            x = x + self._attend(name, inputs, context, positions, sees)
            y = self._norm(f"{name}post_attention_layernorm", x)
            gate = F.silu(self._linear(f"{name}mlp.gate_proj", y))
            x = x + self._linear(f"{name}mlp.down_proj", gate * self._linear(f"{name}mlp.up_proj", y))
        return self._norm("norm", x)[1:] @ self._output.T

    def _attend(self, name: str, inputs: Tensor, context: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        def heads(part: str, x: Tensor) -> Tensor:
            return self._linear(f"{name}self_attn.{part}_proj", x).unflatten(-1, (-1, DIM)).transpose(0, 1)

        everything = torch.cat([context, inputs])
        q = rotated(self._norm(f"{name}self_attn.q_norm", heads("q", inputs)), positions[len(context) :])
        k = rotated(self._norm(f"{name}self_attn.k_norm", heads("k", everything)), positions)
        group = HEADS[0] // HEADS[1]
        k, v = k.repeat_interleave(group, 0), heads("v", everything).repeat_interleave(group, 0)
        scores = (q @ k.mT / DIM**0.5).masked_fill(~sees, -torch.inf)
        out = scores.softmax(-1) @ v
        return self._linear(f"{name}self_attn.o_proj", out.transpose(0, 1).flatten(1))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], EPS)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"])


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate [heads, L, D]: component i and i + D/2 by position times THETA^(-2i/D)."""
    angles = positions.double()[:, None] * THETA ** (-torch.arange(0, DIM, 2).double() / DIM)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
