"""The gated delta rule: torch_ops against the float64 recurrence, and rounds of verify and commit against it."""

from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specmamba.kernels.gated_delta_rule import reference, torch_ops
from specmamba.kernels.state_records import TreePlacement
from specmamba.kernels.state_records import reference as records_reference
from specmamba.kernels.state_records import torch_ops as records_ops
from tests.kernels.recurrent.records import HEADS, TOLERANCE, check_rounds, make_records, make_state
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of


class Tokens(NamedTuple):
    """Inputs of T tokens per row, in the argument order of the op."""

    q: Tensor  # [B, T, Hk, K]
    k: Tensor  # [B, T, Hk, K]
    v: Tensor  # [B, T, Hv, V]
    g: Tensor  # [B, T, Hv]
    beta: Tensor  # [B, T, Hv]

    def at(self, start: int, stop: int) -> "Tokens":
        return Tokens(*(x[:, start:stop].contiguous() for x in self))

    def double(self) -> "Tokens":
        return Tokens(*(x.double() for x in self))


def make_tokens(batch: int, length: int, heads: tuple[int, int, int, int], seed: int) -> tuple[Tokens, Tensor]:
    """Random tokens as a model would produce them, and a checkpoint [B, Hv, K, V]."""
    hk, hv, width_k, width_v = heads
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    unit = torch.nn.functional.normalize
    tokens = Tokens(
        unit(normal(batch, length, hk, width_k), dim=-1) * width_k**-0.5,
        unit(normal(batch, length, hk, width_k), dim=-1),
        normal(batch, length, hv, width_v),
        -torch.nn.functional.softplus(normal(batch, length, hv) - 1),
        torch.sigmoid(normal(batch, length, hv)),
    )
    return tokens, make_state(batch, heads, seed + 1)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", [[1], [7, 3], [0, 5, 2], [63, 64], [65, 1], [130, 77]])
def test_extend_matches_reference(lengths: list[int], heads: tuple[int, int, int, int]) -> None:
    padded = max(lengths) + len(lengths) % 2
    tokens, state = make_tokens(len(lengths), padded, heads, seed=padded)
    counts = torch.tensor(lengths)
    beyond = torch.arange(padded) >= counts[:, None]
    for x in tokens:
        x[beyond] = 1e3  # also a positive log decay: nothing of the padding may leak through an exponential
    before = [x.clone() for x in (*tokens, state, counts)]
    out, new_state = torch_ops.extend(*tokens, state, counts)
    want, want_state = reference.extend(*tokens.double(), state.double(), counts)
    for b, length in enumerate(lengths):
        torch.testing.assert_close(out[b, :length].double(), want[b, :length], **TOLERANCE)
    torch.testing.assert_close(new_state.double(), want_state, **TOLERANCE)
    assert out.shape == tokens.v.shape
    assert out.dtype == new_state.dtype == torch.float32
    assert new_state.data_ptr() != state.data_ptr()
    assert all(torch.equal(x, y) for x, y in zip(before, (*tokens, state, counts), strict=True))


def test_reference_keeps_its_dtype() -> None:
    tokens, state = make_tokens(1, 3, HEADS[1], seed=0)
    out, new_state = reference.extend(*tokens, state, torch.tensor([3]))
    want, want_state = reference.extend(*tokens.double(), state.double(), torch.tensor([3]))
    assert (out.dtype, new_state.dtype, want.dtype) == (torch.float32, torch.float32, torch.float64)
    torch.testing.assert_close(new_state.double(), want_state, **TOLERANCE)


@pytest.mark.parametrize("decay", [0.0, -1e-6, -5.0, -60.0])
def test_extend_is_stable_at_any_decay(decay: float) -> None:
    """No decay at all, and decay so strong that dividing by a cumulative product would overflow."""
    tokens, state = make_tokens(2, 71, HEADS[1], seed=3)
    tokens.g.fill_(decay)
    counts = torch.tensor([71, 40])
    out, new_state = torch_ops.extend(*tokens, state, counts)
    want, want_state = reference.extend(*tokens.double(), state.double(), counts)
    torch.testing.assert_close(out[0].double(), want[0], **TOLERANCE)
    torch.testing.assert_close(new_state.double(), want_state, **TOLERANCE)


@pytest.mark.parametrize("split", [1, 31, 64, 99])
def test_extend_in_two_parts_equals_one(split: int) -> None:
    tokens, state = make_tokens(2, 100, HEADS[1], seed=split)
    whole, whole_state = torch_ops.extend(*tokens, state, torch.full((2,), 100))
    first, middle = torch_ops.extend(*tokens.at(0, split), state, torch.full((2,), split))
    second, last = torch_ops.extend(*tokens.at(split, 100), middle, torch.full((2,), 100 - split))
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **TOLERANCE)
    torch.testing.assert_close(last, whole_state, **TOLERANCE)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("nodes", [1, 2, 5, 17, 33])
