"""State space duality in Triton against its reference: pools in place, folds, padding, values that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specmamba.kernels import gpu, ssd
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.ssd import reference, torch_ops
from specmamba.kernels.state_records import Buffers, ExtendOperands, RowSet, TreePlacement, as_stored
from specmamba.kernels.state_records import reference as records_reference
from tests.kernels.recurrent.layer_case import copied, make_buffers_and_trees, moved, values
from tests.kernels.recurrent.records import Records, make_records, make_state
from tests.kernels.recurrent.strong_decay import DECAYS, mixed
from tests.kernels.recurrent.test_ssd import Tokens, make_tokens, whole_sequence
from tests.kernels.rounding import tolerance
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned")

TOLERANCE = tolerance(terms=160)
ULP = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# (G, H, S, P): one head, groups of heads over blocks that do not divide anything
ONE, ODD, WIDE = (1, 1, 8, 8), (1, 3, 7, 5), (2, 4, 20, 40)
# numpy's, of the interpreter: infinite numbers that masks hide are multiplied by 0 as on a GPU
ignores_warnings = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


class Case:
    """A verify over pools whose unread memory holds NaN; ``pending`` None is a row of padding."""

    def __init__(
        self,
        heads: tuple[int, int, int, int],
        nodes: int,
        pending: list[int | None],
        *,
        folds: list[bool] | None = None,
        dtype: torch.dtype = torch.float32,
        shapes: tuple[str, ...] = SHAPES,
    ) -> None:
        buffers, trees = make_buffers_and_trees(heads, nodes, [count or 0 for count in pending], shapes=shapes)
        slots = (trees.slots + 1).masked_fill(torch.tensor([count is None for count in pending]), 0)
        states = torch.cat([torch.full((1, *heads[1:]), 3.0), buffers.states]).to(dtype)
        self.buffers = replace(buffers, states=states)
        folded, is_chain = None if folds is None else torch.tensor(folds), shapes == ("chain",)
        self.trees = replace(trees, slots=slots, folds=folded, is_chain=is_chain)
        self.tokens = strided(make_tokens(len(pending), nodes, heads, seed=nodes))

    def run(self, device: str) -> tuple[Tensor, Buffers]:
        from specmamba.kernels.ssd import triton_ops

        buffers = moved(copied(self.buffers), device)
        tokens = [x.to(device) for x in self.tokens]
        out = triton_ops.tree_verify_in_place(*tokens, buffers, moved(self.trees, device))
        return out.cpu(), moved(buffers, "cpu")

    def check(self, device: str) -> None:
        out, after = self.run(device)
        wanted, records = self.wanted(after.states)
        torch.testing.assert_close(out.double(), wanted, **TOLERANCE)
        t, first = self.trees, self.trees.node_offset
        real, nodes = t.slots > 0, slice(first, first + self.tokens.g.shape[1])
        expected = copied(self.buffers)
        for name, want in zip(("k", "u", "decay"), records, strict=True):
            got = getattr(after, name)[t.rows]
            torch.testing.assert_close(got[real, nodes].double(), want[real, nodes], **TOLERANCE)
            getattr(expected, name)[t.rows[real], nodes] = got[real, nodes]
        if t.folds is not None:
            expected.states[t.slots[real & t.folds]] = after.states[t.slots[real & t.folds]]
        for mine, right in zip(values(after), values(expected), strict=True):  # nothing else was written anywhere
            assert torch.equal(mine.nan_to_num(9.0), right.nan_to_num(9.0))

    def wanted(self, states: Tensor) -> tuple[Tensor, Records]:
        """Outputs and records by the reference in float64, from the states that were left; these are checked first."""
        t, x = self.trees, self.buffers
        num_pending = t.num_pending
        records = Records(*(buffer[t.rows].double() for buffer in (x.k, x.u, x.decay)))
        if t.folds is not None:
            assert num_pending is not None
            count = torch.where(t.folds, num_pending, 0)
            folded = records_reference.fold(x.states[t.slots].double(), *records, count)
            real = t.slots > 0
            want, dtype = as_stored(folded[real], states.dtype).double(), states.dtype
            torch.testing.assert_close(states[t.slots[real]].double(), want, rtol=ULP[dtype], atol=ULP[dtype] / 4)
            num_pending = num_pending - count
        state = states[t.slots].double()
        out = reference.tree_verify(
            *self.tokens.double(), state, records, TreePlacement(num_pending, t.node_offset, t.ancestors)
        )
        out[t.slots == 0] = 0
        return out, records


def strided(tokens: Tokens) -> Tokens:
    """C and B as parts of one tensor, as a convolution leaves them."""
    both = torch.cat([tokens.b, tokens.c], -1)
    size = tokens.b.shape[-1]
    return tokens._replace(c=both[..., size:], b=both[..., :size])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("nodes", [1, 2, 7, 17])
def test_tree_verify(nodes: int, gpu_device: str) -> None:
    """A star, padding, a bushy tree and one with padding nodes."""
    Case(ODD, nodes, [0, None, 17], shapes=("star", "chain", "bushy")).check(gpu_device)
    Case(ONE, nodes, [4], shapes=("padded",)).check(gpu_device)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_short_chains(nodes: int, gpu_device: str) -> None:
    """As the recurrence: all fills of a ring, folds, padding, blocks of columns, groups of heads, odd widths."""
    for heads in (ODD, WIDE, (1, 1, 130, 24)):
        case = Case(heads, nodes, [0, None, 17, 3], folds=[False, True, False, True], shapes=("chain",))
        assert case.trees.is_chain
        case.check(gpu_device)


def test_chains_run_on_a_state_in_registers(gpu_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host says that they are chains, and up to eight nodes."""
    from specmamba.kernels.ssd import triton_kernels

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **__: launched.append(grid)

    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(triton_kernels, "chain_verify", Kernel())
    for nodes, shapes in ((2, ("chain",)), (8, ("chain",)), (9, ("chain",)), (2, ("star",)), (1, ("chain",))):
        Case(ONE, nodes, [1], shapes=shapes).run(gpu_device)
    assert len(launched) == 2


