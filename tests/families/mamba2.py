"""Tiny Mamba2 checkpoints: no attention at all."""

from pathlib import Path
from typing import Any

from transformers import Mamba2Config, Mamba2ForCausalLM

from tests.families.checkpoints import write_checkpoint

HAS_MTP = False

# Grouped heads, an untied head, and no size that is a power of two.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 36,
    "num_heads": 6,
    "head_dim": 12,
    "expand": 2,
    "n_groups": 2,
    "state_size": 10,
    "conv_kernel": 4,
    "num_hidden_layers": 3,
    "chunk_size": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "biased-tied": {"use_bias": True, "tie_word_embeddings": True, "n_groups": 1, "conv_kernel": 3},
    "no-conv-bias": {"use_conv_bias": False, "n_groups": 6, "layer_norm_epsilon": 1e-3, "residual_in_fp32": False},
    "limited-steps": {"time_step_limit": (0.05, 0.4), "expand": 1, "num_heads": 3, "n_groups": 3, "state_size": 21},
}


def build(folder: Path, variant: str = "default", seed: int = 0) -> Mamba2ForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    return write_checkpoint(folder, Mamba2ForCausalLM(Mamba2Config(**DEFAULTS | VARIANTS[variant])), seed)
