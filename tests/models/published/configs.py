"""Configs of published checkpoints that are quantized, and the fields that are shrunk for tests.

``quantized.py`` says where they were found.
"""

from __future__ import annotations

from typing import Any

QWEN = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": 248044,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 248320,
}
QWEN_MOE = QWEN | {
    "hidden_size": 2048,
    "layer_types": [*3 * ["linear_attention"], "full_attention"] * 10,
    "linear_num_value_heads": 32,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}
QWEN_DENSE = QWEN | {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": [*3 * ["linear_attention"], "full_attention"] * 16,
    "linear_num_value_heads": 48,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
}
VISION = {"depth": 27, "hidden_size": 1152, "num_heads": 16, "out_hidden_size": 2048, "patch_size": 16}


def multimodal(text: dict[str, Any]) -> dict[str, Any]:
    """The config around that of a text model."""
    kind = str(text["model_type"]).removesuffix("_text")
    name = "Qwen3_5Moe" if "moe" in kind else "Qwen3_5"
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": 248056,
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": VISION | {"model_type": f"{kind}_vision"},
    }


SMALL_QWEN = {
    "head_dim": 32,
    "hidden_size": 160,
    "layer_types": [*3 * ["linear_attention"], "full_attention"],
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 32,
    "linear_num_value_heads": 6,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "bos_token_id": None,
    "eos_token_id": 0,
}
SMALL_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2}
SMALL_EXPERTS |= {"shared_expert_intermediate_size": 32}
QWEN_NEXT = {name: value for name, value in QWEN_MOE.items() if not name.startswith(("mtp_", "attn_", "mamba_"))} | {
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "intermediate_size": 5120,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "layer_types": [*3 * ["linear_attention"], "full_attention"] * 12,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default", "partial_rotary_factor": 0.25},
    "vocab_size": 151936,
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_group": 1,
    "n_groups": 8,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
NANO = NEMOTRON | {
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_num_heads": 64,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "routed_scaling_factor": 2.5,
    "torch_dtype": "bfloat16",
}
BLOCK_TYPES = {"M": "mamba", "E": "moe", "*": "attention"}
LIGHTNING = {name: value for name, value in NANO.items() if name != "hybrid_override_pattern"} | {
    "dtype": "bfloat16",
    "layers_block_type": [BLOCK_TYPES[letter] for letter in str(NANO["hybrid_override_pattern"])],
    "max_position_embeddings": 1048576,
    "moe_latent_size": None,
    "moe_shared_expert_overlap": True,
    "mtp_layers_block_type": ["attention", "moe"],
    "num_nextn_predict_layers": 1,
}
SUPER = NEMOTRON | {
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "hybrid_override_pattern": f"MEMEMEM*{'EMEMEMEM*' * 2}{'EMEMEMEMEM*' * 4}EMEMEMEM*EMEMEMEME",
    "intermediate_size": 2688,
    "mamba_num_heads": 128,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "moe_shared_expert_overlap": False,
    "mtp_hybrid_override_pattern": "*E",
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "num_hidden_layers": 88,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 5.0,
    "time_step_limit": [0.0, float("inf")],
}
SMALL_NEMOTRON = {
    "head_dim": 16,
    "hidden_size": 96,
    "intermediate_size": 48,
    "mamba_head_dim": 16,
    "mamba_num_heads": 4,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 64,
    "n_groups": 2,
    "n_routed_experts": 6,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "ssm_state_size": 16,
    "vocab_size": 128,
}
SMALL_PATTERN = {"hybrid_override_pattern": "MEM*EME", "num_hidden_layers": 7}
