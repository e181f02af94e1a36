"""Compaction of record buffers: torch_ops against the reference, with overlapping and repeated moves."""

import pytest
import torch
from torch import Tensor

from specmamba.kernels.state_copy import native_ops, reference, torch_ops
from tests.pairwise import pairwise


def make_buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A buffer in which every element is different, so that any misplaced copy shows."""
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def random_moves(batch: int, moves: int, capacity: int, seed: int) -> tuple[Tensor, Tensor]:
    """source and target [B, J]: any sources, different targets; in the end each row's first move again and again."""
    gen = torch.Generator().manual_seed(seed)
    source = torch.randint(capacity, (batch, moves), generator=gen)
    target = torch.stack([torch.randperm(capacity, generator=gen)[:moves] for _ in range(batch)])
    is_surplus = torch.arange(moves) >= torch.randint(1, moves + 1, (batch, 1), generator=gen)
    return source.where(~is_surplus, source[:, :1]), target.where(~is_surplus, target[:, :1])


def compact(form: str, buffer: Tensor, *moves: Tensor) -> None:
    (native_ops if form == "native" else torch_ops).compact(buffer, *moves)


def check(form: str, buffer: Tensor, rows: list[int], source: Tensor, target: Tensor) -> Tensor:
    want = buffer.clone()
    arguments = (torch.tensor(rows), source, target)
    before = [x.clone() for x in arguments]
    reference.compact(want, *arguments)
    compact(form, buffer, *arguments)
    assert torch.equal(buffer, want)
    assert all(torch.equal(a, b) for a, b in zip(before, arguments, strict=True))
    return want


@pairwise(
    pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64]),
    pytest.mark.parametrize("tail", [(), (3,), (2, 5)]),
    pytest.mark.parametrize("seed", range(3)),
)
def test_random_moves(form: str, seed: int, tail: tuple[int, ...], dtype: torch.dtype) -> None:
    layers, rows_total, capacity, batch, moves = 1 + seed, 7, 9, 3, 5
    rows = torch.randperm(rows_total, generator=torch.Generator().manual_seed(seed))[:batch].tolist()
    source, target = random_moves(batch, moves, capacity, seed)
    check(form, make_buffer(layers, rows_total, capacity, *tail, dtype=dtype), rows, source, target)


def test_all_reads_happen_before_any_write(form: str) -> None:
    """A cycle and a shift: both go wrong when moves are done one after another."""
    source, target = torch.tensor([[1, 2, 0], [0, 1, 2]]), torch.tensor([[0, 1, 2], [1, 2, 3]])
    buffer = make_buffer(2, 3, 4, 2)
    old = buffer.clone()
    got = check(form, buffer, [2, 0], source, target)
    assert torch.equal(got[:, 2, :3], old[:, 2, [1, 2, 0]])
    assert torch.equal(got[:, 0, 1:], old[:, 0, :3])


def test_commit_moves_an_accepted_path_behind_the_pending_records(form: str) -> None:
    """As a commit does it: nodes 0, 2, 5 of the tree at offset 4 go behind one pending record."""
    buffer = make_buffer(1, 2, 12, 3)
    old = buffer.clone()
    check(form, buffer, [1], torch.tensor([[4, 6, 9, 4]]), torch.tensor([[1, 2, 3, 1]]))
    assert torch.equal(buffer[:, 1, :4], old[:, 1, [0, 4, 6, 9]])
    assert torch.equal(buffer[:, 1, 4:], old[:, 1, 4:])


def test_a_move_onto_itself_leaves_the_buffer_alone(form: str) -> None:
    buffer = make_buffer(2, 3, 4, 5)
    old = buffer.clone()
    entries = torch.tensor([[0, 1, 0], [3, 3, 3]])
    compact(form, buffer, torch.tensor([1, 2]), entries, entries)
    assert torch.equal(buffer, old)


def test_special_values_move_unchanged(form: str) -> None:
    """NaN and infinity are moved, and never spread to neighbours."""
    buffer = make_buffer(1, 1, 4, 2)
    buffer[0, 0, 3], buffer[0, 0, 2] = float("nan"), float("inf")
    compact(form, buffer, torch.tensor([0]), torch.tensor([[2, 3]]), torch.tensor([[0, 3]]))
    assert buffer[0, 0, 0].isinf().all()
    assert buffer[0, 0, 3].isnan().all()
    assert buffer[0, 0, :3].isnan().sum() == 0


def test_layers_rows_and_entries_may_lie_apart(form: str) -> None:
    whole = make_buffer(4, 6, 10, 3)
    before = whole.clone()
    got = check(form, whole[::2, 1:5, :8], [2, 0], torch.tensor([[6, 7], [1, 0]]), torch.tensor([[0, 1], [3, 0]]))
    assert torch.equal(whole[::2, 1:5, :8], got)
    assert torch.equal(whole[1::2], before[1::2])


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize(("row", "source", "target"), [(7, 0, 1), (-1, 0, 1), (0, 9, 1), (0, 0, -1)])
def test_native_code_refuses_moves_outside_of_the_buffer(row: int, source: int, target: int) -> None:
    buffer = make_buffer(2, 7, 9, 4)
    before, (rows, from_, to) = (
        buffer.clone(),
        (torch.tensor([row]), torch.tensor([[source]]), torch.tensor([[target]])),
    )
    with pytest.raises(IndexError, match="outside"):
        native_ops.compact(buffer, rows, from_, to)
    with pytest.raises(ValueError, match="int64"):
        native_ops.compact(buffer, rows.int(), from_, to)
    assert torch.equal(buffer, before)


def test_nothing_waits_for_the_content_of_a_tensor() -> None:
    """It runs on tensors that have none: a CUDA graph can hold it."""
    entries = torch.empty(3, 5, dtype=torch.int64, device="meta")
    torch_ops.compact(torch.empty(2, 7, 9, 4, device="meta"), entries[:, 0], entries, entries)
