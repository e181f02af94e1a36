"""Tiny Kimi-Linear checkpoints: decays by key channel, latent attention without rotation, mixtures of experts."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from tests.families.checkpoints import write_checkpoint

HAS_MTP = False
LINEAR, FULL = "linear_attention", "full_attention"

# No size that is a power of two, and of latent attention no two that are equal.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 22,
    "moe_intermediate_size": 12,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "linear_head_dim": 12,
    "linear_num_heads": 3,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "kv_lora_rank": 18,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "latent-queries": {
        "q_lora_rank": 20,
        "layer_types": [FULL, LINEAR, FULL],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": False,
        "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": True,
    },
}


def build(folder: Path, variant: str = "default", seed: int = 0) -> KimiLinearForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    settings = DEFAULTS | VARIANTS[variant]
    config = KimiLinearConfig(**settings, num_hidden_layers=len(settings["layer_types"]))
    model = KimiLinearForCausalLM(config)
    draw_router_biases(model, seed)
    write_checkpoint(folder, model, seed)
    if variant == "default":
        _use_published_names(folder / "model.safetensors")
    return model


def draw_router_biases(model: nn.Module, seed: int) -> None:
    """Correction biases of all routers, which are no parameters, between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.rand(bias.shape, generator=generator))


def _use_published_names(file: Path) -> None:
    """Dense layers by their own name; transformers saves them by that of mixtures."""
    names = {f".block_sparse_moe.{x}_proj": f".mlp.{x}_proj" for x in ("gate", "up", "down")}
    tensors = load_file(file)
    for name in list(tensors):
        for saved, published in names.items():
            if saved in name:
                tensors[name.replace(saved, published)] = tensors.pop(name)
    save_file(tensors, file, {"format": "pt"})
