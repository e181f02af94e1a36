"""Mixtures of experts: every token is multiplied by the matrices of the few experts that a router chooses for it.

Sizes: T tokens, E experts, k experts of a token, P = T k pairs of a token and an expert.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.linear import Matrix, QuantizedMatrix, WeightForm, round_to_form, shape_of_codes
from specmamba.kernels.linear import native_ops as linear_native
from specmamba.kernels.moe import native_ops, torch_ops
from specmamba.kernels.moe.reference import Groups, PartOfGroups, Routing

__all__ = [
    "Groups",
    "PackedExperts",
    "PackedRouter",
    "PartOfGroups",
    "Routing",
    "combine",
    "dispatch",
    "pack",
    "pack_codes",
    "pack_router",
    "packed",
    "router_dtype",
    "sigmoid_routing",
    "softmax_routing",
    "topk_softmax_routing",
]

MAX_CHOSEN = 32  # of the experts of a token that Triton looks for
MAX_PAIRS = 1 << 30  # that Triton sorts: it numbers them in int32


def can_multiply(weight: Tensor) -> bool:
    """Whether Triton takes products with these experts."""
    return weight.numel() > 0 and weight.dtype in gpu.FLOAT_DTYPES and gpu.can_launch(weight)


def can_dispatch(x: Tensor, experts: Tensor) -> bool:
    """Whether Triton sorts rows of x."""
    return x.dtype in gpu.FLOAT_DTYPES and experts.numel() <= MAX_PAIRS and gpu.can_launch(x, experts)


def can_combine(y: Tensor, groups: Groups, weights: Tensor) -> bool:
    """Whether Triton sums rows of y."""
    return y.dtype in gpu.FLOAT_DTYPES and gpu.can_launch(y, groups.places, weights)


def can_route(logits: Tensor, k: int, *_: object) -> bool:
    """Whether Triton chooses k experts: it looks for one after the other."""
    return k <= MAX_CHOSEN and logits.dtype is torch.float32 and gpu.can_launch(logits)


class PackedRouter(Protocol):
    """The weight of a router, laid out for its device: scores x W^T of all experts."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Scores [T, E] float32 of x [T, H].

        Raises:
            ValueError: another device or width (native form).
        """


class PackedExperts(Protocol):
    """The weights of all experts, laid out for their device: y[p] = x[p] W[expert of p]^T in x's dtype."""

    nbytes: int  # of the tensors that are kept, without the padding of panels

    def __call__(self, x: Tensor, groups: Groups, /) -> Tensor:
        """Multiply x [P, K], sorted by expert; the result is [P, N].

        Raises:
            ValueError: another dtype, device, width or number of rows (native and Triton forms).
        """


@operator(native=lambda weight: weight.is_cpu and weight.numel() > 0 and native_ops.code() is not None)
def pack_router(weight: Tensor) -> PackedRouter:
    """Lay out a router's weight: in native panels on a CPU, in bfloat16 on a GPU if it is, in float32 elsewhere.

    Args:
        weight: [E, H]; not kept in native panels. On a GPU one in bfloat16 takes x in bfloat16 alone.

    Returns:
        A product that takes x [T, H] to scores [T, E] float32.
    """
    keeps_16_bits = weight.is_cuda and weight.dtype is torch.bfloat16
    return torch_ops.HalfRouter(weight) if keeps_16_bits else torch_ops.PlainRouter(weight)


def router_dtype(device: torch.device, stored: torch.dtype, inputs: torch.dtype) -> torch.dtype:
    """The dtype in which ``pack_router`` keeps a weight for x of dtype ``inputs``: no bit of it is lost."""
    is_native = device.type == "cpu" and native_ops.code() is not None
    is_half = device.type == "cuda" and inputs is torch.bfloat16  # tensor cores sum exact products in float32
    return torch.bfloat16 if stored is torch.bfloat16 and (is_native or is_half) else torch.float32


@operator(
    triton=lambda weight, form: form in ("plain", "int8") and can_multiply(weight),
    native=native_ops.can_pack,
)
def pack(weight: Tensor, form: WeightForm = "plain") -> PackedExperts:
    """Lay out the experts' weights for multiplying inputs of their dtype.

    On a GPU Triton multiplies by all experts in one launch without waiting for the device, in either form.
    ``plain`` elsewhere: bf16 and float32 are copied into native panels on a CPU; every other dtype is one product per
    active expert.
    ``int8``: rounded as ``linear``'s weights are; bf16 and float32 on a CPU multiply in native code, elsewhere active
    experts are widened at every use, which saves memory and not time. Forms of codes in groups: ``pack_codes``. Empty
    weights stay plain.

    Args:
        weight: [E, N, K]; not kept where it is copied.
        form: how the weights are stored.

    Returns:
        A product that takes x [P, K], sorted by expert, to [P, N].
    """
    if form == "int8" and weight.numel() > 0:
        return torch_ops.Int8Experts(weight)
    if form != "plain" and weight.numel() > 0:
        form = "fp8" if form == "fp8-dynamic" else form  # PyTorch has no such product for experts
        return packed(round_to_form(weight, form), dtype=weight.dtype)
    return torch_ops.GroupedExperts(weight) if torch_ops.can_group(weight) else torch_ops.PlainExperts(weight)


