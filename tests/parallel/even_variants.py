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


def variants(family: str) -> list[str]:
    """Names of all variants of a family, those that ranks can divide included."""
    return [*FAMILIES[family].VARIANTS, *EVEN.get(family, ())]


def build_variant(folder: Path, family: str, variant: str) -> None:
    """Write a checkpoint of a variant of the family itself, or of an even one."""
    with patch.dict(FAMILIES[family].VARIANTS, EVEN.get(family, {})):
        FAMILIES[family].build(folder, variant)
