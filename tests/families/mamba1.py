"""Tiny Mamba checkpoints: Mamba1 layers alone."""

from pathlib import Path
from typing import Any

from transformers import MambaConfig, MambaForCausalLM

from tests.families.checkpoints import write_checkpoint

HAS_MTP = False

# An untied head, and no size that is a power of two.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 36,
    "expand": 2,
    "state_size": 10,
    "conv_kernel": 4,
    "time_step_rank": 5,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "biased-tied": {"use_bias": True, "tie_word_embeddings": True, "conv_kernel": 3, "time_step_rank": "auto"},
    "no-conv-bias": {"use_conv_bias": False, "layer_norm_epsilon": 1e-3, "expand": 3, "state_size": 21},
}


def build(folder: Path, variant: str = "default", seed: int = 0) -> MambaForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    return write_checkpoint(folder, MambaForCausalLM(MambaConfig(**DEFAULTS | VARIANTS[variant])), seed)
