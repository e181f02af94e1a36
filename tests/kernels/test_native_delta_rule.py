"""The native fold of pending records against the float64 recurrence; test_delta_net.py has the native verify."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specmamba.kernels import gated_delta_rule
from specmamba.kernels.gated_delta_rule import native_ops, reference, torch_ops
from tests.kernels.test_gated_delta_rule import (
    HEADS,
    TOLERANCE,
    Records,
    check_fold_into,
    make_records,
    make_tokens,
)

WIDE_HEADS = [(2, 4, 64, 64), (1, 2, 128, 128), (2, 2, 100, 72)]


pytestmark = pytest.mark.usefixtures("needs_native")


def test_shapes_that_do_not_fit_are_refused() -> None:
    """Native code would read, and write, the memory of others."""
    _, state = make_tokens(2, 1, HEADS[1], seed=71)
    records = make_records(2, 8, HEADS[1], torch.tensor([4, 4]), seed=72)
    names = ("state", *(f"records_{name}" for name in Records._fields), "num_pending")
    fitting = dict(zip(names, (state, *records, torch.tensor([1, 1])), strict=True))

    def refuse(complaint: str, **changed: Tensor) -> None:
        with pytest.raises(ValueError, match=complaint):
            native_ops.fold(**(fitting | changed))

    refuse("no multiple", records_k=torch.zeros(2, 8, 3, 16))
    refuse("records_k", records_k=records.k[:1])
    refuse("records_u", records_u=records.u[:, :7])
    refuse("records_decay", records_decay=records.decay[..., :1])
    refuse("num_pending", num_pending=torch.tensor([1]))
    refuse("num_pending", num_pending=torch.tensor([1.0, 1.0]))
    refuse("out has another shape", out=state[:1])


@pytest.mark.parametrize("heads", [*HEADS, *WIDE_HEADS])
def test_fold_matches_reference(heads: tuple[int, int, int, int]) -> None:
    num_pending = torch.tensor([0, 1, 4, 9])
    _, state = make_tokens(4, 1, heads, seed=8)
    records = make_records(4, 9, heads, num_pending, seed=9)
    before = [x.clone() for x in (state, *records)]
    new_state = native_ops.fold(state, *records, num_pending)
    want = reference.fold(state.double(), *records.clone(torch.float64), num_pending)
    torch.testing.assert_close(new_state.double(), want, **TOLERANCE)
    assert torch.equal(new_state[0], state[0])
    assert all(torch.equal(x, y) for x, y in zip(before, (state, *records), strict=True))


def test_fold_in_place_and_into_another_slot() -> None:
    check_fold_into(native_ops)


def test_a_fold_into_another_layout_is_not_native() -> None:
    _, state = make_tokens(1, 1, HEADS[1], seed=20)
    records = make_records(1, 2, HEADS[1], torch.tensor([2]), seed=21)
    out = torch.full((1, 4, 24, 16), torch.nan).mT
    gated_delta_rule.fold(state, *records, torch.tensor([2]), out)
    torch.testing.assert_close(out, native_ops.fold(state, *records, torch.tensor([2])), **TOLERANCE)


def chosen(monkeypatch: pytest.MonkeyPatch, *records: Tensor) -> ModuleType:
    """Which form the op takes for a fold of these."""
    state = torch.zeros(1, 4, 16, 24, dtype=records[0].dtype)
    taken: list[ModuleType] = []
    for ops in (native_ops, torch_ops):
        monkeypatch.setattr(ops, "fold", lambda *_, ops=ops: taken.append(ops))
    gated_delta_rule.fold(state, *records, torch.tensor([1]))
    return taken[0]


def test_the_op_takes_native_code_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    records = make_records(1, 3, HEADS[1], torch.tensor([1]), seed=61)
    assert chosen(monkeypatch, *records) is native_ops
    assert chosen(monkeypatch, *records.clone(torch.float64)) is torch_ops
    assert chosen(monkeypatch, records.k, records.u.transpose(-1, -2).contiguous().mT, records.decay) is torch_ops
    monkeypatch.setattr(native_ops, "code", lambda: None)
    assert chosen(monkeypatch, *records) is torch_ops


def test_a_fold_of_parts_of_buffers() -> None:
    """As the cache passes them: rows of larger buffers, slots of a pool."""
    num_pending = torch.tensor([4, 0, 2])
    _, state = make_tokens(3, 1, HEADS[1], seed=31)
    records = make_records(3, 4, HEADS[1], num_pending, seed=32)
    padded = [torch.full((5, 9, *x.shape[2:]), float("nan")) for x in records]
    for buffer, x in zip(padded, records, strict=True):
        buffer[1:4, :4] = x
    pool = torch.full((6, *state.shape[1:]), float("nan"))
    pool[2:5] = state
    parts = [buffer[1:4, :4] for buffer in padded]
    assert native_ops.can_take(pool[2:5], *parts)
    assert torch.equal(native_ops.fold(pool[2:5], *parts, num_pending), native_ops.fold(state, *records, num_pending))


def test_a_fold_of_what_is_no_number_stays_in_its_row() -> None:
    num_pending = torch.tensor([3, 2, 4])
    _, state = make_tokens(3, 1, HEADS[1], seed=51)
    records = make_records(3, 4, HEADS[1], num_pending, seed=52)
    want = native_ops.fold(state, *records, num_pending)
    records.u[1, 0] = torch.nan
    got = native_ops.fold(state, *records, num_pending)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], want[[0, 2]])


def test_a_fold_in_place_does_not_depend_on_threads(set_threads: Callable[[int], None]) -> None:
    num_pending = torch.tensor([0, 6, 2, 5])
    _, state = make_tokens(4, 1, WIDE_HEADS[0], seed=41)
    records = make_records(4, 6, WIDE_HEADS[0], num_pending, seed=42)
    want = native_ops.fold(state, *records, num_pending)
    alone = [native_ops.fold(x, *(r[b : b + 1] for r in records), num_pending[b : b + 1]) for b, x in each(state)]
    assert torch.equal(torch.cat(alone), want)
    set_threads(2)
    folded = state.clone()
    native_ops.fold(folded, *records, num_pending, folded)
    assert torch.equal(folded, want)


def each(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The rows of a tensor, each still with its dimension."""
    return enumerate(rows.split(1))