def test_tree_verify_matches_reference(nodes: int, heads: tuple[int, int, int, int]) -> None:
    batch, node_offset, capacity = len(SHAPES), 6, nodes + 9
    tokens, state = make_tokens(batch, nodes, heads, seed=nodes)
    num_pending = torch.tensor([0, 6, 1, 3, 5])
    records = make_records(batch, capacity, heads, num_pending, seed=nodes + 1)
    written = slice(node_offset, node_offset + nodes)
    for x in records:
        x[:, written] = float("nan")  # the op must write these before it reads them
    got, want = records.clone(), records.clone(torch.float64)
    mask, checkpoint = mask_of(batch_of_parents(SHAPES, nodes, seed=nodes)), state.clone()
    out = torch_ops.tree_verify(*tokens, state, got, TreePlacement(num_pending, node_offset, mask))
    want_out = reference.tree_verify(
        *tokens.double(), state.double(), want, TreePlacement(num_pending, node_offset, mask)
    )
    torch.testing.assert_close(out.double(), want_out, **TOLERANCE)
    outside = [j for j in range(capacity) if j not in range(node_offset, node_offset + nodes)]
    for got_x, want_x, before in zip(got, want, records, strict=True):
        torch.testing.assert_close(got_x[:, written].double(), want_x[:, written], **TOLERANCE)
        assert torch.equal(got_x[:, outside], before[:, outside])
    assert torch.equal(state, checkpoint)


@pytest.mark.parametrize("node_offset", [0, 1, 5])
@pytest.mark.parametrize("nodes", [1, 6])
def test_num_pending_none_means_every_record_before_the_nodes(nodes: int, node_offset: int) -> None:
    full = torch.full((2,), node_offset)
    tokens, state = make_tokens(2, nodes, HEADS[1], seed=21)
    mask = mask_of(batch_of_parents(("bushy", "padded"), nodes, seed=22))
    want = make_records(2, node_offset + nodes, HEADS[1], full, seed=23)
    for ops in (reference, torch_ops):
        got = want.clone()
        want_out = reference.tree_verify(*tokens, state, want, TreePlacement(full, node_offset, mask))
        out = ops.tree_verify(*tokens, state, got, TreePlacement(None, node_offset, mask))
        for x, y in zip((out, *got), (want_out, *want), strict=True):
            torch.testing.assert_close(x, y, **TOLERANCE)


@pytest.mark.parametrize("node_offset", [0, 4])
def test_tree_verify_without_pending_records(node_offset: int) -> None:
    """A root alone, with nothing pending, is one plain step of the recurrence."""
    tokens, state = make_tokens(3, 1, HEADS[1], seed=11)
    none = torch.zeros(3, dtype=torch.int64)
    records = make_records(3, node_offset + 1, HEADS[1], none, seed=12)
    out = torch_ops.tree_verify(
        *tokens, state, records, TreePlacement(none, node_offset, torch.ones(3, 1, 1, dtype=torch.bool))
    )
    want, _ = reference.extend(*tokens, state, torch.ones(3, dtype=torch.int64))
    torch.testing.assert_close(out, want, **TOLERANCE)


@pytest.mark.parametrize("decay", [0.0, -60.0])
def test_tree_verify_is_stable_at_any_decay(decay: float) -> None:
    """Strong decay along a path makes off-path differences so large that their exponential overflows."""
    tokens, state = make_tokens(len(SHAPES), 7, HEADS[1], seed=31)
    tokens.g.fill_(decay)
    num_pending = torch.tensor([0, 3, 1, 2, 3])
    mask = mask_of(batch_of_parents(SHAPES, 7, seed=32))
    got = make_records(len(SHAPES), 10, HEADS[1], num_pending, seed=33)
    want = got.clone(torch.float64)
    out = torch_ops.tree_verify(*tokens, state, got, TreePlacement(num_pending, 3, mask))
    want_out = reference.tree_verify(*tokens.double(), state.double(), want, TreePlacement(num_pending, 3, mask))
    torch.testing.assert_close(out.double(), want_out, **TOLERANCE)
    torch.testing.assert_close(got.u.double(), want.u, **TOLERANCE)


def test_siblings_do_not_mix() -> None:
    """Changing one leaf changes nothing at any other node: each record is final when it is written."""
    tokens, state = make_tokens(1, 9, HEADS[1], seed=5)
    mask = mask_of(batch_of_parents(("star",), 9, seed=0))
    none = torch.zeros(1, dtype=torch.int64)
    first = make_records(1, 9, HEADS[1], none, seed=6)
    second = first.clone()
    out = torch_ops.tree_verify(*tokens, state, first, TreePlacement(none, 0, mask))
    for x in tokens:
        x[:, 4] *= 0.5
    changed = torch_ops.tree_verify(*tokens, state, second, TreePlacement(none, 0, mask))
    others = [i for i in range(9) if i != 4]
    torch.testing.assert_close(out[:, others], changed[:, others], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(first.u[:, others], second.u[:, others], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(out[:, 4], changed[:, 4])


@pytest.mark.parametrize(
    ("ops", "of_records"),
    [(reference, records_reference), (torch_ops, records_ops)],
    ids=["reference", "torch_ops"],
)
@pytest.mark.parametrize("seed", range(4))
def test_rounds_of_verify_and_commit_equal_the_recurrence(ops: ModuleType, of_records: ModuleType, seed: int) -> None:
    """Verify a random tree, accept a random path, fold when it is due, and go on: always equal to plain extend."""

    def tokens_of(*args: Any) -> Tokens:
        return make_tokens(2, *args)[0]

    def recurrence(history: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
        return reference.extend(*history, state, torch.tensor([history.g.shape[1]]))

    checkpoint = make_state(2, HEADS[1], seed + 1)
    check_rounds(tokens_of, recurrence, ops, of_records, checkpoint, seed)
