"""Recurrences over draft trees and prompts: the gated delta rule, that of Mamba2, and folds.

Letters in costs: B requests, N nodes, m pending records, H heads, G key heads, states of K x V numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specmamba.bench.ops import peers
from specmamba.bench.ops.case import (
    FALCON,
    NEMOTRON,
    QWEN,
    TINY,
    Candidate,
    Case,
    Cost,
    Operator,
    Place,
    Run,
    counted,
    delta_inputs,
    make_layer,
    records_of,
    ssd_inputs,
    triton_ops,
)
from specmamba.kernels.gated_delta_rule import torch_ops as delta_torch
from specmamba.kernels.ssd import torch_ops as ssd_torch
from specmamba.kernels.state_records import native_ops as fold_native
from specmamba.kernels.state_records import torch_ops as fold_torch


class Recurrence(NamedTuple):
    """One of the two kinds of recurrence."""

    name: str  # of its folder under kernels/
    torch_ops: ModuleType
    inputs_of: Callable[[Case, int, torch.Generator], tuple[Tensor, ...]]
    num_gates: int  # numbers per head and node: the decay, with the delta rule also beta
    num_reads: int  # rows per head and node that read a state: queries, with the delta rule also keys


DELTA = Recurrence("gated_delta_rule", delta_torch, delta_inputs, 2, 2)
SSD = Recurrence("ssd", ssd_torch, ssd_inputs, 1, 1)


def verify_candidates(case: Case, place: Place, kind: Recurrence) -> list[Candidate]:
    """Verification of trees from checkpoints and records."""
    layer = make_layer(case, place, kind.inputs_of)
    written = slice(case["pending"], case["pending"] + case["nodes"])

    def in_torch() -> Run:
        own = layer.copied()
        b = own.buffers
        operands = b.states[1:], (b.k[1:], b.u[1:], b.decay[1:]), own.trees.placement
        return lambda: (kind.torch_ops.tree_verify(*own.inputs, *operands), *records_of(own, written))

    def in_triton() -> Run:
        ops, own = triton_ops(kind.name), layer.copied()
        return lambda: (ops.tree_verify_in_place(*own.inputs, own.buffers, own.trees), *records_of(own, written))

    found = place.forms(in_torch, in_triton)
    if case.kind == "chain" and not case["pending"]:
        others = peers.fla_recurrent if kind is DELTA else peers.mamba_update
        found += others(layer.inputs, layer.buffers.states[1:])
    return found


def snapshot_candidates(case: Case, place: Place, kind: Recurrence) -> list[Candidate]:
    """Verification that writes a whole state behind every node, for comparison with records."""
    layer = make_layer(case, place, kind.inputs_of)
    states = layer.buffers.states[1:]
    parents = None if case.kind == "chain" else layer.parents

    def run(ops: Any) -> Run:
        snapshots = states.new_empty(case["batch"], case["nodes"], *states.shape[1:])
        return lambda: (ops.tree_verify_snapshots(*layer.inputs, states, snapshots, parents), snapshots)

    return place.forms(lambda: run(kind.torch_ops), lambda: run(triton_ops(kind.name)))


def extend_candidates(case: Case, place: Place, kind: Recurrence) -> list[Candidate]:
    """Known tokens, as many in every row. In place, each repetition goes on from the last; the first is compared."""
    gen, batch, length = case.generator(), case["batch"], case["tokens"]
    inputs = tuple(x.to(place.device) for x in kind.inputs_of(case, length, gen))
    states = torch.randn(batch + 1, case["heads"], case["key"], case["value"], generator=gen).to(place.device)
    slots = torch.arange(1, batch + 1, device=place.device)
    lengths = torch.full((batch,), length, device=place.device)

    def in_triton() -> Run:
        ops, own = triton_ops(kind.name), states.clone()
        return lambda: (ops.extend_in_place(*inputs, own, slots, lengths), own[1:])

    found = place.forms(lambda: lambda: kind.torch_ops.extend(*inputs, states[1:], lengths), in_triton)
    return found + (peers.fla_chunk if kind is DELTA else peers.mamba_chunk)(inputs, states[1:])


def fold_candidates(case: Case, place: Place) -> list[Candidate]:
    """Folds of pending records into other slots: a fold in place could not be repeated."""
    layer = make_layer(case, place, delta_inputs)
    b, count = layer.buffers, case["pending"]
    pending, given = layer.trees.num_pending, (b.states[1:], b.k[1:, :count], b.u[1:, :count], b.decay[1:, :count])
    assert pending is not None

    def run(ops: Any) -> Run:
        out = torch.empty_like(given[0])
        return lambda: (ops.fold(*given, pending, out),)

    native = (lambda: run(fold_native)) if fold_native.can_take(*given) else None
    return place.forms(lambda: run(fold_torch), lambda: run(triton_ops("state_records")), native)


def state_bytes(case: Case) -> int:
    """Bytes of all states of a batch, float32: 4 B H K V."""
    return 4 * case["batch"] * case["heads"] * case["key"] * case["value"]


def record_bytes(case: Case, count: int) -> int:
    """Bytes of ``count`` records of every request: k [G, K], u [H, V] and a decay [H], float32."""
    return 4 * case["batch"] * count * (case["key_heads"] * case["key"] + case["heads"] * (case["value"] + 1))


def node_bytes(case: Case, count: int, kind: Recurrence) -> int:
    """Bytes of nodes' inputs and outputs: two of [G, K], one of [H, V] and the gates [H] in, [H, V] out; float32."""
    per_node = 2 * case["key_heads"] * case["key"] + case["heads"] * (2 * case["value"] + kind.num_gates)
    return 4 * case["batch"] * count * per_node


