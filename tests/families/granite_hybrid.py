"""Tiny Granite 4 hybrid checkpoints: Mamba2 and attention, a shared MLP beside experts, no multiplier of 1."""

import json
from pathlib import Path
from typing import Any

from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from tests.families.checkpoints import write_checkpoint

HAS_MTP = False
MAMBA, ATTENTION = "mamba", "attention"  # as published configs say

# Grouped heads of both kinds, an untied head, and no size that is a power of two.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 14,
    "shared_intermediate_size": 22,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "layer_types": [MAMBA, ATTENTION, MAMBA, MAMBA],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "position_embedding_type": "nope",
    "mamba_expand": 2,
    "mamba_n_heads": 6,
    "mamba_d_head": "auto",
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "embedding_multiplier": 3.5,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.7,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "rotated": {"position_embedding_type": "rope", "layer_types": [ATTENTION, MAMBA, ATTENTION], "head_dim": 8},
    "biased": {"attention_bias": True, "mamba_proj_bias": True, "num_experts_per_tok": 1, "mamba_n_groups": 3},
    "no-experts": {"num_local_experts": 0, "tie_word_embeddings": True, "num_key_value_heads": 6, "mamba_d_conv": 3},
    "no-conv-bias": {
        "mamba_conv_bias": False,
        "num_experts_per_tok": 6,
        "num_key_value_heads": 1,
        "time_step_limit": (0.05, 0.4),
        "rms_norm_eps": 1e-3,
        "mamba_expand": 1,
        "mamba_n_heads": 4,
    },
    "no-attention": {"layer_types": [MAMBA, MAMBA], "mamba_n_groups": 1},
    "no-state": {"layer_types": [ATTENTION, ATTENTION], "num_local_experts": 0, "position_embedding_type": "rope"},
}


def build(folder: Path, variant: str = "default", seed: int = 0) -> GraniteMoeHybridForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    settings = DEFAULTS | VARIANTS[variant]
    config = GraniteMoeHybridConfig(**settings, num_hidden_layers=len(settings["layer_types"]))
    config._experts_implementation = "eager"  # the grouped product wants rows of whole 16 bytes
    model = write_checkpoint(folder, GraniteMoeHybridForCausalLM(config), seed)
    written = json.loads((folder / "config.json").read_text("utf8"))
    written["layer_types"] = settings["layer_types"]  # transformers writes its newer names
    (folder / "config.json").write_text(json.dumps(written), "utf8")
    return model
