"""The selective scan against the float64 recurrence: known tokens, trees behind pending records, snapshots, folds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specmamba.kernels import selective_scan
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.selective_scan import native_ops, reference, torch_ops
from specmamba.kernels.state_records import Buffers, ExtendOperands, RecordOperands, RowSet, TreePlacement, Trees
from tests.kernels.recurrent.records import TOLERANCE
from tests.kernels.recurrent.strong_decay import mixed
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of
from tests.pairwise import pairwise

STEPS = torch.tensor([0.0, 1e-6, 1e-3, 0.03, 0.5, 4.0, 30.0, 500.0])
SIZES = [(1, 1), (4, 6), (16, 24), (7, 5), (3, 129), (16, 300)]  # state size, channels: native tasks have 128 of these
CPU = torch.device("cpu")
SPARE = 2  # rows and slots that belong to no row of a batch; they hold NaN
each_size = pytest.mark.parametrize("sizes", SIZES, ids=str)
each_decay = pytest.mark.parametrize("strong", [False, True])
needs_native = pytest.mark.usefixtures("needs_native")
Records = tuple[Tensor, Tensor, Tensor]


class Tokens(NamedTuple):
    c: Tensor
    b: Tensor
    u: Tensor
    dt: Tensor
    rates: Tensor

    def double(self) -> Tokens:
        return Tokens(*(x.double() for x in self))

    def part(self, rows: slice, tokens: slice | list[int]) -> Tokens:
        return Tokens(*(x[rows, tokens] for x in self[:4]), self.rates)


def make_tokens(batch: int, length: int, sizes: tuple[int, int], seed: int, strong: bool = False) -> Tokens:
    generator, (size, channels) = torch.Generator().manual_seed(seed), sizes
    both = torch.randn(batch, length, 1, 2 * size + 3, generator=generator)  # as parts of one projection
    c, b = both[..., 3 : 3 + size], both[..., 3 + size :]
    u, dt = (torch.randn(batch, length, 1, channels, generator=generator) for _ in "ud")
    rates = -(torch.randn(size, channels, generator=generator)).exp()
    dt = mixed(STEPS, dt.shape, seed) if strong else torch.nn.functional.softplus(dt - 1)
    return Tokens(c, b, u, dt, rates)


def make_state(batch: int, sizes: tuple[int, int]) -> Tensor:
    return torch.randn(batch, 1, *sizes, generator=torch.Generator().manual_seed(9))


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), **TOLERANCE)


def in_pool(x: Tensor) -> tuple[Tensor, list[int]]:
    """A pool with these rows in it, and where they are; others hold NaN."""
    places = torch.randperm(len(x) + SPARE, generator=torch.Generator().manual_seed(4))[: len(x)]
    pool = torch.full((len(x) + SPARE, *x.shape[1:]), torch.nan, dtype=x.dtype)
    pool[places] = x
    return pool, places.tolist()


def only_in(pool: Tensor, places: list[int]) -> Tensor:
    """The rows of a pool; the others still hold NaN."""
    others = [i for i in range(len(pool)) if i not in places]
    assert pool[others].isnan().all()
    return pool[places]


def extended(form: str, tokens: Tokens, state: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and states after known tokens."""
    if form == "torch":
        return torch_ops.extend(*tokens, state.float(), lengths)
    pool, slots = in_pool(state)
    operands = ExtendOperands(pool, torch.empty(len(pool), 0, 0), RowSet.of(slots, CPU), lengths)
    assert operator_of(selective_scan.advance).choose(*tokens, operands) == "native"
    return selective_scan.advance(*tokens, operands), only_in(pool, slots)


def verified(
    form: str, tokens: Tokens, state: Tensor, records: Records, placement: TreePlacement, counts: Tensor | None = None
) -> Tensor:
    """Outputs of trees; their records are written. ``counts``: of nodes that are no padding."""
    if form == "torch":
        return torch_ops.tree_verify(*tokens, state, records, placement)
    operands, rows = record_operands(state, records, placement, counts)
    assert operator_of(selective_scan.advance).choose(*tokens, operands) == "native"
    out = selective_scan.advance(*tokens, operands)
    buffers = operands.buffers
    for x, buffer in zip(records, (buffers.k, buffers.u, buffers.decay), strict=True):
        x.copy_(only_in(buffer, rows))
    return out


