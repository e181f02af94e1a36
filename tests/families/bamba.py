"""Tiny Bamba checkpoints: Mamba2 and attention whose heads are rotated by half, an MLP behind each."""

from pathlib import Path
from typing import Any

from transformers import BambaConfig, BambaForCausalLM

from tests.families.checkpoints import write_checkpoint

HAS_MTP = False

# Grouped heads of both kinds, an untied head, and no size that is a power of two.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 22,
    "num_hidden_layers": 4,
    "attn_layer_indices": [1],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "mamba_expand": 2,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "biased-tied": {
        "attention_bias": True,
        "mlp_bias": True,
        "mamba_proj_bias": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 3,
        "num_hidden_layers": 3,
        "attn_layer_indices": [0, 2],
        "mamba_n_groups": 3,
    },
    "no-conv-bias": {
        "mamba_conv_bias": False,
        "mamba_d_conv": 3,
        "mamba_n_groups": 1,
        "time_step_limit": (0.05, 0.4),
        "rms_norm_eps": 1e-3,
        "num_hidden_layers": 2,
    },
    "no-attention": {"attn_layer_indices": None, "num_hidden_layers": 2},
}


def build(folder: Path, variant: str = "default", seed: int = 0) -> BambaForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    return write_checkpoint(folder, BambaForCausalLM(BambaConfig(**DEFAULTS | VARIANTS[variant])), seed)
