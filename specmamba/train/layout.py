"""A trained head as a folder in the EAGLE-3 layout of Hugging Face checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specmamba.train.head import EPS, ROPE_THETA, Eagle3Head, HeadShape


def write_head(folder: Path, head: Eagle3Head, layers: tuple[int, ...], max_positions: int) -> None:
    """model.safetensors and config.json.

    Args:
        folder: created if need be; a head found there is replaced.
        head: the head.
        layers: of the target, in front of which it reads.
        max_positions: tokens of the longest text of the target.
    """
    folder.mkdir(exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_file(head_tensors(head), partial, {"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    config = head_config(head.shape, layers, max_positions)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf8")


def head_tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """By their names in the layout. Draft token i is target token i + d2t[i]; t2d says which ones are drafted."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in head.named_parameters()}
    tensors["fc.weight"] = tensors["fc.weight"] / tensors.pop("scales")
    if head.target_ids is not None:
        ids = head.target_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(head.shape.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def head_config(shape: HeadShape, layers: tuple[int, ...], max_positions: int) -> dict[str, Any]:
    """The content of config.json.

    It names the target's layers twice, for runtimes that count the inputs of layers and for those that count outputs.
    """
    ids = "eagle_aux_hidden_state_layer_ids"
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": max_positions,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "attention_bias": False,
        "tie_word_embeddings": False,
        ids: list(layers),
        "eagle_config": {ids: [layer - 1 for layer in layers], "use_aux_hidden_state": True},
        "dtype": "float32",
    }
