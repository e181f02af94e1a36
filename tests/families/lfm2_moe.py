"""Tiny LFM2-MoE checkpoints: the layers of LFM2, with experts behind all but the first of them."""

from pathlib import Path
from typing import Any

import torch
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

from tests.families.checkpoints import write_checkpoint
from tests.families.lfm2 import ATTENTION, CONV
from tests.families.lfm2 import DEFAULTS as DENSE

HAS_MTP = False

DEFAULTS: dict[str, Any] = {name: value for name, value in DENSE.items() if name != "block_multiple_of"} | {
    "intermediate_size": 22,
    "moe_intermediate_size": 14,
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.3,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "tied": {"tie_word_embeddings": True, "num_experts_per_tok": 1, "num_dense_layers": 0, "conv_bias": True},
    "unnormalised": {
        "norm_topk_prob": False,
        "use_expert_bias": False,
        "num_experts_per_tok": 6,
        "layer_types": [ATTENTION, CONV],
    },
}


def build(folder: Path, variant: str = "default", seed: int = 0) -> Lfm2MoeForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    settings = DEFAULTS | VARIANTS[variant]
    config = Lfm2MoeConfig(**settings, num_hidden_layers=len(settings["layer_types"]))
    config._experts_implementation = "eager"  # the grouped product wants rows of whole 16 bytes
    model, generator = Lfm2MoeForCausalLM(config), torch.Generator().manual_seed(seed + 1000)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return write_checkpoint(folder, model, seed)
