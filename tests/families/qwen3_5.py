"""Tiny dense Qwen3.5 checkpoints, with an MTP head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Qwen3_5ForCausalLM

from tests.tiny import FULL, LINEAR, write_tiny_checkpoint

HAS_MTP = True

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "attention-first": {
        "vocab_size": 97,
        "layer_types": [FULL, LINEAR, FULL, LINEAR, LINEAR],
        "hidden_size": 30,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 1.0,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_conv_kernel_dim": 3,
    },
    "tied": {"vocab_size": 203, "num_key_value_heads": 6, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
}


def build(folder: Path, variant: str = "default", seed: int = 0) -> Qwen3_5ForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    write_tiny_checkpoint(folder, seed, **VARIANTS[variant])
    return Qwen3_5ForCausalLM.from_pretrained(folder).float().eval()
