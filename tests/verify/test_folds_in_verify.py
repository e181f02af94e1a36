"""Where records of nodes go when the verify itself folds: never on top of what is pending, however large trees are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.cache.state_pool import StateOwnershipError, StatePool
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.verify.record_buffers import RecordBuffers

CPU = torch.device("cpu")
SHAPE = CacheShape((KVShape(1, 1, 4),), 1, StateShape(1, 1, 4, 4, 4), torch.float32, folds_in_verify=True)
NUM_ROWS = 4


def begun(max_nodes: int, shape: CacheShape = SHAPE) -> tuple[RecordBuffers, StatePool]:
    pool = StatePool(shape, NUM_ROWS, CPU)
    buffers = RecordBuffers(shape, pool, NUM_ROWS, max_nodes, CPU)
    for row in range(1, NUM_ROWS + 1):
        slot = pool.allocate(str(row))
        assert slot is not None
        buffers.begin(row, slot, str(row), 0)
    return buffers, pool


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 8, 16, 64])
@pytest.mark.parametrize("is_replayed", [True, False])
def test_nodes_stand_behind_what_is_pending(max_nodes: int, is_replayed: bool) -> None:
    rng = random.Random(max_nodes)
    buffers, pool = begun(max_nodes)
    num_folds, positions = 0, [0] * (NUM_ROWS + 1)
    for _ in range(300):
        rows = sorted(rng.sample(range(1, NUM_ROWS + 1), rng.randint(1, NUM_ROWS)))
        num_nodes = rng.randint(1, max_nodes)
        slots = buffers.place(rows, num_nodes)
        on_device = slots.on(CPU)
        offset = buffers.node_offset(num_nodes) if is_replayed else on_device.node_offset
        assert max(slots.num_pending) <= offset
        assert offset + num_nodes <= buffers.capacity
        folds = [False] * len(rows) if on_device.folds is None else on_device.folds.tolist()
        assert folds == [row in slots.folded for row in rows]
        num_folds += len(slots.folded)
        accepted = [rng.randrange(num_nodes) for _ in rows]
        buffers.advance(accepted)
        for row, count in zip(rows, accepted, strict=True):
            positions[row] += count + 1
            available = buffers.positions(row)
            assert available[-1] == positions[row]
            if row in slots.folded:  # the checkpoint has moved up to the root, and says so
                assert len(available) == count + 2
                assert pool.stamp(row).position == available[0]
    assert num_folds


def test_a_fold_before_the_verify_needs_less_room() -> None:
    before, _ = begun(8, replace(SHAPE, folds_in_verify=False))
    during, _ = begun(8)
    assert (before.capacity, during.capacity) == (16, 24)
    assert not before.place([1], 8).folded


def test_records_of_a_folded_row_begin_its_list() -> None:
    """Those of the other rows go behind what is pending."""
    buffers, _ = begun(4)
    chain = chain_shape(2, 4, CPU)
    while not (slots := buffers.place([1, 2], 4)).folded:
        buffers.advance([3, 0])
    assert slots.folded == (1,)
    entries = torch.arange(buffers.capacity, dtype=torch.float32)
    buffers.decay[:] = entries[:, None]
    on_device = slots.on(CPU)
    path, num_accepted = torch.arange(4).expand(2, -1), torch.tensor([2, 1])
    buffers.promote(buffers.plan_at(on_device, chain), path, num_accepted)
    first = on_device.node_offset
    assert buffers.decay[0, 1, :3, 0].tolist() == [first, first + 1, first + 2]
    behind = slots.num_pending[1]
    assert buffers.decay[0, 2, : behind + 2, 0].tolist() == [*range(behind), first, first + 1]


def test_kernels_are_told_of_chains() -> None:
    """By the drafts' shape, which the host knows: in a captured step nothing is read from the device."""
    buffers, _ = begun(3)
    slots = buffers.place([1, 2], 3).on(CPU)
    chains = torch.tensor([[-1, 0, 1]] * 2)
    assert buffers.plan_at(slots, chain_shape(2, 3, CPU)).trees.is_chain
    assert not buffers.plan_at(slots, tree_shape(chains, 2)).trees.is_chain


@pytest.mark.usefixtures("needs_native")
def test_the_plan_of_a_captured_step_folds_as_the_host_does() -> None:
    """The same states, windows and positions; to run the plan again, as after a failed recording, changes nothing."""
    shape = replace(SHAPE, folds_in_verify=False)
    by_host, by_plan = (begun(4, shape) for _ in range(2))
    for buffers, pool in (by_host, by_plan):
        noise = torch.Generator().manual_seed(1)
        for x in (buffers.k, buffers.u, buffers.decay, buffers.conv_inputs, pool.recurrent):
            x[:] = torch.randn(x.shape, generator=noise)
        for accepted in ([3, 0, 2], [3, 2, 0], [3, 1, 1], [3, 3, 3]):
            buffers.place([1, 2, 4], 4)
            buffers.advance(accepted)
    (host, host_pool), (plan, plan_pool) = by_host, by_plan
    host.place([1, 2, 4], 4)
    placed = plan.place([1, 2, 4], 4, is_captured=True)
    assert placed.folded == (1,)
    slots = placed.on(CPU)
    for _ in range(2):
        made = plan.plan_at(slots, chain_shape(3, 4, CPU))
        assert made.trees.folds is None
        assert slots.num_pending is not None
        assert slots.num_pending.tolist() == [0, 10, 10]
    host.advance([1, 1, 1])
    plan.advance([1, 1, 1])
    assert [plan.positions(row) for row in (1, 2, 4)] == [host.positions(row) for row in (1, 2, 4)]
    assert [plan_pool.stamp(slot) for slot in (1, 2, 4)] == [host_pool.stamp(slot) for slot in (1, 2, 4)]
    for x, y in ((plan_pool.recurrent, host_pool.recurrent), (plan_pool.conv, host_pool.conv)):
        assert torch.equal(x, y)
    assert torch.equal(plan.conv_inputs, host.conv_inputs)


def test_direct_steps_and_16_bit_states_fold_on_the_host() -> None:
    plain = replace(SHAPE, folds_in_verify=False)
    for shape, is_captured in ((plain, False), (replace(plain, state_dtype=torch.float16), True)):
        buffers, _ = begun(4, shape)
        for _ in range(12):
            assert not buffers.place([1, 2], 4, is_captured).folded
            buffers.advance([3, 1])


@pytest.mark.usefixtures("needs_native")
def test_nothing_goes_on_from_a_step_that_folded_and_failed() -> None:
    buffers, _ = begun(4, replace(SHAPE, folds_in_verify=False))
    while not (placed := buffers.place([1, 2], 4, is_captured=True)).folded:
        buffers.advance([3, 1])
    assert placed.folded == (1,)
    with pytest.raises(StateOwnershipError, match="is_written=False"):
        buffers.place([1, 2], 4, is_captured=True)
    with pytest.raises(StateOwnershipError, match="is_written=False"):
        buffers.retire(1, buffers.position(1))
    buffers.place([2], 4, is_captured=True)
