"""Tiny LFM3 checkpoints: gated short convolutions, full attention, and attention over windows smaller than a tree."""

from pathlib import Path
from typing import Any

from transformers import Lfm3Config, Lfm3ForCausalLM

from tests.families.checkpoints import write_checkpoint

HAS_MTP = False
CONV, WINDOWED, ATTENTION = "conv", "sliding_attention", "full_attention"

# Grouped heads that are wider than the hidden size, an untied head, and no size that is a power of two.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 30,
    "layer_types": [CONV, WINDOWED, ATTENTION, CONV],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "sliding_window": 9,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {
        WINDOWED: {"rope_type": "default", "rope_theta": 100.0},
        ATTENTION: {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "biased-tied": {
        "conv_bias": True,
        "attention_bias": True,
        "conv_L_cache": 4,
        "tie_word_embeddings": True,
        "norm_eps": 1e-3,
        "sliding_window": 2,
    },
    "plain": {"use_sandwich_norm": False, "use_attention_gate": False, "num_key_value_heads": 6},
    "windows-alone": {"layer_types": [WINDOWED, CONV, WINDOWED], "num_key_value_heads": 1, "sliding_window": 3},
    "no-attention": {"layer_types": [CONV, CONV], "conv_L_cache": 5},
}


def build(folder: Path, variant: str = "default", seed: int = 0) -> Lfm3ForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    settings = DEFAULTS | VARIANTS[variant]
    config = Lfm3Config(**settings, num_hidden_layers=len(settings["layer_types"]))
    return write_checkpoint(folder, Lfm3ForCausalLM(config), seed)