def record_operands(
    state: Tensor, records: Records, placement: TreePlacement, counts: Tensor | None = None
) -> tuple[RecordOperands, list[int]]:
    """Operands of a verify in buffers of their own, and the rows."""
    (pool, slots), ((k, rows), (u, _), (dt, _)) = in_pool(state), (in_pool(x) for x in records)
    batch, nodes, _ = placement.ancestors.shape
    index, places = torch.zeros(batch, nodes, 1, dtype=torch.int64), (torch.tensor(rows), torch.tensor(slots))
    packing = {} if counts is None else {"firsts": counts.cumsum(0) - counts, "counts": counts}
    trees = Trees(*places, index, *placement, **packing, num_packed=None if counts is None else int(counts.sum()))
    buffers = Buffers(pool, torch.empty(len(k), 0, 0), k, u, dt)
    return RecordOperands(buffers, trees, RowSet.of(rows, CPU), RowSet.of(slots, CPU)), rows


def no_records(tokens: Tokens) -> Records:
    return torch.zeros_like(tokens.b), torch.zeros_like(tokens.u), torch.zeros_like(tokens.dt)


@each_decay
@each_size
def test_known_tokens(form: str, sizes: tuple[int, int], strong: bool) -> None:
    tokens, state, lengths = make_tokens(3, 37, sizes, 1, strong), make_state(3, sizes), torch.tensor([37, 5, 0])
    is_padding = torch.arange(37) >= lengths[:, None]
    for x in tokens[:-1]:
        x[is_padding] = 1e3
    out, after = extended(form, tokens, state, lengths)
    want, want_after = reference.extend(*tokens.double(), state.double(), lengths)
    assert_close(after, want_after)
    assert torch.equal(after[2], state[2])
    assert_close(out[~is_padding], want[~is_padding])


@pairwise(
    each_decay,
    each_size,
    pytest.mark.parametrize("nodes", [1, 6, 17]),
    pytest.mark.parametrize("is_full", [False, True]),
)
def test_trees(form: str, is_full: bool, nodes: int, sizes: tuple[int, int], strong: bool) -> None:
    batch, offset = len(SHAPES), 6
    tokens, state = make_tokens(batch, nodes, sizes, nodes, strong), make_state(batch, sizes)
    pending = make_tokens(batch, offset, sizes, 3, strong)
    counts = None if is_full else torch.tensor([0, 6, 1, 3, 5])
    b, u, dt = (
        torch.cat([x, torch.full_like(y, torch.nan)], 1) for x, y in zip(pending[1:4], tokens[1:4], strict=True)
    )
    if counts is not None:
        for x in (b, u, dt):
            x[:, :offset][torch.arange(offset) >= counts[:, None]] = torch.nan
    placement = TreePlacement(counts, offset, mask_of(batch_of_parents(SHAPES, nodes, seed=nodes)))
    wanted = b.double(), u.double(), dt.double()
    out = verified(form, tokens, state, (b, u, dt), placement)
    assert_close(out, reference.tree_verify(*tokens.double(), state.double(), wanted, placement))
    for got, want in zip((b, u, dt), wanted, strict=True):
        assert_close(got[:, offset:], want[:, offset:])


@pairwise(each_decay, each_size, pytest.mark.parametrize("is_chain", [False, True]))
def test_snapshots(sizes: tuple[int, int], strong: bool, is_chain: bool) -> None:
    batch, nodes = len(SHAPES), 7
    tokens, state = make_tokens(batch, nodes, sizes, 5, strong), make_state(batch, sizes)
    parents = torch.arange(-1, nodes - 1).expand(batch, -1) if is_chain else batch_of_parents(SHAPES, nodes, seed=2)
    snapshots = torch.full((batch, nodes, *state.shape[1:]), torch.nan)
    out = torch_ops.tree_verify_snapshots(*tokens, state, snapshots, None if is_chain else parents)
    placement, many = TreePlacement(None, 0, mask_of(parents)), tokens.double()
    assert_close(out, reference.tree_verify(*many, state.double(), no_records(many), placement))
    for row in range(batch):
        path = placement.ancestors[row, -1].nonzero().flatten()
        kept = [x[row : row + 1, path] for x in many[:4]]
        _, after = reference.extend(*kept, many.rates, state[row : row + 1].double(), torch.tensor([len(path)]))
        assert_close(snapshots[row, -1], after[0])


@pairwise(each_decay, each_size, pytest.mark.parametrize("by_layer", [False, True]))
def test_folds(form: str, by_layer: bool, sizes: tuple[int, int], strong: bool) -> None:
    tokens, state, counts = make_tokens(3, 9, sizes, 6, strong), make_state(3, sizes), torch.tensor([9, 0, 4])
    rates = tokens.rates * torch.tensor([1.0, 2.0, 0.5])[:, None, None] if by_layer else tokens.rates
    many, operands = tokens.double(), (state, *tokens[1:4], rates, counts)
    want = reference.fold(state.double(), *many[1:4], rates.double(), counts)
    assert form == "torch" or operator_of(selective_scan.fold).choose(*operands) == "native"
    got = torch_ops.fold(*operands) if form == "torch" else selective_scan.fold(*operands)
    assert_close(got, want)
    assert torch.equal(got[1], state[1])


