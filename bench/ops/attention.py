"""Attention over a pool of keys and values: trees behind long contexts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specmamba.bench.ops import peers
from specmamba.bench.ops.case import Candidate, Case, Cost, Operator, Place, Run, counted, tree_parents, triton_ops
from specmamba.kernels import paged_attention
from specmamba.kernels import tree as tree_ops
from specmamba.kernels.paged_attention import native_ops, torch_ops

QWEN = {"heads": 16, "key_heads": 2, "head_dim": 256}  # Qwen3-Next
ROTATED = 64


def make_metadata(case: Case, device: torch.device) -> paged_attention.AttentionMetadata:
    """Metadata of a tree behind ``context`` tokens in each row; slots of the pool are in random order, 0 is padding."""
    batch, nodes, context = case["batch"], case["nodes"], case["context"]
    slots = 1 + torch.randperm(batch * (context + nodes), generator=case.generator()).view(batch, -1)
    table = torch.cat([torch.zeros_like(slots[:1]), slots]).to(device)
    seen = tree_ops.ancestors(tree_parents(case)).to(device)
    roots = torch.full((batch,), context, device=device)
    last = (roots - 1)[:, None].expand(batch, nodes)
    places = torch.arange(1, batch + 1, device=device)
    return paged_attention.AttentionMetadata(table, places, last, context + nodes, roots=roots, seen=seen, first_row=1)


def make_pools(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pools of keys and values, each [T, Hkv, D]."""
    size = 1 + case["batch"] * (case["context"] + case["nodes"])
    shape = 2, size, case["key_heads"], case["head_dim"]
    pools = torch.randn(shape, generator=case.generator()).to(device, case.torch_dtype)
    return pools[0], pools[1]


def attend_candidates(case: Case, place: Place) -> list[Candidate]:
    """Scores, softmax and values; with ``kind`` "layer" everything between the two products of an attention layer."""
    metadata, (k_pool, v_pool) = make_metadata(case, place.device), make_pools(case, place.device)
    if case.kind == "layer":
        return _layer_candidates(case, place, metadata, k_pool, v_pool)
    shape = case["batch"], case["nodes"], case["heads"], case["head_dim"]
    q = torch.randn(shape, generator=case.generator()).to(place.device, case.torch_dtype)
    mask, scale = metadata.mask, case["head_dim"] ** -0.5
    assert mask is not None

    def in_triton() -> Run:
        ops = triton_ops("paged_attention")
        return lambda: (ops.attend(q, k_pool, v_pool, metadata, scale),)

    found = place.forms(
        lambda: lambda: (torch_ops.attend(q, k_pool, v_pool, metadata.indices, mask, scale),), in_triton
    )
    return found + peers.flashinfer_attend(q, k_pool, v_pool, metadata.indices, mask)


def _layer_candidates(
    case: Case, place: Place, metadata: paged_attention.AttentionMetadata, k_pool: Tensor, v_pool: Tensor
) -> list[Candidate]:
    heads, key_heads, dim, device = case["heads"], case["key_heads"], case["head_dim"], place.device
    config = paged_attention.AttentionConfig(
        heads, key_heads, dim, dim**-0.5, torch.ones(heads + key_heads, dim, device=device), 1e-6, has_gate=True
    )
    width = (2 * heads + 2 * key_heads) * dim
    gen, dtype = case.generator(), case.torch_dtype
    projected = torch.randn(case["batch"], case["nodes"], width, generator=gen).to(device, dtype)
    angles = torch.rand(case["batch"], case["nodes"], 1, min(ROTATED, dim), generator=gen)
    turn = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    write_slots = metadata.table[1:, case["context"] :].flatten()

    def run(layer: Any) -> Run:
        kv = paged_attention.LayerKV(k_pool.clone(), v_pool.clone(), write_slots)
        return lambda: (layer(projected, config, turn, kv, metadata), kv.k_pool, kv.v_pool)

    can_take = native_ops.can_take(projected, paged_attention.LayerKV(k_pool, v_pool, write_slots), metadata)
    return place.forms(
        lambda: run(torch_ops.attend_layer),
        lambda: run(triton_ops("paged_attention").attend_layer),
        (lambda: run(native_ops.attend_layer)) if can_take else None,
    )


def attend_cost(case: Case) -> Cost:
    """Keys and values are read once per request, queries (or a projection) in, outputs out."""
    batch, nodes, length = case["batch"], case["nodes"], case["context"] + case["nodes"]
    heads, key_heads, dim = case["heads"], case["key_heads"], case["head_dim"]
    per_node = heads * dim
    if case.kind == "layer":  # queries, gates, keys and values in, keys and values stored
        per_node = (2 * heads + 4 * key_heads) * dim
    pool = 2 * batch * length * key_heads * dim
    size = case.itemsize * (pool + batch * nodes * (per_node + heads * dim))
    return Cost(size, 4 * batch * nodes * length * heads * dim, case.dtype)


def _case(batch: int, nodes: int, context: int, kind: str = "", is_quick: bool = False) -> Case:
    name = f"{kind + ', ' if kind else ''}{counted(nodes, 'node')} behind {context}, batch {batch}"
    sizes = {**QWEN, "batch": batch, "nodes": nodes, "context": context}
    return Case(name, sizes, "bfloat16", kind, is_quick)


_TINY = Case("tiny", {"heads": 4, "key_heads": 2, "head_dim": 16, "batch": 2, "nodes": 4, "context": 9}, is_tiny=True)

OPERATORS = (
    Operator(
        "paged_attention",
        ("paged_attention",),
        (
            _case(1, 1, 4096),
            _case(1, 8, 4096, is_quick=True),
            _case(32, 1, 1024),
            _case(32, 8, 1024, is_quick=True),
            _case(32, 8, 1024, "layer", is_quick=True),
            _TINY,
            replace(_TINY, name="tiny layer", kind="layer"),
        ),
        attend_cost,
        attend_candidates,
        tolerance=2e-2,
        gpu_tests=("paged_attention_triton",),
    ),
)
