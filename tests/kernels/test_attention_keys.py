"""Which query sees which key: ``AttentionMetadata`` against its docstring, position by position."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels.paged_attention import AttentionMetadata, LayerKV
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of
from tests.pairwise import pairwise

PAGE = 4
NUM_ROWS = 7


def sees(keys: AttentionMetadata, b: int, q: int, position: int) -> bool:
    """The definition."""
    last = int(keys.last[b, q])
    if position >= keys.num_keys:
        return False
    if keys.roots is not None and keys.seen is not None:
        entry = position - int(keys.roots[b])
        if 0 <= entry < keys.seen.shape[2] and bool(keys.seen[b, q, entry]):
            return True
        return keys.first <= position <= last
    return position <= last if last < keys.first else keys.first <= position <= last


def plain_mask(keys: AttentionMetadata) -> Tensor:
    """[B, Q, num_keys] bool."""
    batch, num_queries = keys.last.shape
    positions = range(keys.num_keys)
    return torch.tensor(
        [[[sees(keys, b, q, t) for t in positions] for q in range(num_queries)] for b in range(batch)]
    ).view(batch, num_queries, keys.num_keys)


def layer_arguments(parts: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``attend_layer``: of the parts, cos and sin become one value, and pools with write slots another."""
    angles = None if parts["cos"] is None else (parts["cos"], parts["sin"])
    scales = parts.get("k_scales"), parts.get("v_scales")
    kv = LayerKV(parts["k_pool"], parts["v_pool"], parts["write_slots"], *scales, parts.get("is_exact", False))
    kept = {name: parts[name] for name in ("projected", "config", "metadata")}
    return kept | {"angles": angles, "kv": kv}


def make_table(width: int, seed: int = 0) -> Tensor:
    """[NUM_ROWS + 1, width] slots in scattered pages, no two alike but for row 0, which is padding."""
    gen = torch.Generator().manual_seed(seed)
    num_pages = -(-width // PAGE)
    pages = 1 + torch.randperm((NUM_ROWS + 1) * num_pages, generator=gen).view(NUM_ROWS + 1, num_pages, 1)
    table = (pages * PAGE + torch.arange(PAGE)).flatten(1)[:, :width].contiguous()
    table[0] = 0
    return table


def make_keys(
    contexts: list[int], num_queries: int, *, first: int = 0, slack: int = 3, num_entries: int = 0
) -> AttentionMetadata:
    """Queries behind contexts of these lengths, in rows of no order.

    Without entries each sees itself and what came before it. With them it is one of the newest nodes of a tree of so
    many, which stands behind the context.
    """
    num_keys = max(contexts) + max(num_queries, num_entries) + slack
    table = make_table(num_keys + 5, seed=num_queries)
    rows = torch.tensor(random.Random(num_queries).sample(range(1, NUM_ROWS + 1), len(contexts)))
    roots = torch.tensor(contexts)
    if not num_entries:
        return AttentionMetadata(table, rows, roots[:, None] + torch.arange(num_queries), num_keys, first)
    shapes = tuple(SHAPES[b % len(SHAPES)] for b in range(len(contexts)))
    seen = mask_of(batch_of_parents(shapes, num_entries, seed=num_queries))[:, -num_queries:]
    last = (roots - 1)[:, None].expand(-1, num_queries)
    return AttentionMetadata(table, rows, last, num_keys, first, roots, seen)


@pairwise(
    pytest.mark.parametrize("first", [0, 1, 2]),
    pytest.mark.parametrize("num_entries", [0, 5, 9]),
    pytest.mark.parametrize("slack", [-3, 0, 20]),
)
def test_masks_and_indices(slack: int, num_entries: int, first: int) -> None:
    """Contexts that end before ``first``, and a bound of keys that is tight, loose, or cuts something off."""
    keys = make_keys([0, 11, 1, 2, 7], 5, first=first, slack=slack, num_entries=num_entries)
    assert keys.mask is not None
    assert torch.equal(keys.mask, plain_mask(keys))
    assert keys.mask.any()
    for b, row in enumerate(keys.rows.tolist()):
        assert keys.indices[b].tolist() == keys.table[row, : keys.num_keys].tolist()


@pytest.mark.parametrize("last", [-1, 0, 1, 2])
def test_queries_before_the_first_key(last: int) -> None:
    """Without a tree they see all that came before them, so that they see something; with one, entries alone."""
    keys = replace(make_keys([4], 1, first=2), last=torch.tensor([[last]]))
    assert keys.mask is not None
    assert keys.mask[0, 0].nonzero().flatten().tolist() == {-1: [], 0: [0], 1: [0, 1], 2: [2]}[last]
    entries = torch.tensor([[[True, False, True]]])
    keys = replace(keys, roots=torch.tensor([1]), seen=entries, last=torch.tensor([[0]]))
    assert keys.mask is not None
    assert keys.mask[0, 0].nonzero().flatten().tolist() == [1, 3]


@pytest.mark.parametrize("first", [0, 1])
def test_rows_that_are_consecutive_are_a_view(first: int) -> None:
    keys = replace(make_keys([3, 9, 4], 2, first=first), rows=torch.tensor([2, 3, 4]))
    known = replace(keys, first_row=2)
    assert torch.equal(known.indices, keys.indices)
    assert known.indices.data_ptr() == keys.table[2].data_ptr()
    assert known.mask is not None
    assert keys.mask is not None
    assert torch.equal(known.mask, keys.mask)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("first_row", [None, 3])
def test_queries_that_see_all_need_no_mask(first_row: int | None, first: int) -> None:
    keys = replace(make_keys([6], 1, first=first, slack=0), rows=torch.tensor([3]), first_row=first_row)
    lone = replace(keys, sees_all=True)
    assert lone.mask is None
    assert lone.indices[0].tolist() == keys.indices[0][plain_mask(keys)[0, 0]].tolist()
