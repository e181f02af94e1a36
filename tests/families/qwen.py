"""Shared by the tiny Qwen checkpoints: an MTP head made of the family's own layers, and how it is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tests.families.checkpoints import randomize
from tests.tiny import write_config

LINEAR, FULL = "linear_attention", "full_attention"

# Grouped heads of both kinds, an untied head, and no size that is a power of two.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 36,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 4,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 26,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def rope(partial: float) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": partial}


def finished(config: PreTrainedConfig) -> PreTrainedConfig:
    config._experts_implementation = "eager"  # the grouped product wants rows of whole 16 bytes
    return config


class MTPHead(nn.Module):
    """fc([norm(embedding of x[t+1]), norm(h[t])]), one attention layer, a norm; no cache anywhere."""

    def __init__(self, config: PreTrainedConfig, layer: type[nn.Module], norm: type[nn.Module]) -> None:
        super().__init__()
        settings = {"layer_types": [FULL], "num_hidden_layers": 1, "mlp_only_layers": [], "decoder_sparse_step": 1}
        own = type(config)(**config.to_dict() | settings)
        own._attn_implementation = "sdpa"  # causal without a mask
        own._experts_implementation = config._experts_implementation
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(hidden, eps), norm(hidden, eps)
        self.layers = nn.ModuleList([layer(own, 0)])
        self.norm = norm(hidden, eps)

    def forward(self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """embeddings, hidden [B, T, H]; rotary: cosines and sines of the embedded tokens' positions."""
        pair = torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], -1)
        out = self.layers[0](self.fc(pair), position_embeddings=rotary, attention_mask=None, position_ids=None)
        normed: Tensor = self.norm(out)
        return normed


@torch.no_grad()
def lively(module: nn.Module, seed: int) -> Any:
    """Random weights; norms here multiply by 1 + w."""
    randomize(module, torch.Generator().manual_seed(seed))
    part: Any
    for part in module.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.weight -= 1.0
    return module.float().eval()


def write(folder: Path, model: PreTrainedModel, head: nn.Module, *, fused: bool, fused_mtp: bool) -> None:
    """Write a checkpoint with its MTP head, as the model's config has it, with the demo's tokenizer.

    Experts are stored in one tensor for all, or in one for each. Published checkpoints have all of these: one for each
    (Qwen3-Next), one for all (Qwen3.6), and one for all in the target beside one for each in the head (Qwen3.5).
    """
    model.save_pretrained(folder)
    write_config(folder, model.config, type(model).__name__)
    file = folder / "model.safetensors"
    tensors = _with_experts(load_file(file), fused)
    tensors |= _with_experts({f"mtp.{name}": tensor for name, tensor in head.state_dict().items()}, fused_mtp)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


def _with_experts(tensors: dict[str, Tensor], fused: bool) -> dict[str, Tensor]:
    return _fuse(_split(tensors)) if fused else _split(tensors)


def _split(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts in one tensor for all -> one for each."""
    split = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        kinds = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}.get(kind)
        if kinds is None:
            split[name] = tensor
            continue
        for expert, both in enumerate(tensor):
            parts = zip(kinds, both.chunk(len(kinds)), strict=True)
            split |= {f"{prefix}.{expert}.{part}.weight": value for part, value in parts}
    return split


def _fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts in one tensor for each -> one for all."""
    fused: dict[str, Tensor] = {}
    experts: dict[str, Any] = {}
    for name, tensor in tensors.items():
        prefix, is_expert, rest = name.partition(".experts.")
        if is_expert:
            number, kind, _ = rest.split(".")
            experts.setdefault(f"{prefix}.experts.", {}).setdefault(kind, {})[int(number)] = tensor
        else:
            fused[name] = tensor
    for prefix, kinds in experts.items():
        gate, up, down = (
            torch.stack([kinds[kind][i] for i in range(len(kinds[kind]))])
            for kind in ("gate_proj", "up_proj", "down_proj")
        )
        fused |= {f"{prefix}gate_up_proj": torch.cat([gate, up], 1), f"{prefix}down_proj": down}
    return fused
