"""A verify of one recurrent layer for tests: buffers whose unread memory holds NaN, and trees in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, replace
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.state_records import Buffers, RecordOperands, RowSet, Trees
from specmamba.kernels.tree import reference as tree
from tests.kernels.rounding import tolerance
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

NUM_ROWS, NUM_SLOTS = 9, 7
TERMS = 400  # the convolution, the products over a key and over all nodes and records, and the norm
TOLERANCE = {dtype: tolerance(dtype, terms=TERMS) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
RECORDS = TOLERANCE[torch.float32]

T = TypeVar("T")


def make_buffers_and_trees(
    heads: tuple[int, int, int, int],
    nodes: int,
    pending: list[int],
    *,
    width: int = 4,
    shapes: tuple[str, ...] = SHAPES,
    dtype: torch.dtype = torch.float32,
    plain_channels: int = 0,
    has_channels: bool = False,
) -> tuple[Buffers, Trees]:
    """Of heads (Hk, Hv, K, V), for one tree per entry of ``pending``; rows and slots lie in no order."""
    (hk, hv, key_dim, value_dim), batch, offset = heads, len(pending), max(pending)
    channels, capacity = 2 * hk * key_dim + hv * value_dim + plain_channels, offset + nodes + 2
    of_decay = (hv, key_dim) if has_channels else (hv,)
    rows, slots = torch.randperm(NUM_ROWS)[:batch], torch.randperm(NUM_SLOTS)[:batch]
    buffers = Buffers(
        states=torch.full((NUM_SLOTS, hv, key_dim, value_dim), torch.nan),
        conv_inputs=torch.full((NUM_ROWS, width - 1 + capacity, channels), torch.nan, dtype=dtype),
        k=torch.full((NUM_ROWS, capacity, hk, key_dim), torch.nan),
        u=torch.full((NUM_ROWS, capacity, hv, value_dim), torch.nan),
        decay=torch.full((NUM_ROWS, capacity, *of_decay), torch.nan),
    )
    parents = batch_of_parents(tuple(shapes[b % len(shapes)] for b in range(batch)), nodes, seed=nodes)
    relative, index = tree.conv_index(parents, width), torch.empty(batch, nodes, width, dtype=torch.int64)
    for b, (row, slot, count) in enumerate(zip(rows.tolist(), slots.tolist(), pending, strict=True)):
        buffers.states[slot].normal_()
        buffers.conv_inputs[row, : width - 1 + count].normal_()
        buffers.k[row, :count] = torch.nn.functional.normalize(torch.randn(count, hk, key_dim), dim=-1)
        buffers.u[row, :count].normal_()
        buffers.decay[row, :count] = -torch.rand(count, *of_decay)
        index[b] = relative[b] + width - 1 + torch.where(relative[b] >= 0, offset, count)
    return buffers, Trees(rows, slots, index, torch.tensor(pending), offset, mask_of(parents))


def values(operand: Any) -> list[Tensor]:
    """Its tensors."""
    found = (getattr(operand, field.name) for field in fields(operand))
    return [x for x in found if isinstance(x, Tensor)]


def moved(operand: T, device: str) -> T:
    """On a device, its tensors' layout kept."""
    tensors = {field.name: getattr(operand, field.name) for field in fields(operand)}
    there = {name: x.to(device) for name, x in tensors.items() if isinstance(x, Tensor)}
    return replace(operand, **there)  # type: ignore[type-var]


def copied(operand: T, dtype: torch.dtype | None = None) -> T:
    """With tensors of its own, their layout kept."""
    tensors = {field.name: getattr(operand, field.name) for field in fields(operand)}
    own = {name: x.to(dtype or x.dtype, copy=True) for name, x in tensors.items() if isinstance(x, Tensor)}
    return replace(operand, **own)  # type: ignore[type-var]


def part_of_rows(trees: Trees, rows: slice) -> Trees:
    """Some of the trees."""
    pending = None if trees.num_pending is None else trees.num_pending[rows]
    places = trees.rows[rows], trees.slots[rows], trees.conv_index[rows], pending
    return Trees(*places, trees.node_offset, trees.ancestors[rows])


def first_nodes(trees: Trees, count: int) -> Trees:
    """The first nodes of all trees."""
    index, ancestors = trees.conv_index[:, :count].contiguous(), trees.ancestors[:, :count, :count].contiguous()
    return replace(trees, conv_index=index, ancestors=ancestors)


def check_buffers(got: Buffers, wanted: Buffers, before: Buffers, trees: Trees, mixed: Tensor, tolerance: Any) -> None:
    """After a verify: ``wanted`` was written and nothing else; inputs of nodes are kept bit for bit."""
    for mine, right in zip(values(got), values(wanted), strict=True):
        torch.testing.assert_close(mine.double(), right, equal_nan=True, **tolerance)  # NaN: nothing was written there
    assert torch.equal(got.states.nan_to_num(9.0), before.states.nan_to_num(9.0))
    first = got.conv_inputs.shape[1] - mixed.shape[1] - 2
    assert torch.equal(got.conv_inputs[trees.rows, first : first + mixed.shape[1]], mixed)


def operands_of(buffers: Buffers, trees: Trees) -> RecordOperands:
    """What a layer gets of buffers and trees."""
    rows, slots = (RowSet.of(x.tolist(), x.device, x) for x in (trees.rows, trees.slots))
    return RecordOperands(buffers, trees, rows, slots)


