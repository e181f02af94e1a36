"""Operators on each token alone: norms, gates, rotations, products with int8 weights, and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specmamba.bench.ops import peers
from specmamba.bench.ops.case import Candidate, Case, Cost, Operator, Place, Run, counted, triton_ops
from specmamba.kernels import linear, moe
from specmamba.kernels.linear import torch_ops as linear_torch
from specmamba.kernels.moe import torch_ops as moe_torch
from specmamba.kernels.rowwise import native_ops, torch_ops

EPS = 1e-6
ROTATED = 64


def row_arguments(case: Case, device: torch.device) -> tuple[Any, ...]:
    """The arguments of ``rowwise``'s function of this kind."""
    gen, dtype = case.generator(), case.torch_dtype
    tokens, heads, dim = (case["batch"], case["nodes"]), case["heads"], case["dim"]

    def random(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=gen).to(device, of)

    f32 = torch.float32
    if case.kind == "rms_norm":
        return random(*tokens, dim), random(dim, of=f32), EPS
    if case.kind == "gated_rms_norm":
        return random(*tokens, heads, dim, of=f32), random(*tokens, heads, dim), random(dim, of=f32), EPS
    if case.kind == "silu_mul":
        return (random(*tokens, 2 * dim),)
    if case.kind == "rotate":
        return random(*tokens, heads, dim), random(*tokens, 1, ROTATED), random(*tokens, 1, ROTATED)
    key_heads = heads // 2
    mixed = random(*tokens, (2 * key_heads + heads) * dim, of=f32)
    gates = random(*tokens, heads), random(*tokens, heads)
    return mixed, *gates, -random(heads, of=f32).abs(), random(heads, of=f32), key_heads, dim


def row_candidates(case: Case, place: Place) -> list[Candidate]:
    """One function of ``rowwise``; flashinfer has some of them too."""
    given = row_arguments(case, place.device)

    def run(ops: Any) -> Run:
        function: Callable[..., Any] = getattr(ops, case.kind)

        def call() -> tuple[Tensor, ...]:
            result = function(*given)
            return result if isinstance(result, tuple) else (result,)

        return call

    native = (lambda: run(native_ops)) if native_ops.can_take(given[0]) else None
    found = place.forms(lambda: run(torch_ops), lambda: run(triton_ops("rowwise")), native)
    weight = given[1] if case.kind == "rms_norm" else None
    return found + peers.flashinfer_rows(case.kind, given[0], weight, EPS)


def row_cost(case: Case) -> Cost:
    """All inputs are read once, all outputs written once; a few operations an element, which never decide."""
    tokens, heads, dim, item = case["batch"] * case["nodes"], case["heads"], case["dim"], case.itemsize
    per_token = {
        "rms_norm": 2 * item * dim,
        "gated_rms_norm": (4 + 2 * item) * heads * dim,
        "silu_mul": 3 * item * dim,
        "rotate": item * (2 * heads * dim + 2 * ROTATED),
        "delta_inputs": 4 * (2 * heads * dim + 2 * heads) + 2 * item * heads,  # two of [heads / 2, dim], in and out
    }[case.kind]
    width = dim if case.kind in ("rms_norm", "silu_mul") else heads * dim
    return Cost(tokens * per_token, 4 * tokens * width)


def linear_candidates(case: Case, place: Place) -> list[Candidate]:
    """A product with weights [N, K] that were rounded to int8; ``torch`` widens them first."""
    gen, dtype = case.generator(), case.torch_dtype
    weight = (torch.randn(case["out"], case["in"], generator=gen) * case["in"] ** -0.5).to(place.device, dtype)
    x = torch.randn(case["rows"], case["in"], generator=gen).to(place.device, dtype)

    def run(product: Any) -> Run:
        return lambda: (product(x),)

    in_torch, ours = place.forms(
        lambda: run(linear_torch.Int8Weight(weight)),
        lambda: run(triton_ops("linear").TritonInt8Weight(weight)),
        lambda: run(linear.pack(weight, "int8")),
        tolerance=3e-2,
    )
    plain = Candidate("torch bf16", lambda: run(linear_torch.PlainWeight(weight)), 5e-2, note="weights not rounded")
    return [in_torch, plain, ours]


def linear_cost(case: Case) -> Cost:
    """Reads a byte per weight, a float32 scale per output, and activations; writes activations."""
    n, k, m = case["out"], case["in"], case["rows"]
    return Cost(n * k + 4 * n + case.itemsize * m * (n + k), 2 * m * n * k, case.dtype)


