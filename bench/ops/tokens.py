"""Operators between two forwards: choosing tokens, walking trees, moving records."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specmamba.bench.ops.case import Candidate, Case, Cost, Operator, Place, Run, tree_parents, triton_ops
from specmamba.kernels.sampling import native_ops as sampling_native
from specmamba.kernels.sampling import torch_ops as sampling_torch
from specmamba.kernels.state_copy import torch_ops as copy_torch
from specmamba.kernels.tree import native_ops as tree_native
from specmamba.kernels.tree import torch_ops as tree_torch

VOCABULARY = 248_320  # Qwen3.5


def sampling_candidates(case: Case, place: Place) -> list[Candidate]:
    """The most likely token after every node, or a sampled one."""
    gen, shape = case.generator(), (case["batch"], case["nodes"])
    logits = (3 * torch.randn(*shape, case["vocabulary"], generator=gen)).to(place.device)
    temperature = torch.full(shape[:1], 0.8, device=place.device)
    uniforms = torch.rand(*shape, generator=gen).to(place.device)

    def run(ops: Any) -> Run:
        if case.kind == "argmax":
            return lambda: (ops.argmax(logits),)
        return lambda: (ops.sample(logits, temperature, None, None, None, uniforms),)

    native = (lambda: run(sampling_native)) if sampling_native.can_take(logits) else None
    return place.forms(lambda: run(sampling_torch), lambda: run(triton_ops("sampling")), native)


def sampling_cost(case: Case) -> Cost:
    """Logits are read once, float32; a comparison each, or an exponential and two sums."""
    count = case["batch"] * case["nodes"] * case["vocabulary"]
    return Cost(4 * count + 8 * case["batch"] * case["nodes"], (1 if case.kind == "argmax" else 4) * count)


def path_candidates(case: Case, place: Place) -> list[Candidate]:
    """The accepted path of every tree; about half of the tokens agree with the target's."""
    parents = tree_parents(case)
    gen, ancestors = case.generator(), tree_torch.ancestors(parents).to(place.device)
    tokens, target = torch.randint(0, 2, (2, *parents.shape), generator=gen).to(place.device).unbind()
    parents = parents.to(place.device)

    def run(ops: Any) -> Run:
        return lambda: ops.accepted_path(tokens, parents, ancestors, target)

    return place.forms(
        lambda: run(tree_torch),
        lambda: run(triton_ops("tree")),
        (lambda: run(tree_native)) if tree_native.can_take(tokens) else None,
    )


def path_cost(case: Case) -> Cost:
    """Tokens, parents and targets in, path and tokens out: int64."""
    count = case["batch"] * case["nodes"]
    return Cost(8 * (5 * count + 3 * case["batch"]), count)


def compact_candidates(case: Case, place: Place) -> list[Candidate]:
    """Accepted records moved to the front, in all layers at once: node 2 i to place i, as after a bushy tree."""
    gen, (layers, rows, nodes) = case.generator(), (case["layers"], case["batch"], case["nodes"])
    buffer = torch.randn(layers, rows + 1, 2 * nodes, case["width"], generator=gen).to(place.device)
    accepted = torch.arange(case["accepted"], device=place.device).expand(rows, -1)
    source, target = 2 * accepted, accepted.clone()
    places = torch.arange(1, rows + 1, device=place.device)

    def run(ops: Any) -> Run:
        own = buffer.clone()

        def call() -> tuple[Tensor, ...]:
            ops.compact(own, places, source, target)
            return (own,)

        return call

    return place.forms(lambda: run(copy_torch), lambda: run(triton_ops("state_copy")))


def compact_cost(case: Case) -> Cost:
    """All accepted records are read and written, even the first, which stays at its place."""
    moves = case["batch"] * case["accepted"]
    return Cost(2 * 4 * case["layers"] * moves * case["width"], 0)


def _sampling_case(kind: str, batch: int, nodes: int, is_quick: bool = False) -> Case:
    sizes = {"batch": batch, "nodes": nodes, "vocabulary": VOCABULARY}
    return Case(f"{kind}, {nodes} nodes, batch {batch}", sizes, kind=kind, is_quick=is_quick)


def _tiny_sampling(kind: str) -> Case:
    return Case(f"tiny {kind}", {"batch": 2, "nodes": 2, "vocabulary": 600}, kind=kind, is_tiny=True)


OPERATORS = (
    Operator(
        "sampling",
        ("sampling",),
        (
            _sampling_case("argmax", 32, 8, True),
            _sampling_case("sample", 1, 8),
            _sampling_case("sample", 32, 8, True),
            _tiny_sampling("argmax"),
            _tiny_sampling("sample"),
        ),
        sampling_cost,
        sampling_candidates,
        tolerance=0.01,  # share of the tokens: a random number at the border of two tokens may choose either
        gpu_tests=("sampling_triton", "drafts_triton"),
    ),
    Operator(
        "tree.accepted_path",
        ("tree",),
        (
            Case("8 nodes, batch 32", {"batch": 32, "nodes": 8}, is_quick=True),
            Case("64 nodes, batch 32", {"batch": 32, "nodes": 64}),
            Case("tiny", {"batch": 2, "nodes": 4}, is_tiny=True),
        ),
        path_cost,
        path_candidates,
        tolerance=0.0,
        gpu_tests=("tree_triton",),
    ),
    Operator(
        "state_copy.compact",
        ("state_copy",),
        (
            Case(
                "3 of 16 nodes, 24 layers, batch 32",
                {"layers": 24, "batch": 32, "nodes": 16, "accepted": 3, "width": 4096},
                is_quick=True,
            ),
            Case("tiny", {"layers": 2, "batch": 2, "nodes": 4, "accepted": 3, "width": 8}, is_tiny=True),
        ),
        compact_cost,
        compact_candidates,
        tolerance=0.0,
        gpu_tests=("state_copy_triton",),
    ),
)
