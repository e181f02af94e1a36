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

from tests.models.published.configs import (
    LIGHTNING,
    NANO,
    QWEN_DENSE,
    QWEN_MOE,
    QWEN_NEXT,
    SMALL_EXPERTS,
    SMALL_NEMOTRON,
    SMALL_PATTERN,
    SMALL_QWEN,
    SUPER,
    multimodal,
)
from tests.models.published.forms import (
    BITS,
    LIGHTNING_NVFP4,
    MTP,
    QWEN_FP8,
    QWEN_NVFP4,
    QWEN_REST,
    SUPER_FP8,
    SUPER_NVFP4,
    Header,
    of_nano,
    stored,
)
from tests.models.published.names import Shape, Tensors, nemotron, qwen


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
