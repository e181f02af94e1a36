"""Tiny Ling-3 checkpoints: bounded decays by key channel, latent attention with rotation and gates of heads."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import BailingHybridConfig, BailingHybridForCausalLM

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
    "head_dim": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "kv_lora_rank": 18,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "unbounded": {
        "kda_safe_gate": False,
        "q_lora_rank": 20,
        "layer_types": [FULL, LINEAR],
        "mlp_layer_types": ["sparse", "dense"],
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "short_conv_kernel_size": 3,
        "tie_word_embeddings": True,
    },
}


def build(folder: Path, variant: str = "default", seed: int = 0) -> BailingHybridForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    settings = DEFAULTS | VARIANTS[variant]
    config = BailingHybridConfig(**settings, num_hidden_layers=len(settings["layer_types"]))
    model = BailingHybridForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.rand(bias.shape, generator=generator))
    write_checkpoint(folder, model, seed)
    # published configs have the size of heads of delta attention here; transformers saves that of rotation
    file = folder / "config.json"
    written = {
        name: value for name, value in json.loads(file.read_text("utf8")).items() if not name.startswith("linear")
    }
    file.write_text(json.dumps(written | {"head_dim": settings["head_dim"]}), "utf8")
    _add_mtp_layer(folder / "model.safetensors", len(settings["layer_types"]))
    return model


def _add_mtp_layer(file: Path, layer: int) -> None:
    """A tensor of the MTP head, which is read past."""
    tensors = load_file(file)
    save_file(tensors | {f"model.layers.{layer}.eh_proj.weight": torch.ones(3, 6)}, file, {"format": "pt"})
