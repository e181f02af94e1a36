"""Attention of runs, of more queries than a draft tree has: each sees the positions of its row up to its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels.paged_attention import AttentionMetadata, native_ops, reference, torch_ops
from tests.kernels.test_attention_keys import layer_arguments
from tests.kernels.test_paged_attention import DTYPES, assert_alike, make_layer, needs_native
from tests.kernels.trees import mask_of
from tests.pairwise import pairwise

OPS = {"torch": torch_ops, "native": native_ops}
HEADS = [(2, 2, 16), (6, 2, 8), (5, 1, 7), (4, 2, 67), (8, 2, 256)]
GATHERED = 1024  # keys at a time, in native code


def make_run(
    lengths: list[int],
    num_keys: int,
    heads: tuple[int, int, int] = HEADS[1],
    dtype: torch.dtype = torch.float32,
    first: int = 0,
    parts: str = "norm rotary gate",
) -> dict[str, Any]:
    """A layer's arguments: row b has ``lengths[b]`` tokens and padding; before the longest, ``num_keys`` less as many.

    What no query of a row sees holds NaN.
    """
    batch, queries = len(lengths), max(lengths)
    layer = make_layer(batch, queries, num_keys, heads, 2 * (heads[2] // 4) or 2, dtype, parts)
    indices, context = layer.pop("kv_indices"), num_keys - queries
    del layer["mask"]
    counts = torch.tensor(lengths)[:, None]
    last = torch.where(torch.arange(queries) < counts, context + torch.arange(queries), 0)
    unused = min(set(range(len(layer["k_pool"]))) - set(indices.flatten().tolist()))
    layer["write_slots"] = layer["write_slots"].masked_fill((torch.arange(queries) >= counts).flatten(), unused)
    table = torch.cat([torch.full_like(indices[:1], unused), indices])
    for b, length in enumerate(lengths):
        for pool in (layer["k_pool"], layer["v_pool"]):
            pool[indices[b, context + length :]] = torch.nan
            if not last[b, :length].lt(first).any() and length == queries:
                pool[indices[b, :first]] = torch.nan
    layer["metadata"] = AttentionMetadata(table, torch.arange(1, batch + 1), last, num_keys, first, first_row=1)
    return layer


def run(form: str, layer: dict[str, Any], **changes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the pools, which are not the ones that were given."""
    ops = {**OPS, "reference": reference}[form]
    pools = {name: layer[name].clone() for name in ("k_pool", "v_pool")}
    if form == "torch":  # which multiplies what it masks by 0
        pools = {name: pool.nan_to_num(0.0) for name, pool in pools.items()}
    out = ops.attend_layer(**layer_arguments(layer | pools | changes))
    return out, pools["k_pool"].nan_to_num(0.0), pools["v_pool"].nan_to_num(0.0)


def check(form: str, layer: dict[str, Any], lengths: list[int], dtype: torch.dtype) -> None:
    """Results of tokens, and the pools, are those of the reference."""
    got, want = run(form, layer), run("reference", layer)
    of_tokens = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    assert_alike((got[0][of_tokens], *got[1:]), (want[0][of_tokens], *want[1:]), dtype)


