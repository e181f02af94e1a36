"""Every family at about half a billion parameters, as transformers builds it: random weights, real proportions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specmamba.bench.demo.checkpoint import save_with_demo_tokenizer

COMMON: dict[str, Any] = {
    "vocab_size": 32768,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
LONG: dict[str, Any] = {"max_position_embeddings": 4096}
THREE_TO_ONE = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
QWEN: dict[str, Any] = {
    **LONG,
    "hidden_size": 1024,
    "num_hidden_layers": 20,
    "layer_types": THREE_TO_ONE * 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512,
}
OLMO_HYBRID: dict[str, Any] = {
    **LONG,
    "hidden_size": 1280,
    "intermediate_size": 3584,
    "num_hidden_layers": 20,
    "layer_types": THREE_TO_ONE * 5,
    "num_attention_heads": 10,
    "linear_num_key_heads": 10,
    "linear_num_value_heads": 10,
    "linear_key_head_dim": 96,
    "linear_value_head_dim": 192,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}
KIMI_LINEAR: dict[str, Any] = {
    **LONG,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 20,
    "layer_types": THREE_TO_ONE * 5,
    "mlp_layer_types": ["dense"] + ["sparse"] * 19,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "linear_num_heads": 8,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
}
LING: dict[str, Any] = {
    **LONG,
    "hidden_size": 1024,
    "intermediate_size": 2560,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 18,
    "layer_types": (["linear_attention"] * 5 + ["full_attention"]) * 3,
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "kv_lora_rank": 512,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "rope_theta": 6e6,
}
BAMBA: dict[str, Any] = {
    **LONG,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "attn_layer_indices": [5, 11, 17, 23],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
}
FALCON_H1: dict[str, Any] = {
    **LONG,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
}
GRANITE_HYBRID: dict[str, Any] = {
    **LONG,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 20,
    "layer_types": (["mamba"] * 4 + ["attention"]) * 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "position_embedding_type": "nope",
}
NEMOTRON_H: dict[str, Any] = {
    **LONG,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "hybrid_override_pattern": "M-M-M*-M-M-M*-M-M-M*-M-M-M*-",
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "mamba_num_heads": 40,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "tie_word_embeddings": False,
}
MAMBA2: dict[str, Any] = {
    "hidden_size": 1280,
    "num_hidden_layers": 48,
    "num_heads": 40,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "expand": 2,
}
FALCON_MAMBA: dict[str, Any] = {
    "hidden_size": 1280,
    "num_hidden_layers": 40,
    "state_size": 16,
    "expand": 2,
    "time_step_rank": 80,
}
JAMBA: dict[str, Any] = {
    **LONG,
    "hidden_size": 1024,
    "intermediate_size": 768,
    "num_hidden_layers": 16,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_dt_rank": 64,
}
LFM2: dict[str, Any] = {
    **LONG,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 20,
    "layer_types": ["conv", "conv", "conv", "full_attention"] * 5,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "conv_L_cache": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
LFM2_MOE: dict[str, Any] = LFM2 | {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_dense_layers": 2,
    "moe_intermediate_size": 384,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
LFM3: dict[str, Any] = {
    **LONG,
    "hidden_size": 1280,
    "intermediate_size": 4800,
    "num_hidden_layers": 21,
    "layer_types": ["conv", *["conv", "full_attention", "conv", "sliding_attention"] * 5],
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "conv_L_cache": 7,
    "sliding_window": 256,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}

# family: (class of the configuration, class of the model, settings)
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", QWEN | {"intermediate_size": 3584}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", QWEN | QWEN_EXPERTS | {"intermediate_size": 3584}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", QWEN | QWEN_EXPERTS),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", OLMO_HYBRID),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", KIMI_LINEAR),
    "bailing_hybrid": ("BailingHybridConfig", "BailingHybridForCausalLM", LING),
    "bamba": ("BambaConfig", "BambaForCausalLM", BAMBA),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", FALCON_H1),
    "granite_hybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", GRANITE_HYBRID),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", NEMOTRON_H),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", LFM2),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", LFM2_MOE),
    "lfm3": ("Lfm3Config", "Lfm3ForCausalLM", LFM3),
    "falcon_mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", FALCON_MAMBA),
    "jamba": ("JambaConfig", "JambaForCausalLM", JAMBA),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", MAMBA2),
}


def write_family(name: str, folder: Path, seed: int = 0) -> int:
    """Write a checkpoint of a family in bfloat16, with the demo's tokenizer; returns the number of parameters."""
    import transformers

    config_class, model_class, settings = SHAPES[name]
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: Any = getattr(transformers, model_class)(getattr(transformers, config_class)(**COMMON | settings))
    finally:
        torch.set_default_dtype(before)
    save_with_demo_tokenizer(model, folder, "bfloat16")
    return sum(parameter.numel() for parameter in model.parameters())
