"""Published quantized checkpoints: their configs, and which of their tensors are stored in which form.

What was found published, and what is inferred:

- Qwen3.6-35B-A3B-FP8: published are the numbers of its tensors (64,196, of which 333 are of the vision tower and 1,560
  of the MTP head; a registry of served checkpoints), which matrices have blocks of 128 x 128, bf16 scales and experts
  one by one (card of a checkpoint that copies its layout), and the config of the text model (with the NVFP4 checkpoint
  of the same model). The names follow from these: they give exactly the published numbers.
- Qwen3.8-27B-FP8: published are the config and the blocks of 128 x 128 (pull requests of loaders), and the scaled
  matrices of Qwen3.5-27B-FP8 (an issue that lists them). Its MTP head is inferred from Qwen3.6's.
- Qwen3.8-27B-NVFP4: published are config.json and hf_quant_config.json of a ModelOpt export, and the types of its
  tensors (a loader's pull request). The names of KV scales are those of ModelOpt's exporter; input scales of MLPs are
  those of its W4A4 exports.
- Qwen3.6-35B-A3B-NVFP4: published are config.json and hf_quant_config.json. That experts are stored one by one is in
  ModelOpt's exporter; its MTP head is that of the bf16 checkpoint, and stacked here, as in other exports of the family.
- Nemotron-3-Nano NVFP4: published are both configs, the number of tensors and bytes of the release, and shapes and
  types by layer (a loader's test). There is no MTP head.
- Nemotron-3-Nano FP8: the config was not found; the layers are published as the same (cards of checkpoints made by its
  recipe). Types are those of ModelOpt's FP8 per tensor; KV scales are inferred.
- Nemotron-3-Super NVFP4: published is the config, and for single layers shapes and types (a loader's test); which 139
  matrices are FP8 is not known in full, so the layers here have all mixtures that are.
- Nemotron-3-Super FP8: published is the config. FP8 per tensor as in Nano, and an MTP head in bf16 as in the NVFP4
  release, are inferred.
- Nemotron-3.5-Lightning NVFP4: published are config.json and the header of every tensor.
- Qwen3-Next-80B-A3B-Instruct-FP8: published is the config of the bf16 model, and that ``mtp.fc`` has no scale (a
  loader's pull request); the rest is inferred from Qwen3.6's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

from tests.models.published.names import Shape, Tensors, nemotron, qwen

Header = tuple[str, Shape]  # type as safetensors writes it, and shape
BITS = {"F32": 32, "I32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "U8": 8}

# As the bf16 checkpoints have them; F32 of A_log and the norm are inferred, the router's is of the release.
QWEN_REST = ((r"linear_attn\.(A_log|norm\.weight)$", "F32"), (r"", "BF16"))
NEMOTRON_REST = ((r"gate\.e_score_correction_bias$", "F32"), (r"", "BF16"))
MTP = (r"^mtp\.", "BF16")
QWEN_FP8 = (
    (r"\.(q|k|v|o)_proj\.weight$", "blocks"),
    (r"linear_attn\.(in_proj_qkv|in_proj_qkvz|in_proj_z|out_proj)\.weight$", "blocks"),
    (r"mlp\.(.*\.)?(gate|up|down)_proj\.weight$", "blocks"),
    *QWEN_REST,
)
QWEN_NVFP4 = (
    MTP,
    (r"self_attn\.(q|k|v|o)_proj\.weight$", "FP8"),
    (r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.weight$", "FP8"),
    (r"mlp\.(.*\.)?(gate|up|down)_proj\.weight$|lm_head\.weight$", "NVFP4"),
    *QWEN_REST,
)


def of_nano(form: str, before_attention: str) -> tuple[tuple[str, str], ...]:
    """Attention, and the Mamba layers in front of it, are left as they were."""
    return (
        (rf"layers\.({before_attention})\.mixer\.(in|out)_proj\.weight$", "BF16"),
        (r"mixer\.((in|out)_proj|.*experts\..*)\.weight$", form),
        (r"mixer\.gate\.weight$", "F32"),
        *NEMOTRON_REST,
    )


SUPER_NVFP4 = (
    MTP,
    (r"layers\.1\.mixer\.shared_experts\.down_proj\.weight$", "NVFP4 and input"),
    (r"layers\.4\.mixer\.shared_experts\.(up|down)_proj\.weight$", "BF16"),
    (r"layers\.2\.mixer\.out_proj\.weight$|layers\.1\.mixer\.fc2_latent_proj\.weight$", "BF16"),
    (r"mixer\.experts\..*\.weight$", "NVFP4 and input"),
    (r"mixer\.(in_proj|out_proj|o_proj|fc1_latent_proj|fc2_latent_proj|shared_experts\..*)\.weight$", "FP8"),
    *NEMOTRON_REST,
)
SUPER_FP8 = (
    MTP,
    (r"mixer\.(in_proj|out_proj|fc1_latent_proj|fc2_latent_proj|.*experts\..*)\.weight$", "FP8"),
    *NEMOTRON_REST,
)
LIGHTNING_NVFP4 = (
    MTP,
    (r"mixer\.(in|out)_proj\.weight$", "FP8"),
    (r"mixer\..*experts\..*\.weight$|lm_head\.weight$", "NVFP4"),
    (r"mixer\.gate\.weight$", "F32"),
    *NEMOTRON_REST,
)


def stored(name: str, shape: Shape, form: str) -> dict[str, Header]:
    """The tensors in which a tensor is stored."""
    base = name.removesuffix(".weight")
    if form in BITS:
        return {name: (form, shape)}
    if form == "blocks":
        scales = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        return {name: ("F8_E4M3", shape), f"{name}_scale_inv": ("BF16", scales)}
    if form == "FP8":
        return {
            name: ("F8_E4M3", shape),
            **dict.fromkeys((f"{base}.weight_scale", f"{base}.input_scale"), ("F32", ())),
        }
    if form == "GPTQ":
        n, k = shape
        words = {f"{base}.qweight": ("I32", (k // 8, n)), f"{base}.qzeros": ("I32", (k // 16, n // 8))}
        return words | {f"{base}.scales": ("F16", (k // 16, n)), f"{base}.g_idx": ("I32", (k,))}
    groups = (*shape[:-1], shape[-1] // 16)
    scale = {f"{base}.weight_scale": ("F8_E4M3", groups), f"{base}.weight_scale_2": ("F32", ())}
    scale |= {f"{base}.input_scale": ("F32", ())} if form == "NVFP4 and input" else {}
    return {name: ("U8", (*shape[:-1], shape[-1] // 2)), **scale}


class Published(NamedTuple):
    """A checkpoint; ``small`` are the fields of its config that are shrunk."""

    config: dict[str, Any]
    small: dict[str, Any]
    names: Callable[[dict[str, Any]], Tensors]
    rules: tuple[tuple[str, str], ...]
    quantization: dict[str, Any]
    in_own_file: bool = False  # hf_quant_config.json holds it, and config.json nothing
    has_mtp: bool = True
    kv_scales: tuple[Shape, ...] = ()  # of each attention layer
    num_tensors: int | None = None  # as published, without a vision tower
    num_bytes: int | None = None
    num_parameters: int | None = None

    def text(self, small: bool) -> dict[str, Any]:
        """The config of the text model."""
        found: dict[str, Any] = self.config.get("text_config", self.config)
        return found | (self.small if small else {})

    def headers(self, small: bool) -> dict[str, Header]:
        """Type and shape of all tensors but those of a vision tower, by name."""
        found: dict[str, Header] = {}
        for name, shape in self.names(self.text(small)):
            form = next(form for pattern, form in self.rules if re.search(pattern, name))
            found |= stored(name, shape, form)
            letter = re.search(r"(k|v)_proj\.weight$", name)
            if letter and self.kv_scales and not name.startswith("mtp."):
                found[f"{name.removesuffix('weight')}{letter[1]}_scale"] = "F32", self.kv_scales[0]
        return found

    def size(self) -> int:
        """Bytes of all tensors, unshrunk."""
        return sum(prod(shape) * BITS[dtype] // 8 for dtype, shape in self.headers(small=False).values())


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
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    # as in published lists: names without the wrapper's prefix, and one of a module that is converted all the same
    "modules_to_not_convert": [
        "lm_head",
        "model.layers.0.linear_attn.conv1d",
        "model.visual",
        "model.layers.3.self_attn.q_proj",
    ],
}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "producer": {"name": "modelopt"}}
IGNORED = {"exclude_modules": ["lm_head", "backbone.layers.0.mixer.conv1d", "mtp*"]}
IN_TEXT = "model.language_model."

CHECKPOINTS = {
    "Qwen3.6-35B-A3B-FP8": Published(
        multimodal(QWEN_MOE),
        SMALL_QWEN | SMALL_EXPERTS,
        partial(qwen, prefix=IN_TEXT, fused=False, one_by_one=(True, True)),
        QWEN_FP8,
        FP8,
        num_tensors=64_196 - 333,
        num_parameters=35_951_822_704 - 446_571_248,  # without the vision tower
    ),
    "Qwen3.8-27B-FP8": Published(
        multimodal(QWEN_DENSE),
        SMALL_QWEN | {"intermediate_size": 192},
        partial(qwen, prefix=IN_TEXT, fused=False),
        QWEN_FP8,
        FP8,
    ),
    "Qwen3.8-27B-NVFP4": Published(
        multimodal(QWEN_DENSE),
        SMALL_QWEN | {"intermediate_size": 192},
        partial(qwen, prefix=IN_TEXT, fused=False),
        tuple((pattern, "NVFP4 and input" if form == "NVFP4" else form) for pattern, form in QWEN_NVFP4),
        MIXED | {"ignore": ["mtp*", "model.visual*"], "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        kv_scales=((),),
    ),
    "Qwen3.6-35B-A3B-NVFP4": Published(
        multimodal(QWEN_MOE),
        SMALL_QWEN | SMALL_EXPERTS,
        partial(qwen, prefix=IN_TEXT, fused=False, one_by_one=(True, False)),
        QWEN_NVFP4,
        MIXED | {"ignore": ["mtp.layers.0*", "mtp*"]},
    ),
    "Qwen3-Next-80B-A3B-Instruct-FP8": Published(
        QWEN_NEXT,
        SMALL_QWEN | SMALL_EXPERTS,
        partial(qwen, prefix="model.", fused=True),
        QWEN_FP8,
        FP8,
    ),
    "Nemotron-3-Nano-NVFP4": Published(
        NANO,
        SMALL_NEMOTRON | SMALL_PATTERN,
        nemotron,
        of_nano("NVFP4 and input", "4|11|18|25|32|41"),
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16} | IGNORED,
        in_own_file=True,
        has_mtp=False,
        num_tensors=24_147,
        num_bytes=19_339_781_632,
        num_parameters=31_577_940_288,
    ),
    "Nemotron-3-Nano-FP8": Published(
        NANO,
        SMALL_NEMOTRON | SMALL_PATTERN,
        nemotron,
        of_nano("FP8", "2|4|11|18|25|32|41"),
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"} | IGNORED,
        in_own_file=True,
        has_mtp=False,
        kv_scales=((),),
    ),
    "Nemotron-3-Super-NVFP4": Published(
        SUPER,
        SMALL_NEMOTRON | SMALL_PATTERN | {"moe_latent_size": 32},
        nemotron,
        SUPER_NVFP4,
        {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"} | IGNORED,
        in_own_file=True,
        kv_scales=((),),
    ),
    "Nemotron-3-Super-FP8": Published(
        SUPER,
        SMALL_NEMOTRON | SMALL_PATTERN | {"moe_latent_size": 32},
        nemotron,
        SUPER_FP8,
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"} | IGNORED,
        in_own_file=True,
        kv_scales=((),),
    ),
    "Nemotron-3.5-Lightning-NVFP4": Published(
        LIGHTNING,
        SMALL_NEMOTRON
        | {
            "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "mamba", "moe"],
            "num_hidden_layers": 7,
        },
        nemotron,
        LIGHTNING_NVFP4,
        MIXED | {"ignore": ["backbone.embeddings", "backbone.layers.1.mixer.gate", "mtp*"]},
        kv_scales=((1,),),
        num_tensors=18_487,
    ),
}

# What other exporters make of the same models, and what goes wrong in published ones.
_MOE_FP8, _MOE_NVFP4 = CHECKPOINTS["Qwen3.6-35B-A3B-FP8"], CHECKPOINTS["Qwen3.6-35B-A3B-NVFP4"]
_SUPER = CHECKPOINTS["Nemotron-3-Super-NVFP4"]
_stacks = partial(qwen, prefix=IN_TEXT, fused=False, one_by_one=(False, False))
VARIANTS = {
    # transformers' FP8, which leaves experts stacked
    "stacks in FP8": _MOE_FP8._replace(
        names=_stacks, rules=((r"experts\.(gate_up|down)_proj$", "blocks"), *QWEN_FP8), num_tensors=None
    ),
    # a head in bf16 that was added to a quantized model
    "MTP in bf16": _MOE_FP8._replace(rules=(MTP, *QWEN_FP8)),
    # as in NVFP4 checkpoints of Qwen3.8 Flash-Next: the head's experts alone are FP8
    "MTP experts in FP8 beside NVFP4": _MOE_NVFP4._replace(
        names=_MOE_FP8.names, rules=((r"^mtp\..*mlp\.experts\..*\.weight$", "blocks"), *QWEN_NVFP4)
    ),
    "embedding and output head in FP8": _MOE_FP8._replace(
        rules=((r"(embed_tokens|lm_head)\.weight$", "blocks"), *QWEN_FP8)
    ),
    # published cards: the experts alone in 4 bits, the head in bf16 with experts one by one
    "experts in GPTQ": _MOE_FP8._replace(
        rules=(MTP, (r"mlp\.experts\..*\.weight$", "GPTQ"), *QWEN_REST),
        quantization={"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "checkpoint_format": "gptq_v2"},
    ),
    "MTP in FP8 and NVFP4": _SUPER._replace(
        rules=((r"^mtp.*(eh_proj|[qkvo]_proj)\.weight$", "FP8"), (r"^mtp.*experts.*\.weight$", "NVFP4"), *SUPER_NVFP4)
    ),
}
