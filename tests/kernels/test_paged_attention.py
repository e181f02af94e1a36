"""Attention over scattered rows: torch_ops against the reference and against torch's own attention."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels.paged_attention import native_ops, reference, torch_ops
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
needs_native = pytest.mark.usefixtures("needs_native")
ATTEND = {"torch": torch_ops.attend, "native": native_ops.attend}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# (Hq, Hkv, D): one kv head per query head, grouped, all on one, odd widths
HEADS = pytest.mark.parametrize("heads", [(2, 2, 16), (6, 2, 8), (5, 1, 7), (4, 2, 67), (8, 2, 256)])


@pytest.fixture(params=ATTEND)
def form(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        request.getfixturevalue("needs_native")
    return str(request.param)


def make(batch: int, nodes: int, length: int, heads: tuple[int, int, int], dtype: torch.dtype) -> Inputs:
    """q, the two pools (NaN in every row that kv_indices does not name) and kv_indices [B, L] without repeats."""
    query_heads, kv_heads, width = heads
    gen = torch.Generator().manual_seed(nodes * 1000 + length)
    pool = 3 * batch * length + 1
    indices = torch.randperm(pool, generator=gen)[: batch * length].view(batch, length)
    k_pool, v_pool = torch.randn(2, pool, kv_heads, width, generator=gen).to(dtype)
    unnamed = torch.ones(pool, dtype=torch.bool)
    unnamed[indices.flatten()] = False
    k_pool[unnamed], v_pool[unnamed] = float("nan"), float("nan")
    return torch.randn(batch, nodes, query_heads, width, generator=gen).to(dtype), k_pool, v_pool, indices


@DTYPES
@HEADS
@pytest.mark.parametrize(("batch", "nodes", "length"), [(1, 1, 1), (1, 1, 37), (2, 5, 1), (1, 7, 63), (2, 16, 100)])
def test_attend_to_everything(
    form: str, batch: int, nodes: int, length: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    inputs = make(batch, nodes, length, heads, dtype)
    out = ATTEND[form](*inputs, None)
    torch.testing.assert_close(out, reference.attend(*inputs, None), **TOLERANCE[dtype])
    assert out.shape == inputs[0].shape
    assert out.dtype == dtype


@DTYPES
@HEADS
@pytest.mark.parametrize(("batch", "nodes", "length"), [(1, 1, 2), (1, 6, 41), (3, 19, 64)])
def test_attend_under_a_random_mask(
    form: str, batch: int, nodes: int, length: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    inputs = make(batch, nodes, length, heads, dtype)
    gen = torch.Generator().manual_seed(length)
    mask = torch.rand(batch, nodes, length, generator=gen) < 0.3
    mask.scatter_(2, torch.randint(length, (batch, nodes, 1), generator=gen), True)  # every query sees something
    out = ATTEND[form](*inputs, mask)
    torch.testing.assert_close(out, reference.attend(*inputs, mask), **TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [(2, 2, 16), (6, 2, 8), (5, 1, 7)])
@pytest.mark.parametrize("nodes", [1, 4, 15])
def test_attend_over_a_tree_after_ragged_contexts(form: str, nodes: int, heads: tuple[int, int, int]) -> None:
    """Contexts of different lengths, then the nodes' own keys; unseen entries all point at one loud row."""
    batch, longest = len(SHAPES), 23
    q, k_pool, v_pool, indices = make(batch, nodes, longest + nodes, heads, torch.float32)
    context = torch.tensor([23, 0, 1, 9, 16])
    unseen = torch.arange(longest) >= context[:, None]
    loud = int(indices[0, 0])
    k_pool[loud], v_pool[loud] = 50.0, -1e4
    indices[:, :longest][unseen] = loud
    tree_mask = mask_of(batch_of_parents(SHAPES, nodes, seed=nodes))
    mask = torch.cat([~unseen[:, None].expand(batch, nodes, longest), tree_mask], 2)
    out = ATTEND[form](q, k_pool, v_pool, indices, mask)
    want = reference.attend(q, k_pool, v_pool, indices, mask)
    torch.testing.assert_close(out, want, **TOLERANCE[torch.float32])
    assert out[1:].abs().max() < 100  # the loud row leaked into no row that does not see it


def test_attend_does_not_write_its_inputs(form: str) -> None:
    inputs = make(2, 3, 8, (4, 2, 8), torch.float32)
    before = [x.clone() for x in inputs]
    ATTEND[form](*inputs, torch.ones(2, 3, 8, dtype=torch.bool))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, inputs, strict=True))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_native_reads_views_and_many_rows(dtype: torch.dtype) -> None:
    """Queries cut out of a projection, indices cut out of a table, a layer's part of a pool, more rows than a task."""
    gen = torch.Generator().manual_seed(1)
    batch, nodes, length = 3, 33, 50
    projection = torch.randn(batch, nodes, 12, 16, generator=gen).to(dtype)
    pools = torch.randn(2, 5, 300, 2, 16, generator=gen).to(dtype)
    table = torch.randint(300, (batch, 80), generator=gen)
    mask = torch.rand(batch, nodes, 64, generator=gen) < 0.5
    mask[..., 7] = True
    arguments = projection[:, :, 2:10], pools[0, 3], pools[1, 3], table[:, 7 : 7 + length], mask[..., :length]
    torch.testing.assert_close(native_ops.attend(*arguments), reference.attend(*arguments), **TOLERANCE[dtype])


@needs_native
def test_native_does_not_read_what_nobody_sees() -> None:
    q, k_pool, v_pool, indices = make(2, 3, 9, (4, 2, 8), torch.float32)
    mask = torch.ones(2, 3, 9, dtype=torch.bool)
    want = native_ops.attend(q, k_pool, v_pool, indices[:, :7], mask[..., :7])
    mask[..., 7:] = False
    k_pool[indices[:, 7:]], v_pool[indices[:, 7:]] = torch.nan, torch.nan
    assert torch.equal(native_ops.attend(q, k_pool, v_pool, indices, mask), want)


@needs_native
def test_native_refuses_what_does_not_fit() -> None:
    q, k_pool, v_pool, indices = make(2, 3, 9, (4, 2, 8), torch.float32)
    for wrong in [
        (q[..., :7], k_pool, v_pool, indices, None),
        (q[:, :, :3], k_pool, v_pool, indices, None),
        (q, k_pool, v_pool[:, :1], indices, None),
        (q, k_pool, v_pool, indices[:1], None),
        (q, k_pool, v_pool, indices.int(), None),
        (q, k_pool, v_pool, indices, torch.ones(2, 3, 8, dtype=torch.bool)),
        (q, k_pool, v_pool, indices, torch.ones(2, 3, 9)),
    ]:
        with pytest.raises(ValueError, match=r"fit|need"):
            native_ops.attend(*wrong)


def test_reference_matches_torch_attention() -> None:
    """An outside oracle for the reference, in float64 and with grouped heads."""
    q, k_pool, v_pool, indices = make(2, 5, 13, (6, 2, 8), torch.float32)
    q, k_pool, v_pool = q.double(), k_pool.double(), v_pool.double()
    keys, values = k_pool[indices].transpose(1, 2), v_pool[indices].transpose(1, 2)
    want = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), keys, values, enable_gqa=True)
    torch.testing.assert_close(reference.attend(q, k_pool, v_pool, indices, None), want.transpose(1, 2))
