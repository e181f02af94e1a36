"""The gated delta rule with a log decay for each key channel (Kimi Delta Attention), against the float64 recurrence."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels.gated_delta_rule import reference, torch_ops
from specmamba.kernels.state_records import TreePlacement, native_ops
from specmamba.kernels.state_records import reference as records_reference
from specmamba.kernels.state_records import torch_ops as records_ops
from tests.exactness import why_not_native
from tests.kernels.recurrent.records import HEADS, TOLERANCE, check_rounds, make_records, make_state
from tests.kernels.recurrent.strong_decay import DECAYS, mixed
from tests.kernels.recurrent.test_gated_delta_rule import Tokens
from tests.kernels.recurrent.test_gated_delta_rule import make_tokens as make_tokens_by_head
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

each_heads = pytest.mark.parametrize("heads", HEADS)


def make_tokens(
    batch: int, length: int, heads: tuple[int, int, int, int], seed: int, *, strong: bool = False
) -> Tokens:
    """Random tokens; ``strong``: log decays from 0 to -3000, mixed."""
    tokens, _ = make_tokens_by_head(batch, length, heads, seed)
    shape = (*tokens.g.shape, heads[2])
    g = mixed(DECAYS, torch.Size(shape), seed)
    if not strong:
        g = -torch.nn.functional.softplus(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) - 1)
    return tokens._replace(g=g)


def assert_close(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y.double(), **TOLERANCE)


@pytest.mark.parametrize("strong", [False, True])
@each_heads
def test_known_tokens(heads: tuple[int, int, int, int], strong: bool) -> None:
    lengths, length = [37, 5, 0], 40
    tokens, state = make_tokens(3, length, heads, seed=1, strong=strong), make_state(3, heads, seed=2)
    counts = torch.tensor(lengths)
    for x in tokens:
        x[torch.arange(length) >= counts[:, None]] = 1e3
    out, after = torch_ops.extend(*tokens, state, counts)
    want, want_after = reference.extend(*tokens.double(), state.double(), counts)
    assert_close(
        [after, *(x[:n] for x, n in zip(out, lengths, strict=True))],
        [want_after, *(x[:n] for x, n in zip(want, lengths, strict=True))],
    )


@pytest.mark.parametrize("strong", [False, True])
@each_heads
def test_reference_is_the_recurrence_of_transformers(heads: tuple[int, int, int, int], strong: bool) -> None:
    """Which has as many key heads as value heads, computes in float32 and scales queries itself."""
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention as naive

    tokens, state = make_tokens(2, 19, heads, seed=5, strong=strong), make_state(2, heads, seed=6)
    q, k = (x.repeat_interleave(heads[1] // heads[0], 2) for x in tokens[:2])
    want = naive(q * heads[2] ** 0.5, k, *tokens[2:], state, True)
    assert_close(reference.extend(*tokens, state, torch.tensor([19, 19])), want)


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("nodes", [1, 6, 17])
@each_heads
def test_trees(heads: tuple[int, int, int, int], nodes: int, strong: bool) -> None:
    tokens, num_pending = (
        make_tokens(len(SHAPES), nodes, heads, seed=nodes, strong=strong),
        torch.tensor([0, 6, 1, 3, 5]),
    )
    state = make_state(len(SHAPES), heads, seed=3)
    records = make_records(len(SHAPES), nodes + 8, heads, num_pending, 4, has_channels=True)
    for x in records:
        x[:, 6 : 6 + nodes] = torch.nan  # the op must write these before it reads them
    placement = TreePlacement(num_pending, 6, mask_of(batch_of_parents(SHAPES, nodes, seed=nodes)))
    got, want = records.clone(), records.clone(torch.float64)
    out = torch_ops.tree_verify(*tokens, state, got, placement)
    wanted = reference.tree_verify(*tokens.double(), state.double(), want, placement)
    assert_close([out, *got], [wanted, *want])


def test_what_is_not_finite_reaches_descendants_alone() -> None:
    tokens, none = make_tokens(1, 4, HEADS[1], seed=8), torch.zeros(1, dtype=torch.int64)
    tokens.g[0, 1, 2, 3] = torch.nan
    records = make_records(1, 4, HEADS[1], none, 9, has_channels=True)
    mask = mask_of(torch.tensor([[-1, 0, 1, 0]]))  # a chain of three, and a sibling of the second
    out = torch_ops.tree_verify(*tokens, make_state(1, HEADS[1], 10), records, TreePlacement(none, 0, mask))
    assert out[0, 1:3, 2].isnan().all()
    assert out[0, [0, 3]].isfinite().all()
    assert all(x.isfinite().all() for x in records)


def test_snapshots_are_the_recurrence() -> None:
    nodes, heads = 6, HEADS[1]
    tokens, state = make_tokens(2, nodes, heads, seed=5), make_state(2, heads, seed=6)
    parents = batch_of_parents(("bushy", "binary"), nodes, seed=7)
    got = torch.full((2, nodes, *state.shape[1:]), torch.nan)
    want = got.double()
    out = torch_ops.tree_verify_snapshots(*tokens, state, got, parents)
    wanted = reference.tree_verify_snapshots(*tokens.double(), state.double(), want, parents)
    assert_close([out, got], [wanted, want])


@pytest.mark.parametrize("heads", [*HEADS, (2, 2, 100, 72)])
def test_folds(heads: tuple[int, int, int, int]) -> None:
    num_pending = torch.tensor([0, 1, 9])
    records = make_records(3, 9, heads, num_pending, 11, has_channels=True)
    is_pending = (torch.arange(9) < num_pending[:, None])[..., None, None]
    strong = mixed(DECAYS, records.decay.shape, 12)
    state = make_state(3, heads, seed=13)
    for given in (records, records._replace(decay=torch.where(is_pending, strong, records.decay))):
        want = records_reference.fold(state.double(), *given.clone(torch.float64), num_pending)
        for ops in (records_ops, *([native_ops] if why_not_native() is None else [])):
            assert_close([ops.fold(state, *given, num_pending)], [want])


@pytest.mark.parametrize(
    ("ops", "of_records"),
    [(reference, records_reference), (torch_ops, records_ops)],
    ids=["reference", "torch_ops"],
)
def test_rounds_of_verify_and_commit_equal_the_recurrence(ops: ModuleType, of_records: ModuleType) -> None:
    def tokens_of(*args: Any) -> Tokens:
        return make_tokens(2, *args)

    def recurrence(history: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
        return reference.extend(*history, state, torch.tensor([history.g.shape[1]]))

    check_rounds(tokens_of, recurrence, ops, of_records, make_state(2, HEADS[1], 1), seed=0)
