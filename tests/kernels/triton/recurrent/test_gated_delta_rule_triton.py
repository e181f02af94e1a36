"""The gated delta rule in Triton against the float64 recurrence: trees in place, folds, known tokens, snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import gated_delta_rule, gpu
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.gated_delta_rule import reference, torch_ops
from specmamba.kernels.state_records import Buffers, ExtendOperands, RowSet, TreePlacement, Trees
from specmamba.kernels.state_records import reference as records_reference
from tests.kernels import rounding
from tests.kernels.recurrent import strong_decay, test_kda_rule
from tests.kernels.recurrent.layer_case import copied, make_buffers_and_trees, moved
from tests.kernels.recurrent.records import Records, make_records, make_state
from tests.kernels.recurrent.test_gated_delta_rule import Tokens, make_tokens
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

pytest.importorskip("triton")
from specmamba.kernels.gated_delta_rule import tiles, triton_kernels, triton_ops

pytestmark = pytest.mark.usefixtures("poisoned")

TOLERANCE = rounding.tolerance(terms=160)
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# (nodes, heads): one node and more, two blocks of values, odd widths, grouped heads, both tiles of large trees
SIZES = [
    (1, (1, 2, 20, 40)),
    (2, (1, 3, 7, 5)),
    (7, (2, 4, 16, 24)),
    (17, (1, 1, 40, 24)),
    (33, (1, 1, 8, 20)),
]

KINDS = [(1, False), (5, False), (4, True)]  # nodes, and whether the trees are chains

# the interpreter multiplies in NumPy, which warns of infinite operands
may_be_invalid = pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning")


def bits(x: Tensor) -> Tensor:
    """For comparison of memory where there may be NaN."""
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def verify(
    device: str,
    tokens: Tokens,
    state: Tensor,
    records: Records,
    *places: Any,
    is_chain: bool = False,
    model_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Records]:
    """Outputs and the records afterwards, which are not the ones that were given."""
    after = Records(*(x.to(device, copy=True) for x in records))
    where = [x.to(device) if isinstance(x, Tensor) else x for x in places]
    there = [x.to(device) for x in tokens]
    out = triton_ops.tree_verify(*there, state.to(device), after, TreePlacement(*where), is_chain, model_dtype)
    return out.cpu(), Records(*(x.cpu() for x in after))


def check_verify(
    device: str,
    tokens: Tokens,
    state: Tensor,
    records: Records,
    *places: Any,
    is_chain: bool = False,
    **tolerance: float,
) -> None:
    """Outputs and records are those of the float64 recurrence, and nothing else is written."""
    nodes, offset = tokens.g.shape[1], places[1]
    out, got = verify(device, tokens, state, records, *places, is_chain=is_chain)
    want = records.clone(torch.float64)
    want_out = reference.tree_verify(*tokens.double(), state.double(), want, TreePlacement(*places))
    torch.testing.assert_close(out.double(), want_out, **(TOLERANCE | tolerance))
    for mine, right, before in zip(got, want, records, strict=True):
        written = slice(offset, offset + nodes)
        torch.testing.assert_close(mine[:, written].double(), right[:, written], **(TOLERANCE | tolerance))
        outside = [j for j in range(before.shape[1]) if not offset <= j < offset + nodes]
        assert torch.equal(bits(mine[:, outside]), bits(before[:, outside]))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("nodes", "heads"), SIZES)
def test_tree_verify_matches_reference(nodes: int, heads: tuple[int, int, int, int], gpu_device: str) -> None:
    shapes: tuple[str, ...] = SHAPES
    pending, offset = torch.tensor([0, 6, 1, 3, 5]), 6
    if nodes > 17:
        shapes, pending = ("bushy", "padded"), torch.tensor([5, 6])
    tokens, state = make_tokens(len(shapes), nodes, heads, seed=nodes)
    records = make_records(len(shapes), nodes + 9, heads, pending, seed=nodes + 1)
    for x in records:
        x[:, offset : offset + nodes] = torch.nan  # written before it is read
    check_verify(gpu_device, tokens, state, records, pending, offset, mask_of(batch_of_parents(shapes, nodes, seed=3)))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("nodes", "heads"),
    [(2, (1, 3, 7, 5)), (4, (1, 2, 128, 40)), (3, (2, 4, 16, 24)), (8, (2, 2, 20, 40)), (5, (1, 1, 130, 12))],
)
def test_chains_match_reference(nodes: int, heads: tuple[int, int, int, int], gpu_device: str) -> None:
    """The recurrence in registers: one block of values and several, odd widths, grouped heads."""
    pending, offset = torch.tensor([0, 6, 1]), 6
    tokens, state = make_tokens(3, nodes, heads, seed=nodes)
    records = make_records(3, nodes + 9, heads, pending, seed=nodes + 1)
    for x in records:
        x[:, offset : offset + nodes] = torch.nan  # written before it is read
    mask = mask_of(batch_of_parents(("chain",) * 3, nodes, seed=0))
    check_verify(gpu_device, tokens, state, records, pending, offset, mask, is_chain=True)


@pytest.mark.parametrize(
    ("nodes", "is_chain", "kernel"),
    [
        (1, True, "root_kernel"),
        (2, True, "chain_kernel"),
        (8, True, "chain_kernel"),
        (9, True, "tree_kernel"),
        (2, False, "tree_kernel"),
    ],
)
def test_chains_are_known_without_a_look_at_their_ancestors(
    nodes: int, is_chain: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    for name in ("root_kernel", "chain_kernel", "tree_kernel"):
        monkeypatch.setattr(triton_kernels, name, Recorded(getattr(triton_kernels, name), name, launched))
    tokens, state = make_tokens(1, nodes, (1, 1, 8, 8), seed=0)
    records = make_records(1, nodes, (1, 1, 8, 8), torch.zeros(1), seed=0)
    mask = mask_of(batch_of_parents(("chain",), nodes, seed=0))
    verify("cpu", tokens, state, records, None, 0, mask, is_chain=is_chain)
    assert launched == [kernel]


class Recorded:
    """A kernel that is not run: its name is noted."""

    def __init__(self, kernel: Any, name: str, launched: list[str]) -> None:
        self.arg_names, self._name, self._launched = kernel.arg_names, name, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: self._launched.append(self._name)


def error_of(
    dtype: torch.dtype, nodes: int, heads: tuple[int, int, int, int], device: str, is_strong: bool = False
) -> tuple[float, float]:
    """Largest differences from the float64 recurrence, of outputs and of updates, over the largest of each.

    ``is_strong``: with decays from 0 to e^-3000, mixed.
    """
    pending, offset = torch.tensor([0, 18, 5, 3]), 18
    tokens, state = make_tokens(4, nodes, heads, seed=nodes)
    records = make_records(4, nodes + 20, heads, pending, seed=nodes + 1)
    if is_strong:
        tokens = strong_decay.make_tokens("gated_delta_rule", 4, nodes, heads, seed=nodes)
        records = strong_decay.pending_records(nodes + 20, heads, pending, seed=nodes + 1)
    mask = mask_of(batch_of_parents(("bushy", "chain", "binary", "padded"), nodes, seed=3))
    out, got = verify(device, tokens, state, records, pending, offset, mask, model_dtype=dtype)
    want = records.clone(torch.float64)
    wanted = reference.tree_verify(*tokens.double(), state.double(), want, TreePlacement(pending, offset, mask))
    at = slice(offset, offset + nodes)
    assert torch.equal(got.k[:, at], tokens.k)
    torch.testing.assert_close(got.decay[:, at].double(), want.decay[:, at], **TOLERANCE)

    def largest(mine: Tensor, right: Tensor) -> float:
        return ((mine - right).abs().max() / right.abs().max()).item()

    return largest(out, wanted), largest(got.u[:, at], want.u[:, at])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("nodes", "heads"), [(7, (1, 2, 128, 40)), (16, (2, 2, 128, 32)), (20, (1, 1, 40, 24))])
def test_products_follow_the_dtype_of_the_model(nodes: int, heads: tuple[int, int, int, int], gpu_device: str) -> None:
    """Of 16-bit models they run in parts of bfloat16, with errors far below those of their numbers, 2^-8."""
    exact = error_of(torch.float32, nodes, heads, gpu_device)
    assert max(exact) < 1e-6
    for dtype in (torch.bfloat16, torch.float16):
        split = error_of(dtype, nodes, heads, gpu_device)
        print(nodes, exact, split)
        assert max(exact) < max(split) < 2**-14


def test_products_in_parts_at_strong_decays(gpu_device: str) -> None:
    """Nodes and records in more than one block: strong decays lose no more digits than weak ones."""
    weak, strong = (error_of(torch.bfloat16, 18, (1, 1, 16, 8), gpu_device, is_strong) for is_strong in (False, True))
    assert max(strong) < 2 * max(weak) < 2**-12


@pytest.mark.parametrize("nodes", [1, 64])
def test_a_long_chain_and_a_root(nodes: int, gpu_device: str) -> None:
    """Nothing pending, and keys that repeat: the system is as far from diagonal as it gets."""
    tokens, state = make_tokens(1, nodes, (1, 1, 8, 8), seed=4)
    tokens.k[:] = tokens.k[:, :1].clone()
    tokens.g.fill_(-0.01)
    tokens.beta.fill_(0.98)
    none, mask = torch.zeros(1, dtype=torch.int64), mask_of(batch_of_parents(("chain",), nodes, seed=0))
    check_verify(gpu_device, tokens, state, make_records(1, nodes, (1, 1, 8, 8), none, seed=5), none, 0, mask)


@pytest.mark.parametrize(("nodes", "is_chain"), [(1, False), (3, False), (3, True)])
def test_every_fill_of_the_pending_list(nodes: int, is_chain: bool, gpu_device: str) -> None:
    heads, pending = (1, 1, 16, 8), torch.arange(18)
    tokens, state = make_tokens(18, nodes, heads, seed=6)
    records = make_records(18, 17 + nodes, heads, pending, seed=7)
    shapes = ("chain",) * 18 if is_chain else ("bushy", "star", "chain") * 6
    mask = mask_of(batch_of_parents(shapes, nodes, seed=8))
    check_verify(gpu_device, tokens, state, records, pending, 17, mask, is_chain=is_chain)


@pytest.mark.parametrize("node_offset", [0, 1, 5])
@pytest.mark.parametrize(("nodes", "is_chain"), [(1, False), (6, False), (6, True)])
def test_num_pending_none_means_every_record_before_the_nodes(
    nodes: int, is_chain: bool, node_offset: int, gpu_device: str
) -> None:
    heads = (1, 1, 8, 8)
    tokens, state = make_tokens(2, nodes, heads, seed=9)
    records = make_records(2, node_offset + nodes, heads, torch.full((2,), node_offset), seed=10)
    mask = mask_of(batch_of_parents(("chain", "chain") if is_chain else ("bushy", "padded"), nodes, seed=11))
    check_verify(gpu_device, tokens, state, records, None, node_offset, mask, is_chain=is_chain)


@pytest.mark.parametrize(("nodes", "is_chain"), [(1, False), (7, False), (18, False), (7, True)])
def test_strong_decays(nodes: int, is_chain: bool, gpu_device: str) -> None:
    """From 0 to -3000, mixed; nodes and records in more than one block."""
    heads, pending = (1, 1, 16, 8), torch.tensor([0, 19, 1, 16, 3])
    tokens = strong_decay.make_tokens("gated_delta_rule", len(SHAPES), nodes, heads, seed=12)
    mask = mask_of(batch_of_parents(("chain",) * len(SHAPES) if is_chain else SHAPES, nodes, seed=13))
    records = strong_decay.pending_records(19 + nodes, heads, pending, seed=14)
    state = make_state(len(SHAPES), heads, seed=15)
    check_verify(gpu_device, tokens, state, records, pending, 19, mask, is_chain=is_chain)


class InPlace:
    """Operands of one call in pools: slot 0 and row 2 of the batch are padding, rows 0, 2 and 3 fold."""

    heads, pending, folds = (1, 2, 16, 24), [3, 5, 4, 0], [True, False, True, True]

    def __init__(
        self,
        nodes: int,
        dtype: torch.dtype = torch.float32,
        is_chain: bool = False,
        is_exact: bool = True,
        has_channels: bool = False,
    ) -> None:
        torch.manual_seed(nodes)
        shapes = ("chain",) if is_chain else ("bushy", "star", "chain")
        inputs = torch.float32 if is_exact else torch.bfloat16
        made, trees = make_buffers_and_trees(
            self.heads, nodes, self.pending, shapes=shapes, dtype=inputs, has_channels=has_channels
        )
        states = torch.cat([torch.full_like(made.states[:1], torch.nan), made.states])
        slots = torch.where(torch.tensor([True, True, False, True]), trees.slots + 1, 0)
        self.buffers: Buffers = replace(made, states=states.to(dtype))
        self.trees: Trees = replace(trees, slots=slots, folds=torch.tensor(self.folds), is_chain=is_chain)
        self.tokens, _ = make_tokens(4, nodes, self.heads, seed=nodes)
        if has_channels:
            self.tokens = test_kda_rule.make_tokens(4, nodes, self.heads, seed=nodes)

    def run(self, device: str, trees: Trees) -> tuple[Tensor, Buffers]:
        buffers, tokens = moved(copied(self.buffers), device), [x.to(device) for x in self.tokens]
        out = triton_ops.tree_verify_in_place(*tokens, buffers, moved(trees, device))
        return out.cpu(), moved(buffers, "cpu")

    def wanted(self, row: int, state: Tensor, pending: int) -> tuple[Tensor, Records]:
        """Of one row, by the reference: outputs and all of its records."""
        b, t, at = slice(row, row + 1), self.trees, self.trees.rows[row : row + 1]
        records = Records(*(x[at].double() for x in (self.buffers.k, self.buffers.u, self.buffers.decay)))
        tokens, count = Tokens(*(x[b].double() for x in self.tokens)), torch.tensor([pending])
        places = count, t.node_offset, t.ancestors[b]
        return reference.tree_verify(*tokens, state[None].double(), records, TreePlacement(*places))[0], records

    def check(self, device: str) -> None:
        """Outputs, records and checkpoints are the reference's, and all other memory is as it was."""
        out, after = self.run(device, self.trees)
        eps = torch.finfo(self.buffers.states.dtype).eps
        rounding = {"rtol": max(2e-5, eps), "atol": max(2e-5, eps)}
        states, rings = self.buffers.states.clone(), [x.clone() for x in (after.k, after.u, after.decay)]
        t, before = self.trees, (self.buffers.k, self.buffers.u, self.buffers.decay)
        for b in (0, 1, 3):
            row, slot, pending = t.rows[b], t.slots[b], self.pending[b]
            if self.folds[b]:
                old = [x[row][None].double() for x in before]
                folded = records_reference.fold(states[slot][None].double(), *old, torch.tensor([pending]))
                torch.testing.assert_close(after.states[slot].double(), folded[0], **rounding)
                states[slot] = after.states[slot]
            want, records = self.wanted(b, states[slot], 0 if self.folds[b] else pending)
            torch.testing.assert_close(out[b].double(), want, **TOLERANCE)
            for ring, kept, wanted in zip(rings, before, records, strict=True):
                written = slice(t.node_offset, t.node_offset + self.trees.num_nodes)
                torch.testing.assert_close(ring[row, written].double(), wanted[0, written], **TOLERANCE)
                ring[row, written] = kept[row, written]
        assert torch.equal(out[2], torch.zeros_like(out[2]))
        assert torch.equal(bits(after.states), bits(states))
        assert torch.equal(bits(states[t.slots[3]]), bits(self.buffers.states[t.slots[3]]))  # nothing was pending
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(rings, before, strict=True))


