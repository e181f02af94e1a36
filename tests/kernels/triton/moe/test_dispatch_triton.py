"""Many pairs sorted by counting: the same bits as the reference's stable sort, whatever the groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import moe
from specmamba.kernels.moe import reference, torch_ops
from specmamba.kernels.moe.reference import Groups

pytestmark = pytest.mark.usefixtures("poisoned")

CHOICES = {  # experts [T, k] and how many there are; blocks have 16 pairs, sums 2 blocks of 4 experts
    "one pair": ([[0]], 1),
    "one pair of the last": ([[6]], 7),
    "one has all": ([[2]] * 53, 5),
    "the last has all": ([[8]] * 33, 9),
    "whole blocks": ([[3, 0], [0, 3]] * 16, 4),
    "two in turns": ([[1, 4], [4, 1], [1, 4]] * 13, 6),
    "one more than blocks": ([[0, 4, 2], [3, 1, 0], [2, 0, 3]] * 11, 5),
}


@pytest.fixture
def ops(gpu_device: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Any number of pairs is counted, in small blocks; comparing them with each other fails."""
    from specmamba.kernels.moe import triton_dispatch

    monkeypatch.setattr(triton_dispatch, "MAX_RANKED_PAIRS", 0)
    monkeypatch.setattr(triton_dispatch, "rank", None)
    monkeypatch.setattr(triton_dispatch, "COUNTED_PAIRS", 16)
    monkeypatch.setattr(triton_dispatch, "SUM_BLOCKS", {"BLOCKS": 2, "EXPERTS": 4})
    return triton_dispatch


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_experts(tokens: int, k: int, num_experts: int, seed: int) -> Tensor:
    return normal(tokens, num_experts, seed=seed).topk(k).indices


def assert_same(got: tuple[Tensor, Groups], want: tuple[Tensor, Groups]) -> None:
    (rows, groups), (want_rows, want_groups) = got, want
    assert (groups.places.dtype, groups.ends.dtype) == (torch.int64, torch.int32)
    assert torch.equal(groups.ends.cpu(), want_groups.ends)
    assert torch.equal(groups.places.cpu(), want_groups.places)
    assert rows.dtype is want_rows.dtype
    assert torch.equal(rows.cpu(), want_rows)


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_any_groups(name: str, ops: Any, gpu_device: str) -> None:
    chosen, num_experts = CHOICES[name]
    experts = torch.tensor(chosen)
    x = normal(len(experts), 3, seed=1)
    got = ops.dispatch(x.to(gpu_device), experts.to(gpu_device), num_experts)
    assert_same(got, reference.dispatch(x, experts, num_experts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_groups(dtype: torch.dtype, ops: Any, gpu_device: str) -> None:
    """Views of wider tensors; experts with and without pairs, in more blocks of experts and of pairs than one."""
    x, experts = normal(37, 9, seed=1, dtype=dtype), random_experts(37, 6, 21, seed=2) // 2 * 2
    for part in (x[:, 2:7], x[:, 2:7].T.contiguous().T):
        got = ops.dispatch(part.to(gpu_device), experts.to(gpu_device)[:, 1:4], 21)
        assert_same(got, reference.dispatch(part, experts[:, 1:4], 21))


def test_more_columns_than_a_block(ops: Any, gpu_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops.DISPATCH_BLOCKS, "BLOCK_K", 16)
    x, experts = normal(9, 37, seed=3), random_experts(9, 2, 3, seed=4)
    assert_same(ops.dispatch(x.to(gpu_device), experts.to(gpu_device), 3), reference.dispatch(x, experts, 3))


def test_what_is_no_expert_stays_among_the_rows(ops: Any, gpu_device: str) -> None:
    """No other memory is written: it is taken for the first or the last expert."""
    experts = torch.tensor([[0, 1 << 40], [-7, 2], [1, 3], [-(1 << 40), 1]])
    x = normal(4, 3, seed=5)
    got = ops.dispatch(x.to(gpu_device), experts.to(gpu_device), 3)
    assert_same(got, reference.dispatch(x, experts.clamp(0, 2), 3))


def test_more_pairs_than_are_compared(gpu_device: str, launchable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the sizes of every launch, through the entry."""
    from specmamba.kernels.moe import triton_dispatch

    experts = random_experts(373, 11, 45, seed=6) // 2 + 5
    assert experts.numel() == triton_dispatch.MAX_RANKED_PAIRS + 7
    monkeypatch.setattr(triton_dispatch, "rank", None)
    x = normal(373, 1, seed=7)
    got = moe.dispatch(x.to(gpu_device), experts.to(gpu_device), 45)
    assert_same(got, torch_ops.dispatch(x, experts, 45))


@pytest.mark.gpu
def test_a_graph_sorts_what_it_is_given(ops: Any) -> None:
    x, experts = normal(37, 9, seed=1).cuda(), random_experts(37, 3, 21, seed=2).cuda()
    ops.dispatch(x, experts, 21)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.dispatch(x, experts, 21)
    later = random_experts(37, 3, 20, seed=8)
    experts.copy_(later)
    graph.replay()
    assert_same(got, reference.dispatch(x.cpu(), later, 21))