def experts_candidates(case: Case, place: Place) -> list[Candidate]:
    """Tokens sent to their experts, multiplied and put back together."""
    gen, dtype, count = case.generator(), case.torch_dtype, case["experts"]
    weight = torch.randn(count, case["out"], case["in"], generator=gen) * case["in"] ** -0.5
    weight = weight.to(place.device, dtype)
    x = torch.randn(case["rows"], case["in"], generator=gen).to(place.device, dtype)
    routing = moe.softmax_routing(torch.randn(case["rows"], count, generator=gen), case["chosen"], True)
    chosen, weights = (part.to(place.device) for part in routing)

    def run(ops: Any, product: Any) -> Run:
        def call() -> tuple[Tensor, ...]:
            pairs, groups = ops.dispatch(x, chosen, count)
            return (ops.combine(product(pairs, groups), groups, weights),)

        return call

    in_torch = moe_torch.GroupedExperts if moe_torch.can_group(weight) else moe_torch.PlainExperts

    def in_triton() -> Run:
        # on a GPU the package decides: many pairs are sorted, and large products made, by PyTorch there too
        ops = triton_ops("moe")
        return run(moe if x.is_cuda else ops, ops.TritonExperts(weight))

    return place.forms(
        lambda: run(moe_torch, in_torch(weight)),
        in_triton,
        lambda: run(moe, moe.pack(weight)),
        tolerance=3e-2,
    )


def experts_cost(case: Case) -> Cost:
    """Every expert that has a token is read once: all of them, where there are as many pairs as experts or more."""
    n, k, pairs = case["out"], case["in"], case["rows"] * case["chosen"]
    active = min(case["experts"], pairs)
    size = case.itemsize * (active * n * k + pairs * (n + k) + case["rows"] * (n + k))
    return Cost(size, 2 * pairs * n * k, case.dtype)


def _row(kind: str, heads: int, dim: int, batch: int = 32, is_quick: bool = False) -> Case:
    name = f"{kind}, 8 nodes, batch {batch}"
    return Case(name, {"batch": batch, "nodes": 8, "heads": heads, "dim": dim}, "bfloat16", kind, is_quick)


def _tiny_row(kind: str, heads: int, dim: int) -> Case:
    return Case(f"tiny {kind}", {"batch": 2, "nodes": 3, "heads": heads, "dim": dim}, kind=kind, is_tiny=True)


_ROWS = {"rms_norm": (1, 4096), "gated_rms_norm": (32, 128), "silu_mul": (1, 12288), "rotate": (18, 256)}
_ROWS |= {"delta_inputs": (32, 128)}

OPERATORS = (
    Operator(
        "rowwise",
        ("rowwise",),
        (
            *(_row(kind, *sizes, is_quick=True) for kind, sizes in _ROWS.items()),
            *(_row(kind, *sizes, batch=1) for kind, sizes in _ROWS.items()),
            *(_tiny_row(kind, min(heads, 4), 64) for kind, (heads, _) in _ROWS.items()),
        ),
        row_cost,
        row_candidates,
        tolerance=2e-2,
        gpu_tests=("rowwise_triton",),
    ),
    Operator(
        "linear.int8",
        ("linear_int8",),
        (
            *(
                Case(
                    f"{counted(rows, 'row')}, 12288 x 4096",
                    {"rows": rows, "out": 12288, "in": 4096},
                    "bfloat16",
                    "",
                    rows == 8,
                )
                for rows in (1, 8, 64)
            ),
            Case("tiny", {"rows": 3, "out": 40, "in": 32}, is_tiny=True),
        ),
        linear_cost,
        linear_candidates,
        tolerance=3e-2,
        gpu_tests=("linear_triton",),
    ),
    Operator(
        "moe.experts",
        ("moe",),
        (
            Case(
                "64 tokens, 10 of 128 experts",
                {"rows": 64, "experts": 128, "chosen": 10, "out": 1024, "in": 2048},
                "bfloat16",
            ),
            Case(
                "8 tokens, 10 of 128 experts",
                {"rows": 8, "experts": 128, "chosen": 10, "out": 1024, "in": 2048},
                "bfloat16",
                is_quick=True,
            ),
            Case("tiny", {"rows": 4, "experts": 3, "chosen": 2, "out": 32, "in": 16}, is_tiny=True),
        ),
        experts_cost,
        experts_candidates,
        tolerance=2e-2,
        gpu_tests=("moe_triton",),
    ),
)
