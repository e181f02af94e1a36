"""The native gated delta rule against the float64 recurrence: trees, pending records, layouts, folds."""

from __future__ import annotations

import random
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
    Tokens,
    check_fold_into,
    make_records,
    make_tokens,
)
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of, path_to

WIDE_HEADS = [(2, 4, 64, 64), (1, 2, 128, 128), (2, 2, 100, 72)]


pytestmark = pytest.mark.usefixtures("needs_native")


def poisoned(records: Records, node_offset: int, nodes: int) -> Records:
    """Where the nodes' records go there is nothing that may be read."""
    for x in records:
        x[:, node_offset : node_offset + nodes] = float("nan")
    return records


def check_verify(nodes: int, heads: tuple[int, int, int, int], pending: list[int], node_offset: int, seed: int) -> None:
    shapes = tuple(random.Random(seed).choices(SHAPES, k=len(pending)))
    tokens, state = make_tokens(len(pending), nodes, heads, seed)
    num_pending = torch.tensor(pending)
    records = make_records(len(pending), node_offset + nodes + 2, heads, num_pending, seed + 1)
    records = poisoned(records, node_offset, nodes)
    got, want = records.clone(), records.clone(torch.float64)
    mask, checkpoint = mask_of(batch_of_parents(shapes, nodes, seed)), state.clone()
    out = native_ops.tree_verify(*tokens, state, *got, num_pending, node_offset, mask)
    want_out = reference.tree_verify(*tokens.double(), state.double(), *want, num_pending, node_offset, mask)
    torch.testing.assert_close(out.double(), want_out, **TOLERANCE)
    written = slice(node_offset, node_offset + nodes)
    outside = [j for j in range(node_offset + nodes + 2) if j not in range(written.start, written.stop)]
    for got_x, want_x, before in zip(got, want, records, strict=True):
        torch.testing.assert_close(got_x[:, written].double(), want_x[:, written], **TOLERANCE)
        assert torch.equal(got_x[:, outside], before[:, outside])
    assert torch.equal(state, checkpoint)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("nodes", [1, 2, 5, 17, 64])
def test_tree_verify_matches_reference(nodes: int, heads: tuple[int, int, int, int]) -> None:
    check_verify(nodes, heads, pending=[0, 6, 1, 3, 5], node_offset=6, seed=nodes)


@pytest.mark.parametrize("heads", WIDE_HEADS)
@pytest.mark.parametrize(("nodes", "pending"), [(1, [0]), (1, [20, 19]), (4, [5]), (13, [2, 17])])
def test_wide_heads_match_reference(nodes: int, pending: list[int], heads: tuple[int, int, int, int]) -> None:
    check_verify(nodes, heads, pending, node_offset=max(pending), seed=nodes)


