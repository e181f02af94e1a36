"""The selective scan in Triton against its reference: pools in place, folds, padding, values that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specmamba.kernels import gpu, selective_scan
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.selective_scan import reference
from specmamba.kernels.state_records import Buffers, ExtendOperands, RowSet, TreePlacement, as_stored
from tests.kernels.recurrent.layer_case import copied, make_buffers_and_trees, moved, values
from tests.kernels.recurrent.strong_decay import mixed
from tests.kernels.recurrent.test_selective_scan import STEPS, Tokens, make_state, make_tokens
from tests.kernels.rounding import tolerance
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

pytest.importorskip("triton")
from specmamba.kernels.selective_scan import triton_ops

pytestmark = pytest.mark.usefixtures("poisoned")

TOLERANCE = tolerance(terms=160)
ULP = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
ONE, ODD, WIDE = (8, 8), (7, 37), (16, 72)  # state size, channels: one block, and blocks that do not divide anything
# numpy's, of the interpreter: what is infinite is multiplied by 0 as on a GPU
ignores_warnings = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def on(device: str, tokens: Tokens) -> list[Tensor]:
    """Tokens as the layer has them: c and b are parts of one projection, u and dt are not."""
    return [x.to(device) for x in tokens]


class Case:
    """A verify over pools whose unread memory holds NaN; ``pending`` None is a row of padding."""

    def __init__(
        self,
        sizes: tuple[int, int],
        nodes: int,
        pending: list[int | None],
        *,
        folds: list[bool] | None = None,
        dtype: torch.dtype = torch.float32,
        shapes: tuple[str, ...] = SHAPES,
        strong: bool = False,
    ) -> None:
        counts = [count or 0 for count in pending]
        buffers, trees = make_buffers_and_trees((1, 1, *sizes), nodes, counts, shapes=shapes)
        steps = torch.full((*buffers.u.shape,), torch.nan)
        for row, count in zip(trees.rows.tolist(), counts, strict=True):
            of_row = steps[row, :count]
            of_row.copy_(mixed(STEPS, of_row.shape, 5) if strong else torch.rand(of_row.shape))
        slots = (trees.slots + 1).masked_fill(torch.tensor([count is None for count in pending]), 0)
        states = torch.cat([torch.full((1, 1, *sizes), 3.0), buffers.states]).to(dtype)
        self.buffers = replace(buffers, states=states, decay=steps)
        self.trees = replace(trees, slots=slots, folds=None if folds is None else torch.tensor(folds))
        self.tokens = make_tokens(len(pending), nodes, sizes, seed=nodes, strong=strong)

    def run(self, device: str) -> tuple[Tensor, Buffers]:
        buffers = moved(copied(self.buffers), device)
        out = triton_ops.tree_verify_in_place(*on(device, self.tokens), buffers, moved(self.trees, device))
        return out.cpu(), moved(buffers, "cpu")

    def check(self, device: str) -> None:
        out, after = self.run(device)
        wanted, records = self.wanted(after.states)
        torch.testing.assert_close(out.double(), wanted, **TOLERANCE)
        t, first = self.trees, self.trees.node_offset
        real, nodes = t.slots > 0, slice(first, first + out.shape[1])
        expected = copied(self.buffers)
        for name, want in zip(("k", "u", "decay"), records, strict=True):
            got = getattr(after, name)[t.rows]
            assert torch.equal(got[real, nodes].double(), want[real, nodes])  # inputs, as they were
            getattr(expected, name)[t.rows[real], nodes] = got[real, nodes]
        if t.folds is not None:
            expected.states[t.slots[real & t.folds]] = after.states[t.slots[real & t.folds]]
        for mine, right in zip(values(after), values(expected), strict=True):  # nothing else was written anywhere
            assert torch.equal(mine.nan_to_num(9.0), right.nan_to_num(9.0))

    def wanted(self, states: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Outputs and records by the reference in float64, from the states that were left; these are checked first."""
        t, x, tokens = self.trees, self.buffers, self.tokens.double()
        num_pending = t.num_pending
        records = x.k[t.rows].double(), x.u[t.rows].double(), x.decay[t.rows].double()
        if t.folds is not None:
            assert num_pending is not None
            count = torch.where(t.folds, num_pending, 0)
            folded = reference.fold(x.states[t.slots].double(), *records, tokens.rates, count)
            real, dtype = t.slots > 0, states.dtype
            want = as_stored(folded[real], dtype).double()
            torch.testing.assert_close(states[t.slots[real]].double(), want, rtol=ULP[dtype], atol=ULP[dtype] / 4)
            num_pending = num_pending - count
        placement = TreePlacement(num_pending, t.node_offset, t.ancestors)
        out = reference.tree_verify(*tokens, states[t.slots].double(), records, placement)
        out[t.slots == 0] = 0
        return out, records


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 7, 17])
def test_tree_verify(nodes: int, strong: bool, gpu_device: str) -> None:
    """A star, padding, a bushy tree and one with padding nodes."""
    Case(ODD, nodes, [0, None, 17], shapes=("star", "chain", "bushy"), strong=strong).check(gpu_device)
    Case(ONE, nodes, [4], shapes=("padded",), strong=strong).check(gpu_device)


