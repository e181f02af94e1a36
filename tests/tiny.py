"""Tiny Qwen3.5 checkpoints with random weights, for tests that compare with transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from specmamba.bench.demo.checkpoint import copy_demo_tokenizer
from specmamba.bench.demo.model import MTPHead

LINEAR, FULL = "linear_attention", "full_attention"

# Grouped heads of both kinds, an untied head, and no size that is a power of two.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 52,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
# Rows of all matrices are multiples of 32 weights, as quantized formats need.
WHOLE_BLOCKS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
# A vision tower beside a language model; ``out_hidden_size`` is the language model's.
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def tiny_config(**overrides: Any) -> Qwen3_5TextConfig:
    settings = DEFAULTS | overrides
    partial = settings.pop("partial_rotary_factor")
    config = Qwen3_5TextConfig(
        **settings,
        num_hidden_layers=len(settings["layer_types"]),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": partial},
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        mtp_num_hidden_layers=1,
    )
    config._attn_implementation = "sdpa"  # what MTPHead's causal attention relies on
    return config


def write_tiny_checkpoint(folder: Path, seed: int, *, with_mtp: bool = True, **overrides: Any) -> Path:
    """Write a random checkpoint in Hugging Face layout, float32, with the demo's tokenizer.

    Args:
        folder: created if need be.
        seed: of the weights.
        with_mtp: write ``mtp.*`` tensors too.
        overrides: values of the config in place of ``DEFAULTS``.
    """
    config = tiny_config(**overrides)
    generator = torch.Generator().manual_seed(seed)
    target = Qwen3_5ForCausalLM(config)
    randomize(target, generator)
    tensors = dict(target.state_dict())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if with_mtp:
        tensors |= mtp_tensors(config, generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    write_config(folder, config, "Qwen3_5ForCausalLM")
    return folder


def write_config(folder: Path, config: PreTrainedConfig, architecture: str) -> None:
    """config.json and the demo's tokenizer."""
    description = {**config.to_dict(), "architectures": [architecture], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(description), "utf8")
    copy_demo_tokenizer(folder)


def mtp_tensors(config: Qwen3_5TextConfig, generator: torch.Generator) -> dict[str, Tensor]:
    head = MTPHead(config)
    randomize(head, generator)
    return {f"mtp.{name}": tensor.contiguous() for name, tensor in head.state_dict().items()}


@torch.no_grad()
def randomize(module: nn.Module, generator: torch.Generator) -> None:
    """Weights large enough that every part shows in the logits, and delta nets whose states remember.

    transformers' own start is of no use here: with weights of 0.02 the logits are nearly uniform.
    """

    def uniform(x: Tensor, low: float, high: float) -> None:
        x.copy_(torch.rand(x.shape, generator=generator) * (high - low) + low)

    def normal(x: Tensor, std: float) -> None:
        x.copy_(torch.randn(x.shape, generator=generator) * std)

    for part in module.modules():
        if isinstance(part, nn.Linear):
            normal(part.weight, 1.5 / math.sqrt(part.in_features))
        elif isinstance(part, nn.Embedding):
            normal(part.weight, 1.0)
        elif isinstance(part, Qwen3_5RMSNorm):  # multiplies by 1 + w
            uniform(part.weight, -0.5, 0.5)
        elif isinstance(part, Qwen3_5RMSNormGated):
            uniform(part.weight, 0.5, 1.5)
        elif isinstance(part, Qwen3_5GatedDeltaNet):
            normal(part.conv1d.weight, 0.6)
            uniform(part.A_log, math.log(0.05), math.log(16.0))
            uniform(part.dt_bias, -7.0, -2.0)  # softplus: time steps of 0.001 to 0.13
