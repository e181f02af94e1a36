"""Tiny Ling-3 checkpoints: bounded decays by key channel, latent attention with rotation and gates of heads."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import BailingHybridConfig, BailingHybridForCausalLM

from tests.families import kimi_linear
from tests.families.checkpoints import write_checkpoint

HAS_MTP = False
LINEAR, FULL = kimi_linear.LINEAR, kimi_linear.FULL

DEFAULTS: dict[str, Any] = {
    **{name: value for name, value in kimi_linear.DEFAULTS.items() if not name.startswith("linear")},
    "head_dim": 12,
    "n_group": 3,
    "topk_group": 2,
    "rope_theta": 10000.0,
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
    kimi_linear.draw_router_biases(model, seed)
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
