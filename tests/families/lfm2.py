"""Tiny LFM2 checkpoints: gated short convolutions, whose state is a window alone, and attention."""

from pathlib import Path
from typing import Any

from transformers import Lfm2Config, Lfm2ForCausalLM

from tests.families.checkpoints import write_checkpoint

HAS_MTP = False
CONV, ATTENTION = "conv", "full_attention"

# Grouped heads, an untied head, and no size that is a power of two.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 30,
    "block_multiple_of": 6,
    "layer_types": [CONV, CONV, ATTENTION, CONV],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "conv_L_cache": 3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "biased-tied": {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": True, "norm_eps": 1e-3},
    "plain-sizes": {"block_auto_adjust_ff_dim": False, "num_key_value_heads": 6, "conv_L_cache": 2},
    "wide-sizes": {"block_ffn_dim_multiplier": 1.3, "num_key_value_heads": 1, "layer_types": [ATTENTION, CONV]},
    "no-attention": {"layer_types": [CONV, CONV], "conv_L_cache": 5},
}


def build(folder: Path, variant: str = "default", seed: int = 0) -> Lfm2ForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    settings = DEFAULTS | VARIANTS[variant]
    config = Lfm2Config(**settings, num_hidden_layers=len(settings["layer_types"]))
    return write_checkpoint(folder, Lfm2ForCausalLM(config), seed)
