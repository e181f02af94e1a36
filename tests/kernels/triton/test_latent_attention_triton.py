"""Latent attention in Triton against the reference: trees and longer runs, numbers and codes, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.paged_attention import (
    AttentionConfig,
    AttentionMetadata,
    LayerKV,
    attend_layer,
    reference,
    tiles,
)
from specmamba.kernels.paged_attention.codes import as_bytes
from tests.kernels.attention.test_latent_attention import LENGTH, make
from tests.kernels.rounding import tolerance
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

pytest.importorskip("triton")
from specmamba.kernels.paged_attention import triton_ops

pytestmark = pytest.mark.usefixtures("poisoned")

FP32, BF16 = torch.float32, torch.bfloat16
# queries, keys and weights are rounded; to bfloat16 the interpreter rounds towards zero, so twice as far
TOLERANCE = {FP32: tolerance(terms=160), BF16: tolerance(BF16, roundings=12)}


class Case:
    """Operands of ``test_latent_attention`` behind a row of padding, which is the first of the batch too."""

    def __init__(self, given: dict[str, Any], queries: int, is_tree: bool) -> None:
        self.given, batch = given, len(given["table"])
        table = torch.cat([torch.zeros_like(given["table"][:1]), given["table"]])
        rows, roots = torch.arange(batch), torch.full((batch,), LENGTH)  # row 0 in place of the last one
        if is_tree:
            last = (roots - 1)[:, None].expand(-1, queries)
            seen = mask_of(batch_of_parents(SHAPES[:batch], queries, seed=3))
            self.metadata = AttentionMetadata(table, rows, last, LENGTH + queries, 0, roots, seen)
        else:
            last = LENGTH + torch.arange(queries).expand(batch, -1)
            self.metadata = AttentionMetadata(table, rows, last, LENGTH + queries)
        slots = table[rows, LENGTH:]
        self.kv: LayerKV = given["kv"]._replace(write_slots=slots.flatten())

    def run(self, ops: Any, device: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Outputs, and pool and scales afterwards, which are copies."""
        config: AttentionConfig = self.given["config"]
        pool, scales = self.kv.k_pool.to(device, copy=True), self.kv.k_scales
        scales = None if scales is None else scales.to(device, copy=True)
        kv = LayerKV(pool, pool[..., -config.value_dim :], self.kv.write_slots.to(device), scales, scales)
        angles = None if self.given["angles"] is None else tuple(x.to(device) for x in self.given["angles"])
        m = self.metadata
        there = AttentionMetadata(
            *(m.table.to(device), m.rows.to(device), m.last.to(device), m.num_keys, m.first),
            roots=None if m.roots is None else m.roots.to(device),
            seen=None if m.seen is None else m.seen.to(device),
        )
        out = ops.attend_layer(self.given["projected"].to(device), config, angles, kv, there)
        return out.cpu(), pool.cpu(), None if scales is None else scales.cpu()

    def check(self, device: str) -> None:
        out, pool, scales = self.run(triton_ops, device)
        want, stored, of_stored = self.run(reference, "cpu")
        want[0] = 0
        assert (out.shape, out.dtype) == (want.shape, want.dtype)
        torch.testing.assert_close(out, want, **TOLERANCE[out.dtype])
        kept = torch.arange(len(pool)) > 0  # nothing is stored in slot 0
        if scales is None:
            torch.testing.assert_close(pool[kept], stored[kept], equal_nan=True, **TOLERANCE[out.dtype])
        else:
            assert of_stored is not None
            torch.testing.assert_close(scales[kept], of_stored[kept], rtol=1e-6, atol=0.0)
            differ = as_bytes(pool)[kept] != as_bytes(stored)[kept]  # a GPU may divide otherwise
            assert int(differ.sum()) <= (0 if device == "cpu" else 2)
        mine, right = (as_bytes(x[:1]).float().nan_to_num(9.0) for x in (pool, self.kv.k_pool))
        assert torch.equal(mine, right)


@pytest.mark.fast_cases("int8-bf16-19", "None-bf16-13", "None-fp32-19")
@pytest.mark.parametrize("latent", [13, 19])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn], ids=["None", "int8", "fp8"])
def test_trees(codes: torch.dtype | None, dtype: torch.dtype, latent: int, gpu_device: str) -> None:
    Case(make(3, 7, latent, dtype, codes), 7, is_tree=True).check(gpu_device)


@pytest.mark.fast_cases("None-fp32")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("codes", [None, torch.int8], ids=["None", "int8"])
def test_runs(codes: torch.dtype | None, dtype: torch.dtype, gpu_device: str) -> None:
    """One query, and more than are cut into parts."""
    for queries in (1, 66):
        Case(make(2, queries, 13, dtype, codes), queries, is_tree=False).check(gpu_device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_sizes_of_models(dtype: torch.dtype, gpu_device: str) -> None:
    """Heads of 576 numbers, of which 512 are values: pieces of keys, and blocks that are wider than keys."""
    torch.manual_seed(0)
    case = Case(make(2, 3, 13, dtype, None), 3, is_tree=True)
    pool = torch.randn(len(case.kv.k_pool), 1, 576).to(dtype)
    config = AttentionConfig(3, 1, 576, 576**-0.5, latent_dim=512)
    case.kv = case.kv._replace(k_pool=pool)
    case.given |= {"config": config, "projected": torch.randn(2, 3, 4 * 576).to(dtype), "angles": None}
    case.check(gpu_device)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
def test_what_is_not_finite(gpu_device: str) -> None:
    """It is stored as 0, and a query with it has no result; the others do not see it."""
    # the first row of the batch is padding
    case = Case(make(2, 4, 13, FP32, None), 4, is_tree=True)
    width = case.given["config"].head_dim
    case.given["projected"][1, 2, 0] = torch.nan  # of the first query head
    case.given["projected"][1, 3, -1] = torch.inf  # of the key
    out, pool, _ = case.run(triton_ops, gpu_device)
    heads = out.unflatten(-1, (-1, 13))
    assert heads[1, 2, 0].isnan().all()
    heads[1, 2, 0] = 0
    assert heads.isfinite().all()
    slots = case.kv.write_slots[4:]
    assert pool[slots].isfinite().all()
    assert pool[slots[3], 0, width - 1] == 0


def test_the_operator_takes_triton(launchable: None, gpu_device: str) -> None:
    if gpu_device == "cuda":
        pytest.skip("tensors on the CPU")
    case = Case(make(2, 4, 13, FP32, None), 4, is_tree=True)
    given = case.given["projected"], case.given["config"], None, case.kv, case.metadata
    assert operator_of(attend_layer).choose(*given) == "triton"
    assert operator_of(attend_layer).choose(*given[:3], case.kv._replace(is_exact=True), given[4]) != "triton"


def test_tiles_fit() -> None:
    for num_rows in (1, 32, 4096):
        for dtype in (FP32, BF16):
            tile = tiles.latent_tile(num_rows, dtype)
            assert all(size >= 16 and size & (size - 1) == 0 for size in (tile.rows, tile.keys, tile.piece))
