"""Mixtures of experts: every token is multiplied by the matrices of the few experts that a router sends it to."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specmamba.kernels.linear import WeightForm
from specmamba.kernels.moe import native_ops, tiles, torch_ops
from specmamba.kernels.moe.operands import Groups, Routing
from specmamba.kernels.moe.torch_routing import sigmoid_routing, softmax_routing, topk_softmax_routing

__all__ = [
    "Groups",
    "PackedExperts",
    "PackedRouter",
    "Routing",
    "combine",
    "dispatch",
    "pack",
    "pack_router",
    "router_dtype",
    "sigmoid_routing",
    "softmax_routing",
    "topk_softmax_routing",
]


class PackedRouter(Protocol):
    """What a router says of every expert: x W^T in float32."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """[T, H] -> [T, E] float32."""


class PackedExperts(Protocol):
    """y[p] = x[p] W[expert of p]^T in x's dtype, one product for all experts."""

    nbytes: int  # of what is kept, but for the padding of panels

    def __call__(self, x: Tensor, groups: Groups, /) -> Tensor:
        """[P, K], sorted by expert -> [P, N]."""


def pack_router(weight: Tensor) -> PackedRouter:
    """Lay out a router's weight [E, H]: in native panels on a CPU, in float32 elsewhere."""
    if weight.device.type == "cpu" and weight.numel():
        code = native_ops.code()
        if code is not None:
            return native_ops.NativeRouter(weight, code)
    return torch_ops.PlainRouter(weight)


def router_dtype(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The type in which ``pack_router`` keeps a weight of type ``stored``: nothing of it is lost."""
    is_native = device.type == "cpu" and native_ops.code() is not None
    return torch.bfloat16 if stored is torch.bfloat16 and is_native else torch.float32


def pack(weight: Tensor, form: WeightForm = "plain") -> PackedExperts:
    """Lay out the experts' weights [E, N, K] for multiplying inputs of their dtype.

    On a GPU Triton multiplies by all experts in one launch and waits for nothing, in either form.
    ``plain`` elsewhere: bf16 is copied into native panels on a CPU; everything else is one product per active expert.
    ``int8``: rounded as ``linear``'s are; bf16 and float32 on a CPU multiply in native code, elsewhere active experts
    are widened at every use, which saves memory and not time.
    """
    is_int8 = form == "int8" and weight.numel() > 0
    if tiles.can_multiply(weight):
        from specmamba.kernels.moe import triton_ops

        return triton_ops.TritonInt8Experts(weight) if is_int8 else triton_ops.TritonExperts(weight)
    dtypes = (torch.bfloat16, torch.float32) if is_int8 else (torch.bfloat16,)
    if weight.device.type == "cpu" and weight.dtype in dtypes and weight.numel():
        code = native_ops.code()
        if code is not None:
            return native_ops.NativeInt8Experts(weight, code) if is_int8 else native_ops.NativeExperts(weight, code)
    if is_int8:
        return torch_ops.Int8Experts(weight)
    return torch_ops.GroupedExperts(weight) if torch_ops.can_group(weight) else torch_ops.PlainExperts(weight)


def dispatch(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Groups]:
    """The inputs of all pairs of a token and an expert, sorted by expert; see ``torch_ops.dispatch``."""
    if tiles.can_dispatch(x, experts):
        from specmamba.kernels.moe import triton_ops

        return triton_ops.dispatch(x, experts, num_experts)
    if native_ops.can_dispatch(x):
        return native_ops.dispatch(x, experts, num_experts)
    return torch_ops.dispatch(x, experts, num_experts)


def combine(y: Tensor, groups: Groups, weights: Tensor) -> Tensor:
    """What each token's experts said, weighted and summed; see ``torch_ops.combine``."""
    if tiles.can_combine(y, groups, weights):
        from specmamba.kernels.moe import triton_ops

        return triton_ops.combine(y, groups, weights)
    if native_ops.can_dispatch(y):
        return native_ops.combine(y, groups, weights)
    return torch_ops.combine(y, groups, weights)
