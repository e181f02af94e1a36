"""Where records of nodes go when the verify itself folds: never on top of what is pending, however large trees are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.cache.state_pool import StatePool
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
