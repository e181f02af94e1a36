"""States that are a convolution's window alone: both backends beside one that runs every token by itself.

Trees are random and so is what is accepted: rows have every number of pending records, and fold. Windows are
materialized at the positions that can be had.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.cache.access import ExtendState
from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.cache.state_pool import PREFIX_CACHE, StatePool
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.kernels import short_conv
from specmamba.kernels.short_conv import Inputs, Weights
from specmamba.kernels.state_records import RowSet
from specmamba.verify.record_buffers import RecordBuffers
from specmamba.verify.snapshot_buffers import SnapshotBuffers
from specmamba.verify.state_buffers import StateBuffers
from tests.kernels.trees import SHAPES, batch_of_parents, path_to

CPU = torch.device("cpu")
LAYERS, CHANNELS, MAX_NODES, NUM_ROWS = 2, 5, 6, 3
TOLERANCE: dict[str, Any] = {"atol": 1e-6, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Text:
    """The inputs of the tokens of one request, in every layer, and what each layer makes of them."""

    def __init__(self, width: int) -> None:
        self.gated = torch.zeros(LAYERS, width - 1, CHANNELS)  # in front of the first token: zeros

    def with_token(self, gated: Tensor) -> Tensor:
        """All inputs up to one more token: [layers, T, C]."""
        return torch.cat([self.gated, gated[:, None]], 1)


def sums(gated: Tensor, weights: list[Weights]) -> Tensor:
    """Of the last token of [layers, T, C], in every layer: [layers, C]."""
    found = []
    for of_layer, w in zip(gated, weights, strict=True):
        assert w.conv_bias is not None
        found.append((of_layer[-w.conv.shape[1] :] * w.conv.t()).sum(0) + w.conv_bias)
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 states", "bf16 states"])
@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("backend", [RecordBuffers, SnapshotBuffers])
def test_backends(backend: type[RecordBuffers] | type[SnapshotBuffers], width: int, dtype: torch.dtype) -> None:
    state = StateShape.window(CHANNELS, width)
    shape = CacheShape((KVShape(1, 1, 2),), LAYERS, state, torch.float32, state_dtype=dtype)
    pool, rng = StatePool(shape, 2 * NUM_ROWS, CPU), random.Random(width)
    pool.conv.fill_(torch.nan)
    buffers = backend(shape, pool, NUM_ROWS, MAX_NODES, CPU)
    weights = [Weights(torch.randn(width, CHANNELS).t(), torch.randn(CHANNELS)) for _ in range(LAYERS)]
    texts = {row: Text(width) for row in range(1, NUM_ROWS + 1)}
    slots = {row: pool.allocate(f"request {row}") for row in texts}
    for row, slot in slots.items():
        assert slot is not None
        extend(pool, slot, texts[row], weights, rng.randint(0, 7), f"request {row}")
        buffers.begin(row, slot, f"request {row}", position(texts[row], width))
    spare = pool.allocate(PREFIX_CACHE)
    assert spare is not None
    for _ in range(40):
        rows = rng.sample(sorted(texts), rng.randint(1, NUM_ROWS))
        verify(buffers, {row: texts[row] for row in rows}, weights, rng)
        row = rng.choice(rows)
        at = rng.choice(buffers.positions(row))
        buffers.materialize(row, at, spare)
        end = at + width - 1
        assert torch.equal(pool.conv[:, spare], texts[row].gated[:, end - width + 1 : end])
        pool.check(spare, PREFIX_CACHE, at)


def position(text: Text, width: int) -> int:
    return text.gated.shape[1] - width + 1


def extend(pool: StatePool, slot: int, text: Text, weights: list[Weights], length: int, owner: str) -> None:
    """Run known tokens, padding behind them."""
    pool.begin_write(slot, owner)
    start = position(text, weights[0].conv.shape[1])
    inputs = [Inputs(*torch.randn(1, length + 2, 3 * CHANNELS).chunk(3, -1)) for _ in range(LAYERS)]
    state = ExtendState(pool, RowSet.of([slot], CPU), torch.tensor([length]))
    out = torch.stack([short_conv.advance(x, weights[i], state.operands(i)) for i, x in enumerate(inputs)])
    gated = torch.stack([x.in_gate * x.mixed for x in inputs])[:, 0]
    for t in range(length):
        text.gated = text.with_token(gated[:, t])
        gates = torch.stack([x.gate[0, t] for x in inputs])
        torch.testing.assert_close(out[:, 0, t], gates * sums(text.gated, weights), **TOLERANCE)
    pool.end_write(slot, start + length)


def verify(buffers: StateBuffers[Any], texts: dict[int, Text], weights: list[Weights], rng: random.Random) -> None:
    """One tree per row: every node is as if the tokens before it had been run one by one; then accept at random."""
    nodes, rows = rng.randint(1, MAX_NODES), list(texts)
    tree = tree_shape(batch_of_parents(tuple(rng.choice(SHAPES) for _ in rows), nodes, rng.randint(0, 99)), nodes)
    tree = rng.choice([tree, chain_shape(len(rows), nodes, CPU)])
    parents, plan = tree.parents, buffers.plan(rows, tree)
    inputs = [Inputs(*torch.randn(len(rows), nodes, 3 * CHANNELS).chunk(3, -1)) for _ in range(LAYERS)]
    out = torch.stack([short_conv.advance(x, weights[i], buffers.operands(i, plan)) for i, x in enumerate(inputs)])
    gated = torch.stack([x.in_gate * x.mixed for x in inputs])
    paths = torch.zeros(len(rows), nodes, dtype=torch.int64)
    accepted = []
    for b, row in enumerate(rows):
        before = {-1: texts[row].gated}
        for i in range(nodes):
            own = torch.cat([before[int(parents[b, i])], gated[:, b, i : i + 1]], 1)
            before[i] = own
            gates = torch.stack([x.gate[b, i] for x in inputs])
            torch.testing.assert_close(out[:, b, i], gates * sums(own, weights), **TOLERANCE)
        real = [i for i in range(nodes) if i == 0 or parents[b, i] >= 0]
        path = path_to(parents[b].tolist(), rng.choice(real))
        paths[b, : len(path)] = torch.tensor(path)
        accepted.append(len(path) - 1)
        texts[row].gated = before[path[-1]]
    buffers.commit(plan, paths, torch.tensor(accepted), accepted)
