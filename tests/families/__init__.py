"""Tiny checkpoints with random weights of every family, beside the same model in transformers.

Every module has ``VARIANTS``, changes of its tiny config by name; ``HAS_MTP``; and ``build(folder, variant, seed)``,
which writes the checkpoint and gives the transformers model, float32.
"""

from types import ModuleType

from tests.families import (
    bailing_hybrid,
    bamba,
    falcon_h1,
    falcon_mamba,
    granite_hybrid,
    jamba,
    kimi_linear,
    lfm2,
    lfm2_moe,
    lfm3,
    mamba1,
    mamba2,
    nemotron_h,
    olmo_hybrid,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
)

FAMILIES: dict[str, ModuleType] = {
    "bailing-hybrid": bailing_hybrid,
    "bamba": bamba,
    "falcon-h1": falcon_h1,
    "falcon-mamba": falcon_mamba,
    "granite-hybrid": granite_hybrid,
    "jamba": jamba,
    "kimi-linear": kimi_linear,
    "lfm2": lfm2,
    "lfm2-moe": lfm2_moe,
    "lfm3": lfm3,
    "mamba1": mamba1,
    "mamba2": mamba2,
    "nemotron-h": nemotron_h,
    "olmo-hybrid": olmo_hybrid,
    "qwen3.5": qwen3_5,
    "qwen3.5-moe": qwen3_5_moe,
    "qwen3-next": qwen3_next,
}
