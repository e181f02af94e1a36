"""Tiny checkpoints whose heads two ranks and four can divide, of families whose others have three."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.families import FAMILIES

_FOUR = {"num_attention_heads": 4, "num_key_value_heads": 4}
_GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
_CHANGES: dict[str, dict[str, Any]] = {
    "bailing-hybrid": _FOUR,
    "bamba": _GROUPED,
    "jamba": _GROUPED,
    "kimi-linear": _FOUR | {"linear_num_heads": 4},
}
# By family and name; all variants of Ling-3, Jamba and Kimi-Linear.
EVEN: dict[str, dict[str, dict[str, Any]]] = {
    family: {
        f"even-{name}": FAMILIES[family].VARIANTS[name] | changes
        for name in (["default"] if family == "bamba" else FAMILIES[family].VARIANTS)
    }
    for family, changes in _CHANGES.items()
}

# Of eight heads two have keys, and of as many value heads two have keys too: four ranks repeat them.
GROUPED: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "hidden_size": 48,
}
# Sizes that four ranks divide, of every family; each has one query head or two, and repeats keys and groups.
_MAMBA = {"mamba_n_heads": 8, "num_attention_heads": 4, "hidden_size": 48, "mamba_n_groups": 2}
QUARTERS: dict[str, dict[str, Any]] = {
    "bailing-hybrid": EVEN["bailing-hybrid"]["even-default"],
    "bamba": _MAMBA | {"num_key_value_heads": 2},
    "falcon-h1": {"num_attention_heads": 8},
    "falcon-mamba": {},
    "granite-hybrid": _MAMBA,
    "jamba": {"num_attention_heads": 4},
    "kimi-linear": EVEN["kimi-linear"]["even-latent-queries"],
    "lfm2": {"num_attention_heads": 4, "hidden_size": 40},
    "lfm2-moe": {"num_attention_heads": 4, "hidden_size": 40},
    "lfm3": {"num_attention_heads": 4, "hidden_size": 40},
    "mamba1": {},
    "mamba2": {"num_heads": 8, "head_dim": 9},
    "nemotron-h": {"num_attention_heads": 8, "mamba_num_heads": 8},
    "olmo-hybrid": GROUPED,
    "qwen3.5": GROUPED,
    "qwen3.5-moe": GROUPED,
    "qwen3-next": GROUPED,
}


def variants(family: str) -> list[str]:
    """Names of all variants of a family, those that ranks can divide included."""
    return [*FAMILIES[family].VARIANTS, *EVEN.get(family, ())]


def build_variant(folder: Path, family: str, variant: str) -> None:
    """Write a checkpoint of a variant of the family itself, or of an even one."""
    with patch.dict(FAMILIES[family].VARIANTS, EVEN.get(family, {})):
        FAMILIES[family].build(folder, variant)


def build_quarters(folder: Path, family: str) -> None:
    """Write a checkpoint of sizes that four ranks divide (``QUARTERS``)."""
    module = FAMILIES[family]
    with (
        patch.dict(module.VARIANTS, quarters=QUARTERS[family]),
        patch.dict(getattr(module, "FUSED", {}), quarters=(True, True)),
    ):
        module.build(folder, "quarters")
