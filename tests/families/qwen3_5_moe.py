"""Tiny Qwen3.5 checkpoints with mixtures of experts, and an MTP head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm

from tests.families.qwen import DEFAULTS, FULL, LINEAR, MTPHead, finished, lively, rope, write

HAS_MTP = True

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "tied": {"tie_word_embeddings": True, "num_experts_per_tok": 1, "num_experts": 4, "rope_parameters": rope(0.25)},
    "all-experts": {
        "num_experts_per_tok": 7,
        "layer_types": [FULL, LINEAR],
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_conv_kernel_dim": 2,
        "num_key_value_heads": 1,
        "attention_bias": True,
    },
}
# whether experts are stored in one tensor for all, in the target and in the head
FUSED = {"default": (True, False), "tied": (True, True), "all-experts": (False, False)}


def config(variant: str = "default") -> Qwen3_5MoeTextConfig:
    settings: dict[str, Any] = DEFAULTS | {"rope_parameters": rope(0.5)} | VARIANTS[variant]
    return finished(
        Qwen3_5MoeTextConfig(**settings, num_hidden_layers=len(settings["layer_types"]), mtp_num_hidden_layers=1)
    )


def mtp_head(variant: str = "default", seed: int = 0) -> MTPHead:
    """The head that ``build`` writes."""
    return lively(MTPHead(config(variant), Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm), seed + 1000)


def build(folder: Path, variant: str = "default", seed: int = 0) -> Qwen3_5MoeForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    model: Qwen3_5MoeForCausalLM = lively(Qwen3_5MoeForCausalLM(config(variant)), seed)
    fused, fused_mtp = FUSED[variant]
    write(folder, model, mtp_head(variant, seed), fused=fused, fused_mtp=fused_mtp)
    return model
