"""Compaction of record buffers in Triton, against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specmamba.kernels import state_copy
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.state_copy import reference
from specmamba.kernels.tree import reference as tree_reference
from tests.kernels.recurrent.test_state_copy import make_buffer, random_moves

pytestmark = pytest.mark.usefixtures("poisoned")


def check(buffer: Tensor, rows: list[int], source: Tensor, target: Tensor, device: str) -> Tensor:
    """The buffer after moves in Triton; the same as after the reference's."""
    from specmamba.kernels.state_copy import triton_ops

    want, got = buffer.clone(), _like(buffer, device)
    reference.compact(want, torch.tensor(rows), source, target)
    moves = [x.to(device) for x in (torch.tensor(rows), source, target)]
    before = [x.clone() for x in moves]
    triton_ops.compact(got, *moves)
    assert torch.equal(got.cpu(), want)
    assert all(torch.equal(a, b) for a, b in zip(before, moves, strict=True))
    return want


def _like(x: Tensor, device: str) -> Tensor:
    """A copy with the strides of x."""
    whole = torch.zeros(1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)), dtype=x.dtype)
    whole = whole.to(device)
    whole.as_strided(x.shape, x.stride()).copy_(x)
    return whole.as_strided(x.shape, x.stride())


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("tail", [(), (3,), (2, 35)])
def test_random_moves(gpu_device: str, tail: tuple[int, ...], dtype: torch.dtype) -> None:
    for seed, moves in enumerate((1, 2, 5, 9)):
        layers, rows_total, capacity, batch = 1 + seed, 7, 9, 3
        rows = torch.randperm(rows_total, generator=torch.Generator().manual_seed(seed))[:batch].tolist()
        source, target = random_moves(batch, moves, capacity, seed)
        buffer = make_buffer(layers, rows_total, capacity, *tail, dtype=torch.int64)
        check(((buffer * 37) % 251).to(dtype), rows, source, target, gpu_device)


def test_strided_buffers(gpu_device: str) -> None:
    """A part of larger rows of some of the layers, as a view; nothing around it is touched."""
    source, target = random_moves(3, 5, 6, seed=3)
    whole = make_buffer(4, 5, 9, 3, 16)
    check(whole[::2, :, 1:7, :2], [4, 0, 2], source, target, gpu_device)
    with pytest.raises(ValueError, match="not contiguous"):
        check(whole[..., ::2], [4, 0, 2], source, target, gpu_device)
    with pytest.raises(ValueError, match="not contiguous"):
        check(whole[..., :9], [4, 0, 2], source, target, gpu_device)


def test_all_reads_happen_before_any_write(gpu_device: str) -> None:
    """A cycle and a shift of 64 entries, over several blocks of elements: more than one thread's or one program's."""
    cycle = torch.arange(64)
    source = torch.stack([cycle.roll(-1), cycle])
    target = torch.stack([cycle, cycle + 1])
    buffer = make_buffer(1, 3, 65, 300)
    got = check(buffer, [2, 0], source, target, gpu_device)
    assert torch.equal(got[:, 2, :64], buffer[:, 2, :64].roll(-1, 1))
    assert torch.equal(got[:, 0, 1:], buffer[:, 0, :64])


@pytest.mark.parametrize("pending", [0, 1, 4])
def test_commit(gpu_device: str, pending: int) -> None:
    """Nodes 0, 2, 5 of one tree at offset 4 go behind the pending records; another row keeps its root alone."""
    path, num_accepted = torch.tensor([[0, 2, 5, 5, 5, 5], [0, 0, 0, 0, 0, 0]]), torch.tensor([2, 0])
    moves = tree_reference.commit_moves(path, num_accepted, 4, torch.tensor([pending, 2]))
    buffer = make_buffer(2, 4, 12, 3)
    got = check(buffer, [1, 3], *moves, gpu_device)
    assert torch.equal(got[:, 1, : pending + 3], buffer[:, 1, [*range(pending), 4, 6, 9]])
    assert torch.equal(got[:, 3, :3], buffer[:, 3, [0, 1, 4]])
    assert torch.equal(got[:, [0, 2]], buffer[:, [0, 2]])


def test_padding_stays_in_its_row(gpu_device: str) -> None:
    """Several rows of padding, each with other moves: row 0 may change, the others stay as they were."""
    from specmamba.kernels.state_copy import triton_ops

    source, target = (x.to(gpu_device) for x in random_moves(4, 5, 9, seed=8))
    buffer = make_buffer(2, 3, 9, 7).to(gpu_device)
    old = buffer.clone()
    triton_ops.compact(buffer, torch.zeros(4, dtype=torch.int64, device=gpu_device), source, target)
    assert torch.equal(buffer[:, 1:], old[:, 1:])


def test_special_values_move_unchanged(gpu_device: str) -> None:
    """Every bit of a NaN is moved."""
    buffer = torch.tensor([0x7FC12345, 0x7F800000, -0x7FFFFF, 0, 5, 6], dtype=torch.int32).view(1, 1, 6, 1)
    got = check(buffer, [0], torch.tensor([[0, 1, 2]]), torch.tensor([[3, 4, 5]]), gpu_device)
    floats = buffer.view(torch.float32).to(gpu_device)
    from specmamba.kernels.state_copy import triton_ops

    triton_ops.compact(floats, *(torch.tensor(x, device=gpu_device) for x in ([0], [[0, 1, 2]], [[3, 4, 5]])))
    assert torch.equal(floats.view(torch.int32).cpu(), got)


@pytest.mark.usefixtures("launchable")
def test_triton_is_chosen_where_it_runs() -> None:
    entries = torch.zeros(1, 1, dtype=torch.int64)
    assert operator_of(state_copy.compact).choose(torch.zeros(1, 1, 1), entries[0], entries, entries) == "triton"