@pytest.mark.parametrize("nodes", [1, 5])
def test_blocks_of_channels(nodes: int, gpu_device: str) -> None:
    Case(WIDE, nodes, [3], shapes=("bushy",)).check(gpu_device)
    Case((100, 9), nodes, [1], shapes=("chain",)).check(gpu_device)


def test_many_nodes(gpu_device: str) -> None:
    Case(ONE, 40, [18], shapes=("bushy",)).check(gpu_device)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("shape", ["bushy", "chain"])
def test_every_fill_of_the_ring(shape: str, gpu_device: str) -> None:
    for fill in range(0, 18, 3):
        Case(ONE, 3, [fill], shapes=(shape,)).check(gpu_device)
    Case(ONE, 3, [17, 1, 16, 2], folds=[False, True, True, True], shapes=(shape,)).check(gpu_device)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("nodes", "shapes"), [(1, SHAPES), (3, ("chain",)), (3, SHAPES)])
def test_states_of_any_dtype_fold(nodes: int, shapes: tuple[str, ...], dtype: torch.dtype, gpu_device: str) -> None:
    """Also with nothing pending; a row of padding does not fold, although ``folds`` is true for it."""
    sizes = ODD if dtype is torch.bfloat16 else ONE
    Case(sizes, nodes, [2, 0, None, 5], folds=[True, True, True, False], dtype=dtype, shapes=shapes).check(gpu_device)


def test_a_state_that_float16_cannot_hold(gpu_device: str) -> None:
    case = Case(ONE, 2, [2], folds=[True], dtype=torch.float16)
    row, slot = case.trees.rows[0], case.trees.slots[0]
    case.buffers.k[row, 1, 0] = torch.tensor([1.0, -1.0] * 4)
    case.buffers.u[row, 1] = 1e6
    out, after = case.run(gpu_device)
    assert torch.equal(after.states[slot].abs(), torch.full((1, 8, 8), 65504.0, dtype=torch.float16))
    assert torch.equal(after.states[slot, 0, :2].sign(), torch.tensor([[1.0], [-1.0]]).expand(2, 8).half())
    assert out.isfinite().all()


@pytest.mark.parametrize("fill", [0, 5])
def test_no_counts_of_pending_records_mean_all(fill: int, gpu_device: str) -> None:
    case = Case(ONE, 4, [fill, fill])
    case.trees = replace(case.trees, num_pending=None)
    case.check(gpu_device)


def test_a_path_has_the_same_bits_in_any_tree(gpu_device: str) -> None:
    """A node that continues the one before it, and one whose path is run again, take the same steps."""
    case = Case(ONE, 5, [3, 3], shapes=("chain",))
    t, x = case.trees, case.buffers
    for pool, places in ((x.states, t.slots), (x.k, t.rows), (x.u, t.rows), (x.decay, t.rows)):
        pool[places[1]] = pool[places[0]]
    for of_nodes in case.tokens[:4]:
        of_nodes[1] = of_nodes[0]
        of_nodes[0, 2:4] = of_nodes[1, 3:]
    parents = torch.tensor([[-1, 0, 1, 2, 3], [-1, 0, 0, 1, 3]])
    case.trees = replace(t, ancestors=mask_of(parents))
    out, _ = case.run(gpu_device)
    assert torch.equal(out[1, [0, 1, 3, 4]], out[0, :4])