@pairwise(
    DTYPES,
    pytest.mark.parametrize("heads", HEADS),
    pytest.mark.parametrize("first", [0, 1, 3]),
    pytest.mark.parametrize(("lengths", "num_keys"), [([65], 65), ([100, 37], 163), ([66], GATHERED + 130)]),
)
def test_matches_reference(
    form: str, lengths: list[int], num_keys: int, first: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    check(form, make_run(lengths, num_keys, heads, dtype, first), lengths, dtype)


@pytest.mark.parametrize("parts", ["", "norm", "rotary gate"])
def test_layers_of_any_parts(form: str, parts: str) -> None:
    layer = make_run([70], 80, parts=parts)
    assert_alike(run(form, layer), run("reference", layer), torch.float32)


@needs_native
@DTYPES
def test_a_row_does_not_depend_on_the_others_or_on_threads(
    dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    layer = make_run([90, 71], 150, (8, 2, 16), dtype)
    set_threads(2)
    together = run("native", layer)[0]
    set_threads(1)
    for b in range(2):
        row, metadata = slice(b, b + 1), layer["metadata"]
        own = {name: layer[name][row] for name in ("projected", "cos", "sin")}
        own["metadata"] = replace(metadata, rows=metadata.rows[row], last=metadata.last[row], first_row=b + 1)
        own["write_slots"] = layer["write_slots"].view(2, -1)[b]
        assert torch.equal(run("native", layer, **own)[0][0], together[b])


@needs_native
def test_a_query_that_is_no_number_stays_alone() -> None:
    layer = make_run([70], 80, parts="")
    width = 6 * 8
    layer["projected"][0, 5, :width] = torch.nan
    out = run("native", layer)[0]
    assert out[0, 5].isnan().all()
    assert out[0, torch.arange(70) != 5].isfinite().all()


@needs_native
@pytest.mark.parametrize("size", [1e4, 1e19])
def test_large_scores(size: float) -> None:
    """One key takes all of the weight, block after block another one; scores may be infinite."""
    layer = make_run([80], 200, parts="")
    layer["projected"][..., : 6 * 8] *= size
    got, want = run("native", layer)[0], run("reference", layer)[0]
    assert torch.equal(got.isnan(), want.isnan())
    torch.testing.assert_close(got.nan_to_num(), want.nan_to_num(), rtol=1e-4, atol=1e-4)


def alone(layer: dict[str, Any], query: int, pools: tuple[Tensor, Tensor], metadata: AttentionMetadata) -> Tensor:
    """One query of a layer by itself, over pools that hold all keys."""
    only = slice(query, query + 1)
    of_query = {name: layer[name][:, only] for name in ("projected", "cos", "sin")}
    places = {"write_slots": layer["write_slots"][only], "metadata": metadata}
    return run("native", layer | of_query | places, k_pool=pools[0], v_pool=pools[1])[0][0, 0]


def check_nodes_alone(layer: dict[str, Any], parents: list[int], context: int) -> None:
    """Each node of a tree behind a context has the bits that it has at the end of its path alone."""
    ancestors = mask_of(torch.tensor([parents]))
    nodes = ancestors.shape[1]
    table, rows = layer["metadata"].table, layer["metadata"].rows
    before = torch.full((1, nodes), context - 1)
    tree = AttentionMetadata(table, rows, before, context + nodes, 0, torch.tensor([context]), ancestors)
    together, *pools = run("native", layer | {"metadata": tree})
    for node in range(nodes):
        path = ancestors[0, node].nonzero().flatten()
        in_a_row = torch.cat([table[:, :context], table[:, context + path]], 1)
        last = torch.tensor([[context + len(path) - 1]])
        of_path = AttentionMetadata(in_a_row, rows, last, in_a_row.shape[1])
        assert torch.equal(alone(layer, node, (pools[0], pools[1]), of_path), together[0, node])


@needs_native
@DTYPES
def test_exact_runs_give_a_query_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    layer = make_run([70], 90, dtype=dtype) | {"is_exact": True}
    together, *pools = run("native", layer)
    metadata = layer["metadata"]
    for query in (0, 1, 33, 69):
        own = replace(metadata, last=metadata.last[:, query : query + 1])
        assert torch.equal(alone(layer, query, (pools[0], pools[1]), own), together[0, query])


@needs_native
@DTYPES
@pytest.mark.parametrize("context", [3, 16, 45])
def test_a_node_of_a_tree_has_the_bits_of_its_path_alone(context: int, dtype: torch.dtype) -> None:
    nodes = 7
    check_nodes_alone(make_run([nodes], context + nodes, dtype=dtype), [-1, 0, 0, 1, 2, 4, 4], context)
