"""Products with weights in codes of 4 and 8 bits, for all tokens and for those of experts."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from specmamba.bench.ops.case import Candidate, Case, Cost, Operator, Place, Run, counted, triton_ops
from specmamba.kernels import linear, moe
from specmamba.kernels.linear import QuantizedMatrix, WeightForm
from specmamba.kernels.linear import torch_ops as linear_torch
from specmamba.kernels.linear.grouped import packed_bytes
from specmamba.kernels.moe import torch_ops as moe_torch

FORMS = ("int4-g32", "int4-g128", "fp8")
NOTE = "weights dequantized once"


def matrix_of(case: Case, device: torch.device, *experts: int) -> QuantizedMatrix:
    """Random weights [..., N, K] in the codes of the case's form."""
    weight = torch.randn(*experts, case["out"], case["in"], generator=case.generator()) * case["in"] ** -0.5
    return linear.round_to_form(weight.to(device), cast("WeightForm", case.kind))


def linear_candidates(case: Case, place: Place) -> list[Candidate]:
    """A product with weights in codes; ``torch`` multiplies by what these stand for."""
    matrix, dtype = matrix_of(case, place.device), case.torch_dtype
    x = torch.randn(case["rows"], case["in"], generator=case.generator()).to(place.device, dtype)

    def run(product: Any) -> Run:
        return lambda: (product(x),)

    in_torch, ours = place.forms(
        lambda: run(linear_torch.PlainWeight(matrix.dequantize(dtype))),
        lambda: run(triton_ops("linear").pack_codes(matrix, dtype)),
        lambda: run(linear.pack_codes(matrix, dtype)),
        tolerance=3e-2,
    )
    return [Candidate(in_torch.name, in_torch.prepare, note=NOTE), ours]


def experts_candidates(case: Case, place: Place) -> list[Candidate]:
    """Products of sorted rows with the experts' codes; ``torch`` multiplies by what these stand for."""
    matrix, dtype, count = matrix_of(case, place.device, case["experts"]), case.torch_dtype, case["experts"]
    gen = case.generator()
    tokens = torch.randn(case["rows"], case["in"], generator=gen).to(dtype)
    routing = moe.softmax_routing(torch.randn(case["rows"], count, generator=gen), case["chosen"], True)
    rows, groups = moe_torch.dispatch(tokens, routing.experts, count)
    rows, groups = rows.to(place.device), moe.Groups(*(x.to(place.device) for x in groups))

    def run(product: Any) -> Run:
        return lambda: (product(rows, groups),)

    def in_torch() -> Run:
        weight: Tensor = matrix.dequantize(dtype)
        is_grouped = moe_torch.can_group(weight)
        return run(moe_torch.GroupedExperts(weight) if is_grouped else moe_torch.PlainExperts(weight))

    first, ours = place.forms(
        in_torch,
        lambda: run(triton_ops("moe").pack_codes(matrix, dtype)),
        lambda: run(moe.pack_codes(matrix, dtype)),
        tolerance=3e-2,
    )
    return [Candidate(first.name, first.prepare, note=NOTE), ours]


def cost(case: Case) -> Cost:
    """Codes and scales of a matrix, or of every expert that has a token, are read once; rows in and out."""
    n, k, rows = case["out"], case["in"], case["rows"] * case.sizes.get("chosen", 1)
    shape = matrix_of(Case("", {"out": n, "in": k}, kind=case.kind), torch.device("meta"))
    active = min(case.sizes.get("experts", 1), rows)
    return Cost(active * packed_bytes(shape) + case.itemsize * rows * (n + k), 2 * rows * n * k, case.dtype)


def _product(form: str, rows: int) -> Case:
    sizes = {"rows": rows, "out": 12288, "in": 4096}
    return Case(f"{form}, {counted(rows, 'row')}, 12288 x 4096", sizes, "bfloat16", form, is_quick=rows == 8)


def _experts(form: str, rows: int) -> Case:
    sizes = {"rows": rows, "experts": 128, "chosen": 10, "out": 1024, "in": 2048}
    return Case(f"{form}, {counted(rows, 'token')}, 10 of 128 experts", sizes, "bfloat16", form, is_quick=rows == 8)


_TINY = {"rows": 3, "out": 40, "in": 160}

OPERATORS = (
    Operator(
        "linear.codes",
        ("linear_grouped",),
        (
            *(_product(form, rows) for form in FORMS for rows in (1, 8, 64, 1024)),
            *(Case(f"tiny {form}", _TINY, kind=form, is_tiny=True) for form in FORMS),
        ),
        cost,
        linear_candidates,
        tolerance=3e-2,
        gpu_tests=("codes_triton",),
    ),
    Operator(
        "moe.codes",
        ("linear_grouped",),
        (
            *(_experts(form, rows) for form in FORMS for rows in (8, 64)),
            *(Case(f"tiny {form}", {**_TINY, "experts": 4, "chosen": 2}, kind=form, is_tiny=True) for form in FORMS),
        ),
        cost,
        experts_candidates,
        tolerance=3e-2,
        gpu_tests=("codes_triton",),
    ),
)