@pytest.mark.parametrize("nodes", [1, 5])
def test_blocks_and_groups(nodes: int, gpu_device: str) -> None:
    Case(WIDE, nodes, [3], shapes=("bushy",)).check(gpu_device)


def test_many_nodes(gpu_device: str) -> None:
    Case(ONE, 64, [18], shapes=("bushy",)).check(gpu_device)


def test_too_many_nodes_are_refused(gpu_device: str) -> None:
    with pytest.raises(ValueError, match="65 nodes"):
        Case(ONE, 65, [0]).run(gpu_device)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("nodes", "shape"), [(3, "chain"), (1, "bushy"), (3, "bushy")])
def test_every_fill_of_the_ring(nodes: int, shape: str, gpu_device: str) -> None:
    for fill in range(18):
        Case(ONE, nodes, [fill], shapes=(shape,)).check(gpu_device)
    Case(ONE, nodes, [17, 1, 16, 2], folds=[False, True, True, True], shapes=(shape,)).check(gpu_device)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("nodes", "shapes"), [(1, SHAPES), (3, ("chain",)), (3, SHAPES)])
def test_states_of_any_dtype_fold(nodes: int, shapes: tuple[str, ...], dtype: torch.dtype, gpu_device: str) -> None:
    """Also with nothing pending; a row of padding does not fold, although ``folds`` is true for it."""
    heads = ODD if dtype is torch.bfloat16 else ONE
    Case(heads, nodes, [2, 0, None, 5], folds=[True, True, True, False], dtype=dtype, shapes=shapes).check(gpu_device)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_state_that_float16_cannot_hold(nodes: int, gpu_device: str) -> None:
    case = Case(ONE, nodes, [2], folds=[True], dtype=torch.float16)
    row, slot = case.trees.rows[0], case.trees.slots[0]
    case.buffers.k[row, 1] = torch.tensor([1.0, -1.0] * 4)
    case.buffers.u[row, 1] = 1e6
    out, after = case.run(gpu_device)
    assert torch.equal(after.states[slot].abs(), torch.full((1, 8, 8), 65504.0, dtype=torch.float16))
    assert torch.equal(after.states[slot, 0, :2].sign(), torch.tensor([[1.0], [-1.0]]).expand(2, 8).half())
    assert out.isfinite().all()


