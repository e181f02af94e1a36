"""All operators of the benchmark."""

from __future__ import annotations

from collections.abc import Sequence

from specmamba.bench.ops import attention as op_attention
from specmamba.bench.ops import convolution as op_conv
from specmamba.bench.ops import layers as op_layers
from specmamba.bench.ops import recurrent as op_recurrent
from specmamba.bench.ops import rows as op_rows
from specmamba.bench.ops import tokens as op_tokens
from specmamba.bench.ops.case import Operator
from specmamba.errors import ConfigError

OPERATORS: tuple[Operator, ...] = (
    *op_recurrent.OPERATORS,
    *op_layers.OPERATORS,
    *op_conv.OPERATORS,
    *op_attention.OPERATORS,
    *op_rows.OPERATORS,
    *op_tokens.OPERATORS,
)


def chosen_operators(names: Sequence[str]) -> list[Operator]:
    """By name, or by what a name begins with: ``ssd`` is all of Mamba2's recurrence. None given: all.

    Raises:
        ConfigError: a name is nobody's.
    """
    if not names:
        return list(OPERATORS)
    for name in names:
        if not any(_is_called(operator, name) for operator in OPERATORS):
            raise ConfigError(f"--op: there is no operator {name!r}, only {', '.join(o.name for o in OPERATORS)}")
    return [operator for operator in OPERATORS if any(_is_called(operator, name) for name in names)]


def _is_called(operator: Operator, name: str) -> bool:
    return operator.name == name or operator.name.split(".")[0] == name
