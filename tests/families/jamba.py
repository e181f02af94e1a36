"""Tiny Jamba checkpoints: Mamba1 and attention without positions, experts or an MLP behind each."""

from pathlib import Path
from typing import Any

from transformers import JambaConfig, JambaForCausalLM

from tests.families.checkpoints import write_checkpoint

HAS_MTP = False

# Every mixer beside every feed-forward layer but attention beside an MLP, grouped heads, an untied head, and no size
# that is a power of two.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 22,
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "mamba_expand": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
    "mamba_dt_rank": 5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "biased-tied": {
        "mamba_proj_bias": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 3,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "num_experts_per_tok": 1,
        "mamba_d_conv": 3,
        "mamba_dt_rank": "auto",
        "num_hidden_layers": 2,
    },
    "no-conv-bias": {
        "mamba_conv_bias": False,
        "num_experts": 1,
        "rms_norm_eps": 1e-3,
        "mamba_expand": 3,
        "mamba_d_state": 21,
        "num_hidden_layers": 3,
    },
    "no-attention": {"attn_layer_period": 8, "num_experts_per_tok": 6, "attn_layer_offset": 7, "num_hidden_layers": 2},
}


def build(folder: Path, variant: str = "default", seed: int = 0) -> JambaForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    config = JambaConfig(**DEFAULTS | VARIANTS[variant])
    config._experts_implementation = "eager"  # the grouped product wants rows of whole 16 bytes
    return write_checkpoint(folder, JambaForCausalLM(config), seed)