@operator(
    triton=lambda matrix, dtype: dtype in gpu.FLOAT_DTYPES and gpu.can_launch(matrix.codes),
    native=lambda matrix, dtype: linear_native.can_pack_codes(dtype, matrix.codes.device),
)
def pack_codes(matrix: QuantizedMatrix, dtype: torch.dtype) -> PackedExperts:
    """Lay out the experts' quantized matrices for multiplying inputs of a dtype, as ``linear.pack_codes``.

    Args:
        matrix: [E, N, K], not empty; not kept.
        dtype: of inputs.

    Returns:
        A product that takes x [P, K], sorted by expert, to [P, N].
    """
    return pack(matrix.dequantize(dtype))


def packed(
    weight: Matrix,
    form: WeightForm = "plain",
    dtype: torch.dtype | None = None,
    layout: torch.device | None = None,
) -> PackedExperts:
    """Lay out the experts' matrices [E, N, K]: in ``form``; quantized ones for inputs of ``dtype``, or float32.

    ``layout``: the device whose sizes are meant where matrices have no values.
    """
    if not isinstance(weight, QuantizedMatrix):
        return pack(weight, form)
    if weight.codes.is_meta:
        return shape_of_codes(weight, layout)
    return pack_codes(weight, dtype or torch.float32)


@operator(
    triton=lambda x, experts, _: can_dispatch(x, experts),
    native=lambda x, *_: native_ops.can_dispatch(x),
)
def dispatch(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Groups]:
    """The inputs of all pairs of a token and an expert, sorted by expert and, for one expert, by token.

    Args:
        x: [T, K].
        experts: [T, k] int64, from 0 to E - 1.
        num_experts: E.

    Returns:
        [P, K], and the place of each pair.

    Raises:
        ValueError: there is no such expert, or x and experts differ in shape or device (native form).
    """
    return torch_ops.dispatch(x, experts, num_experts)


@operator(
    triton=can_combine,
    native=lambda y, *_: native_ops.can_dispatch(y),
)
def combine(y: Tensor, groups: Groups, weights: Tensor) -> Tensor:
    """Weight and sum the results of each token's experts, in float32.

    Args:
        y: [P, N], sorted by expert.
        groups: from ``dispatch``.
        weights: [T, k] float32.

    Returns:
        [T, N] in y's dtype.

    Raises:
        ValueError: operands differ in shape or device, or a place is outside of y (native form).
    """
    return torch_ops.combine(y, groups, weights)


@operator(triton=can_route, native=native_ops.can_route)
def softmax_routing(logits: Tensor, k: int, renormalise: bool) -> Routing:
    """Choose the k likeliest of all experts (arXiv 2101.03961, section 2.1, for k = 1).

    Args:
        logits: [T, E] float32.
        k: experts of a token.
        renormalise: the weights of a token sum to 1; else they are the probabilities among all experts.

    Returns:
        Experts [T, k] int64 and weights [T, k] float32, likeliest first.
    """
    return torch_ops.softmax_routing(logits, k, renormalise)


@operator(triton=can_route, native=native_ops.can_route)
def topk_softmax_routing(logits: Tensor, k: int) -> Routing:
    """Choose the k likeliest experts, weighted by the softmax over these alone (arXiv 2401.04088, section 2.1).

    Args:
        logits: [T, E] float32.
        k: experts of a token.

    Returns:
        Experts [T, k] int64 and weights [T, k] float32, likeliest first.
    """
    return torch_ops.topk_softmax_routing(logits, k)


@operator(native=native_ops.can_route)
def sigmoid_routing(
    logits: Tensor, bias: Tensor, k: int, num_groups: int, topk_groups: int, renormalise: bool, scale: float
) -> Routing:
    """Choose the k best experts of the best groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    A bias that balances the load ranks the experts and does not count in their weights. The score of a group is the
    sum of its two best experts.

    Args:
        logits: [T, E] float32.
        bias: [E] float32.
        k: experts of a token.
        num_groups: equal runs of experts.
        topk_groups: groups that a token may choose from.
        renormalise: the weights of a token sum to 1 before they are scaled.
        scale: multiplies all weights.

    Returns:
        Experts [T, k] int64 and weights [T, k] float32, best first.
    """
    return torch_ops.sigmoid_routing(logits, bias, k, num_groups, topk_groups, renormalise, scale)