@pytest.mark.fast_cases("fp32-4", "bf16-1")
@pytest.mark.parametrize(("nodes", "is_chain"), KINDS)
@pytest.mark.parametrize("dtype", TYPES)
def test_in_place_with_folds(dtype: str, nodes: int, is_chain: bool, gpu_device: str) -> None:
    """A row that folds goes on from the checkpoint that it leaves; other slots and rows keep every bit."""
    case = InPlace(nodes, TYPES[dtype], is_chain)
    case.check(gpu_device)


@pytest.mark.parametrize(("nodes", "is_chain"), KINDS)
def test_a_fold_changes_no_output(nodes: int, is_chain: bool, gpu_device: str) -> None:
    case = InPlace(nodes, is_chain=is_chain)
    folded, _ = case.run(gpu_device, case.trees)
    out, after = case.run(gpu_device, replace(case.trees, folds=None))
    torch.testing.assert_close(folded, out, **TOLERANCE)
    assert torch.equal(bits(after.states), bits(case.buffers.states))


@pytest.mark.parametrize(("nodes", "is_chain"), KINDS)
def test_float16_ends_at_its_largest_number(nodes: int, is_chain: bool, gpu_device: str) -> None:
    case = InPlace(nodes, torch.float16, is_chain)
    case.buffers.u[case.trees.rows[0], 0] *= 1e7
    out, after = case.run(gpu_device, case.trees)
    assert after.states[case.trees.slots[0]].abs().max() == 65504
    assert out.isfinite().all()


