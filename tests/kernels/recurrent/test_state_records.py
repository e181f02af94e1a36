"""Folds of pending records: torch_ops and native code against the float64 recurrence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import state_records
from specmamba.kernels.dispatch import Form, operator_of
from specmamba.kernels.state_records import Buffers, native_ops, reference, torch_ops
from tests.kernels.recurrent.records import HEADS, WIDE_HEADS, Records, make_records, make_state
from tests.kernels.rounding import tolerance

TOLERANCE = tolerance(terms=160)

needs_native = pytest.mark.usefixtures("needs_native")


@pytest.mark.parametrize("heads", HEADS)
def test_fold_in_pytorch_on_any_device(heads: tuple[int, int, int, int], device: str) -> None:
    """Into a new tensor, and in place."""
    num_pending = torch.tensor([0, 1, 4, 9])
    state, records = make_state(4, heads, seed=8), make_records(4, 9, heads, num_pending, seed=9)
    want, there = token_by_token(state, records, num_pending), state.to(device)
    operands = [x.to(device) for x in (*records, num_pending)]
    for out in (None, there):
        got = torch_ops.fold(there, *operands, out)
        torch.testing.assert_close(got.cpu().double(), want, **TOLERANCE)
    assert torch.equal(there, got)


@pytest.fixture(params=[reference, torch_ops, native_ops], ids=["reference", "torch_ops", "native_ops"])
def ops(request: pytest.FixtureRequest) -> Any:
    if request.param is native_ops:
        request.getfixturevalue("needs_native")
    return request.param


@pytest.mark.parametrize("heads", [*HEADS, *WIDE_HEADS])
def test_fold_matches_the_recurrence(ops: Any, heads: tuple[int, int, int, int]) -> None:
    num_pending = torch.tensor([0, 1, 4, 9])
    state, records = make_state(4, heads, seed=8), make_records(4, 9, heads, num_pending, seed=9)
    before = [x.clone() for x in (state, *records)]
    new_state = ops.fold(state, *records, num_pending)
    want = token_by_token(state, records, num_pending)
    torch.testing.assert_close(new_state.double(), want, **TOLERANCE)
    assert torch.equal(new_state[0], state[0])
    assert new_state.data_ptr() != state.data_ptr()
    assert all(torch.equal(x, y) for x, y in zip(before, (state, *records), strict=True))


@pytest.mark.parametrize("heads", HEADS[:2])
def test_records_that_are_not_pending_any_more_do_not_count(ops: Any, heads: tuple[int, int, int, int]) -> None:
    """They have ordinary values, unlike the huge ones of the tests above."""
    full, num_pending = torch.tensor([6, 6, 6]), torch.tensor([0, 3, 5])
    state, records = make_state(3, heads, seed=10), make_records(3, 6, heads, full, seed=11)
    want = token_by_token(state, records, num_pending)
    torch.testing.assert_close(ops.fold(state, *records, num_pending).double(), want, **TOLERANCE)


def token_by_token(state: Tensor, records: Records, num_pending: Tensor) -> Tensor:
    """S = e^g S + k u^T for every record, in float64 and all heads at once."""
    folded, (k, u, decay) = state.double(), records.clone(torch.float64)
    k = k.repeat_interleave(u.shape[2] // k.shape[2], 2)
    for b, count in enumerate(num_pending.tolist()):
        for j in range(count):
            folded[b] = decay[b, j].exp()[:, None, None] * folded[b] + k[b, j, :, :, None] * u[b, j, :, None]
    return folded


def test_fold_in_place_and_into_another_slot(ops: Any) -> None:
    """Slots of a pool, whose layers stand for the batch: what a fold writes, and nothing else."""
    num_pending, heads = torch.tensor([0, 1, 5]), HEADS[1]
    state, records = make_state(3, heads, seed=18), make_records(3, 5, heads, num_pending, seed=19)
    want = ops.fold(state, *records, num_pending)
    for target in (1, 2):
        pool = torch.full((3, 4, *state.shape[1:]), torch.nan)
        pool[:, 1] = state
        out = ops.fold(pool[:, 1], *records, num_pending, pool[:, target])
        assert out.data_ptr() == pool[:, target].data_ptr()
        assert torch.equal(pool[:, target], want)
        assert target == 1 or torch.equal(pool[:, 1], state)
        assert pool[:, [0, 3]].isnan().all()


@needs_native
def test_shapes_that_do_not_fit_are_refused() -> None:
    """Native code would read and write other memory."""
    state, records = make_state(2, HEADS[1], seed=71), make_records(2, 8, HEADS[1], torch.tensor([4, 4]), seed=72)
    names = "state", *Records._fields, "num_pending"
    fitting = dict(zip(names, (state, *records, torch.tensor([1, 1])), strict=True))

    def refuse(complaint: str, **changed: Tensor) -> None:
        with pytest.raises(ValueError, match=complaint):
            native_ops.fold(**(fitting | changed))

    refuse("no multiple", k=torch.zeros(2, 8, 3, 16))
    refuse("no multiple", k=torch.zeros(2, 8, 0, 16))
    refuse("k has", k=records.k[:1])
    refuse("u has", u=records.u[:, :7])
    refuse("decay has", decay=records.decay[..., :1])
    refuse("num_pending", num_pending=torch.tensor([1]))
    refuse("num_pending", num_pending=torch.tensor([1.0, 1.0]))
    refuse("out has another shape", out=state[:1])


@needs_native
def test_a_fold_into_another_layout_is_not_native() -> None:
    state, records = make_state(1, HEADS[1], seed=20), make_records(1, 2, HEADS[1], torch.tensor([2]), seed=21)
    out = torch.full((1, 4, 24, 16), torch.nan).mT
    state_records.fold(state, *records, torch.tensor([2]), out)
    torch.testing.assert_close(out, native_ops.fold(state, *records, torch.tensor([2])), **TOLERANCE)


def chosen(*records: Tensor) -> Form:
    """The form that a fold of these records takes."""
    state = torch.zeros(1, 4, 16, 24, dtype=records[0].dtype)
    return operator_of(state_records.fold).choose(state, *records, torch.tensor([1]))


@needs_native
def test_the_op_takes_native_code_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    records = make_records(1, 3, HEADS[1], torch.tensor([1]), seed=61)
    assert chosen(*records) == "native"
    assert chosen(*records.clone(torch.float64)) == "torch"
    assert chosen(records.k, records.u.transpose(-1, -2).contiguous().mT, records.decay) == "torch"
    monkeypatch.setattr(native_ops, "code", lambda: None)
    assert chosen(*records) == "torch"


@needs_native
def test_a_fold_of_parts_of_buffers() -> None:
    """As the cache passes them: rows of larger buffers, slots of a pool."""
    num_pending = torch.tensor([4, 0, 2])
    state, records = make_state(3, HEADS[1], seed=31), make_records(3, 4, HEADS[1], num_pending, seed=32)
    padded = [torch.full((5, 9, *x.shape[2:]), float("nan")) for x in records]
    for buffer, x in zip(padded, records, strict=True):
        buffer[1:4, :4] = x
    pool = torch.full((6, *state.shape[1:]), float("nan"))
    pool[2:5] = state
    parts = [buffer[1:4, :4] for buffer in padded]
    assert native_ops.can_take(pool[2:5], *parts)
    assert torch.equal(native_ops.fold(pool[2:5], *parts, num_pending), native_ops.fold(state, *records, num_pending))


@needs_native
def test_nan_in_a_fold_stays_in_its_row() -> None:
    num_pending = torch.tensor([3, 2, 4])
    state, records = make_state(3, HEADS[1], seed=51), make_records(3, 4, HEADS[1], num_pending, seed=52)
    want = native_ops.fold(state, *records, num_pending)
    records.u[1, 0] = torch.nan
    got = native_ops.fold(state, *records, num_pending)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], want[[0, 2]])


@needs_native
def test_a_fold_in_place_does_not_depend_on_threads(set_threads: Callable[[int], None]) -> None:
    num_pending = torch.tensor([0, 6, 2, 5])
    state, records = make_state(4, WIDE_HEADS[0], seed=41), make_records(4, 6, WIDE_HEADS[0], num_pending, seed=42)
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


def layered_buffers(heads: tuple[int, int, int, int], counts: Tensor, rows: Tensor, dtype: torch.dtype) -> Buffers:
    """Buffers of 2 layers, 6 slots and 5 rows; the records of ``rows`` are real, all else is NaN."""
    key_heads, value_heads, key_dim, value_dim = heads
    shapes = ((key_heads, key_dim), (value_heads, value_dim), (value_heads,))
    records = [torch.full((2, 5, 9, *shape), torch.nan) for shape in shapes]
    for layer in range(2):
        for buffer, x in zip(records, make_records(len(rows), 9, heads, counts, seed=layer), strict=True):
            buffer[layer, rows] = x
    channels = 2 * key_heads * key_dim + value_heads * value_dim or 7
    inputs, windows = torch.randn(2, 5, 3 + 9, channels).to(dtype), torch.randn(2, 6, 3, channels).to(dtype)
    states = torch.stack([make_state(6, heads, seed=60 + layer) for layer in range(2)])
    return Buffers(states, inputs, *records, windows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flags", [None, [True, False, True, True]])
@pytest.mark.parametrize("heads", [*HEADS, *WIDE_HEADS])
def test_folds_of_rows(
    ops: Any, heads: tuple[int, int, int, int], flags: list[bool] | None, dtype: torch.dtype
) -> None:
    """In place, in all layers; what does not fold keeps its bits, and a second call changes nothing."""
    rows, slots, counts = torch.tensor([4, 0, 1, 3]), torch.tensor([2, 0, 5, 1]), torch.tensor([9, 0, 4, 1])
    folds = None if flags is None else torch.tensor(flags)
    got = layered_buffers(heads, counts, rows, dtype)
    before = replace(got, **{name: getattr(got, name).clone() for name in ("states", "conv_inputs", "windows")})
    left = counts.clone()
    for _ in range(2):
        ops.fold_rows(got, rows, slots, left, folds)
    assert left.tolist() == [0, 0, 0, 0]
    assert got.windows is not None
    assert before.windows is not None
    for layer in range(2):
        k, u, decay = (x[layer, rows] for x in (got.k, got.u, got.decay))
        want = token_by_token(before.states[layer, slots], Records(k, u, decay), counts)
        torch.testing.assert_close(got.states[layer, slots].double(), want, **TOLERANCE)
        for row, slot, count in zip(rows.tolist(), slots.tolist(), counts.tolist(), strict=True):
            newest = before.conv_inputs[layer, row, count : count + 3] if count else before.windows[layer, slot]
            assert torch.equal(got.windows[layer, slot], newest)
            if count:
                assert torch.equal(got.conv_inputs[layer, row, :3], newest)
    others = [slot for slot in range(6) if slot not in (2, 5, 1)]
    assert torch.equal(got.states[:, others], before.states[:, others])
    assert torch.equal(got.windows[:, others], before.windows[:, others])
    assert torch.equal(got.conv_inputs[:, [0, 2]], before.conv_inputs[:, [0, 2]])
    assert torch.equal(got.conv_inputs[:, :, 3:], before.conv_inputs[:, :, 3:])


def test_folds_of_rows_without_heads_move_windows(ops: Any) -> None:
    """The state is a window alone, of a short convolution; a row without a flag keeps it."""
    rows, slots, counts = torch.tensor([4, 1, 3]), torch.tensor([2, 5, 1]), torch.tensor([9, 4, 1])
    got = layered_buffers((0, 0, 0, 0), counts, rows, torch.bfloat16)
    want = replace(got, **{name: getattr(got, name).clone() for name in ("conv_inputs", "windows")})
    assert want.windows is not None
    for row, slot, count in ((4, 2, 9), (3, 1, 1)):
        want.windows[:, slot] = want.conv_inputs[:, row, count : count + 3]
        want.conv_inputs[:, row, :3] = want.windows[:, slot]
    ops.fold_rows(got, rows, slots, counts, torch.tensor([True, False, True]))
    assert counts.tolist() == [0, 4, 0]
    assert got.windows is not None
    assert torch.equal(got.windows, want.windows)
    assert torch.equal(got.conv_inputs, want.conv_inputs)


@needs_native
def test_native_folds_of_rows_are_those_of_the_fold(set_threads: Callable[[int], None]) -> None:
    """Bit for bit, on any number of threads; rows without a flag stay pending."""
    rows, slots, counts = torch.tensor([2, 4, 1]), torch.tensor([3, 1, 5]), torch.tensor([6, 5, 2])
    want = layered_buffers(HEADS[1], counts, rows, torch.float32)
    results = []
    for threads in (1, 2):
        set_threads(threads)
        got = replace(want, states=want.states.clone(), conv_inputs=want.conv_inputs.clone())
        left = counts.clone()
        native_ops.fold_rows(got, rows, slots, left, torch.tensor([True, False, True]))
        assert left.tolist() == [0, 5, 0]
        results.append(got.states)
        for layer in range(2):
            records = [x[layer, rows] for x in (got.k, got.u, got.decay)]
            folded = native_ops.fold(want.states[layer, slots], *records, counts)
            assert torch.equal(got.states[layer, slots[[0, 2]]], folded[[0, 2]])
            assert torch.equal(got.states[layer, slots[1]], want.states[layer, slots[1]])
    assert torch.equal(*results)


@needs_native
def test_native_folds_of_rows_refuse_what_does_not_fit() -> None:
    rows = torch.tensor([1, 2])
    x = layered_buffers(HEADS[1], torch.tensor([1, 1]), rows, torch.float32)
    for wrong in (
        replace(x, k=x.k[:, :4]),
        replace(x, u=x.u[:, :, :-1]),
        replace(x, conv_inputs=x.conv_inputs[:, :, 1:]),
        replace(x, windows=None),
    ):
        with pytest.raises(ValueError, match=r"shape|windows"):
            native_ops.fold_rows(wrong, rows, rows, rows)
    for places in ((rows, rows[:1], rows), (rows.int(), rows, rows)):
        with pytest.raises(ValueError, match=r"entry per row|int64"):
            native_ops.fold_rows(x, *places)
    with pytest.raises(ValueError, match="bool"):
        native_ops.fold_rows(x, rows, rows, rows, rows)
