"""Tiny checkpoints with random weights of every family, beside the same model in transformers.

Every module has ``VARIANTS``, changes of its tiny config by name; ``HAS_MTP``; and ``build(folder, variant, seed)``,
which writes the checkpoint and gives the transformers model, float32.
"""

from importlib import import_module
from types import ModuleType

import transformers

NAMES = (
    *("bailing-hybrid", "bamba", "falcon-h1", "falcon-mamba", "granite-hybrid", "jamba", "kimi-linear", "lfm2"),
    *("lfm2-moe", "lfm3", "mamba1", "mamba2", "nemotron-h", "olmo-hybrid", "qwen3.5", "qwen3.5-moe", "qwen3-next"),
)
NEWER = {"bailing-hybrid": "BailingHybridConfig", "lfm3": "Lfm3Config"}  # transformers 5.17 on GPU images lacks them


def _module(name: str) -> ModuleType:
    return import_module(f"tests.families.{name.replace('-', '_').replace('.', '_')}")


FAMILIES: dict[str, ModuleType] = {
    name: _module(name) for name in NAMES if name not in NEWER or hasattr(transformers, NEWER[name])
}