@pytest.mark.parametrize("field", ["b", "dt", "u"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_descendants_alone(form: str, value: float, field: str) -> None:
    tokens, state = make_tokens(1, 4, SIZES[1], 8), make_state(1, SIZES[1])
    clean = [x.clone() for x in tokens]
    getattr(tokens, field)[0, 1, 0, 2] = value
    mask = mask_of(torch.tensor([[-1, 0, 1, 0]]))  # a chain of three, and a sibling of the second
    placement, records = TreePlacement(None, 0, mask), no_records(tokens)
    out = verified(form, tokens, state, records, placement)
    want = verified(form, Tokens(*clean), state, no_records(tokens), placement)
    assert torch.equal(out[0, [0, 3]], want[0, [0, 3]])
    if field != "dt" or value is torch.nan:  # an infinite step decays all that was before it
        assert (~out.isfinite()).any(-1)[0, :, 0].tolist() == [False, True, True, False]
    assert all(x.isfinite().all() for x in records)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_of_other_dtypes_are_rounded_once(form: str, dtype: torch.dtype) -> None:
    tokens, state, lengths = make_tokens(2, 9, (7, 5), 2), make_state(2, (7, 5)).to(dtype), torch.tensor([9, 4])
    _, after = extended(form, tokens, state, lengths)
    _, want = reference.extend(*tokens.double(), state.double(), lengths)
    torch.testing.assert_close(after.to(dtype), want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@needs_native
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_others_or_on_threads(threads: int, set_threads: Callable[[int], None]) -> None:
    sizes, nodes = (16, 700), 9
    tokens, state, lengths = make_tokens(3, nodes, sizes, 7), make_state(3, sizes), torch.tensor([9, 3, 9])
    placement = TreePlacement(None, 0, mask_of(batch_of_parents(SHAPES[1:4], nodes, seed=3)))
    whole, (out, after) = (
        verified("native", tokens, state, no_records(tokens), placement),
        extended("native", tokens, state, lengths),
    )
    set_threads(threads)
    for b in range(3):
        one = slice(b, b + 1)
        part, mask = tokens.part(one, slice(None)), placement.ancestors[one]
        alone = verified("native", part, state[one], no_records(part), TreePlacement(None, 0, mask))
        assert torch.equal(alone, whole[one])
        alone, ended = extended("native", part, state[one], lengths[one])
        assert torch.equal(alone, out[one])
        assert torch.equal(ended, after[one])


@needs_native
def test_two_parts_of_a_run_equal_one() -> None:
    tokens, state = make_tokens(1, 30, (7, 5), 2), make_state(1, (7, 5))
    out, after = extended("native", tokens, state, torch.tensor([30]))
    parts = [tokens.part(slice(None), slice(17)), tokens.part(slice(None), slice(17, None))]
    first, between = extended("native", parts[0], state, torch.tensor([17]))
    second, ended = extended("native", parts[1], between, torch.tensor([13]))
    assert torch.equal(torch.cat([first, second], 1), out)
    assert torch.equal(ended, after)


@needs_native
@pytest.mark.parametrize("sizes", [(7, 5), (16, 300)], ids=str)
def test_bits_do_not_depend_on_how_tokens_are_run(sizes: tuple[int, int]) -> None:
    """In one run, as a chain that is folded, and as the path of a tree behind records that are pending."""
    tokens, state, every = make_tokens(1, 12, sizes, 2), make_state(1, sizes), slice(None)
    whole, end = extended("native", tokens, state, torch.tensor([12]))
    first, chain = tokens.part(every, slice(5)), mask_of(torch.tensor([[-1, 0, 1, 2, 3]]))
    room = make_tokens(1, 14, sizes, 3)  # pending records, a hole, and those of the nodes
    records = room.b, room.u, room.dt
    assert torch.equal(verified("native", first, state, records, TreePlacement(None, 0, chain)), whole[:, :5])
    path, parents = [0, 2, 3, 5, 6, 7], [-1, 0, 0, 2, 1, 3, 5, 6]  # of the tree: nodes 1 and 4 are wrong guesses
    drawn = [5, 3, 6, 7, 1, 8, 9, 10]
    nodes, placement = tokens.part(every, drawn), TreePlacement(torch.tensor([5]), 6, mask_of(torch.tensor([parents])))
    assert torch.equal(verified("native", nodes, state, records, placement)[:, path], whole[:, 5:11])
    kept = [*range(5), *(6 + node for node in path)]
    folded = selective_scan.fold_exactly(state, *(x[:, kept] for x in records), tokens.rates, torch.tensor([11]))
    last, after = extended("native", tokens.part(every, slice(11, 12)), folded, torch.tensor([1]))
    assert torch.equal(last, whole[:, 11:])
    assert torch.equal(after, end)


@needs_native
def test_folds_that_native_code_does_not_take_are_not_exact() -> None:
    tokens, state = make_tokens(1, 3, (4, 6), 1).double(), make_state(1, (4, 6)).double()
    with pytest.raises(RuntimeError, match="native code"):
        selective_scan.fold_exactly(state, *tokens[1:4], tokens.rates, torch.tensor([3]))


@needs_native
def test_padding_of_ragged_trees_is_left_out() -> None:
    """Its outputs are 0, and no record is written."""
    sizes, nodes, counts = (7, 300), 4, torch.tensor([4, 0, 2])
    tokens, state = make_tokens(3, nodes, sizes, 5), make_state(3, sizes)
    placement = TreePlacement(None, 0, mask_of(batch_of_parents(SHAPES[1:4], nodes, seed=3)))
    wanted, records = no_records(tokens), no_records(tokens)
    want = verified("native", tokens, state, wanted, placement)
    out = verified("native", tokens, state, records, placement, counts)
    is_node = torch.arange(nodes) < counts[:, None]
    for got, right in zip((out, *records), (want, *wanted), strict=True):
        assert torch.equal(got[is_node], right[is_node])
        assert (got[~is_node] == 0).all()


@needs_native
def test_native_code_takes_what_it_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, state = make_tokens(1, 2, (4, 6), 1), make_state(1, (4, 6))
    placement = TreePlacement(None, 0, mask_of(torch.tensor([[-1, 0]])))
    operands, _ = record_operands(state, no_records(tokens), placement)
    fold = (state, *tokens[1:4], tokens.rates, torch.tensor([2]))
    assert native_ops.can_take(*tokens, operands)
    assert native_ops.can_fold(*fold)
    assert not native_ops.can_take(*tokens.double(), operands)
    assert not native_ops.can_take(*tokens, replace(operands, buffers=replace(operands.buffers, states=state.half())))
    assert not native_ops.can_fold(state.double(), *fold[1:])
    monkeypatch.setattr(native_ops, "code", lambda: None)
    assert not native_ops.can_take(*tokens, operands)
    assert not native_ops.can_fold(*fold)


@needs_native
def test_shapes_that_do_not_fit_are_refused() -> None:
    """Native code would read and write other memory."""
    tokens, state, records = make_tokens(2, 2, (4, 6), 1), make_state(2, (4, 6)), 3
    placement = TreePlacement(None, 1, mask_of(torch.tensor([[-1, 0], [-1, 0]])))
    many = make_tokens(2, records, (4, 6), 2)
    operands, _ = record_operands(state, (many.b, many.u, many.dt), placement)
    buffers, trees = operands.buffers, operands.trees

    def refuse(complaint: str, given: Tokens = tokens, state: RecordOperands | ExtendOperands = operands) -> None:
        with pytest.raises(ValueError, match=complaint):
            native_ops.advance(*given, state)

    refuse("float32", tokens.double())
    refuse("c and b", tokens._replace(b=tokens.b[..., 1:]))
    refuse("u and dt", tokens._replace(dt=tokens.dt[..., 1:]))
    refuse("the rates", tokens._replace(rates=tokens.rates[:, 1:]))
    refuse("other trees", tokens.part(slice(1), slice(None)))
    refuse("no room", state=replace(operands, trees=replace(trees, node_offset=2)))
    refuse("the states", state=replace(operands, buffers=replace(buffers, states=buffers.states[..., 1:].contiguous())))
    refuse("records of b", state=replace(operands, buffers=replace(buffers, k=buffers.k[..., 1:].contiguous())))
    refuse("records of u", state=replace(operands, buffers=replace(buffers, decay=buffers.decay[..., 1:].contiguous())))
    refuse("one entry", state=ExtendOperands(state, torch.empty(2, 0, 0), RowSet.of([0], CPU), torch.tensor([2])))
    for complaint, place, wrong in (
        ("b has", 1, many.b[..., 1:]),
        ("u and dt", 2, many.u[..., 1:]),
        ("the rates", 4, tokens.rates[None, :, 1:]),
        ("num_pending", 5, torch.tensor([2])),
    ):
        fold = [state, *many[1:4], tokens.rates, torch.tensor([2, 0])]
        fold[place] = wrong
        with pytest.raises(ValueError, match=complaint):
            native_ops.fold(*fold)
