"""Tiny Qwen3-Next checkpoints, with experts stored one by one and an MTP head, as published ones have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

from tests.families.qwen import DEFAULTS, FULL, LINEAR, MTPHead, finished, lively, rope, write

HAS_MTP = True

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "unnormalised-tied": {
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "num_experts_per_tok": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 18,
        "rope_parameters": rope(0.25),
    },
    "some-dense": {
        "mlp_only_layers": [0],
        "num_experts_per_tok": 5,
        "num_key_value_heads": 6,
        "head_dim": 10,
        "attention_bias": True,
    },
    "every-second": {"decoder_sparse_step": 2, "layer_types": [FULL, LINEAR, LINEAR], "linear_conv_kernel_dim": 3},
}


def config(variant: str = "default") -> Qwen3NextConfig:
    settings: dict[str, Any] = DEFAULTS | {"intermediate_size": 52, "rope_parameters": rope(0.5)} | VARIANTS[variant]
    return finished(Qwen3NextConfig(**settings, num_hidden_layers=len(settings["layer_types"])))


def mtp_head(variant: str = "default", seed: int = 0) -> MTPHead:
    """The head that ``build`` writes."""
    return lively(MTPHead(config(variant), Qwen3NextDecoderLayer, Qwen3NextRMSNorm), seed + 1000)


def build(folder: Path, variant: str = "default", seed: int = 0) -> Qwen3NextForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    model: Qwen3NextForCausalLM = lively(Qwen3NextForCausalLM(config(variant)), seed)
    write(folder, model, mtp_head(variant, seed), fused=False, fused_mtp=False)
    return model
