"""Every family at about half a billion parameters, as transformers builds it: random weights, real proportions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specmamba.bench.demo.checkpoint import save_with_demo_tokenizer

VOCAB = 32768
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
THREE_TO_ONE = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]


def _qwen3_5() -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**COMMON, **_qwen(), intermediate_size=3584))


def _qwen3_5_moe() -> Any:
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**COMMON, **_qwen(), **_qwen_experts()))


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(Qwen3NextConfig(**COMMON, **_qwen(), **_qwen_experts(), intermediate_size=3584))


def _qwen() -> dict[str, Any]:
    return {
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
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    }


def _qwen_experts() -> dict[str, Any]:
    return {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
    }


def _falcon_h1() -> Any:
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = FalconH1Config(
        **COMMON,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=32,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        mamba_d_ssm=1536,
        mamba_n_heads=24,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return FalconH1ForCausalLM(config)


def _granite_hybrid() -> Any:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **COMMON,
        hidden_size=1024,
        intermediate_size=512,
        shared_intermediate_size=1024,
        num_local_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=20,
        layer_types=(["mamba"] * 4 + ["attention"]) * 4,
        num_attention_heads=16,
        num_key_value_heads=4,
        mamba_n_heads=32,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        position_embedding_type="nope",
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return GraniteMoeHybridForCausalLM(config)


def _nemotron_h() -> Any:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **COMMON,
        hidden_size=1280,
        intermediate_size=5120,
        hybrid_override_pattern="M-M-M*-M-M-M*-M-M-M*-M-M-M*-",
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        mamba_num_heads=40,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return NemotronHForCausalLM(config)


def _mamba2() -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        **COMMON,
        hidden_size=1280,
        num_hidden_layers=48,
        num_heads=40,
        head_dim=64,
        state_size=128,
        n_groups=1,
        expand=2,
        tie_word_embeddings=True,
    )
    return Mamba2ForCausalLM(config)


SHAPES: dict[str, Callable[[], Any]] = {
    "qwen3_5": _qwen3_5,
    "qwen3_next": _qwen3_next,
    "qwen3_5_moe": _qwen3_5_moe,
    "falcon_h1": _falcon_h1,
    "granite_hybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "mamba2": _mamba2,
}


def write_family(name: str, folder: Path, seed: int = 0) -> int:
    """Write a checkpoint of a family in bfloat16, with the demo's tokenizer; returns the number of parameters."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = SHAPES[name]()
    finally:
        torch.set_default_dtype(before)
    save_with_demo_tokenizer(model, folder, "bfloat16")
    return sum(parameter.numel() for parameter in model.parameters())
