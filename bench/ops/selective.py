"""The selective scan of Mamba1 over draft trees and prompts, and its folds.

C channels have states of M numbers each. In costs an exponential counts as one operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.bench.ops.case import (
    Candidate,
    Case,
    Cost,
    Operator,
    Place,
    Run,
    counted,
    moved,
    tree_parents,
    triton_ops,
)
from specmamba.kernels import tree as tree_ops
from specmamba.kernels.selective_scan import native_ops, torch_ops
from specmamba.kernels.state_records import Buffers, ExtendOperands, RecordOperands, RowSet, Trees

MAMBA = {"state": 16, "channels": 3072}  # Mamba-790M
JAMBA = {"state": 16, "channels": 8192}  # Jamba-Mini, Falcon-Mamba-7B
TINY = {"state": 5, "channels": 19, "batch": 2}
SLOT = 1  # of the first request; slot and row 0 are padding, as in the pools


class Tokens(NamedTuple):
    """Inputs in argument order."""

    c: Tensor  # [B, L, 1, M]
    b: Tensor
    u: Tensor  # [B, L, 1, C]
    dt: Tensor
    rates: Tensor  # [M, C]


def make_tokens(case: Case, length: int, gen: torch.Generator, place: Place) -> Tokens:
    """Random inputs; c and b are parts of one projection, as in the layer."""
    batch, size, channels = case["batch"], case["state"], case["channels"]
    c, b = torch.randn(batch, length, 1, 2 * size, generator=gen).to(place.device).chunk(2, -1)
    u, dt = torch.randn(2, batch, length, 1, channels, generator=gen).to(place.device).unbind()
    rates = -torch.arange(1.0, size + 1, device=place.device)[:, None].repeat(1, channels)  # as models start
    return Tokens(c, b, u, F.softplus(dt - 3), rates)


def make_operands(case: Case, place: Place) -> RecordOperands:
    """Checkpoints, pending records and trees of random numbers. Request r has row and slot r."""
    gen, batch, pending, nodes = case.generator(), case["batch"], case["pending"], case["nodes"]
    shape, size, channels = (batch + SLOT, max(16, 2 * nodes, pending + nodes), 1), case["state"], case["channels"]
    buffers = Buffers(
        states=torch.randn(batch + SLOT, 1, size, channels, generator=gen),
        conv_inputs=torch.empty(batch + SLOT, 0, 0),  # not read
        k=torch.randn(*shape, size, generator=gen),
        u=torch.randn(*shape, channels, generator=gen),
        decay=F.softplus(torch.randn(*shape, channels, generator=gen) - 3),
    )
    parents, places = tree_parents(case), torch.arange(SLOT, batch + SLOT)
    index, counts = torch.zeros(batch, nodes, 1, dtype=torch.int64), torch.full((batch,), pending)
    trees = Trees(places, places.clone(), index, counts, pending, tree_ops.ancestors(parents))
    rows = RowSet.of(places.tolist(), place.device)
    return RecordOperands(moved(buffers, place.device), moved(trees, place.device), rows, rows)


def forms(place: Place, tokens: Tokens, prepare: Callable[[Any], Run]) -> list[Candidate]:
    """The forms that take these tokens; ``prepare`` makes operands of its own for a module with one of them."""
    is_native = native_ops.are_floats(*tokens) and native_ops.code() is not None
    native = (lambda: prepare(native_ops)) if is_native else None
    return place.forms(lambda: prepare(torch_ops), lambda: prepare(triton_ops("selective_scan")), native)


def advanced(ops: Any, tokens: Tokens, own: RecordOperands | ExtendOperands) -> Tensor:
    """Outputs by one form."""
    return own.run(torch_ops, tuple(tokens)) if ops is torch_ops else ops.advance(*tokens, own)


def verify_candidates(case: Case, place: Place) -> list[Candidate]:
    """Verification of trees from checkpoints and records."""
    tokens = make_tokens(case, case["nodes"], case.generator(), place)
    written = slice(case["pending"], case["pending"] + case["nodes"])

    def prepare(ops: Any) -> Run:
        own = make_operands(case, place)
        b = own.buffers
        return lambda: (advanced(ops, tokens, own), *(x[SLOT:, written] for x in (b.k, b.u, b.decay)))

    return forms(place, tokens, prepare)


def extend_candidates(case: Case, place: Place) -> list[Candidate]:
    """Known tokens, as many in every row. In place, each repetition goes on from the last; the first is compared."""
    gen, batch, length = case.generator(), case["batch"], case["tokens"]
    tokens = make_tokens(case, length, gen, place)
    states = torch.randn(batch + SLOT, 1, case["state"], case["channels"], generator=gen).to(place.device)
    slots = RowSet.of(range(SLOT, batch + SLOT), place.device)
    lengths = torch.full((batch,), length, device=place.device)

    def prepare(ops: Any) -> Run:
        own = ExtendOperands(states.clone(), torch.empty(batch + SLOT, 0, 0), slots, lengths)
        return lambda: (advanced(ops, tokens, own), own.states[SLOT:])

    return forms(place, tokens, prepare)


def fold_candidates(case: Case, place: Place) -> list[Candidate]:
    """Folds of pending records into new states."""
    tokens, states = (
        make_tokens(case, case["pending"], case.generator(), place),
        make_operands(case, place).states[SLOT:],
    )
    pending = torch.full((case["batch"],), case["pending"], device=place.device)
    given = states, tokens.b, tokens.u, tokens.dt, tokens.rates, pending
    return forms(place, tokens, lambda ops: lambda: (ops.fold(*given),))


def _cost(case: Case, num_states: int, num_records: int, num_tokens: int, num_steps: int) -> Cost:
    """A is read once. An entry takes 5 operations a step, and 2 more for every token that reads it."""
    size, channels, batch = case["state"], case["channels"], case["batch"]
    entries, record, token = size * channels, size + 2 * channels, 2 * size + 3 * channels
    numbers = entries + batch * (num_states * entries + num_records * record + num_tokens * token)
    return Cost(4 * numbers, batch * entries * (5 * num_steps + 2 * num_tokens))


def verify_cost(case: Case) -> Cost:
    """The state is read once, and no state is written."""
    both = case["pending"] + case["nodes"]
    return _cost(case, 1, both, case["nodes"], both)


def extend_cost(case: Case) -> Cost:
    """The state is read and written once."""
    return _cost(case, 2, 0, case["tokens"], case["tokens"])


def fold_cost(case: Case) -> Cost:
    """The state is read and written once, each record read once."""
    return _cost(case, 2, case["pending"], 0, case["pending"])


def _verify_case(sizes: dict[str, int], of: str, nodes: int, batch: int = 1, is_quick: bool = False) -> Case:
    name = f"verify {counted(nodes, 'node')}, batch {batch} ({of})"
    return Case(name, {**sizes, "batch": batch, "nodes": nodes, "pending": 8}, is_quick=is_quick)


OPERATORS = (
    Operator(
        "selective_scan.tree_verify",
        ("selective_scan",),
        (
            *(_verify_case(MAMBA, "Mamba-790M", nodes, is_quick=nodes == 4) for nodes in (1, 4, 8)),
            _verify_case(MAMBA, "Mamba-790M", 8, batch=8),
            _verify_case(JAMBA, "Jamba", 4),
            Case("tiny", {**TINY, "nodes": 4, "pending": 2}, is_tiny=True),
        ),
        verify_cost,
        verify_candidates,
        gpu_tests=("selective_scan_triton",),
    ),
    Operator(
        "selective_scan.extend",
        ("selective_scan",),
        (
            Case("512 tokens, batch 1 (Mamba-790M)", {**MAMBA, "batch": 1, "tokens": 512}, is_quick=True),
            Case("tiny", {**TINY, "tokens": 9}, is_tiny=True),
        ),
        extend_cost,
        extend_candidates,
        1e-3,
        ("selective_scan_triton",),
    ),
    Operator(
        "selective_scan.fold",
        ("selective_scan",),
        (
            Case("16 records, batch 1 (Mamba-790M)", {**MAMBA, "batch": 1, "nodes": 1, "pending": 16}, is_quick=True),
            Case("tiny", {**TINY, "nodes": 1, "pending": 5}, is_tiny=True),
        ),
        fold_cost,
        fold_candidates,
        gpu_tests=("selective_scan_triton",),
    ),
)
