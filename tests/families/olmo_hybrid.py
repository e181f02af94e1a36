"""Tiny Olmo-Hybrid checkpoints: gated delta nets with steps up to 2, attention with norms over whole rows."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

from tests.families.checkpoints import write_checkpoint

HAS_MTP = False
LINEAR, FULL = "linear_attention", "full_attention"

# Grouped heads of both kinds, an untied head, and no size that is a power of two.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 22,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "biased-tied": {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 6,
        "linear_num_value_heads": 2,
        "rms_norm_eps": 1e-2,
    },
    "rotated": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": [FULL, LINEAR, FULL],
        "num_key_value_heads": 1,
        "linear_conv_kernel_dim": 3,
    },
    "small-steps": {"linear_allow_neg_eigval": False, "layer_types": [LINEAR, FULL]},
}


def build(folder: Path, variant: str = "default", seed: int = 0) -> OlmoHybridForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    settings = DEFAULTS | VARIANTS[variant]
    config = OlmoHybridConfig(**settings, num_hidden_layers=len(settings["layer_types"]))
    model = write_checkpoint(folder, OlmoHybridForCausalLM(config), seed)
    _use_published_names(folder / "model.safetensors", config)
    return model


def _use_published_names(file: Path, config: OlmoHybridConfig) -> None:
    """Convolutions of queries, keys and values apart, and the norms of attention blocks by their own names.

    transformers saves three convolutions of one size, and a norm of an attention block by the name of a delta net's.
    """
    tensors = load_file(file)
    key = config.linear_num_key_heads * config.linear_key_head_dim
    value = config.linear_num_value_heads * config.linear_value_head_dim
    for i, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{i}."
        if kind == FULL:
            norm = tensors.pop(f"{prefix}feedforward_layer_norm.weight")
            tensors[f"{prefix}post_attention_layernorm.weight"] = norm
        else:
            names = [f"{prefix}linear_attn.{x}_conv1d.weight" for x in "qkv"]
            parts = torch.cat([tensors[name] for name in names]).split([key, key, value])
            tensors |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, file, {"format": "pt"})
