"""Tiny Ling-3 checkpoints: bounded decays by key channel, latent attention with rotation and gates of heads.

The MTP head, which transformers leaves out, is made of its layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BailingHybridConfig, BailingHybridForCausalLM
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import (
    BailingHybridDecoderLayer,
    BailingHybridRMSNorm,
    BailingHybridRotaryEmbedding,
)

from tests.families import kimi_linear
from tests.families.checkpoints import randomize, write_checkpoint

HAS_MTP = True
LINEAR, FULL = kimi_linear.LINEAR, kimi_linear.FULL

DEFAULTS: dict[str, Any] = {
    **{name: value for name, value in kimi_linear.DEFAULTS.items() if not name.startswith("linear")},
    "head_dim": 12,
    "n_group": 3,
    "topk_group": 2,
    "rope_theta": 10000.0,
    "num_mtp_layers": 1,
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
PUBLISHED = {".self_attn.o_proj.": ".attention.dense.", ".self_attn.": ".attention."}


class MTPModule(nn.Module):
    """norm(block(eh_proj([norm(embedding of x[t+1]), norm(h[t])]))); no cache anywhere."""

    def __init__(self, config: BailingHybridConfig) -> None:
        super().__init__()
        settings = config.to_dict() | {"layer_types": [FULL], "mlp_layer_types": ["sparse"], "num_hidden_layers": 1}
        own = BailingHybridConfig(**settings)
        own._attn_implementation = "sdpa"  # causal without a mask
        own._experts_implementation = "eager"
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = BailingHybridRMSNorm(size, eps), BailingHybridRMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = BailingHybridDecoderLayer(own, 0)
        self.final_layernorm = BailingHybridRMSNorm(size, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """embedded, hidden [B, T, H]; rotary: cosines and sines of the embedded tokens' positions."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        normed: Tensor = self.final_layernorm(self.block(x, position_embeddings=rotary))
        return normed

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """By the names of published checkpoints, which have experts one by one."""
        stored: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            name = f".{name}".replace(".block.", ".").replace("e_score_correction_bias", "expert_bias")
            for ours, theirs in PUBLISHED.items():
                name = name.replace(ours, theirs)
            before, is_of_experts, projection = f"{prefix}{name[1:]}".partition(".experts.")
            if not is_of_experts:
                stored[before] = tensor.clone()
                continue
            names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
            for i, of_expert in enumerate(tensor):
                parts = zip(names, of_expert.chunk(len(names)), strict=True)
                stored |= {f"{before}.experts.{i}.{part}.weight": x.clone() for part, x in parts}
        return stored


def config_of(variant: str) -> BailingHybridConfig:
    settings = DEFAULTS | VARIANTS[variant]
    config = BailingHybridConfig(**settings, num_hidden_layers=len(settings["layer_types"]))
    config._experts_implementation = "eager"  # the grouped product knows no float64
    return config


def build(folder: Path, variant: str = "default", seed: int = 0) -> BailingHybridForCausalLM:
    """Write the checkpoint with its MTP head; the same model in transformers, float32, without the head."""
    config = config_of(variant)
    model = BailingHybridForCausalLM(config)
    kimi_linear.draw_router_biases(model, seed)
    write_checkpoint(folder, model, seed)
    # published configs have the size of heads of delta attention here; transformers saves that of rotation
    file = folder / "config.json"
    written = {
        name: value for name, value in json.loads(file.read_text("utf8")).items() if not name.startswith("linear")
    }
    file.write_text(json.dumps(written | {"head_dim": DEFAULTS["head_dim"]}), "utf8")
    tensors = load_file(folder / "model.safetensors")
    for i, module in enumerate(mtp_modules(config, seed), start=config.num_hidden_layers):
        tensors |= module.tensors(f"model.layers.{i}.")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


def mtp_modules(config: BailingHybridConfig, seed: int = 0) -> list[MTPModule]:
    """The head that ``build`` writes: a module for each of the config's layers."""
    modules = [MTPModule(config).float().eval() for _ in range(config.num_mtp_layers)]
    for i, module in enumerate(modules):
        randomize(module, torch.Generator().manual_seed(seed + 1000 + i))
        kimi_linear.draw_router_biases(module, seed + 1000 + i)
    return modules


def rotary(config: BailingHybridConfig, embedded: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of embeddings [B, T, H] that stand from position ``first`` on."""
    positions = torch.arange(first, first + embedded.shape[1])[None]
    cosines, sines = BailingHybridRotaryEmbedding(config)(embedded, positions)
    return cosines, sines
