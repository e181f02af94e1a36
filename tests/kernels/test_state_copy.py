"""Compaction of record buffers: torch_ops against the reference, with overlapping moves and dead entries."""

import pytest
import torch
from torch import Tensor

from specmamba.kernels.state_copy import reference, torch_ops


def make_buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A buffer in which every element is different, so that any misplaced copy shows."""
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def check(buffer: Tensor, rows: list[int], source: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    want = buffer.clone()
    arguments = (torch.tensor(rows), source, target, valid)
    before = [x.clone() for x in arguments]
    reference.compact(want, *arguments)
    torch_ops.compact(buffer, *arguments)
    assert torch.equal(buffer, want)
    assert all(torch.equal(a, b) for a, b in zip(before, arguments, strict=True))
    return want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("tail", [(), (3,), (2, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_random_moves(seed: int, tail: tuple[int, ...], dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(seed)
    layers, rows_total, capacity, batch, moves = 1 + seed, 7, 9, 3, 5
    rows = torch.randperm(rows_total, generator=gen)[:batch].tolist()
    source = torch.randint(capacity, (batch, moves), generator=gen)
    target = torch.stack([torch.randperm(capacity, generator=gen)[:moves] for _ in range(batch)])
    valid = torch.rand(batch, moves, generator=gen) < 0.6
    check(make_buffer(layers, rows_total, capacity, *tail, dtype=dtype), rows, source, target, valid)


def test_all_reads_happen_before_any_write() -> None:
    """A cycle and a shift: both go wrong when moves are done one after another."""
    source, target = torch.tensor([[1, 2, 0], [0, 1, 2]]), torch.tensor([[0, 1, 2], [1, 2, 3]])
    buffer = make_buffer(2, 3, 4, 2)
    old = buffer.clone()
    got = check(buffer, [2, 0], source, target, torch.ones(2, 3, dtype=torch.bool))
    assert torch.equal(got[:, 2, :3], old[:, 2, [1, 2, 0]])
    assert torch.equal(got[:, 0, 1:], old[:, 0, :3])


def test_commit_moves_an_accepted_path_behind_the_pending_records() -> None:
    """As a commit does it: nodes 0, 2, 5 of the tree at offset 4 go behind one pending record."""
    buffer = make_buffer(1, 2, 12, 3)
    old = buffer.clone()
    path, valid = torch.tensor([[0, 2, 5, 5]]), torch.tensor([[True, True, True, False]])
    check(buffer, [1], 4 + path, 1 + torch.arange(4)[None], valid)
    assert torch.equal(buffer[:, 1, :4], old[:, 1, [0, 4, 6, 9]])
    assert torch.equal(buffer[:, 1, 4:], old[:, 1, 4:])


def test_dead_entries_have_no_effect() -> None:
    """Entries that are not valid may share the target of a live one, also from another batch row on the same row."""
    source = torch.tensor([[3, 2, 2], [1, 1, 1]])
    target = torch.tensor([[0, 0, 1], [0, 1, 0]])
    valid = torch.tensor([[True, False, True], [False, False, False]])
    check(make_buffer(2, 2, 4, 3), [1, 1], source, target, valid)


def test_nothing_valid_leaves_the_buffer_alone() -> None:
    buffer = make_buffer(2, 3, 4, 5)
    old = buffer.clone()
    zeros = torch.zeros(2, 3, dtype=torch.int64)
    torch_ops.compact(buffer, torch.zeros(2, dtype=torch.int64), zeros, zeros, zeros.bool())
    assert torch.equal(buffer, old)


def test_special_values_move_unchanged() -> None:
    """NaN and infinity are moved, and never spread to neighbours."""
    buffer = make_buffer(1, 1, 4, 2)
    buffer[0, 0, 3], buffer[0, 0, 2] = float("nan"), float("inf")
    torch_ops.compact(
        buffer, torch.tensor([0]), torch.tensor([[2, 3]]), torch.tensor([[0, 3]]), torch.ones(1, 2, dtype=torch.bool)
    )
    assert buffer[0, 0, 0].isinf().all()
    assert buffer[0, 0, 3].isnan().all()
    assert buffer[0, 0, :3].isnan().sum() == 0