@pytest.mark.parametrize("fill", [0, 5])
@pytest.mark.parametrize("nodes", [1, 4])
def test_no_counts_of_pending_records_mean_all(nodes: int, fill: int, gpu_device: str) -> None:
    case = Case(ONE, nodes, [fill, fill])
    case.trees = replace(case.trees, num_pending=None)
    case.check(gpu_device)


@pytest.mark.parametrize(
    ("nodes", "shapes"), [(1, ("star",)), (7, ("star", "bushy")), (18, ("star", "bushy")), (7, ("chain",))]
)
def test_strong_decays(nodes: int, shapes: tuple[str, ...], gpu_device: str) -> None:
    """From 0 to -3000, mixed; nodes and records in more than one block."""
    case = Case(ONE, nodes, [19, 0], shapes=shapes)
    for decay, seed in ((case.tokens.g, 1), (case.buffers.decay, 2)):
        decay.copy_(torch.where(decay.isnan(), decay, mixed(DECAYS, decay.shape, seed)))
    case.check(gpu_device)


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_batch_with_its_own_records(nodes: int, gpu_device: str) -> None:
    """The signature of ``torch_ops``: no padding, and states in any layout."""
    from specmamba.kernels.ssd import triton_ops

    pending = torch.tensor([0, 2])
    tokens, state = make_tokens(2, nodes, ODD, seed=1), make_state(2, ODD, seed=2).mT.contiguous().mT
    records, mask = make_records(2, 3 + nodes, ODD, pending, 3), mask_of(batch_of_parents(("bushy",) * 2, nodes, 0))
    got, want = Records(*(x.to(gpu_device) for x in records.clone())), records.clone()
    arguments = (x.to(gpu_device) for x in (*tokens, state))
    out = triton_ops.tree_verify(*arguments, got, TreePlacement(pending.to(gpu_device), 3, mask.to(gpu_device)))
    wanted = torch_ops.tree_verify(*tokens, state, want, TreePlacement(pending, 3, mask))
    torch.testing.assert_close(out.cpu(), wanted, **TOLERANCE)
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine.cpu(), right, **TOLERANCE)


