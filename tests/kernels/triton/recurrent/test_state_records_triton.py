"""The fold of pending records in Triton against the float64 recurrence: layouts, dtypes, slots of a pool."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specmamba.kernels.gpu import next_power_of_2
from specmamba.kernels.state_records import reference
from tests.kernels.recurrent.records import HEADS, Records, make_records, make_state

pytest.importorskip("triton")
from specmamba.kernels.state_records import tiles, triton_ops
from tests.kernels.rounding import tolerance

pytestmark = pytest.mark.usefixtures("poisoned")

TOLERANCE = tolerance(terms=160)
COUNTS = [0, 1, 16, 20]  # of more than one block of records


def fold(state: Tensor, records: Records, counts: list[int], device: str, out: Tensor | None = None) -> Tensor:
    there = [x.to(device) for x in (state, *records, torch.tensor(counts))]
    return triton_ops.fold(*there, out).cpu()


def wanted(state: Tensor, records: Records, counts: list[int]) -> Tensor:
    return reference.fold(state.double(), *records.clone(torch.float64), torch.tensor(counts))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("heads", [*HEADS, (1, 2, 100, 40)])
def test_fold_matches_the_recurrence(heads: tuple[int, int, int, int], gpu_device: str) -> None:
    """Behind the pending ones there are records that overflow, or none."""
    state = make_state(4, heads, seed=1)
    for capacity in (20, 23):
        records = make_records(4, capacity, heads, torch.tensor(COUNTS), seed=2)
        got = fold(state, records, COUNTS, gpu_device)
        torch.testing.assert_close(got.double(), wanted(state, records, COUNTS), **TOLERANCE)
        assert torch.equal(got[0], state[0])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("fill", range(18))
def test_every_fill_of_the_pending_list(fill: int, gpu_device: str) -> None:
    counts, heads = [fill, fill // 2], HEADS[1]
    state, records = make_state(2, heads, seed=3), make_records(2, 18, heads, torch.tensor(counts), seed=4)
    got = fold(state, records, counts, gpu_device)
    torch.testing.assert_close(got.double(), wanted(state, records, counts), **TOLERANCE)


@pytest.mark.parametrize("target", [1, 3])
def test_in_place_and_into_another_slot(target: int, gpu_device: str) -> None:
    """As the cache calls it: layers as the batch, slots of a pool, rows of records. Nothing else is written."""
    counts, heads = [5, 5, 5], HEADS[2]
    pool = torch.full((3, 4, *heads[1:]), torch.nan)
    pool[:, 1] = make_state(3, heads, seed=5)
    rings = make_records(3 * 4, 9, heads, torch.full((12,), 5), seed=6)
    records = Records(*(x.unflatten(0, (3, 4))[:, 2, :5] for x in rings))
    want, there = wanted(pool[:, 1], records, counts), pool.to(gpu_device)
    parts = [x.unflatten(0, (3, 4)).to(gpu_device)[:, 2, :5] for x in rings]
    triton_ops.fold(there[:, 1], *parts, torch.tensor(counts, device=gpu_device), there[:, target])
    torch.testing.assert_close(there[:, target].cpu().double(), want, **TOLERANCE)
    assert target == 1 or torch.equal(there[:, 1].cpu(), pool[:, 1])
    assert there[:, sorted({0, 2, 3} - {target})].isnan().all()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("read", "written"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp16"), ("fp16", "bf16")])
def test_dtypes(read: str, written: str, gpu_device: str) -> None:
    """Computed in float32, rounded once; a fold of nothing of states of the same dtype changes no bit."""
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    counts, heads = [3, 0], HEADS[1]
    state = make_state(2, heads, seed=7).to(types[read])
    records = make_records(2, 4, heads, torch.tensor(counts), seed=8)
    out = torch.empty(state.shape, dtype=types[written], device=gpu_device)
    got, want = fold(state, records, counts, gpu_device, out), wanted(state, records, counts)
    assert got.dtype is types[written]
    rounding = max(2e-6, torch.finfo(types[written]).eps)
    torch.testing.assert_close(got.double(), want, rtol=rounding, atol=rounding)
    assert written != read or torch.equal(got[1], state[1])


def test_float16_ends_at_its_largest_number(gpu_device: str) -> None:
    heads = HEADS[0]
    state, records = make_state(2, heads, seed=9), make_records(2, 1, heads, torch.tensor([1, 1]), seed=10)
    records.u[0] *= 1e6
    records.u[1] = torch.nan
    got = fold(state, records, [1, 1], gpu_device, torch.empty(2, *heads[1:], dtype=torch.float16, device=gpu_device))
    want = wanted(state, records, [1, 1]).clamp(-65504, 65504)
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-3, atol=1e-3)
    assert got[0].abs().max() == 65504
    assert got[1].isnan().all()


def test_any_layout(gpu_device: str) -> None:
    counts, heads = [4, 2], HEADS[1]
    state, records = make_state(2, heads, seed=11), make_records(2, 4, heads, torch.tensor(counts), seed=12)
    want = wanted(state, records, counts)
    turned = [x.mT.contiguous().to(gpu_device).mT for x in (state, records.k, records.u)]
    decay = records.decay.repeat_interleave(2, -1).to(gpu_device)[..., ::2]
    out = torch.full((2, 4, 24, 16), torch.nan, device=gpu_device).mT
    triton_ops.fold(*turned, decay, torch.tensor(counts, device=gpu_device), out)
    torch.testing.assert_close(out.cpu().double(), want, **TOLERANCE)


def test_no_rows(gpu_device: str) -> None:
    state, records = make_state(2, HEADS[1], seed=1), make_records(2, 9, HEADS[1], torch.tensor([3, 3]), seed=2)
    got = fold(state[:0], Records(*(x[:0] for x in records)), [], gpu_device)
    assert got.shape == (0, *state.shape[1:])


def test_tiles_are_large_enough_powers_of_two() -> None:
    for key_dim, value_dim in ((7, 5), (64, 64), (128, 128), (256, 100)):
        tile = triton_ops.fold_tile(key_dim, value_dim)
        assert all(size >= 16 and size == next_power_of_2(size) for size in (tile.keys, tile.values))
    names = [variant.name for variant in tiles.variants()]
    assert len(names) == len(set(names))
