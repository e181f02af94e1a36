"""Latent attention: values are the last numbers of their keys. Trees and long runs, numbers and codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels.paged_attention import (
    AttentionConfig,
    AttentionMetadata,
    LayerKV,
    attend_layer,
    native_ops,
    reference,
)
from specmamba.kernels.paged_attention.codes import as_bytes
from tests.kernels.test_paged_attention import OPS, attention_tolerance
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

HEADS, LENGTH = (5, 19), 90  # query heads, and numbers of a key
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
each_latent = pytest.mark.parametrize("latent", [13, 19])


def make(batch: int, queries: int, latent: int, dtype: torch.dtype, codes: torch.dtype | None) -> dict[str, Any]:
    """Queries behind LENGTH stored keys of each row, whose rows of the pool lie in no order; others hold NaN."""
    torch.manual_seed(latent)
    heads, width = HEADS
    total = LENGTH + queries
    table = (torch.randperm(batch * total) + 1).view(batch, total)
    pool = torch.full((batch * total + 3, 1, width), torch.nan, dtype=dtype)
    pool[table[:, :LENGTH].flatten()] = torch.randn(batch * LENGTH, 1, width).to(dtype)
    scales = None
    if codes is not None:
        scales = torch.rand(len(pool), 1) * 0.02
        pool = (
            torch.randint(-100, 100, pool.shape, dtype=torch.int8)
            if codes is torch.int8
            else pool.nan_to_num().to(codes)
        )
    angles = torch.rand(batch, queries, 1, 6) * 7
    kv = LayerKV(pool, pool[..., -latent:], table[:, LENGTH:].flatten(), scales, scales)
    return {
        "projected": torch.randn(batch, queries, (heads + 1) * width).to(dtype),
        "config": AttentionConfig(heads, 1, width, 0.3, latent_dim=latent),
        # codes are compared bit for bit, and forms round rotations in other ways
        "angles": None if codes else (angles.cos().to(dtype), angles.sin().to(dtype)),
        "kv": kv,
        "table": table,
    }


def run(ops: Any, given: dict[str, Any], metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
    """The result, and the pool afterwards, which is a copy."""
    kv = given["kv"]
    pool = kv.k_pool.clone()
    scales = None if kv.k_scales is None else kv.k_scales.clone()
    own = LayerKV(pool, pool[..., -given["config"].value_dim :], kv.write_slots, scales, scales)
    return ops.attend_layer(given["projected"], given["config"], given["angles"], own, metadata), pool


def check(form: str, given: dict[str, Any], metadata: AttentionMetadata) -> None:
    (out, pool), (want, stored) = (run(ops, given, metadata) for ops in (OPS[form], reference))
    assert (out.shape, out.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(out, want, **attention_tolerance(out.dtype, 0.3 * HEADS[1] ** 0.5))
    if given["kv"].k_scales is None:
        torch.testing.assert_close(pool, stored, equal_nan=True, **attention_tolerance(out.dtype))
    else:
        assert torch.equal(as_bytes(pool), as_bytes(stored))


@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn])
@each_dtype
@each_latent
def test_trees(form: str, latent: int, dtype: torch.dtype, codes: torch.dtype | None) -> None:
    nodes, batch = 7, len(SHAPES)
    given = make(batch, nodes, latent, dtype, codes)
    roots = torch.full((batch,), LENGTH)
    last = (roots - 1)[:, None].expand(-1, nodes)
    seen = mask_of(batch_of_parents(SHAPES, nodes, seed=3))
    check(form, given, AttentionMetadata(given["table"], torch.arange(batch), last, LENGTH + nodes, 0, roots, seen))


@pytest.mark.parametrize("codes", [None, torch.int8])
@each_dtype
@each_latent
def test_runs(form: str, latent: int, dtype: torch.dtype, codes: torch.dtype | None) -> None:
    """More queries than one block of keys, so that native code takes its form for long runs."""
    queries = 70
    given = make(2, queries, latent, dtype, codes)
    last = LENGTH + torch.arange(queries).expand(2, -1)
    check(form, given, AttentionMetadata(given["table"], torch.arange(2), last, LENGTH + queries))


@pytest.mark.usefixtures("needs_native")
def test_pools_that_do_not_fit_are_refused() -> None:
    given = make(1, 2, 13, torch.float32, None)
    metadata = AttentionMetadata(given["table"], torch.arange(1), torch.full((1, 2), LENGTH), LENGTH + 2)
    wrong = given["kv"]._replace(v_pool=given["kv"].k_pool)
    with pytest.raises(ValueError, match="do not fit the heads"):
        attend_layer(given["projected"], given["config"], None, wrong, metadata)
    assert native_ops.can_take(given["projected"], given["kv"], metadata)