def verify_cost(case: Case, kind: Recurrence) -> Cost:
    """The state is read once, and no state is written.

    Each row that reads the state takes 2 K V operations, as many products with m + N keys, and sums over m pending
    values; the nodes' own values take 2 N V for outputs and N V for the solver of the delta rule.
    """
    nodes, pending = case["nodes"], case["pending"]
    size = state_bytes(case) + record_bytes(case, pending + nodes) + node_bytes(case, nodes, kind)
    key, value, rows = case["key"], case["value"], kind.num_reads
    reads = rows * (2 * key * value + 2 * (pending + nodes) * key + 2 * pending * value)
    own = (1 + rows) * nodes * value
    return Cost(size, case["batch"] * case["heads"] * nodes * (reads + own))


def snapshots_cost(case: Case, kind: Recurrence) -> Cost:
    """Every node reads the state of its parent and writes its own; 3 K V operations to advance it, 2 K V a read."""
    return _steps_cost(case, kind, case["nodes"], case["nodes"])


def extend_cost(case: Case, kind: Recurrence) -> Cost:
    """The state is read and written once. Operations are those of one token after the other: the fewest."""
    return _steps_cost(case, kind, case["tokens"], 1)


def _steps_cost(case: Case, kind: Recurrence, steps: int, num_states: int) -> Cost:
    """The cost of ``steps`` of the recurrence, of which ``num_states`` states are read and written."""
    size = 2 * num_states * state_bytes(case) + node_bytes(case, steps, kind)
    advance = (3 + 2 * kind.num_reads) * case["key"] * case["value"]
    return Cost(size, case["batch"] * case["heads"] * steps * advance)


def fold_cost(case: Case) -> Cost:
    """The state is read and written once, each record read once; 2 K V operations a record."""
    pending = case["pending"]
    flops = case["batch"] * case["heads"] * case["key"] * case["value"] * (2 * pending + 1)
    return Cost(2 * state_bytes(case) + record_bytes(case, pending), flops)


def _verify_cases(heads: dict[str, int], of: str) -> tuple[Case, ...]:
    def case(nodes: int, batch: int, kind: str = "", pending: int = 8, is_quick: bool = False) -> Case:
        name = f"{kind or 'verify'} {counted(nodes, 'node')}, batch {batch}{of}" + (
            "" if pending else ", nothing pending"
        )
        return Case(name, {**heads, "batch": batch, "nodes": nodes, "pending": pending}, "float32", kind, is_quick)

    return (
        case(1, 1, "chain", 0, True),
        case(1, 32, "chain", 0, True),
        case(4, 32, "chain", 0),
        case(8, 1),
        case(8, 32, is_quick=True),
        case(16, 32, is_quick=True),
    )


def _tiny(kind: str, **sizes: int) -> Case:
    return Case(f"tiny {kind}".strip(), {**TINY, "batch": 2, **sizes}, kind=kind, is_tiny=True)


def _operators(kind: Recurrence, heads: dict[str, int], of: str, larger: tuple[Case, ...] = ()) -> list[Operator]:
    """Verification with records and with snapshots, and known tokens; ``of`` names the model in cases."""
    verified = (*_verify_cases(heads, of), *larger, _tiny("", nodes=4, pending=2), _tiny("chain", nodes=3, pending=0))
    snapshots = (
        Case(f"8 nodes, batch 8{of}", {**heads, "pending": 0, "batch": 8, "nodes": 8}),
        Case(f"16 nodes, batch 32{of}", {**heads, "pending": 0, "batch": 32, "nodes": 16}, is_quick=True),
        _tiny("", nodes=4, pending=0),
    )
    extended = (
        Case(f"512 tokens, batch 1{of}", {**heads, "batch": 1, "tokens": 512}, is_quick=True),
        Case(f"512 tokens, batch 8{of}", {**heads, "batch": 8, "tokens": 512}),
        _tiny("", tokens=9),
    )

    def operator(
        function: str, cases: tuple[Case, ...], cost: Callable[..., Cost], candidates: Callable[..., list[Candidate]]
    ) -> Operator:
        tests = (kind.name, "not_finite") if function == "tree_verify" else (kind.name,)
        of_kind = partial(cost, kind=kind), partial(candidates, kind=kind)
        tolerance = 1e-3 if function == "extend" else 1e-4
        return Operator(f"{kind.name}.{function}", tests, cases, *of_kind, tolerance, (f"{kind.name}_triton",))

    return [
        operator("tree_verify", verified, verify_cost, verify_candidates),
        operator("tree_verify_snapshots", snapshots, snapshots_cost, snapshot_candidates),
        operator("extend", extended, extend_cost, extend_candidates),
    ]


OPERATORS = (
    *_operators(DELTA, QWEN, ""),
    *_operators(SSD, FALCON, " (Falcon-H1)", _verify_cases(NEMOTRON, " (Nemotron-H)")[-2:]),
    Operator(
        "state_records.fold",
        ("state_records",),
        (
            Case("16 records, batch 1", {**QWEN, "batch": 1, "nodes": 16, "pending": 16}),
            Case("16 records, batch 32", {**QWEN, "batch": 32, "nodes": 16, "pending": 16}, is_quick=True),
            _tiny("", nodes=1, pending=5),
        ),
        fold_cost,
        fold_candidates,
        gpu_tests=("state_records_triton",),
    ),
)