@pytest.mark.fast_cases(1)
@ignores_warnings
@pytest.mark.parametrize(("nodes", "is_chain"), [(4, True), (1, False), (7, False)])
def test_nan_affects_a_node_and_its_descendants_only(nodes: int, is_chain: bool, gpu_device: str) -> None:
    """Rows that are the same, but for one number of one node of all but the first."""
    from specmamba.kernels.ssd import triton_ops

    spoilt = [(field, value) for field in "cbu" for value in (torch.nan, torch.inf)]
    spoilt += [("g", value) for value in (torch.nan, torch.inf, -torch.inf)]
    batch, hit, heads = 1 + len(spoilt), min(1, nodes - 1), (1, 2, 8, 8)
    records = make_records(1, 2 + nodes, heads, torch.tensor([2]), seed=1)
    got = Records(*(x.repeat(batch, *[1] * (x.dim() - 1)).to(gpu_device) for x in records))
    tokens = Tokens(*(x.repeat(batch, *[1] * (x.dim() - 1)) for x in make_tokens(1, nodes, heads, seed=2)))
    for row, (field, value) in enumerate(spoilt, 1):
        x = getattr(tokens, field)
        x[(row, hit, *[0] * (x.dim() - 2))] = value
    state, shape = make_state(1, heads, seed=3).repeat(batch, 1, 1, 1), "chain" if is_chain else "binary"
    mask = mask_of(batch_of_parents((shape,), nodes, 0))
    c, b, u, g, states = (x.to(gpu_device) for x in (*tokens, state))
    places = TreePlacement(None, 2, mask.repeat(batch, 1, 1).to(gpu_device))
    out = triton_ops.tree_verify(c, b, u, g, states, got, places, is_chain).cpu()
    kept = [x[:, 2:].cpu() for x in got]
    below = mask[0, :, hit]
    assert out[0].isfinite().all()
    for row, (field, _) in enumerate(spoilt, 1):
        affected = torch.zeros(nodes, 2, dtype=torch.bool)
        affected[hit if field == "c" else below, : 2 if field in "cb" else 1] = True
        assert torch.equal(~out[row].isfinite().all(-1), affected)
        assert torch.equal(out[row][~affected], out[0][~affected])
        for x in kept:
            assert x[row].isfinite().all()
            assert torch.equal(x[row][~below], x[0][~below])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extend_in_place(dtype: torch.dtype, gpu_device: str) -> None:
    from specmamba.kernels.ssd import triton_ops

    heads, lengths, slots = ODD, torch.tensor([35, 0, 16, 9, 1]), torch.tensor([4, 2, 1, 0, 5])
    tokens = strided(make_tokens(5, 36, heads, seed=3))
    beyond = torch.arange(36) >= lengths[:, None]
    for x in tokens:
        x[beyond] = torch.nan
    pool = torch.full((7, *heads[1:]), torch.nan)
    pool[[0, 1, 4, 5]] = torch.randn(4, *heads[1:])
    pool[2] = torch.inf  # a row of length 0 leaves whatever there is
    before, device = pool.to(dtype), gpu_device
    after = before.to(device, copy=True)
    arguments = [x.to(device) for x in tokens]
    out = triton_ops.extend_in_place(*arguments, after, slots.to(device), lengths.to(device)).cpu()
    after, expected = after.cpu(), before.clone()
    for i in (0, 2, 4):
        count = int(lengths[i])
        row = Tokens(*(x[i : i + 1, :count] for x in tokens))
        want, state = whole_sequence(row, before[slots[i]][None].float())
        torch.testing.assert_close(out[i, :count].double(), want[0], **TOLERANCE)
        stored = as_stored(state[0].float(), dtype)
        torch.testing.assert_close(after[slots[i]], stored, rtol=ULP[dtype], atol=ULP[dtype] / 4)
        expected[slots[i]] = after[slots[i]]
    assert torch.equal(after.nan_to_num(9.0), expected.nan_to_num(9.0))
    assert (out[beyond | (slots == 0)[:, None]] == 0).all()


def test_extend_over_blocks_and_groups(gpu_device: str) -> None:
    from specmamba.kernels.ssd import triton_ops

    tokens, states = make_tokens(1, 18, WIDE, seed=4), make_state(2, WIDE, seed=5).half()
    states[1, 0] = 65504.0
    tokens.b[0, -1, 0], tokens.u[0, -1, 0] = 1.0, 1e6
    want, end = whole_sequence(tokens, states[1:].float())
    places = torch.tensor([1]).to(gpu_device), torch.tensor([18]).to(gpu_device)
    there = states.to(gpu_device)
    out = triton_ops.extend_in_place(*(x.to(gpu_device) for x in tokens), there, *places)
    torch.testing.assert_close(out.cpu().double(), want, rtol=2e-5, atol=1e-3)
    torch.testing.assert_close(
        there[1].cpu(), as_stored(end[0].float(), torch.float16), rtol=ULP[torch.float16], atol=1e-3
    )
    assert (there[1, 0] == 65504.0).all()