@ignores_warnings
def test_what_is_not_finite_reaches_descendants_alone(gpu_device: str) -> None:
    """One number of one node; its outputs may be anything then, those of other paths and all records may not."""
    spoilt = [(field, value) for field in ("c", "b", "u", "dt") for value in (torch.nan, torch.inf)]
    case = Case(ONE, 4, [2], shapes=("binary",))
    below = case.trees.ancestors[0, :, 1]
    alone = Tokens(*(x.clone() for x in case.tokens))
    want, _ = case.run(gpu_device)
    for field, value in spoilt:
        for x, clean in zip(case.tokens, alone, strict=True):
            x.copy_(clean)
        getattr(case.tokens, field)[0, 1, 0, 2] = value
        out, after = case.run(gpu_device)
        affected = torch.tensor([False, True, False, False]) if field == "c" else below
        assert torch.equal(out[0][~affected], want[0][~affected])
        if field != "dt" or value is torch.nan:  # an infinite step decays all that was before it
            assert torch.equal(~out[0].isfinite().all(-1).squeeze(-1), affected)
        nodes = slice(2, 6)
        assert all(x[case.trees.rows[0], nodes].isfinite().all() for x in (after.k, after.u, after.decay))


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Run prompts in chunks of so many tokens; None: in one launch."""

    def choose(tokens: int | None) -> None:
        monkeypatch.setattr(triton_ops, "SHORT", 10**6 if tokens is None else 0)
        monkeypatch.setattr(triton_ops, "CHUNK", tokens)

    return choose


def test_long_prompts_of_few_channels_run_in_chunks() -> None:
    assert [triton_ops.is_long(1, length, 16, 8192) for length in (1, 128, 129, 2048)] == [False, False, True, True]
    assert [triton_ops.is_long(batch, 2048, 16, 8192) for batch in (1, 7, 8, 64)] == [True, True, False, False]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [None, 4, 7])
def test_extend_in_place(
    chunk: int | None, dtype: torch.dtype, gpu_device: str, in_chunks: Callable[[int | None], None]
) -> None:
    in_chunks(chunk)
    lengths, slots = torch.tensor([20, 0, 16, 9, 1]), torch.tensor([4, 2, 1, 0, 5])
    tokens = make_tokens(5, 21, ODD, seed=3)
    beyond = torch.arange(21) >= lengths[:, None]
    for x in tokens[:4]:
        x[beyond] = torch.nan
    pool = torch.full((7, 1, *ODD), torch.nan)
    pool[[0, 1, 4, 5]] = torch.randn(4, 1, *ODD)
    pool[2] = torch.inf  # a row of length 0 leaves whatever there is
    before = pool.to(dtype)
    after = before.to(gpu_device, copy=True)
    places = slots.to(gpu_device), lengths.to(gpu_device)
    out = triton_ops.extend_in_place(*on(gpu_device, tokens), after, *places).cpu()
    after, expected = after.cpu(), before.clone()
    want, states = reference.extend(*tokens.double(), before[slots].double(), lengths)
    for i in (0, 2, 4):
        count = int(lengths[i])
        torch.testing.assert_close(out[i, :count].double(), want[i, :count], **TOLERANCE)
        stored = as_stored(states[i].float(), dtype)
        torch.testing.assert_close(after[slots[i]], stored, rtol=ULP[dtype], atol=ULP[dtype] / 4)
        expected[slots[i]] = after[slots[i]]
    assert torch.equal(after.nan_to_num(9.0), expected.nan_to_num(9.0))
    assert (out[beyond | (slots == 0)[:, None]] == 0).all()


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("chunk", [None, 1, 4, 64])
def test_extend_with_strong_decays_over_blocks(
    chunk: int | None, seed: int, gpu_device: str, in_chunks: Callable[[int | None], None]
) -> None:
    """Steps from 0 to 500 times rates: log decays from 0 to -3000 and beyond, mixed; 150 tokens are three chunks."""
    in_chunks(chunk)
    length, sizes = (150, ONE) if chunk == 64 else (9, WIDE)
    tokens, states = make_tokens(1, length, sizes, seed, strong=True), make_state(2, sizes)
    want, end = reference.extend(*tokens.double(), states[1:].double(), torch.tensor([length]))
    there, places = states.to(gpu_device), (torch.tensor([1]).to(gpu_device), torch.tensor([length]).to(gpu_device))
    out = triton_ops.extend_in_place(*on(gpu_device, tokens), there, *places)
    torch.testing.assert_close(out.cpu().double(), want, **TOLERANCE)
    torch.testing.assert_close(there[1:].cpu().double(), end, **TOLERANCE)


@ignores_warnings
@pytest.mark.parametrize("field", ["b", "u", "dt"])
def test_what_is_not_finite_stays_behind_its_token(
    field: str, gpu_device: str, in_chunks: Callable[[int | None], None]
) -> None:
    in_chunks(4)
    tokens, states = make_tokens(2, 13, ONE, 5), make_state(3, ONE)
    places = [torch.tensor(x).to(gpu_device) for x in ([1, 2], [13, 13])]
    want = triton_ops.extend_in_place(*on(gpu_device, tokens), states.to(gpu_device, copy=True), *places)
    getattr(tokens, field)[0, 6, 0, 2] = torch.nan
    got = triton_ops.extend_in_place(*on(gpu_device, tokens), states.to(gpu_device, copy=True), *places)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0, :6], want[0, :6])
    assert got[0, 6:].isnan().any(-1).all()


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("has_parents", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize(("sizes", "nodes"), [(ODD, 1), (ODD, 7), (WIDE, 2)])
def test_snapshots(sizes: tuple[int, int], nodes: int, has_parents: bool, gpu_device: str) -> None:
    """Into a part of a larger buffer, whose rest stays as it is."""
    shapes = ("bushy", "padded", "star") if has_parents else ("chain", "chain")
    batch = len(shapes)
    tokens, state = make_tokens(batch, nodes, sizes, seed=nodes), make_state(batch, sizes)
    parents = batch_of_parents(shapes, nodes, seed=nodes)
    buffer = torch.full((batch + 2, nodes + 2, 1, *sizes), torch.nan, device=gpu_device)
    arguments = *on(gpu_device, tokens), state.to(gpu_device)
    out = triton_ops.tree_verify_snapshots(
        *arguments, buffer[1:-1, :nodes], parents.to(gpu_device) if has_parents else None
    )
    placement, many = TreePlacement(None, 0, mask_of(parents)), tokens.double()
    records = tuple(torch.zeros_like(x) for x in many[1:4])
    want = reference.tree_verify(*many, state.double(), (records[0], records[1], records[2]), placement)
    torch.testing.assert_close(out.cpu().double(), want, **TOLERANCE)
    for row in range(batch):
        for node in range(nodes):
            path = placement.ancestors[row, node].nonzero().flatten()
            kept = [x[row : row + 1, path] for x in many[:4]]
            _, after = reference.extend(*kept, many.rates, state[row : row + 1].double(), torch.tensor([len(path)]))
            torch.testing.assert_close(buffer[1 + row, node].cpu().double(), after[0], **TOLERANCE)
    assert buffer[[0, -1]].isnan().all()
    assert buffer[:, nodes:].isnan().all()


@pytest.mark.parametrize("by_layer", [False, True])
def test_folds(by_layer: bool, gpu_device: str) -> None:
    tokens, state, counts = make_tokens(3, 9, ODD, 6, strong=True), make_state(3, ODD), torch.tensor([9, 0, 4])
    rates = tokens.rates * torch.tensor([1.0, 2.0, 0.5])[:, None, None] if by_layer else tokens.rates
    want = reference.fold(state.double(), *tokens.double()[1:4], rates.double(), counts)
    tokens.u[2, 4:] = torch.nan  # not pending
    arguments = (x.to(gpu_device) for x in (state, *tokens[1:4], rates, counts))
    got = triton_ops.fold(*arguments).cpu()
    torch.testing.assert_close(got.double(), want, **TOLERANCE)
    assert torch.equal(got[1], state[1])


@pytest.mark.parametrize("can_launch", [True, False])
def test_the_operators_take_triton_where_they_can(can_launch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, state = make_tokens(1, 1, ODD, seed=26), make_state(1, ODD)
    operands = ExtendOperands(state, state, RowSet.of([0], state.device), torch.tensor([1]))
    monkeypatch.setattr(gpu, "can_launch", lambda *_: can_launch)
    chosen = operator_of(selective_scan.advance).choose(*tokens, operands)
    assert (chosen == "triton") == can_launch


def test_pools_that_are_not_dense_are_refused(gpu_device: str) -> None:
    case = Case(ONE, 1, [0])
    states = case.buffers.states.transpose(2, 3)
    case.buffers = replace(case.buffers, states=states.transpose(2, 3).contiguous().mT)
    with pytest.raises(ValueError, match="must be dense"):
        case.run(gpu_device)
