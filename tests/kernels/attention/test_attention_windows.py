"""Attention over a window: of the keys that a query is shown it sees the last W, in runs and in trees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specmamba.kernels.paged_attention import AttentionMetadata
from tests.kernels.attention import test_attention_codes as codes_tests
from tests.kernels.test_attention_keys import make_keys, plain_mask
from tests.kernels.test_attention_runs import HEADS, alone, check, check_nodes_alone, make_run, run
from tests.kernels.test_paged_attention import DTYPES, assert_alike, needs_native
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of
from tests.pairwise import pairwise

each_window = pytest.mark.parametrize("window", [1, 3, 16, 70, 5000])


def windowed(layer: dict[str, Any], window: int) -> dict[str, Any]:
    return layer | {"config": replace(layer["config"], window=window)}


def make_tree(batch: int, nodes: int, context: int, window: int, dtype: torch.dtype, **sizes: Any) -> dict[str, Any]:
    """A layer whose queries are trees of different shapes behind one context."""
    layer = make_run([nodes] * batch, context + nodes, dtype=dtype, **sizes)
    seen = mask_of(batch_of_parents(tuple(SHAPES[b % len(SHAPES)] for b in range(batch)), nodes, seed=nodes))
    last, roots = torch.full((batch, nodes), context - 1), torch.full((batch,), context)
    keys = layer["metadata"]
    tree = AttentionMetadata(keys.table, keys.rows, last, keys.num_keys, 0, roots, seen, first_row=1)
    return windowed(layer | {"metadata": tree}, window)


@each_window
@pytest.mark.parametrize("num_entries", [0, 9])
@pytest.mark.parametrize("first", [0, 2])
def test_masks(window: int, num_entries: int, first: int) -> None:
    """Key by key: as many of those that are shown lie behind it as the window has room for."""
    keys = make_keys([0, 11, 1, 2, 7], 5, first=first, num_entries=num_entries)
    indices, mask = keys.within(window)
    assert mask is not None
    assert torch.equal(indices, keys.indices)
    for shown, seen in zip(plain_mask(keys).flatten(0, 1), mask.flatten(0, 1), strict=True):
        assert seen.nonzero().flatten().tolist() == shown.nonzero().flatten().tolist()[-window:]


@each_window
def test_a_lone_query_needs_no_mask(window: int) -> None:
    keys = replace(make_keys([6], 1, slack=0), sees_all=True)
    indices, mask = keys.within(window)
    assert mask is None
    assert indices.tolist() == keys.indices[:, -window:].tolist()


def test_no_window_is_all_keys() -> None:
    keys = make_keys([6, 3], 4)
    indices, mask = keys.within(0)
    assert mask is keys.mask
    assert indices is keys.indices


@pairwise(
    DTYPES,
    each_window,
    pytest.mark.parametrize("heads", HEADS),
    pytest.mark.parametrize("first", [0, 1, 3]),
    pytest.mark.parametrize(("lengths", "num_keys"), [([5], 40), ([65], 65), ([100, 37], 163), ([66], 1154)]),
)
def test_runs(
    form: str,
    lengths: list[int],
    num_keys: int,
    first: int,
    heads: tuple[int, int, int],
    window: int,
    dtype: torch.dtype,
) -> None:
    """Short ones and long ones, which native code computes in two ways."""
    check(form, windowed(make_run(lengths, num_keys, heads, dtype, first), window), lengths, dtype)


@pairwise(
    DTYPES,
    each_window,
    pytest.mark.parametrize("heads", HEADS),
    pytest.mark.parametrize("context", [1, 15, 90]),
    pytest.mark.parametrize("nodes", [1, 9, 33]),
)
def test_trees(
    form: str, nodes: int, context: int, heads: tuple[int, int, int], window: int, dtype: torch.dtype
) -> None:
    layer = make_tree(3, nodes, context, window, dtype, heads=heads)
    assert_alike(run(form, layer), run("reference", layer), dtype)


@pytest.mark.parametrize("window", [3, 20])
@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_codes(form: str, codes: torch.dtype, window: int) -> None:
    for layer in (make_tree(2, 9, 30, window, torch.float32), windowed(make_run([70], 90), window)):
        codes_tests.check(form, codes_tests.in_codes(layer, codes), torch.float32)


@needs_native
@DTYPES
@each_window
def test_exact_runs_give_a_query_the_bits_that_it_has_alone(window: int, dtype: torch.dtype) -> None:
    layer = windowed(make_run([70], 90, dtype=dtype), window) | {"is_exact": True}
    together, *pools = run("native", layer)
    metadata = layer["metadata"]
    for query in (0, 1, 33, 69):
        own = replace(metadata, last=metadata.last[:, query : query + 1])
        assert torch.equal(alone(layer, query, (pools[0], pools[1]), own), together[0, query])


@needs_native
@DTYPES
@each_window
@pytest.mark.parametrize("context", [3, 16, 45])
def test_a_node_of_a_tree_has_the_bits_of_its_path_alone(context: int, window: int, dtype: torch.dtype) -> None:
    """Also where the window begins in the tree: a key keeps its place in the sums."""
    nodes = 8
    layer = windowed(make_run([nodes], context + nodes, dtype=dtype), window)
    check_nodes_alone(layer, [-1, 0, 0, 1, 2, 4, 4, 5], context)
