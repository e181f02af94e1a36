"""Tiny Nemotron-H checkpoints: all four kinds of layers, and the MTP head that transformers leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import NemotronHConfig, NemotronHForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm

from tests.families.checkpoints import randomize, write_checkpoint

HAS_MTP = True

# Grouped heads of all kinds, an untied head, and no size that is a power of two.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 36,
    "hybrid_override_pattern": "ME*-MEM",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 52,
    "mamba_num_heads": 6,
    "mamba_head_dim": 14,
    "n_groups": 2,
    "ssm_state_size": 10,
    "conv_kernel": 4,
    "chunk_size": 16,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "moe_shared_expert_intermediate_size": 26,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    # as Nemotron-H and Nemotron Nano 2 are: no experts; time_step_min says how weights began, and changes nothing
    "dense": {
        "hybrid_override_pattern": "M-M*-M-",
        "mtp_hybrid_override_pattern": "-*",
        "n_groups": 3,
        "conv_kernel": 3,
        "time_step_min": 0.3,
        "layer_norm_epsilon": 1e-3,
        "residual_in_fp32": True,
    },
    "biased": {
        "use_bias": True,
        "mlp_bias": True,
        "mlp_hidden_act": "gelu",
        "attention_bias": True,
        "use_conv_bias": False,
        "moe_latent_size": 15,
        "num_key_value_heads": 6,
        "n_groups": 1,
    },
    "grouped-routing": {
        "hybrid_override_pattern": "*MEEM",
        "mtp_hybrid_override_pattern": "E**-",
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "mlp_hidden_act": "silu",
        "n_shared_experts": 2,  # together of the config's width
        "sliding_window": 512,  # as long as texts may be
        "routed_scaling_factor": 1.0,
        "moe_latent_size": 18,
        "n_groups": 6,
        "time_step_limit": [0.1, 0.6],
    },
    "tied": {"tie_word_embeddings": True, "hybrid_override_pattern": "MM", "mtp_hybrid_override_pattern": "E"},
}


class MTPHead(nn.Module):
    """The head, made of transformers' blocks, with its parts at the names that checkpoints have for them."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        kinds, size, eps = config.mtp_layers_block_type, config.hidden_size, config.layer_norm_epsilon
        inner = NemotronHConfig(**{**config.to_dict(), "layers_block_type": kinds})
        inner._attn_implementation = "sdpa"  # causal without a mask
        inner._experts_implementation = config._experts_implementation
        self.layers = nn.ModuleList(NemotronHBlock(inner, i) for i in range(len(kinds)))
        _add_attention_biases(self, inner)
        first, last = self.layers[0], self.layers[-1]
        first.enorm, first.hnorm = NemotronHRMSNorm(size, eps), NemotronHRMSNorm(size, eps)
        first.eh_proj = nn.Linear(2 * size, size, bias=False)
        last.final_layernorm = NemotronHRMSNorm(size, eps)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings of tokens and the hidden states before them, both [B, T, H] -> [B, T, H]."""
        first: Any = self.layers[0]
        last: Any = self.layers[-1]
        x = first.eh_proj(torch.cat([first.enorm(embedded), first.hnorm(hidden)], -1))
        for layer in self.layers:
            x = layer(x)
        return last.final_layernorm(x)

    def tensors(self) -> dict[str, Tensor]:
        """As published checkpoints store them: experts one by one."""
        stored: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            before, found, projection = f"mtp.{name}".partition(".experts.")
            if found:
                stored |= {f"{before}.experts.{i}.{projection}.weight": x.clone() for i, x in enumerate(tensor)}
            else:
                stored[before] = tensor.contiguous()
        return stored


def build(folder: Path, variant: str = "default", seed: int = 0) -> NemotronHForCausalLM:
    """Write the checkpoint with its MTP head; the same model in transformers, float32, without the head."""
    model, head = make(variant, seed)
    write_checkpoint(folder, model, seed)
    file = folder / "model.safetensors"
    tensors = load_file(file) | head.tensors()
    if model.config.tie_word_embeddings:  # transformers leaves the two apart, the original code does not
        del tensors["lm_head.weight"]
        model.lm_head.weight = model.model.embeddings.weight
    save_file(tensors, file, {"format": "pt"})
    return model


def make(variant: str, seed: int) -> tuple[NemotronHForCausalLM, MTPHead]:
    """A target without weights yet, and a head with weights that depend on the seed only."""
    config = NemotronHConfig(**DEFAULTS | VARIANTS[variant])
    config._experts_implementation = "eager"  # the grouped product wants rows of whole 16 bytes
    model = NemotronHForCausalLM(config)
    _add_attention_biases(model, config)
    _limit_time_steps(model, config)
    head = MTPHead(config).float().eval()
    generator = torch.Generator().manual_seed(seed + 1000)
    randomize(head, generator)
    for module in (model, head):
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return model, head


def _limit_time_steps(model: NemotronHForCausalLM, config: NemotronHConfig) -> None:
    """The limit of the original code; transformers uses ``time_step_min``, a known bug."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(config.time_step_limit)


def _add_attention_biases(module: nn.Module, config: NemotronHConfig) -> None:
    """Biases as in the original code; transformers has none."""
    if not config.attention_bias:
        return
    for part in module.modules():
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            if isinstance(old := getattr(part, name, None), nn.Linear):
                setattr(part, name, nn.Linear(old.in_features, old.out_features))