def run_in_torch(mix: Callable[..., Tensor], inputs: Any, weights: Any, buffers: Buffers, trees: Trees) -> Tensor:
    """A layer in PyTorch, which multiplies what masks hide by zero: it must be finite, as the cache keeps it.

    ``mix`` is the layer between its projections. Only the nodes' records of ``buffers`` are written.
    """
    finite = {name: getattr(buffers, name).nan_to_num() for name in ("k", "u", "decay")}
    out = mix(inputs, weights, operands_of(replace(buffers, **finite), trees))
    written = slice(trees.node_offset, trees.node_offset + trees.num_nodes)
    for name, buffer in finite.items():
        getattr(buffers, name)[trees.rows, written] = buffer[trees.rows, written]
    return out


@contextmanager
def triton_forms() -> Iterator[None]:
    """Operators launch their Triton forms, also on CPU tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "can_launch", lambda *_: True)
        yield


class LayerCase:
    """Operands of one verify of a layer. Memory that must not be read holds NaN."""

    operators: ModuleType  # with ``can_fuse`` and ``tree_verify``
    mix: Callable[..., Tensor]  # the layer between its projections
    inputs: Any
    weights: Any
    buffers: Buffers
    trees: Trees

    def kept(self) -> Tensor:
        """What a verify leaves of the nodes' inputs, [B, N, C]."""
        mixed: Tensor = self.inputs.mixed
        return mixed

    def leave_slot_0(self) -> None:
        """Move the checkpoint in slot 0, which is padding to Triton, to a slot that no row has."""
        slots = self.trees.slots
        unused = min(set(range(1, NUM_SLOTS)) - set(slots.tolist()))
        self.buffers.states[unused] = self.buffers.states[0]
        slots[slots == 0] = unused

    @staticmethod
    def exact(inputs: Any) -> Any:
        """Inputs in float64."""
        return copied(inputs, torch.float64)

    def run(self, form: str = "native") -> tuple[Tensor, Buffers]:
        """Outputs, and the buffers afterwards; the case stays as it is."""
        buffers = copied(self.buffers)
        if form == "native":
            assert self.operators.can_fuse(operands_of(buffers, self.trees), self.inputs, self.weights)
            return self.operators.tree_verify(self.inputs, self.weights, buffers, self.trees), buffers
        device = "cuda" if form == "cuda" else "cpu"
        inputs, weights = moved(self.inputs, device), moved(self.weights, device)
        trees, buffers = moved(self.trees, device), moved(buffers, device)
        return run_in_torch(self.mix, inputs, weights, buffers, trees).cpu(), moved(buffers, "cpu")

    def wanted(self) -> tuple[Tensor, Buffers]:
        """The same by the reference in float64."""
        buffers = copied(self.buffers, torch.float64)
        inputs, weights = self.exact(self.inputs), copied(self.weights, torch.float64)
        reference = import_module(f"{self.operators.__name__}.reference")
        return reference.tree_verify(inputs, weights, buffers, self.trees), buffers

    def check(self, form: str) -> None:
        """Outputs and buffers are those of the reference."""
        out, buffers = self.run(form)
        want, wanted = self.wanted()
        assert out.dtype is self.inputs.gate.dtype
        torch.testing.assert_close(out.double(), want, **TOLERANCE[out.dtype])
        check_buffers(buffers, wanted, self.buffers, self.trees, self.kept(), RECORDS)

    def row(self, index: int) -> LayerCase:
        """The case of one tree alone, on the same weights and buffers."""
        alone, rows = copy(self), slice(index, index + 1)
        alone.inputs = type(self.inputs)(*(x[rows] for x in values(self.inputs)))
        alone.trees = part_of_rows(self.trees, rows)
        return alone


def check_rows_are_independent(case: LayerCase, threads: int, set_threads: Callable[[int], None]) -> None:
    """A tree alone on one thread gives, bit for bit, what it gives in its batch on ``threads`` threads."""
    set_threads(threads)
    together, left = case.run()
    set_threads(1)
    for b in range(len(together)):
        row = case.trees.rows[b]
        alone, left_alone = case.row(b).run()
        assert torch.equal(alone, together[b : b + 1])
        for mine, theirs in zip(values(left_alone), values(left), strict=True):
            if mine.shape[0] == NUM_ROWS:
                assert torch.equal(mine[row].nan_to_num(9.0), theirs[row].nan_to_num(9.0))


def check_nodes_do_not_depend_on_later_ones(chain: LayerCase) -> None:
    """The first n nodes of a chain have the outputs of a chain of n, bit for bit."""
    whole, _ = chain.run()
    inputs, trees = chain.inputs, replace(chain.trees, num_pending=None)
    for n in range(1, trees.num_nodes):
        chain.inputs = type(inputs)(*(x[:, :n] for x in values(inputs)))
        chain.trees = first_nodes(trees, n)
        part, _ = chain.run()
        assert torch.equal(part, whole[:, :n])


def check_nan_stays_in_its_row(chains: LayerCase, form: str) -> None:
    """NaN at a node of the first chain reaches the nodes behind it, and no other chain."""
    chains.inputs.mixed[0, 1] = torch.nan
    out, _ = chains.run(form)
    assert out[0, 1:].isnan().all()
    assert out[0, 0].isfinite().all()
    assert out[1].isfinite().all()


class Watched:
    """A kernel that runs, and notes whether each launch had an argument."""

    def __init__(self, kernel: Any, argument: str) -> None:
        self.arg_names, self._kernel, self.seen = kernel.arg_names, kernel, list[bool]()
        self._place = kernel.arg_names.index(argument)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*operands: Any, **constants: Any) -> None:
            self.seen.append(operands[self._place] is not None)
            self._kernel[grid](*operands, **constants)

        return launch
