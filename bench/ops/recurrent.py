"""Recurrences over draft trees and prompts: the gated delta rule, that of Mamba2, and folds."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specmamba.bench.ops import peers
from specmamba.bench.ops.case import NATIVE, TORCH, TRITON, Candidate, Case, Operator, Place, Run, counted, generator
from specmamba.bench.ops.inputs import (
    FALCON,
    NEMOTRON,
    QWEN,
    TINY,
    delta_inputs,
    make_layer,
    records_of,
    ssd_inputs,
    triton_ops,
)
from specmamba.bench.ops.recurrent_cost import extend_cost, fold_cost, snapshots_cost, verify_cost
from specmamba.kernels import gated_delta_rule, ssd
from specmamba.kernels.gated_delta_rule import torch_ops as delta_torch
from specmamba.kernels.ssd import torch_ops as ssd_torch
from specmamba.kernels.state_records import native_ops as fold_native
from specmamba.kernels.state_records import torch_ops as fold_torch


def verify_candidates(case: Case, place: Place, is_delta: bool) -> list[Candidate]:
    """Verification from records."""
    layer = make_layer(case, place, delta_inputs if is_delta else ssd_inputs)
    written = slice(case["pending"], case["pending"] + case["nodes"])
    form = (delta_torch if is_delta else ssd_torch).tree_verify
    name = "gated_delta_rule" if is_delta else "ssd"

    def in_torch() -> Run:
        own = layer.copied()
        b, t = own.buffers, own.trees
        records = b.states[1:], b.k[1:], b.u[1:], b.decay[1:]
        return lambda: (
            form(*own.inputs, *records, t.num_pending, t.node_offset, t.ancestors),
            *records_of(own, written),
        )

    def in_triton() -> Run:
        ops, own = triton_ops(name), layer.copied()
        return lambda: (
            ops.tree_verify_in_place(*own.inputs, own.buffers, own.trees),
            *records_of(own, written),
        )

    found = [Candidate(TORCH, in_torch)]
    found += [Candidate(TRITON, in_triton)] if place.has_triton else []
    if case.kind == "chain" and not case["pending"]:
        run = peers.fla_recurrent if is_delta else peers.mamba_update
        found += run(layer.inputs, layer.buffers.states[1:])
    return found


def snapshot_candidates(case: Case, place: Place, is_delta: bool) -> list[Candidate]:
    """Verification that leaves a whole state behind every node: what records take the place of."""
    layer = make_layer(case, place, delta_inputs if is_delta else ssd_inputs)
    states, name = layer.buffers.states[1:], "gated_delta_rule" if is_delta else "ssd"
    parents = None if case.kind == "chain" else layer.parents

    def run(form: Any) -> Run:
        snapshots = states.new_empty(case["batch"], case["nodes"], *states.shape[1:])
        return lambda: (form(*layer.inputs, states, snapshots, parents), snapshots)

    in_torch = (delta_torch if is_delta else ssd_torch).tree_verify_snapshots
    found = [Candidate(TORCH, lambda: run(in_torch))]
    if place.has_triton:
        found.append(Candidate(TRITON, lambda: run(triton_ops(name).tree_verify_snapshots)))
    return found


def extend_candidates(case: Case, place: Place, is_delta: bool) -> list[Candidate]:
    """Runs of known tokens, all of one length. What is compared is the first run."""
    gen, batch, length = generator(case), case["batch"], case["tokens"]
    inputs = tuple(x.to(place.device) for x in (delta_inputs if is_delta else ssd_inputs)(case, length, gen))
    shape = batch + 1, case["heads"], case["key"], case["value"]
    states = torch.randn(*shape, generator=gen).to(place.device)
    slots = torch.arange(1, batch + 1, device=place.device)
    lengths = torch.full((batch,), length, device=place.device)
    form = (gated_delta_rule if is_delta else ssd).extend

    def in_triton() -> Run:
        ops, own = triton_ops("gated_delta_rule" if is_delta else "ssd"), states.clone()
        return lambda: (ops.extend_in_place(*inputs, own, slots, lengths), own[1:])  # each run goes on from the last

    found = [Candidate(TORCH, lambda: lambda: form(*inputs, states[1:], lengths))]
    if place.has_triton:
        found.append(Candidate(TRITON, in_triton))
    return found + (peers.fla_chunk if is_delta else peers.mamba_chunk)(inputs, states[1:])


def fold_candidates(case: Case, place: Place) -> list[Candidate]:
    """Checkpoints advanced over their pending records, into other slots: a fold in place could not be repeated."""
    layer = make_layer(case, place, delta_inputs)
    b, count = layer.buffers, case["pending"]
    pending, given = layer.trees.num_pending, (b.states[1:], b.k[1:, :count], b.u[1:, :count], b.decay[1:, :count])
    assert pending is not None

    def run(form: Any) -> Run:
        out = torch.empty_like(given[0])
        return lambda: (form(*given, pending, out),)

    found = [Candidate(TORCH, lambda: run(fold_torch.fold))]
    if place.has_triton:
        found.append(Candidate(TRITON, lambda: run(triton_ops("state_records").fold)))
    elif fold_native.can_take(*given):
        found.append(Candidate(NATIVE, lambda: run(fold_native.fold)))
    return found


def _verify_cases(heads: dict[str, int], of: str) -> tuple[Case, ...]:
    def case(nodes: int, batch: int, kind: str = "", pending: int = 8, is_quick: bool = False) -> Case:
        name = (
            f"{kind or 'verify'} {counted(nodes, 'node')}, batch {batch}"
            + of
            + ("" if pending else ", nothing pending")
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


def _snapshot_cases(heads: dict[str, int], of: str) -> tuple[Case, ...]:
    sizes = {**heads, "pending": 0}
    return (
        Case(f"8 nodes, batch 8{of}", {**sizes, "batch": 8, "nodes": 8}),
        Case(f"16 nodes, batch 32{of}", {**sizes, "batch": 32, "nodes": 16}, is_quick=True),
        _tiny("", nodes=4, pending=0),
    )


def _extend_cases(heads: dict[str, int], of: str) -> tuple[Case, ...]:
    return (
        Case(f"512 tokens, batch 1{of}", {**heads, "batch": 1, "tokens": 512}, is_quick=True),
        Case(f"512 tokens, batch 8{of}", {**heads, "batch": 8, "tokens": 512}),
        _tiny("", tokens=9),
    )


_TINY_TREES = (_tiny("", nodes=4, pending=2), _tiny("chain", nodes=3, pending=0))
_NEMOTRON = _verify_cases(NEMOTRON, " (Nemotron-H)")[-2:]

OPERATORS = (
    Operator(
        "gated_delta_rule.tree_verify",
        ("gated_delta_rule", "not_finite"),
        (*_verify_cases(QWEN, ""), *_TINY_TREES),
        partial(verify_cost, is_delta=True),
        partial(verify_candidates, is_delta=True),
        gpu_tests=("gated_delta_rule_triton",),
    ),
    Operator(
        "gated_delta_rule.tree_verify_snapshots",
        ("gated_delta_rule",),
        _snapshot_cases(QWEN, ""),
        partial(snapshots_cost, is_delta=True),
        partial(snapshot_candidates, is_delta=True),
        gpu_tests=("gated_delta_rule_triton",),
    ),
    Operator(
        "gated_delta_rule.extend",
        ("gated_delta_rule",),
        _extend_cases(QWEN, ""),
        partial(extend_cost, is_delta=True),
        partial(extend_candidates, is_delta=True),
        tolerance=1e-3,
        gpu_tests=("gated_delta_rule_triton",),
    ),
    Operator(
        "ssd.tree_verify",
        ("ssd", "not_finite"),
        (*_verify_cases(FALCON, " (Falcon-H1)"), *_NEMOTRON, *_TINY_TREES),
        partial(verify_cost, is_delta=False),
        partial(verify_candidates, is_delta=False),
        gpu_tests=("ssd_triton",),
    ),
    Operator(
        "ssd.tree_verify_snapshots",
        ("ssd",),
        _snapshot_cases(FALCON, " (Falcon-H1)"),
        partial(snapshots_cost, is_delta=False),
        partial(snapshot_candidates, is_delta=False),
        gpu_tests=("ssd_triton",),
    ),
    Operator(
        "ssd.extend",
        ("ssd",),
        _extend_cases(FALCON, " (Falcon-H1)"),
        partial(extend_cost, is_delta=False),
        partial(extend_candidates, is_delta=False),
        tolerance=1e-3,
        gpu_tests=("ssd_triton",),
    ),
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
