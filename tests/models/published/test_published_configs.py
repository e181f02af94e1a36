"""Models with the configs and tensor names of published checkpoints, loaded as shapes without weights.

Fields of the configs that are not used in any computation are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from specmamba.cache.shapes import KVShape, StateShape
from specmamba.checkpoints.tensor_reader import ShapeReader, StoredTensor
from specmamba.kernels import mamba2
from specmamba.models import registry
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.parallel.ranks import ONE_RANK, Ranks
from tests.models.published.names import (
    Tensors,
    bamba,
    falcon,
    granite,
    jamba,
    kimi,
    lfm2,
    lfm3,
    ling,
    nemotron,
    olmo,
    pure_mamba,
    qwen,
    selective,
)
from tests.models.test_weight_bytes import parts

INF = float("inf")


class Published(NamedTuple):
    config: dict[str, Any]
    tensors: Callable[[dict[str, Any]], Tensors]
    num_parameters: int | float  # as published, with its MTP head; a float is rounded
    kv: tuple[KVShape, ...]  # with its MTP head
    state_layers: int
    state: StateShape


QWEN = {
    "attention_bias": False,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
QWEN_NEXT = QWEN | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "intermediate_size": 5120,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "vocab_size": 151936,
}
QWEN_35 = QWEN | {
    "model_type": "qwen3_5_moe_text",
    "attn_output_gate": True,
    "layer_types": [*3 * ["linear_attention"], "full_attention"] * 10,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "vocab_size": 248320,
}
BAMBA = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "attn_layer_indices": [9, 18, 27],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
FALCON = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "attention_bias": False,
    "hidden_act": "silu",
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_multipliers": [0.88, 0.59],
    "projectors_bias": False,
    "rope_scaling": None,
    "rope_theta": 1e11,
    "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
    "tie_word_embeddings": False,
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "attention_bias": False,
    "chunk_size": 128,
    "conv_kernel": 4,
    "head_dim": 128,
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 1e-4,
    "time_step_limit": [0.0, INF],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
NEMOTRON_3 = NEMOTRON | {
    "intermediate_size": 1856,
    "max_position_embeddings": 262144,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "topk_group": 1,
}
GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "attention_bias": False,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "normalization_function": "rmsnorm",
    "num_hidden_layers": 40,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "vocab_size": 65536,
}
LFM3 = {
    "architectures": ["Lfm3ForCausalLM"],
    "model_type": "lfm3",
    "attention_bias": False,
    "conv_L_cache": 7,
    "conv_bias": False,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "layer_types": [
        "conv" if i % 2 or i == 0 else "full_attention" if i % 4 == 2 else "sliding_attention" for i in range(24)
    ],
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "sliding_window": 256,
    "tie_word_embeddings": True,
    "use_attention_gate": True,
    "use_sandwich_norm": True,
    "vocab_size": 128000,
}
OLMO_HYBRID = {
    "architectures": ["OlmoHybridForCausalLM"],
    "model_type": "olmo_hybrid",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "layer_types": [*3 * ["linear_attention"], "full_attention"] * 8,
    "linear_allow_neg_eigval": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 96,
    "linear_num_key_heads": 30,
    "linear_num_value_heads": 30,
    "linear_value_head_dim": 192,
    "max_position_embeddings": 65536,
    "num_attention_heads": 30,
    "num_hidden_layers": 32,
    "num_key_value_heads": 30,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": None},
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}

KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
# sizes as transformers has them for this checkpoint; limits of SwiGLU, which change no shape, are left out
LING = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "first_k_dense_replace": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 6144,
    "kda_lower_bound": -5.0,
    "kda_safe_gate": True,
    "kv_lora_rank": 512,
    "layer_group_size": 6,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 768,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 42,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 6000000,
    "routed_scaling_factor": 2.5,
    "short_conv_kernel_size": 4,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 157184,
}

MODELS = {
    "Qwen3-Next-80B-A3B": Published(
        QWEN_NEXT,
        lambda c: qwen(c, "model.", fused=True),
        81_324_862_720,
        (KVShape(13, 2, 256),),
        36,
        StateShape(16, 32, 128, 128, 4),
    ),
    "Qwen3.5-35B-A3B": Published(
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": QWEN_35,
            "tie_word_embeddings": False,
        },
        lambda c: qwen(c["text_config"], "model.language_model.", fused=False),
        35_951_822_704 - 446_571_248,  # without the vision tower
        (KVShape(11, 2, 256),),
        30,
        StateShape(16, 32, 128, 128, 4),
    ),
    "Bamba-9B": Published(BAMBA, bamba, 9.78e9, (KVShape(3, 8, 128),), 29, StateShape(1, 128, 128, 64, 4)),
    "Falcon-H1-0.5B": Published(
        FALCON
        | {
            "head_dim": 64,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "mamba_d_head": 64,
            "mamba_d_ssm": 1536,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_n_heads": 24,
            "mamba_rms_norm": False,
            "max_position_embeddings": 16384,
            "num_attention_heads": 8,
            "num_hidden_layers": 36,
            "num_key_value_heads": 2,
            "vocab_size": 32784,
        },
        falcon,
        521e6,
        (KVShape(36, 2, 64),),
        36,
        StateShape(1, 24, 128, 64, 4),
    ),
    "Falcon-H1-34B": Published(
        FALCON
        | {
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 21504,
            "mamba_d_head": 128,
            "mamba_d_ssm": 4096,
            "mamba_d_state": 256,
            "mamba_n_groups": 2,
            "mamba_n_heads": 32,
            "mamba_rms_norm": True,
            "max_position_embeddings": 262144,
            "num_attention_heads": 20,
            "num_hidden_layers": 72,
            "num_key_value_heads": 4,
            "vocab_size": 261120,
        },
        falcon,
        33.64e9,
        (KVShape(72, 4, 128),),
        72,
        StateShape(2, 32, 256, 128, 4),
    ),
    "Nemotron-Nano-9B-v2": Published(
        NEMOTRON
        | {
            "hidden_size": 4480,
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            "intermediate_size": 15680,
            "mamba_head_dim": 80,
            "mamba_num_heads": 128,
            "num_attention_heads": 40,
            "num_hidden_layers": 56,
            "num_key_value_heads": 8,
        },
        nemotron,
        8_888_227_328,
        (KVShape(4, 8, 128),),
        27,
        StateShape(8, 128, 128, 80, 4),
    ),
    "Nemotron-3-Nano-30B-A3B": Published(
        NEMOTRON_3
        | {
            "hidden_size": 2688,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "mamba_num_heads": 64,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 52,
            "routed_scaling_factor": 2.5,
        },
        nemotron,
        31_577_940_288,
        (KVShape(6, 2, 128),),
        23,
        StateShape(8, 64, 128, 64, 4),
    ),
    "Granite-4.0-h-tiny": Published(
        GRANITE
        | {
            "attention_multiplier": 0.0078125,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "logits_scaling": 6,
            "mamba_n_heads": 48,
            "num_attention_heads": 12,
            "num_experts_per_tok": 6,
            "num_key_value_heads": 4,
            "num_local_experts": 64,
            "shared_intermediate_size": 1024,
        },
        granite,
        6.94e9,
        (KVShape(4, 4, 128),),
        36,
        StateShape(1, 48, 128, 64, 4),
    ),
    "Granite-4.0-h-micro": Published(
        GRANITE
        | {
            "attention_multiplier": 0.015625,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "logits_scaling": 8,
            "mamba_n_heads": 64,
            "num_attention_heads": 32,
            "num_experts_per_tok": 0,
            "num_key_value_heads": 8,
            "num_local_experts": 0,
            "shared_intermediate_size": 8192,
        },
        granite,
        3_191_396_096,
        (KVShape(4, 8, 64),),
        36,
        StateShape(1, 64, 128, 64, 4),
    ),
    # heads and widths are published; of the 700M's and the larger ones' layers it was inferred which have attention
    **{
        f"LFM2-{size}": Published(
            LFM2 | {"hidden_size": hidden, "num_attention_heads": hidden // 64, "block_ff_dim": inner},
            lfm2,
            num_parameters,
            (KVShape(6, 8, 64),),
            10,
            StateShape.window(hidden, 3),
        )
        for size, hidden, inner, num_parameters in (
            ("350M", 1024, 6656, 354_483_968),
            ("700M", 1536, 10240, 742_489_344),
            ("1.2B", 2048, 12288, 1_170_340_608),
        )
    },
    "LFM2.5-2.6B": Published(
        {name: value for name, value in LFM2.items() if name != "rope_theta"}
        | {
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [2, 6, 10, 14, 18, 21, 24, 27],
            "hidden_size": 2048,
            "intermediate_size": 10752,
            "num_attention_heads": 32,
            "num_hidden_layers": 30,
            "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        },
        lfm2,
        2_569_272_320,
        (KVShape(8, 8, 64),),
        22,
        StateShape.window(2048, 3),
    ),
    "LFM2-8B-A1B": Published(
        {name: value for name, value in LFM2.items() if not name.startswith("block_")}
        | {
            "architectures": ["Lfm2MoeForCausalLM"],
            "model_type": "lfm2_moe",
            "full_attn_idxs": [2, 6, 10, 14, 18, 21],
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
        },
        lfm2,
        8.34e9,
        (KVShape(6, 8, 64),),
        18,
        StateShape.window(2048, 3),
    ),
    # sizes of its config class in transformers, which names this checkpoint
    "LFM3-1.7B": Published(
        LFM3,
        lfm3,
        1_728_801_536,
        (KVShape(11, 4, 128),),
        13,
        StateShape.window(2048, 7),
    ),
    "Olmo-Hybrid-7B": Published(
        OLMO_HYBRID, olmo, 7_430_870_688, (KVShape(8, 30, 128),), 24, StateShape(30, 30, 96, 192, 4)
    ),
    "Kimi-Linear-48B-A3B": Published(
        KIMI_LINEAR,
        kimi,
        49.12e9,
        (KVShape(7, 1, 576, 512),),
        20,
        StateShape(32, 32, 128, 128, 4, decays_by_channel=True),
    ),
    # 124 billion without the MTP head
    "Ling-3.0-flash": Published(
        LING,
        ling,
        127.5e9,
        (KVShape(8, 1, 576, 512),),
        35,
        StateShape(32, 32, 128, 128, 4, decays_by_channel=True),
    ),
    "Mamba-Codestral-7B": Published(
        {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "conv_kernel": 4,
            "expand": 2,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "layer_norm_epsilon": 1e-5,
            "n_groups": 8,
            "num_heads": 128,
            "num_hidden_layers": 64,
            "residual_in_fp32": True,
            "rms_norm": True,
            "state_size": 128,
            "tie_word_embeddings": False,
            "time_step_limit": [0.0, INF],
            "use_bias": False,
            "use_conv_bias": True,
            "vocab_size": 32768,
        },
        pure_mamba,
        7.285e9,
        (),
        64,
        StateShape(8, 128, 128, 64, 4),
    ),
    "Falcon-Mamba-7B": Published(
        {
            "architectures": ["FalconMambaForCausalLM"],
            "model_type": "falcon_mamba",
            "conv_kernel": 4,
            "expand": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "layer_norm_epsilon": 1e-5,
            "mixer_rms_eps": 1e-6,
            "num_hidden_layers": 64,
            "state_size": 16,
            "tie_word_embeddings": False,
            "time_step_rank": 256,
            "use_bias": False,
            "use_conv_bias": True,
            "vocab_size": 65024,
        },
        selective,
        7.273e9,
        (),
        64,
        StateShape.selective(8192, 16, 4),
    ),
    # Jamba-v0.1 has the same sizes
    "Jamba-1.5-Mini": Published(
        {
            "architectures": ["JambaForCausalLM"],
            "model_type": "jamba",
            "attn_layer_offset": 4,
            "attn_layer_period": 8,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "mamba_conv_bias": True,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
            "mamba_dt_rank": 256,
            "mamba_expand": 2,
            "mamba_proj_bias": False,
            "max_position_embeddings": 262144,
            "num_attention_heads": 32,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "vocab_size": 65536,
        },
        jamba,
        51.6e9,
        (KVShape(4, 8, 128),),
        28,
        StateShape.selective(8192, 16, 4),
    ),
    "Mamba-2.8B": Published(
        {
            "architectures": ["MambaForCausalLM"],
            "model_type": "mamba",
            "conv_kernel": 4,
            "expand": 2,
            "hidden_act": "silu",
            "hidden_size": 2560,
            "layer_norm_epsilon": 1e-5,
            "num_hidden_layers": 64,
            "state_size": 16,
            "tie_word_embeddings": True,
            "time_step_rank": 160,
            "use_bias": False,
            "use_conv_bias": True,
            "vocab_size": 50280,
        },
        selective,
        2.768e9,
        (),
        64,
        StateShape.selective(5120, 16, 4),
    ),
}


def load_shapes(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks = ONE_RANK
) -> LoadedModel:
    (tmp_path / "config.json").write_text(json.dumps(published.config | {"dtype": "bfloat16"}), "utf8")
    (tmp_path / "model.safetensors").touch()

    class Headers(ShapeReader):
        def _open(self, file: Path) -> list[StoredTensor]:
            return [StoredTensor(key, file, shape, "BF16") for key, shape in published.tensors(published.config)]

    monkeypatch.setattr(registry, "ShapeReader", Headers)
    options = LoadOptions(torch.bfloat16, torch.device("meta"), want_draft_head=True, ranks=ranks)
    return registry.load_model(tmp_path, options)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", MODELS)
def test_published_models(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = MODELS[name]
    model = load_shapes(published, tmp_path, monkeypatch)
    is_exact = isinstance(published.num_parameters, int)
    assert model.num_parameters == pytest.approx(published.num_parameters, rel=0 if is_exact else 1e-3, abs=0)
    embedding = model.target.vocab_size * model.target.hidden_size  # kept twice where it is the head too
    assert 2 * model.num_parameters <= model.weight_bytes <= 2.01 * model.num_parameters + 2 * embedding
    shape = model.cache_shape
    assert (shape.kv, shape.num_state_layers, shape.state) == (published.kv, published.state_layers, published.state)
    limits = {part.dt_limit for part in parts(model.target, set()) if isinstance(part, mamba2.operands.Weights)}
    without_mamba2 = ("Qwen", "LFM", "Olmo", "Kimi", "Ling", "Falcon-Mamba", "Jamba", "Mamba-2.8B")
    assert limits == (set() if name.startswith(without_mamba2) else {(0.0, INF)})