def test_extend_with_strong_decays(gpu_device: str) -> None:
    from specmamba.kernels.ssd import triton_ops

    tokens, states = make_tokens(1, 20, ONE, seed=3), make_state(2, ONE, seed=4)
    tokens.g.copy_(mixed(DECAYS, tokens.g.shape, seed=5))
    want, end = whole_sequence(tokens, states[1:])
    there, places = states.to(gpu_device), (torch.tensor([1]).to(gpu_device), torch.tensor([20]).to(gpu_device))
    out = triton_ops.extend_in_place(*(x.to(gpu_device) for x in tokens), there, *places)
    torch.testing.assert_close(out.cpu().double(), want, **TOLERANCE)
    torch.testing.assert_close(there[1:].cpu().double(), end, **TOLERANCE)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("has_parents", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize(("heads", "nodes"), [(ODD, 1), (ODD, 7), (WIDE, 2)])
def test_snapshots(heads: tuple[int, int, int, int], nodes: int, has_parents: bool, gpu_device: str) -> None:
    """Into a part of a larger buffer, whose rest stays as it is."""
    shapes = ("bushy", "padded", "star") if has_parents else ("chain", "chain")
    batch = len(shapes)
    tokens, state = strided(make_tokens(batch, nodes, heads, seed=nodes)), make_state(batch, heads, seed=nodes + 1)
    parents = batch_of_parents(shapes, nodes, seed=nodes)
    buffer = torch.full((batch + 2, nodes + 2, *state.shape[1:]), torch.nan, device=gpu_device)
    want_snapshots = torch.empty(batch, nodes, *state.shape[1:], dtype=torch.float64)
    want = reference.tree_verify_snapshots(*tokens.double(), state.double(), want_snapshots, parents)
    from specmamba.kernels.ssd import triton_ops

    arguments = (x.to(gpu_device) for x in (*tokens, state))
    out = triton_ops.tree_verify_snapshots(
        *arguments, buffer[1:-1, :nodes], parents.to(gpu_device) if has_parents else None
    )
    torch.testing.assert_close(out.cpu().double(), want, **TOLERANCE)
    torch.testing.assert_close(buffer[1:-1, :nodes].cpu().double(), want_snapshots, **TOLERANCE)
    assert buffer[[0, -1]].isnan().all()
    assert buffer[:, nodes:].isnan().all()


@pytest.mark.parametrize("can_launch", [True, False])
def test_the_operator_takes_triton_where_it_can(can_launch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, state = make_tokens(1, 1, ODD, seed=26), make_state(1, ODD, seed=27)
    operands = ExtendOperands(state, state, RowSet.of([0], state.device), torch.tensor([1]))
    monkeypatch.setattr(gpu, "can_launch", lambda *_: can_launch)
    assert operator_of(ssd.advance).choose(*tokens, operands) == ("triton" if can_launch else "torch")


@pytest.mark.parametrize("nodes", [7, 20])
def test_products_of_16_bit_models_run_in_parts(nodes: int, gpu_device: str) -> None:
    """Outputs are off by far less than numbers of 16 bits are, 2^-9; records, which are inputs, stay exact."""
    case = Case((2, 4, 40, 24), nodes, [0, 18, 5], shapes=("bushy", "binary", "padded"))
    exact, of_exact = case.run(gpu_device)
    case.buffers = replace(case.buffers, conv_inputs=case.buffers.conv_inputs.bfloat16())
    split, of_split = case.run(gpu_device)
    assert 0 < float((split - exact).abs().max() / exact.abs().max()) < 2**-14
    for mine, right in ((of_split.k, of_exact.k), (of_split.u, of_exact.u), (of_split.decay, of_exact.decay)):
        assert torch.equal(mine.nan_to_num(9.0), right.nan_to_num(9.0))


@pytest.mark.parametrize(("nodes", "shapes"), [(1, SHAPES), (3, ("chain",)), (7, ("bushy",)), (20, ("padded",))])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_kernels_without_folds(nodes: int, shapes: tuple[str, ...], inputs: torch.dtype, gpu_device: str) -> None:
    """As those with folds that are told that no row folds; compilers may join products and sums differently."""
    case = Case(ODD, nodes, [0, None, 18, 5], folds=[False] * 4, shapes=shapes)
    case.buffers = replace(case.buffers, conv_inputs=case.buffers.conv_inputs.to(inputs))
    want, wanted = case.run(gpu_device)
    case.trees = replace(case.trees, folds=None)
    out, after = case.run(gpu_device)
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)
    for mine, right in ((after.k, wanted.k), (after.u, wanted.u), (after.decay, wanted.decay)):
        assert torch.equal(mine.nan_to_num(9.0), right.nan_to_num(9.0))
    assert torch.equal(after.states.nan_to_num(9.0), case.buffers.states.nan_to_num(9.0))