@pytest.mark.parametrize("fill", range(18))
def test_every_fill_of_the_pending_list(fill: int) -> None:
    check_verify(5, HEADS[1], [fill, fill // 2], node_offset=fill, seed=fill)


@pytest.mark.parametrize("node_offset", [0, 1, 5])
def test_num_pending_none_means_every_record_before_the_nodes(node_offset: int) -> None:
    tokens, state = make_tokens(2, 6, HEADS[1], seed=21)
    mask = mask_of(batch_of_parents(("bushy", "padded"), 6, seed=22))
    full = torch.full((2,), node_offset)
    records = make_records(2, node_offset + 6, HEADS[1], full, seed=23)
    got, want = records.clone(), records.clone()
    out = native_ops.tree_verify(*tokens, state, *got, None, node_offset, mask)
    want_out = native_ops.tree_verify(*tokens, state, *want, full, node_offset, mask)
    for x, y in zip((out, *got), (want_out, *want), strict=True):
        assert torch.equal(x, y)


def test_parts_of_buffers() -> None:
    """As the cache passes them: rows of larger buffers, one mask for all rows, values inside of other channels."""
    nodes, heads = 7, HEADS[1]
    tokens, state = make_tokens(3, nodes, heads, seed=31)
    mask = mask_of(batch_of_parents(("chain",), nodes, seed=0))
    records = make_records(3, nodes + 4, heads, torch.tensor([4, 4, 4]), seed=32)
    want = records.clone()
    want_out = native_ops.tree_verify(*tokens, state, *want, None, 4, mask.expand(3, -1, -1).contiguous())

    padded = [torch.full((5, nodes + 9, *x.shape[2:]), float("nan")) for x in records]
    for buffer, x in zip(padded, records, strict=True):
        buffer[1:4, : nodes + 4] = x
    parts = Records(*(buffer[1:4, : nodes + 4] for buffer in padded))
    pool = torch.full((6, *state.shape[1:]), float("nan"))
    pool[2:5] = state
    channels = torch.full((3, nodes, 11 + tokens.v[0, 0].numel()), float("nan"))
    channels[..., 11:] = tokens.v.flatten(2)
    tokens = tokens._replace(v=channels[..., 11:].view(tokens.v.shape))
    assert native_ops.can_take(pool[2:5], *parts)
    out = native_ops.tree_verify(*tokens, pool[2:5], *parts, None, 4, mask.expand(3, -1, -1))
    for x, y in zip((out, *parts), (want_out, *want), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("decay", [0.0, -60.0])
def test_stable_at_any_decay(decay: float) -> None:
    tokens, state = make_tokens(len(SHAPES), 7, HEADS[1], seed=31)
    tokens.g.fill_(decay)
    num_pending = torch.tensor([0, 3, 1, 2, 3])
    mask = mask_of(batch_of_parents(SHAPES, 7, seed=32))
    got = make_records(len(SHAPES), 10, HEADS[1], num_pending, seed=33)
    want = got.clone(torch.float64)
    out = native_ops.tree_verify(*tokens, state, *got, num_pending, 3, mask)
    want_out = reference.tree_verify(*tokens.double(), state.double(), *want, num_pending, 3, mask)
    torch.testing.assert_close(out.double(), want_out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.u.double(), want.u, rtol=1e-4, atol=1e-4)


def verify(rows: slice, tokens: Tokens, state: Tensor, records: Records, pending: Tensor, mask: Tensor) -> Tensor:
    part = Tokens(*(x[rows] for x in tokens))
    own = Records(*(x[rows].clone() for x in records))
    return native_ops.tree_verify(*part, state[rows], *own, pending[rows], 6, mask[rows])


def test_a_row_does_not_depend_on_the_others_or_on_threads() -> None:
    tokens, state = make_tokens(4, 9, WIDE_HEADS[0], seed=41)
    pending = torch.tensor([0, 6, 2, 5])
    records = make_records(4, 15, WIDE_HEADS[0], pending, seed=42)
    mask = mask_of(batch_of_parents(("bushy", "chain", "star", "padded"), 9, seed=43))
    together = verify(slice(0, 4), tokens, state, records, pending, mask)
    alone = [verify(slice(b, b + 1), tokens, state, records, pending, mask) for b in range(4)]
    assert torch.equal(torch.cat(alone), together)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    threaded = verify(slice(0, 4), tokens, state, records, pending, mask)
    torch.set_num_threads(before)
    assert torch.equal(threaded, together)


def test_nodes_do_not_depend_on_later_ones() -> None:
    """A chain of 8 says of its first 3 nodes what a chain of 3 says, bit for bit."""
    tokens, state = make_tokens(1, 8, WIDE_HEADS[0], seed=51)
    records = make_records(1, 14, WIDE_HEADS[0], torch.tensor([6]), seed=52)
    mask = mask_of(batch_of_parents(("chain",), 8, seed=0))
    whole = native_ops.tree_verify(*tokens, state, *records.clone(), None, 6, mask)
    part = native_ops.tree_verify(*tokens.at(0, 3), state, *records.clone(), None, 6, mask[:, :3, :3].contiguous())
    assert torch.equal(part, whole[:, :3])


def test_shapes_that_do_not_fit_are_refused() -> None:
    """Native code would read, and write, the memory of others."""
    tokens, state = make_tokens(2, 3, HEADS[1], seed=71)
    records = make_records(2, 8, HEADS[1], torch.tensor([4, 4]), seed=72)
    mask = torch.ones(2, 3, 3, dtype=torch.bool)

    def refuse(complaint: str, *, offset: int = 4, ancestors: Tensor = mask, **changed: Tensor) -> None:
        names = (*Tokens._fields, "state", *(f"records_{name}" for name in Records._fields))
        arguments = dict(zip(names, (*tokens, state, *records), strict=True)) | changed
        with pytest.raises(ValueError, match=complaint):
            native_ops.tree_verify(**arguments, num_pending=None, node_offset=offset, ancestors=ancestors)

    refuse("room for 8, not for 9", offset=6)
    refuse("q, k and v", q=tokens.q[:, :2])
    refuse("g and beta", beta=tokens.beta[:, :2])
    refuse("ancestors need one row", ancestors=mask[:, :2])
    refuse("dtype bool", ancestors=mask.float())
    refuse("the state", state=state[:1])
    refuse("records_u", records_u=records.u[:, :7])
    with pytest.raises(ValueError, match="records_decay"):
        native_ops.fold(state, records.k, records.u, records.decay[..., :1], torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="out has another shape"):
        native_ops.fold(state, *records, torch.tensor([1, 1]), state[:1])


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


@pytest.mark.parametrize("seed", range(3))
def test_rounds_of_verify_and_commit_equal_the_recurrence(seed: int) -> None:
    """Verify a random tree, accept a random path, fold when it is due, and go on: never apart from plain extend."""
    rng, heads, nodes, node_offset = random.Random(seed), HEADS[1], 7, 12
    _, checkpoint = make_tokens(1, 1, heads, seed)
    want_state, records = checkpoint.double(), make_records(1, node_offset + nodes, heads, torch.zeros(1), seed)
    pending = 0
    for round_ in range(60):
        if pending + nodes > node_offset:
            checkpoint, pending = native_ops.fold(checkpoint, *records, torch.tensor([pending])), 0
        parents = batch_of_parents(("bushy",), nodes, seed=100 * seed + round_)
        tokens, _ = make_tokens(1, nodes, heads, seed=1000 * seed + round_)
        out = native_ops.tree_verify(
            *tokens, checkpoint, *records, torch.tensor([pending]), node_offset, mask_of(parents)
        )
        path = path_to(parents[0].tolist(), rng.randrange(nodes))
        accepted = Tokens(*(x[:, path].double() for x in tokens))
        want, want_state = reference.extend(*accepted, want_state, torch.tensor([len(path)]))
        torch.testing.assert_close(out[:, path].double(), want, **TOLERANCE)
        for x in records:
            x[0, pending : pending + len(path)] = x[0, [node_offset + i for i in path]]
        pending += len(path)
    folded = native_ops.fold(checkpoint, *records, torch.tensor([pending]))
    torch.testing.assert_close(folded.double(), want_state, **TOLERANCE)
