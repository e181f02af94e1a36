"""The selective scan against the float64 recurrence: known tokens, trees behind pending records, snapshots, folds."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specmamba.kernels.selective_scan import reference, torch_ops
from specmamba.kernels.state_records import TreePlacement
from tests.kernels.recurrent.records import TOLERANCE
from tests.kernels.recurrent.strong_decay import mixed
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

STEPS = torch.tensor([0.0, 1e-6, 1e-3, 0.03, 0.5, 4.0, 30.0, 500.0])
SIZES = [(4, 6), (16, 24), (7, 5)]  # state size, channels
each_size = pytest.mark.parametrize("sizes", SIZES)
each_decay = pytest.mark.parametrize("strong", [False, True])


class Tokens(NamedTuple):
    c: Tensor
    b: Tensor
    u: Tensor
    dt: Tensor
    rates: Tensor

    def double(self) -> Tokens:
        return Tokens(*(x.double() for x in self))


def make_tokens(batch: int, length: int, sizes: tuple[int, int], seed: int, strong: bool = False) -> Tokens:
    generator, (size, channels) = torch.Generator().manual_seed(seed), sizes
    c, b = (torch.randn(batch, length, 1, size, generator=generator) for _ in "cb")
    u, dt = (torch.randn(batch, length, 1, channels, generator=generator) for _ in "ud")
    rates = -(torch.randn(size, channels, generator=generator)).exp()
    dt = mixed(STEPS, dt.shape, seed) if strong else torch.nn.functional.softplus(dt - 1)
    return Tokens(c, b, u, dt, rates)


def make_state(batch: int, sizes: tuple[int, int]) -> Tensor:
    return torch.randn(batch, 1, *sizes, generator=torch.Generator().manual_seed(9))


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), **TOLERANCE)


@each_decay
@each_size
def test_known_tokens(sizes: tuple[int, int], strong: bool) -> None:
    tokens, state, lengths = make_tokens(3, 37, sizes, 1, strong), make_state(3, sizes), torch.tensor([37, 5, 0])
    is_padding = torch.arange(37) >= lengths[:, None]
    for x in tokens[:-1]:
        x[is_padding] = 1e3
    out, after = torch_ops.extend(*tokens, state, lengths)
    want, want_after = reference.extend(*tokens.double(), state.double(), lengths)
    assert_close(after, want_after)
    assert_close(out[~is_padding], want[~is_padding])


@each_decay
@pytest.mark.parametrize("nodes", [1, 6, 17])
@pytest.mark.parametrize("is_full", [False, True])
@each_size
def test_trees(sizes: tuple[int, int], nodes: int, strong: bool, is_full: bool) -> None:
    batch, offset = len(SHAPES), 6
    tokens, state = make_tokens(batch, nodes, sizes, nodes, strong), make_state(batch, sizes)
    pending = make_tokens(batch, offset, sizes, 3, strong)
    counts = None if is_full else torch.tensor([0, 6, 1, 3, 5])
    records = tuple(
        torch.cat([x, torch.full_like(y, torch.nan)], 1) for x, y in zip(pending[1:4], tokens[1:4], strict=True)
    )
    if counts is not None:
        for x in records:
            x[:, :offset][torch.arange(offset) >= counts[:, None]] = torch.nan
    placement = TreePlacement(counts, offset, mask_of(batch_of_parents(SHAPES, nodes, seed=nodes)))
    b, u, dt = (x.double() for x in records)
    out = torch_ops.tree_verify(*tokens, state, records, placement)
    wanted = reference.tree_verify(*tokens.double(), state.double(), (b, u, dt), placement)
    assert_close(out, wanted)
    for got, want in zip(records, (b, u, dt), strict=True):
        assert_close(got[:, offset:], want[:, offset:])


@each_decay
@pytest.mark.parametrize("is_chain", [False, True])
@each_size
def test_snapshots(sizes: tuple[int, int], strong: bool, is_chain: bool) -> None:
    batch, nodes = len(SHAPES), 7
    tokens, state = make_tokens(batch, nodes, sizes, 5, strong), make_state(batch, sizes)
    parents = torch.arange(-1, nodes - 1).expand(batch, -1) if is_chain else batch_of_parents(SHAPES, nodes, seed=2)
    snapshots = torch.full((batch, nodes, *state.shape[1:]), torch.nan)
    out = torch_ops.tree_verify_snapshots(*tokens, state, snapshots, None if is_chain else parents)
    records = tuple(torch.zeros_like(x).double() for x in tokens[1:4])
    placement, many = TreePlacement(None, 0, mask_of(parents)), tokens.double()
    assert_close(out, reference.tree_verify(*many, state.double(), (records[0], records[1], records[2]), placement))
    for row in range(batch):
        path = placement.ancestors[row, -1].nonzero().flatten()
        kept = [x[row : row + 1, path] for x in many[:4]]
        _, after = reference.extend(*kept, many.rates, state[row : row + 1].double(), torch.tensor([len(path)]))
        assert_close(snapshots[row, -1], after[0])


@each_decay
@pytest.mark.parametrize("by_layer", [False, True])
def test_folds(strong: bool, by_layer: bool) -> None:
    tokens, state, counts = make_tokens(3, 9, SIZES[1], 6, strong), make_state(3, SIZES[1]), torch.tensor([9, 0, 4])
    rates = tokens.rates * torch.tensor([1.0, 2.0, 0.5])[:, None, None] if by_layer else tokens.rates
    many = tokens.double()
    want = reference.fold(state.double(), *many[1:4], rates.double(), counts)
    assert_close(torch_ops.fold(state, *tokens[1:4], rates, counts), want)
    assert torch.equal(torch_ops.fold(state, *tokens[1:4], rates, counts)[1], state[1])


def test_what_is_not_finite_reaches_descendants_alone() -> None:
    tokens, state = make_tokens(1, 4, SIZES[0], 8), make_state(1, SIZES[0])
    tokens.dt[0, 1, 0, 2] = torch.nan
    records = torch.zeros_like(tokens.b), torch.zeros_like(tokens.u), torch.zeros_like(tokens.dt)
    mask = mask_of(torch.tensor([[-1, 0, 1, 0]]))  # a chain of three, and a sibling of the second
    out = torch_ops.tree_verify(*tokens, state, records, TreePlacement(None, 0, mask))
    assert out.isnan().any(-1)[0, :, 0].tolist() == [False, True, True, False]
    assert all(x.isfinite().all() for x in records)