def test_folds_of_16_bit_models_are_exact(gpu_device: str) -> None:
    """A checkpoint is what the records say, to the last bit, where outputs are computed in parts of bfloat16."""
    split, exact = InPlace(5, is_exact=False), InPlace(5)
    out, after = split.run(gpu_device, split.trees)
    want, wanted = exact.run(gpu_device, exact.trees)
    torch.testing.assert_close(after.states, wanted.states, rtol=2e-6, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
    assert not torch.equal(out, want)
    plain, kept = split.run(gpu_device, replace(split.trees, folds=None))
    torch.testing.assert_close(plain, want, rtol=2e-3, atol=2e-3)
    assert torch.equal(bits(kept.states), bits(split.buffers.states))


@pytest.mark.parametrize(("nodes", "is_exact"), [(1, True), (5, True), (5, False), (20, False)])
def test_where_no_row_folds_kernels_have_no_folds(
    nodes: int, is_exact: bool, gpu_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are told so when they are compiled; results are those of the kernels with folds, told that none does."""
    case, name = InPlace(nodes, is_exact=is_exact), "root_kernel" if nodes == 1 else "tree_kernel"
    want, wanted = case.run(gpu_device, replace(case.trees, folds=torch.zeros(4, dtype=torch.bool)))
    kernel = getattr(triton_kernels, name)
    place, seen = kernel.arg_names.index("folds"), []

    class Watched:
        arg_names = kernel.arg_names

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*operands: Any, **sizes: Any) -> None:
                seen.append(operands[place])
                kernel[grid](*operands, **sizes)

            return launch

    monkeypatch.setattr(triton_kernels, name, Watched())
    out, after = case.run(gpu_device, replace(case.trees, folds=None))
    assert seen == [None]
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)  # compilers may join products and sums differently
    for mine, right in ((after.k, wanted.k), (after.u, wanted.u), (after.decay, wanted.decay)):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(bits(after.states), bits(case.buffers.states))


@pytest.mark.parametrize(("nodes", "is_chain"), KINDS)
def test_parts_of_larger_tensors(nodes: int, is_chain: bool, gpu_device: str) -> None:
    """Values as a slice of the convolution's output, layers of pools, trees that rows share."""
    case, (hk, hv, key_dim, value_dim) = InPlace(nodes, is_chain=is_chain), InPlace.heads
    t = replace(case.trees, ancestors=case.trees.ancestors[:1].expand(4, -1, -1))
    want, wanted = case.run(gpu_device, t)
    mixed = torch.cat([x.flatten(2) for x in case.tokens[:3]], -1).to(gpu_device)
    q, k, v = mixed.split([hk * key_dim, hk * key_dim, hv * value_dim], -1)
    q, k, v = (x.unflatten(2, (-1, dim)) for x, dim in ((q, key_dim), (k, key_dim), (v, value_dim)))
    buffers = moved(copied(case.buffers), gpu_device)
    apart = {name: torch.stack([getattr(buffers, name)] * 2, 1)[:, 1] for name in ("states", "k", "u", "decay")}
    g, beta = (torch.stack([x, x], -1).to(gpu_device)[..., 0] for x in (case.tokens.g, case.tokens.beta))
    out = triton_ops.tree_verify_in_place(q, k, v, g, beta, replace(buffers, **apart), moved(t, gpu_device))
    assert torch.equal(out.cpu(), want)
    for name, x in apart.items():
        assert torch.equal(bits(x.cpu()), bits(getattr(wanted, name)))
    turned = replace(buffers, u=buffers.u.mT.contiguous().mT)
    with pytest.raises(ValueError, match="dense"):
        triton_ops.tree_verify_in_place(q, k, v, g, beta, turned, moved(t, gpu_device))


@pytest.mark.fast_cases("4", "bf16")
@may_be_invalid
@pytest.mark.parametrize(
    ("nodes", "is_chain", "dtype"), [(1, False, "fp32"), (7, False, "fp32"), (4, True, "fp32"), (7, False, "bf16")]
)
def test_nan_affects_a_node_and_its_descendants_only(nodes: int, is_chain: bool, dtype: str, gpu_device: str) -> None:
    """One row for each number of a node that may be spoilt, in every way."""
    how: Any = {"is_chain": is_chain, "model_dtype": TYPES[dtype]}
    hit, heads, batch = min(1, nodes - 1), (1, 2, 16, 8), 15
    tokens, state = make_tokens(batch, nodes, heads, seed=15)
    pending = torch.arange(batch) % 3
    records = make_records(batch, 2 + nodes, heads, pending, seed=16)
    mask = mask_of(batch_of_parents(("chain" if is_chain else "binary",) * batch, nodes, seed=0))
    want, clean = verify(gpu_device, tokens, state, records, pending, 2, mask, **how)
    affected = torch.zeros(batch, nodes, 2, dtype=torch.bool)
    for row in range(batch):
        field, value = Tokens._fields[row % 5], (torch.nan, torch.inf, -torch.inf)[row // 5]
        x = getattr(tokens, field)
        x[(row, hit, *[0] * (x.dim() - 2))] = value
        below = mask[row, :, hit] if field != "q" else torch.arange(nodes) == hit
        affected[row, below] = torch.tensor([True, field in "qk"])
    out, left = verify(gpu_device, tokens, state, records, pending, 2, mask, **how)
    assert torch.equal(~out.isfinite().all(-1), affected)
    torch.testing.assert_close(out[~affected], want[~affected], rtol=1e-6, atol=1e-6)
    others = ~mask[:, :, hit]
    for mine, right in zip(left, clean, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine[:, 2:][others], right[:, 2:][others], rtol=1e-6, atol=1e-6)


def test_a_checkpoint_that_is_not_finite_leaves_finite_records(gpu_device: str) -> None:
    for nodes, is_chain in ((1, False), (3, False), (3, True)):
        tokens, state = make_tokens(2, nodes, (1, 1, 8, 8), seed=17)
        shapes = ("chain" if is_chain else "star",) * 2
        pending, mask = torch.tensor([1, 1]), mask_of(batch_of_parents(shapes, nodes, seed=0))
        state[0, 0, 3] = torch.nan
        records = make_records(2, 1 + nodes, (1, 1, 8, 8), pending, seed=18)
        out, left = verify(gpu_device, tokens, state, records, pending, 1, mask, is_chain=is_chain)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()
        assert all(x.isfinite().all() for x in left)


class Run:
    """Known tokens in a pool: nothing, a part of a chunk, a whole one, more; the last row is padding."""

    lengths, slots = torch.tensor([0, 1, 32, 70, 5]), torch.tensor([6, 2, 5, 1, 0])

    def __init__(
        self, heads: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, has_channels: bool = False
    ) -> None:
        self.tokens, _ = make_tokens(5, 71, heads, seed=19)
        if has_channels:
            self.tokens = test_kda_rule.make_tokens(5, 71, heads, seed=19)
        beyond = torch.arange(71) >= self.lengths[:, None]
        for x in self.tokens:
            x[beyond] = torch.nan
        self.states = make_state(7, heads, seed=20).to(dtype)
        self.states[[0, 3, 4]] = torch.nan

    def run(self, device: str, model_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        states = self.states.to(device, copy=True)
        places = states, self.slots.to(device), self.lengths.to(device)
        return triton_ops.extend_in_place(
            *(x.to(device) for x in self.tokens), *places, model_dtype
        ).cpu(), states.cpu()

    def check(self, out: Tensor, states: Tensor) -> None:
        kept, rounding = torch.ones(7, dtype=torch.bool), max(2e-5, torch.finfo(states.dtype).eps)
        for b, (slot, length) in enumerate(zip(self.slots.tolist(), self.lengths.tolist(), strict=True)):
            if slot == 0 or length == 0:
                continue
            kept[slot], row = False, Tokens(*(x[b : b + 1].double() for x in self.tokens))
            want, state = reference.extend(*row, self.states[slot][None].double(), self.lengths[b : b + 1])
            torch.testing.assert_close(out[b, :length].double(), want[0, :length], **TOLERANCE)
            torch.testing.assert_close(states[slot].double(), state[0], rtol=rounding, atol=rounding)
        assert torch.equal(bits(states[kept]), bits(self.states[kept]))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("heads", "dtype"), [((1, 2, 16, 24), "fp32"), ((1, 1, 40, 8), "bf16"), ((1, 1, 7, 5), "fp16")]
)
def test_extend_in_place(heads: tuple[int, int, int, int], dtype: str, gpu_device: str) -> None:
    case = Run(heads, TYPES[dtype])
    out, states = case.run(gpu_device)
    case.check(out, states)
    padding = torch.arange(71) >= case.lengths.masked_fill(case.slots == 0, 0)[:, None]
    assert torch.equal(out[padding], torch.zeros_like(out[padding]))


def test_extend_of_16_bit_models(gpu_device: str) -> None:
    """Products in parts of bfloat16: on four chunks behind each other, errors stay below 2^-13 of the largest."""
    case = Run((1, 2, 64, 24))
    exact, split = case.run(gpu_device), case.run(gpu_device, torch.bfloat16)
    row, count, slot = 3, int(case.lengths[3]), int(case.slots[3])
    tokens = Tokens(*(x[row : row + 1].double() for x in case.tokens))
    want, state = reference.extend(*tokens, case.states[slot][None].double(), case.lengths[row : row + 1])
    for of_exact, of_split, right in (
        (exact[0][row, :count], split[0][row, :count], want[0, :count]),
        (exact[1][slot], split[1][slot], state[0]),
    ):
        errors = [float((x.double() - right).abs().max() / right.abs().max()) for x in (of_exact, of_split)]
        assert errors[0] < errors[1] < 2**-13
    padding = torch.arange(71) >= case.lengths.masked_fill(case.slots == 0, 0)[:, None]
    assert torch.equal(split[0][padding], torch.zeros_like(split[0][padding]))


def test_extend_ends_at_the_largest_number_of_float16(gpu_device: str) -> None:
    for form in (triton_ops, torch_ops):
        tokens, state = make_tokens(1, 3, (1, 1, 8, 8), seed=21)
        tokens.v[:, :, :, 0] *= 1e6
        states = torch.cat([state, state]).half().to(gpu_device)
        places = RowSet.of([1], states.device), torch.tensor([3], device=gpu_device)
        operands = ExtendOperands(states, states, *places)
        run = operands.launch if form is triton_ops else operands.run
        run(form, tuple(x.to(gpu_device) for x in tokens))
        assert states[1].abs().max() == 65504


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("field", Tokens._fields)
def test_nan_in_a_known_token_affects_its_row_only(field: str, gpu_device: str) -> None:
    tokens, state = make_tokens(2, 35, (1, 1, 8, 8), seed=22)
    states, places = torch.cat([state, state]), (torch.tensor([2, 1]), torch.tensor([35, 3]))
    x = getattr(tokens, field)
    x[(0, 1, *[0] * (x.dim() - 2))] = torch.nan
    there, where = states.to(gpu_device, copy=True), [x.to(gpu_device) for x in places]
    out = triton_ops.extend_in_place(*(x.to(gpu_device) for x in tokens), there, *where)
    assert not out[0, 1].isfinite().all()
    assert there[2].isfinite().all() == (field == "q")
    assert out[1].isfinite().all()
    assert there[1].isfinite().all()


@pytest.mark.parametrize("shapes", [SHAPES, None])
def test_snapshots_match_reference(shapes: tuple[str, ...] | None, gpu_device: str) -> None:
    """Snapshots are parts of larger buffers; what is behind the nodes stays."""
    heads, nodes = (1, 2, 20, 40), 7
    batch = 5 if shapes else 2
    tokens, state = make_tokens(batch, nodes, heads, seed=23)
    state = state.bfloat16()
    parents = None if shapes is None else batch_of_parents(shapes, nodes, seed=24)
    buffer = torch.full((2, batch, nodes + 1, *heads[1:]), torch.nan, device=gpu_device)
    there = None if parents is None else parents.to(gpu_device)
    operands = [*(x.to(gpu_device) for x in tokens), state.to(gpu_device), buffer[1, :, :nodes], there]
    out = triton_ops.tree_verify_snapshots(*operands)
    snapshots = torch.empty(batch, nodes, *heads[1:], dtype=torch.float64)
    want = reference.tree_verify_snapshots(*tokens.double(), state.double(), snapshots, parents)
    torch.testing.assert_close(out.cpu().double(), want, **TOLERANCE)
    torch.testing.assert_close(buffer[1, :, :nodes].cpu().double(), snapshots, **TOLERANCE)
    assert buffer[0].isnan().all()
    assert buffer[1, :, nodes].isnan().all()


def test_nan_in_a_snapshot_affects_descendants_only(gpu_device: str) -> None:
    tokens, state = make_tokens(1, 7, (1, 1, 8, 8), seed=25)
    parents = batch_of_parents(("binary",), 7, seed=0)
    tokens.v[0, 1] = torch.nan
    snapshots = torch.empty(1, 7, 1, 8, 8, device=gpu_device)
    operands = [x.to(gpu_device) for x in (*tokens, state)]
    out = triton_ops.tree_verify_snapshots(*operands, snapshots, parents.to(gpu_device)).cpu()
    affected = mask_of(parents)[0, :, 1]
    assert torch.equal(~out[0].isfinite().all(-1).all(-1), affected)
    assert torch.equal(~snapshots[0].cpu().flatten(1).isfinite().all(-1), affected)


@pytest.mark.parametrize("can_launch", [True, False])
def test_the_operator_takes_triton_where_it_can(can_launch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, state = make_tokens(1, 1, (1, 1, 8, 8), seed=26)
    operands = ExtendOperands(state, state, RowSet.of([0], state.device), torch.tensor([1]))
    monkeypatch.setattr(gpu, "can_launch", lambda *_: can_launch)
    assert operator_of(gated_delta_rule.advance).choose(*tokens, operands) == ("triton" if can_launch else "torch")


def test_tiles_are_large_enough_powers_of_two() -> None:
    for nodes in (2, 8, 16, 17, 64, 100):
        tile = tiles.tree_tile(nodes, 128)
        assert tile.tokens >= max(16, nodes)
        assert all(size >= 16 and size & (size - 1) == 0 for size in (tile.tokens, tile.keys, tile.values))
    assert all(tiles.root_tile(dim, dim).keys >= dim for dim in (5, 64, 100, 256))
    names = [variant.name for variant in tiles.variants()]
    assert len(names) == len(set(names))
