"""What changes from call to call makes no kernel of its own: serving does not compile in the middle of a request."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from textwrap import dedent
from typing import Any

import pytest

pytest.importorskip("triton")

from specmamba.kernels.aot.compile import find_operators

OPERATORS = find_operators()
# lengths of prompts, nodes of trees, rows of a batch and where they begin, and strides over so many small things
CHANGING = frozenset({
    *("num_nodes", "nodes", "node_offset", "num_tokens", "length", "max_length", "num_rows", "moves", "num_pairs", "M"),
    *("num_queries", "num_keys", "first", "num_entries", "num_splits", "total", "count"),
    *("g_batch_stride", "dt_batch_stride", "a_stride_b", "b_stride_b", "index_stride_b", "ancestors_row_stride"),
    *("parents_stride", "tokens_stride", "targets_stride", "path_stride", "slots_stride", "tree_stride"),
    *("parents_row_stride", "ancestors_node_stride", "position_stride"),
    *("last_stride_b", "seen_stride_b", "seen_stride_n"),
})  # fmt: skip


def names_without_variants(kernel: Any) -> set[str]:
    """What the decorator of a kernel says is not specialized."""
    definition = ast.parse(dedent(inspect.getsource(kernel.fn))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    names = [
        x.value for decorator in definition.decorator_list for x in ast.walk(decorator) if isinstance(x, ast.Constant)
    ]
    return {name for name in names if isinstance(name, str)}


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_changes_from_call_to_call_is_not_specialized(operator: str) -> None:
    variants = import_module(OPERATORS[operator]).variants()
    assert variants
    for variant in variants:
        numbers = {name for name, kind in variant.signature.items() if kind in ("i32", "i64")}
        assert (numbers & CHANGING) <= names_without_variants(variant.kernel), variant.name


def test_the_numbers_are_found() -> None:
    from specmamba.kernels.causal_conv1d.triton_kernels import extend_kernel, shift_windows_kernel

    assert names_without_variants(extend_kernel) == {"num_tokens"}
    assert names_without_variants(shift_windows_kernel) == set()
