"""Tiny Falcon-H1 checkpoints: attention and Mamba2 in parallel, no multiplier of 1."""

from pathlib import Path
from typing import Any

from transformers import FalconH1Config, FalconH1ForCausalLM

from tests.families.checkpoints import write_checkpoint

HAS_MTP = False

# Grouped heads of both kinds, an untied head, and no size that is a power of two.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "mamba_d_ssm": 44,
    "mamba_n_heads": 4,
    "mamba_d_head": "auto",
    "mamba_n_groups": 2,
    "mamba_d_state": 9,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "embedding_multiplier": 2.7,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.8, 0.7],
    "key_multiplier": 0.55,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.85,
    "ssm_multipliers": [0.9, 1.2, 0.7, 1.3, 0.65],
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.75,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}

BIASES = dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), True)

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},  # gate alone
    "norm-before-gate": {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_d_ssm": None},
    "norm-after-gate": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True},
    "biased": BIASES | {"mamba_rms_norm": True, "num_key_value_heads": 6, "head_dim": None, "mamba_d_conv": 2},
    # the two biases of a mixer's projections are told apart; one group of heads; time steps that are clamped
    "half-biased": {
        "projectors_bias": True,
        "mamba_conv_bias": False,
        "mamba_n_groups": 1,
        "num_key_value_heads": 1,
        "time_step_limit": (0.05, 0.4),
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
    },
    "other-biased": {
        "mamba_proj_bias": True,
        "mlp_bias": True,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 400,
            "factor": 2.0,
            "short_factor": [1.0, 1.3, 1.1, 2.0, 1.7],
            "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0],
        },
    },
}


def build(folder: Path, variant: str = "default", seed: int = 0) -> FalconH1ForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    settings = DEFAULTS | VARIANTS[variant]
    if settings["head_dim"] is None:
        del settings["head_dim"]  # transformers falls back where it is absent, and only there
    return write_checkpoint(folder, FalconH1ForCausalLM(FalconH1Config(**settings)), seed)
