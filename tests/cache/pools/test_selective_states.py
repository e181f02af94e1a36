"""States of a Mamba1 draft model go back to any position of a draft; those of a target fold as soon as they can."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specmamba.cache.shapes import CacheShape, StateShape
from specmamba.cache.state_pool import StatePool
from specmamba.draft.draft_model import DraftStates
from specmamba.draft.drafter import chain_shape
from specmamba.kernels import causal_conv1d, selective_scan
from specmamba.kernels.state_records import RecordOperands
from specmamba.verify.record_buffers import MOST_SELECTIVE_PENDING, RecordBuffers

pytestmark = pytest.mark.usefixtures("needs_native")  # what else is there folds only where rows are full

CPU = torch.device("cpu")
CHANNELS, SIZE, WIDTH, LAYERS, MAX_NODES = 12, 4, 4, 2, 5
START = 7  # tokens that were run before a row drafts


def selective_shape() -> CacheShape:
    rates = -torch.rand(LAYERS, SIZE, CHANNELS, generator=torch.Generator().manual_seed(1))
    state = StateShape.selective(CHANNELS, SIZE, WIDTH)
    return CacheShape(kv=(), num_state_layers=LAYERS, state=state, dtype=torch.float32, rates=rates)


def run_token(token: int, row: int, layer: int, operands: RecordOperands, rates: Tensor) -> None:
    """Let a layer run a token of a row, whose inputs are random numbers of both."""
    generator = torch.Generator().manual_seed(100 * token + 10 * row + layer)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, 1, *shape, generator=generator)

    causal_conv1d.advance(random(CHANNELS), torch.ones(CHANNELS, WIDTH), None, operands)
    b, c, u = random(1, SIZE), random(1, SIZE), random(1, CHANNELS)
    selective_scan.advance(c, b, u, random(1, CHANNELS).abs(), rates, operands)


def drafting(tokens: Sequence[int]) -> DraftStates:
    """A row that drafts, and has run these tokens one by one."""
    states = DraftStates(selective_shape(), 2, MAX_NODES, CPU)
    states.load(1, states.values(1, 0).normal_(generator=torch.Generator().manual_seed(2)), START)
    states.start(1, START)
    run(states, tokens)
    return states


def run(states: DraftStates, tokens: Sequence[int]) -> None:
    rates = selective_shape().rates
    assert rates is not None
    for token in tokens:
        plan, _ = states.plan((1,), chain_shape(1, 1, CPU))
        for layer in range(LAYERS):
            run_token(token, 1, layer, states._records.operands(layer, plan), rates[layer])
        states.commit(plan, [1])


@pytest.mark.parametrize("dropped", [0, 1, 2, 3])
def test_a_draft_goes_back_to_each_of_its_positions(dropped: int) -> None:
    tokens = [5, 6, 8]
    states, straight = drafting(tokens), drafting(tokens[: 3 - dropped])
    states.roll_back(1, START + 3 - dropped)
    assert states.position(1) == straight.position(1) == START + 3 - dropped
    for more in ([], [9], [3, 4]):
        for each in (states, straight):
            run(each, more)
        place = states.position(1)
        torch.testing.assert_close(states.values(1, place), straight.values(1, place), atol=0, rtol=0)
    assert not torch.equal(states.values(1, START), states.values(1, states.position(1)))


def test_positions_of_a_draft_stay_until_there_is_no_room() -> None:
    """Each state on the way, after all of it was run."""
    tokens = list(range(MAX_NODES))
    states = drafting(tokens)
    for count in range(MAX_NODES + 1):
        straight = drafting(tokens[:count])
        at = START + count
        torch.testing.assert_close(states.values(1, at), straight.values(1, at), atol=0, rtol=0)


@pytest.mark.parametrize("folds_early", [False, True])
def test_records_of_plain_steps(folds_early: bool) -> None:
    """A target folds every other step: no row ever has more than one pending record before a step."""
    shape = selective_shape()
    assert shape.rates is not None
    pool = StatePool(shape, 2, CPU)
    records = RecordBuffers(shape, pool, 1, MAX_NODES, CPU, folds_early=folds_early)
    slot = pool.allocate("row 1")
    assert slot is not None
    records.begin(1, slot, "row 1", 0)
    before = []
    for token in range(6):
        plan = records.plan((1,), chain_shape(1, 1, CPU))
        before.append(records.num_pending)
        for layer in range(LAYERS):
            run_token(token, 1, layer, records.operands(layer, plan), shape.rates[layer])
        records.commit(plan, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), [0])
    assert records.position(1) == 6
    assert before == ([0, 1, 0, 1, 0, 1] if folds_early else [0, 1, 2, 3, 4, 5])
    assert MOST_SELECTIVE_PENDING == 1
