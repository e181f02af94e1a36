"""Which operators run in Triton: ``SPECMAMBA_TRITON``.

Unset: all of them. ``0``: none. ``interpret``: all, on CPU tensors too. ``moe,linear``: these alone.
``-moe,-linear``: all but these. ``always``: all, also where PyTorch is found to be faster when an engine starts.
``interpret`` and ``always`` may stand beside names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SWITCH = "SPECMAMBA_TRITON"

# A verify that folds pending records folds states in one of these operators and windows in another: all or none.
FOLDING = ("causal_conv1d", "gated_delta_rule", "selective_scan", "short_conv", "ssd")
# One layout of quantized matrices serves both.
MULTIPLYING_CODES = ("linear", "moe")


@dataclass(frozen=True)
class Choice:
    """What the variable asks for."""

    operators: frozenset[str]  # those that run in Triton
    is_interpreted: bool  # on CPU tensors too
    is_always: bool = False  # nothing is timed to see whether PyTorch is faster

    @property
    def off(self) -> tuple[str, ...]:
        """Operators that do not run in Triton although they could."""
        return tuple(name for name in operators() if name not in self.operators)


@cache
def operators() -> tuple[str, ...]:
    """Every operator that has a form in Triton."""
    return tuple(sorted(file.parent.name for file in Path(__file__).parents[1].glob("*/triton_ops.py")))


@cache
def choice() -> Choice:
    """What the environment asks for. Raises ValueError as ``parse``."""
    return parse(os.environ.get(SWITCH, ""))


def parse(setting: str) -> Choice:
    """Read a value of the variable.

    Raises:
        ValueError: an operator that does not exist, or names with and without a minus together.
    """
    words = [word.strip() for word in setting.split(",") if word.strip()]
    ways = "interpret" in words, "always" in words
    words = [word for word in words if word not in ("interpret", "always", "1")]
    if words == ["0"] and not any(ways):
        return Choice(frozenset(), False)
    unwanted = [word for word in words if word.startswith("-")]
    names = [word.removeprefix("-") for word in words]
    _require_known(setting, names)
    if not unwanted:
        return Choice(frozenset(names or operators()), *ways)
    if len(unwanted) < len(words):
        raise ValueError(f"{SWITCH}={setting}: name the operators to run in Triton, or with - those not to, not both")
    return Choice(frozenset(operators()) - set(names), *ways)


def _require_known(setting: str, names: Iterable[str]) -> None:
    unknown = [name for name in names if name not in operators()]
    if unknown:
        raise ValueError(
            f"{SWITCH}={setting}: there is no operator {unknown[0]!r} in Triton; there are 0, interpret, always, "
            f"{', '.join(operators())}, and -NAME for all but one"
        )
