"""Case tables in which every pair of values of any two parameters occurs, instead of every combination.

``SPECMAMBA_TEST_FULL=1`` makes every combination of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"


def pairwise(*parameters: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """One table of cases in place of a stack of ``pytest.mark.parametrize``.

    Most faults show at one value or at the meeting of two. A stack of decorators makes the product of all values; this
    table holds every value and every pair of values of two parameters at least once, and is about as long as the
    product of the two longest parameters.

    Args:
        parameters: what would be the stacked decorators; a parameter of several names counts as one.
    """
    names = [_names(parameter) for parameter in parameters]
    columns = [_values(parameter) for parameter in parameters]
    sizes = [len(column) for column in columns]
    rows = list(product(*map(range, sizes))) if IS_FULL else all_pairs(sizes)
    cases = []
    for row in rows:
        chosen = [column[i] for column, i in zip(columns, row, strict=True)]
        values = [value for each in chosen for value in each.values]
        marks = [mark for each in chosen for mark in each.marks]
        cases.append(pytest.param(*values, marks=marks, id="-".join(str(each.id) for each in chosen)))
    return pytest.mark.parametrize([name for of_one in names for name in of_one], cases)


def all_pairs(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of indices below ``sizes``, in which each pair of values of two columns occurs.

    Greedy and deterministic: every row begins with the first pair that is missing, and takes in each other column the
    value that adds most missing pairs; among equals the one that was used least.
    """
    if len(sizes) < 2:
        return [(i,) for size in sizes for i in range(size)]
    missing = {
        ((a, i), (b, j)): None
        for a, b in combinations(range(len(sizes)), 2)
        for i, j in product(range(sizes[a]), range(sizes[b]))
    }
    used = {(column, i): 0 for column, size in enumerate(sizes) for i in range(size)}
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for column in (column for column in range(len(sizes)) if column not in row):

            def gain(i: int, column: int = column, row: dict[int, int] = row) -> tuple[int, int]:
                pairs = (tuple(sorted([(column, i), other])) for other in row.items())
                return sum(pair in missing for pair in pairs), -used[column, i]

            row[column] = max(range(sizes[column]), key=gain)
        for pair in combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        for value in row.items():
            used[value] += 1
        rows.append(tuple(row[column] for column in range(len(sizes))))
    return rows


def _names(parameter: pytest.MarkDecorator) -> list[str]:
    names = parameter.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _values(parameter: pytest.MarkDecorator) -> list[Any]:
    """Each value as a ``pytest.param`` with an id."""
    names, ids, found = _names(parameter), parameter.kwargs.get("ids"), []
    for i, value in enumerate(parameter.args[1]):
        if not hasattr(value, "marks"):
            value = pytest.param(*value) if len(names) > 1 else pytest.param(value)
        if value.id is None:
            given = ids[i] if isinstance(ids, list | tuple) else None
            label = given or "-".join(
                _label(name, each, i, ids) for name, each in zip(names, value.values, strict=True)
            )
            value = pytest.param(*value.values, marks=value.marks, id=label)
        found.append(value)
    return found


def _label(name: str, value: object, number: int, ids: Any) -> str:
    if callable(ids) and (label := ids(value)) is not None:
        return str(label)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, str | int | float):
        return str(value)
    return getattr(value, "__name__", f"{name}{number}")
